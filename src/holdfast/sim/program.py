# SPDX-License-Identifier: Apache-2.0
"""The workers' processes under a real agent, modelled: they start, run their program, are stopped
and killed. They run the program of sim/script.py."""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from holdfast.agent.processes import Processes, Service, Worker, WorkerExit, WorkerOrder
from holdfast.model.errors import RejectedError, RetryableError
from holdfast.protocol import messages as m
from holdfast.sim.script import Job, Line, Script
from holdfast.worker.progress import ProgressCell

KILL_S = 0.05
TERM_S = 1.0
"""How long a process may take to end."""

WORST_START_S = 2.0
CRASHED = 1


class ModelledWorker(Worker):
    """One worker process."""

    def __init__(self, owner: "ModelledProcesses", order: WorkerOrder, started_at: float) -> None:
        # Not the real one's initializer: there is no child process.
        self.pid = next(owner.job.pids)
        self.local_rank = order.local_rank
        self.how = "cold"
        self.started_at = started_at
        self.is_gone = asyncio.Event()
        self._owner = owner
        self._job = owner.job
        self.run = run_of(order.env)
        self._socket = order.env["HOLDFAST_SOCKET"]
        self._cell = ProgressCell.open(order.progress)
        self._loop = asyncio.get_running_loop()
        self._stops: set[str] = set()
        self._line = Line(f"worker-{self.pid}")
        self._job.begin(owner.place, owner.number, self.run)
        rank = int(order.env["RANK"])
        self._script = Script(self._job, self.run, owner.place, rank, self._line, owner.rng)
        self._script.begin(self._work())

    async def _work(self) -> None:
        try:
            await self._line.open(self._socket, self._job.token)
            await self._script.run(self._cell)
        except (RejectedError, RetryableError) as exc:
            self._job.say(f"{self._owner.place} worker {self.local_rank} fails: {exc}")
            self._over(CRASHED, None)
        else:
            self._over(0, None)

    # ---- signals --------------------------------------------------------------------------------

    def end(self, number: int, within_s: float) -> None:
        """A signal that ends it soon. After SIGKILL it executes nothing more."""
        if number == signal.SIGKILL:
            self._script.end()
        self._loop.call_later(self._owner.rng.uniform(0.0, within_s), self._over, None, number)

    def hurt(self, kind: str, seconds: float) -> None:
        """A fault of the scenario hits this worker."""
        if kind == "kill_worker":
            self._over(None, signal.SIGKILL)
        elif kind == "crash_worker":
            self._over(CRASHED, None)
        else:
            self._owner.stop_one(self, seconds)

    def hold(self, who: str) -> None:
        self._stops.add(who)
        self._script.may_run.clear()

    def go_on(self, who: str) -> None:
        self._stops.discard(who)
        if not self._stops:
            self._script.may_run.set()

    def cease(self) -> None:
        """Its machine or its agent is gone: its end is not reported."""
        if not self.is_gone.is_set():
            self.is_gone.set()
            self._job.left(self.run)
            self._script.end()
            self._cell.close()

    def _over(self, code: int | None, number: int | None) -> None:
        if self.is_gone.is_set():
            return
        if code != 0:
            self._job.checkers.worker_failed(self.run.round)
        self._line.abort()
        self.cease()
        self._owner.worker_over(self, code, number)


class ModelledProcesses(Processes):
    """What an agent uses as its processes. Only the types of the real ones are used."""

    def __init__(
        self,
        *,
        job: Job,
        place: str,
        number: int,
        rng: Random,
        on_exit: Callable[[WorkerExit], None],
        on_stopped: Callable[[int, int], None],
        on_continued: Callable[[int], None],
        **_unused: Any,
    ) -> None:
        """`number` tells the agent processes of a place apart."""
        self.job = job
        self.place = place
        self.number = number
        self.rng = rng
        self._on_exit = on_exit
        self._on_stopped = on_stopped
        self._on_continued = on_continued
        self._running: dict[int, ModelledWorker] = {}
        self._ends = 0
        self._lease: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def spare_state(self) -> str:
        return "off: modelled"

    @property
    def learned(self) -> tuple[str, ...]:
        return ()

    def preload(self, names: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        raise AssertionError("there are no spares")

    @property
    def workers(self) -> tuple[ModelledWorker, ...]:
        return tuple(self._running.values())

    async def start(self, order: WorkerOrder) -> Worker:
        ends, began = self._ends, self._loop.time()
        await asyncio.sleep(self.rng.uniform(0.02, self.rng.choice((0.1, WORST_START_S))))
        worker = ModelledWorker(self, order, began)
        self._running[worker.pid] = worker
        if self._ends != ends:
            worker.end(signal.SIGKILL, KILL_S)
        return worker

    async def start_service(self, order: WorkerOrder) -> Service | None:
        return None

    def signal_all(self, sig: int) -> None:
        for worker in self.workers:
            if sig == signal.SIGSTOP:
                worker.hold("agent")
            else:
                worker.go_on("agent")

    def keep_lease(self, until: float) -> None:
        """Hold the workers when the lease ends, as the guardian does."""
        if self._lease is not None:
            self._lease.cancel()
        for worker in self.workers:
            worker.go_on("guardian")
        self._lease = self._loop.call_at(until, self._lease_ends)

    def _lease_ends(self) -> None:
        for worker in self.workers:
            worker.hold("guardian")

    def stop_one(self, worker: ModelledWorker, seconds: float) -> None:
        """Another program stops a worker, and lets it go on later."""
        worker.hold("somebody")
        self.job.checkers.worker_failed(worker.run.round)
        self._on_stopped(worker.local_rank, signal.SIGSTOP)

        def go_on() -> None:
            if not worker.is_gone.is_set():
                worker.go_on("somebody")
                self._on_continued(worker.local_rank)

        self._loop.call_later(seconds, go_on)

    async def stop(self, grace_s: float) -> None:
        self._ends += 1
        workers = self.workers
        for worker in workers:
            worker.end(signal.SIGTERM, min(grace_s, TERM_S))
        for worker in workers:
            await worker.is_gone.wait()

    def kill_now(self) -> None:
        self._ends += 1
        for worker in self.workers:
            worker.end(signal.SIGKILL, KILL_S)

    async def close(self) -> None:
        for worker in self.workers:
            worker.cease()
        self._running.clear()

    def worker_over(self, worker: ModelledWorker, code: int | None, number: int | None) -> None:
        del self._running[worker.pid]
        self._on_exit(WorkerExit(worker.pid, worker.local_rank, code, number))


def run_of(env: Mapping[str, str]) -> m.RunWorld:
    """The world that a worker finds in its environment."""
    return m.RunWorld(
        round=int(env["HOLDFAST_ROUND"]),
        generation=int(env["HOLDFAST_GENERATION"]),
        group_rank=int(env["GROUP_RANK"]),
        group_size=int(env["GROUP_WORLD_SIZE"]),
        rank_offset=int(env["RANK"]) - int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        store_host="",
        store_port=0,
        store_hosted=False,
        restarts=int(env["TORCHELASTIC_RESTART_COUNT"]),
        reason="",
        planned=False,
    )
