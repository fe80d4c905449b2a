# SPDX-License-Identifier: Apache-2.0
"""The user's program under a real agent: modelled processes that step, count and end.

A worker talks to its agent through a real link: it counts its steps in the key-value store, so
that a request that is lost, or done twice, shows.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from holdfast.agent.processes import Processes, Service, Worker, WorkerExit, WorkerOrder
from holdfast.model.errors import RetryableError
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect
from holdfast.sim.checkers import Checkers
from holdfast.sim.scenario import Scenario
from holdfast.worker.progress import ProgressCell

NO_PID = 1 << 23
"""Above what any kernel gives: nobody mistakes a modelled process for a real one."""

KILL_S = 0.05
TERM_S = 1.0
"""How long a process may take to end."""

WORST_START_S = 2.0
CRASHED = 1


class Job:
    """What all workers of a job share: their collectives, what they saved, what they counted."""

    def __init__(self, scenario: Scenario, checkers: Checkers, token: bytes) -> None:
        self.scenario = scenario
        self.checkers = checkers
        self.token = token
        self.agreed: set[int] = set()
        """Rounds of which the master's disk knows."""
        self.counted = 0
        self._pids = NO_PID
        self._saved = 0
        #: By generation: the step before its first one, and who has come to which step.
        self._begins: dict[int, int] = {}
        self._meetings: dict[tuple[int, int], tuple[set[int], asyncio.Event]] = {}
        self._broken: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._answers: dict[int, set[int]] = {}

    def next_pid(self) -> int:
        self._pids += 1
        return self._pids

    def begin(self, place: str, pid: int, run: m.RunWorld) -> int:
        """A worker starts: the step from which its world goes on."""
        if run.round not in self.agreed:
            self.checkers.fail(f"{place} begins round {run.round}, which is not on the disk")
        self.checkers.world_received(place, pid, run)
        return self._begins.setdefault(run.generation, self._saved)

    async def meet(self, run: m.RunWorld, rank: int, step: int) -> None:
        """A step ends when all ranks have come to it; without one of them never."""
        ranks, all_there = self._meetings.setdefault(
            (run.generation, step), (set(), asyncio.Event())
        )
        ranks.add(rank)
        if len(ranks) == run.world_size and run.generation not in self._broken:
            all_there.set()
        await all_there.wait()

    def left(self, run: m.RunWorld) -> None:
        """A worker is gone: its world does nothing together any more."""
        self._broken.add(run.generation)

    def stepped(self, place: str, run: m.RunWorld, rank: int, step: int) -> None:
        self.checkers.stepped(place, run, rank, step)
        self._saved = max(self._saved, step)

    def counts(self, run: m.RunWorld) -> None:
        """A worker asks for its step to be counted."""
        self._asked[run.round] += 1

    def counted_as(self, run: m.RunWorld, number: int) -> None:
        """The answer: each number once, and no higher than what was asked for."""
        answers = self._answers.setdefault(run.round, set())
        if number in answers:
            self.checkers.fail(f"two steps of round {run.round} were counted as {number}")
        if number > self._asked[run.round]:
            self.checkers.fail(
                f"{self._asked[run.round]} steps of round {run.round} were counted {number} times"
            )
        answers.add(number)
        self.counted += 1


class ModelledWorker(Worker):
    """One worker process."""

    def __init__(self, owner: "ModelledProcesses", order: WorkerOrder, started_at: float) -> None:
        # Not the real one's: there is no child.
        self.pid = owner.job.next_pid()
        self.local_rank = order.local_rank
        self.how = "cold"
        self.started_at = started_at
        self.is_gone = asyncio.Event()
        self._owner = owner
        self._job = owner.job
        self._run = run_of(order.env)
        self._rank = int(order.env["RANK"])
        self._socket = order.env["HOLDFAST_SOCKET"]
        self._cell = ProgressCell.open(order.progress)
        self._loop = asyncio.get_running_loop()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._stops: set[str] = set()
        self._link: Link | None = None
        #: The answer to the request that is under way.
        self._answer: asyncio.Future[m.AnyMessage] | None = None
        self._seq = 0
        self._step = self._job.begin(owner.place, owner.number, self._run)
        self._task = self._loop.create_task(self._work())

    # ---- the program ----------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            self._link = await connect(self._socket, self, self._job.token)
        except RetryableError:
            self._over(CRASHED, None)
            return
        while self._step < self._job.scenario.steps:
            await asyncio.sleep(self._job.scenario.step_s * self._owner.rng.uniform(0.9, 1.1))
            await self._job.meet(self._run, self._rank, self._step + 1)
            while not self._may_run.is_set():
                await self._may_run.wait()
            self._step += 1
            self._cell.advance(self._loop.time())
            self._cell.report(self._step, self._loop.time())
            self._job.stepped(self._owner.place, self._run, self._rank, self._step)
            if self._answer is None or self._answer.done():
                self._count()
        if self._answer is not None:
            await self._answer
        self._over(0, None)

    def _count(self) -> None:
        """Have the step counted; training goes on meanwhile."""
        assert self._link is not None
        self._seq += 1
        self._answer = self._loop.create_future()
        self._job.counts(self._run)
        body = m.KvAdd(self._run.round, "steps", 1)
        self._link.send(body, self._seq, f"worker-{self.pid}", self._seq)

    def received(self, link: Link, frame: m.Frame) -> None:
        assert self._answer is not None
        if isinstance(frame.body, m.Number):
            self._job.counted_as(self._run, frame.body.number)
        self._answer.set_result(frame.body)

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def closed(self, link: Link) -> None:
        """The agent is gone, and this worker with it."""

    # ---- signals --------------------------------------------------------------------------------

    def end(self, number: int, within_s: float) -> None:
        """A signal that ends it, some time soon. After SIGKILL it does nothing more."""
        if number == signal.SIGKILL:
            self._task.cancel()
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
        self._may_run.clear()

    def go_on(self, who: str) -> None:
        self._stops.discard(who)
        if not self._stops:
            self._may_run.set()

    def cease(self) -> None:
        """Its machine or its agent is gone: nobody hears of its end."""
        if not self.is_gone.is_set():
            self.is_gone.set()
            self._job.left(self._run)
            self._task.cancel()
            self._cell.close()

    def _over(self, code: int | None, number: int | None) -> None:
        if self.is_gone.is_set():
            return
        if self._link is not None:
            self._link.abort()
        self.cease()
        self._owner.worker_over(self, code, number)


class ModelledProcesses(Processes):
    """What an agent knows as its processes. Nothing of the real ones is used but their types."""

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

    def stop_one(self, worker: ModelledWorker, seconds: float) -> None:
        """Somebody else stops a worker, and lets it go on later."""
        worker.hold("somebody")
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
