# SPDX-License-Identifier: Apache-2.0
"""A node: the real worker core of an agent, with modelled processes, beats and checkpoint memory.

It does what agent/agent.py and agent/pulse.py do with the commands of the core.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from holdfast.core.job.membership.admission import rules_of
from holdfast.core.kernel import Command, Tick
from holdfast.core.node import events as ev
from holdfast.core.node.workers import Handled, Workers
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointPush
from holdfast.sim.clock import Clock, Task, Timer
from holdfast.sim.network import DOWN, UP
from holdfast.sim.stage import Stage
from holdfast.sim.stream import Stream
from holdfast.sim.vault import Memory, Vault
from holdfast.sim.worker import Worker

FAREWELL_S = 2.0
GRACE_S = 1.0
"""How long workers may take to act on SIGTERM."""


class Guardian:
    """Holds the workers of an agent still when their lease is over, as agent/guardian.py does."""

    def __init__(self, clock: Clock, workers: Callable[[], Iterable[Worker]]) -> None:
        self._clock = clock
        self._workers = workers
        self._timer: Timer | None = None
        self.is_holding = False

    def keep_lease(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._hold(is_held=False)
        self._timer = self._clock.at(until, lambda: self._hold(is_held=True))

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _hold(self, *, is_held: bool) -> None:
        if is_held != self.is_holding:
            self.is_holding = is_held
            for worker in self._workers():
                worker.hold(is_held=is_held)


class Agent:
    """One agent process and its workers."""

    def __init__(
        self,
        stage: Stage,
        place: str,
        memory: Memory,
        *,
        ended: Callable[["Agent", int], None],
        node_id: int = -1,
        node_rank: int = -1,
    ) -> None:
        """`place` is the machine; `ended` is called with the exit code when the process is over."""
        self.stage = stage
        self.place = place
        self.memory = memory
        self.is_alive = True
        self.node_id = node_id
        self.round = 0
        self._ordered_id, self._wanted_rank = node_id, node_rank
        self._ended = ended
        self.rng = stage.rng(f"agent {place} at {stage.clock.now}")
        self._core = Workers(stage.scenario.nproc)
        self._timer: Timer | None = None
        self._beat_timer: Timer | None = None
        self._welcome: m.Attached | None = None
        self._tasks: list[Task] = []
        self.workers: dict[int, Worker] = {}
        self.is_held = False
        self.guardian = Guardian(stage.clock, lambda: self.workers.values())
        #: Events that it hears when it goes on; None while it runs.
        self._unheard: list[Handled] | None = None
        self.awake = stage.clock.promise()
        """Kept while the agent does not stand still."""
        self.awake.keep(None)
        self._unreported = 0
        self._all_reported = stage.clock.promise()
        self.vault = Vault(self)
        self.stream = Stream(stage.clock, stage.network, place, self.rng, self)

    # ---- the core -------------------------------------------------------------------------------

    def feed(self, event: Handled) -> None:
        if not self.is_alive:
            return
        if self._unheard is not None:
            self._unheard.append(event)
            return
        for command in self._core.handle(event, self.stage.clock.now).commands:
            self._execute(command)
        if self._timer is not None:
            self._timer.cancel()
        at = self._core.deadline()
        if at is not None and self.is_alive:
            self._timer = self.stage.clock.at(at, lambda: self.feed(Tick()))

    def _execute(self, command: Command) -> None:
        match command:
            case ev.StartWorkers():
                self.spawn(self._start(command.run))
            case ev.EndWorkers():
                for worker in list(self.workers.values()):
                    signal, within_s = (15, GRACE_S) if command.gently else (9, 0.05)
                    worker.end(signal, self.rng.uniform(0.0, within_s))
            case ev.Report(m.WorkersDone() as done):
                self.spawn(self._report_done(done))
            case ev.Report():
                self._report(command.body)
            case ev.Flush():
                self.spawn(self._flush())
            case ev.KeepLease():
                self.guardian.keep_lease(command.until)
            case ev.HoldWorkers() | ev.ResumeWorkers():
                self.is_held = isinstance(command, ev.HoldWorkers)
                for worker in self.workers.values():
                    worker.hold(is_held=self.is_held)
            case ev.Rejoin():
                self.stream.rejoin()
            case ev.ExitAgent():
                self.spawn(self._exit(command.exit_code))
            case ev.Tell():
                self.note(command.text)
            case _:
                raise AssertionError(f"nobody executes {type(command).__name__}")

    async def _start(self, run: m.RunWorld) -> None:
        self.stage.checkers.world_received(self.place, self.node_id, run)
        self.note(f"starts round {run.round} as {run.group_rank} of {run.group_size}")
        self.round = run.round
        self.vault.begin_round(run)
        began = self.stage.clock.now
        await self.stage.clock.pause(self.rng.choice((0.1, 0.3, 2.0)) * self.rng.uniform(0.5, 1.5))
        await self.awake
        self.is_held = False
        for local_rank in range(self.stage.scenario.nproc):
            worker = self.workers[local_rank] = Worker(self, run, local_rank)
            worker.hold(is_held=self.guardian.is_holding)
        took_s = self.stage.clock.now - began
        started = frozenset(self.workers)
        self.feed(ev.StartFinished(run.round, started, "zygote", took_s, ""))

    def worker_exited(self, worker: Worker, code: int | None, signal: int | None) -> None:
        self.workers.pop(worker.local_rank, None)
        self.note(f"worker {worker.local_rank} of round {worker.round} ends: {code} {signal}")
        if code != 0:
            self.stage.checkers.worker_failed(worker.round)
        self.feed(ev.WorkerExited(worker.local_rank, 1, code, signal, "", "", -1.0))

    # ---- reports --------------------------------------------------------------------------------

    def _report(self, body: m.WorkersStarted | m.WorkersFailed | m.WorkersDone | m.Leave) -> None:
        self._unreported += 1

        def answered(_: m.AnyMessage) -> None:
            self._unreported -= 1
            if self._unreported == 0:
                self._all_reported.keep(None)
                self._all_reported = self.stage.clock.promise()

        self.stream.call(body, answered)

    async def _report_done(self, done: m.WorkersDone) -> None:
        await self.vault.persister.settled()
        await self.vault.persister.flush()
        self._report(done)

    async def _flush(self) -> None:
        await self.vault.persister.flush()
        self.feed(ev.Flushed())

    async def _exit(self, exit_code: int) -> None:
        if self._unreported:
            reported = self._all_reported
            self.stage.clock.after(FAREWELL_S, lambda: reported.keep(None))
            await reported
        self.stage.clock.after(0.0, lambda: self._die(exit_code))

    # ---- the master -----------------------------------------------------------------------------

    def attachment(self) -> m.Attach:
        return m.Attach(
            agent_key="",
            rules=rules_of(self.stage.scenario.spec()),
            nproc=self.stage.scenario.nproc,
            host=self.place,
            store_port=4000,
            round=self._core.round,
            node_id=self._ordered_id,
            node_rank=self._wanted_rank,
            peer_port=7000,
        )

    def attached(self, welcome: m.Attached, *, sent_at: float) -> None:
        self.note(f"is node {welcome.node_id}, rank {welcome.node_rank}")
        self._welcome = welcome
        self.stage.agents.pop(self.node_id, None)
        self.node_id = welcome.node_id
        self.stage.agents[self.node_id] = self
        self.feed(ev.LeaseRenewed(sent_at + welcome.lease_s))
        self._arm_beat()

    def _arm_beat(self) -> None:
        assert self._welcome is not None
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        self._beat_timer = self.stage.clock.after(self._welcome.beat_s, self._beat)

    def _beat(self) -> None:
        assert self._welcome is not None
        if self._unheard is not None:
            self._arm_beat()
            return
        sent_at, lease_s = self.stage.clock.now, self._welcome.lease_s

        def answered(body: m.AnyMessage) -> None:
            if isinstance(body, m.Done):
                self.feed(ev.LeaseRenewed(sent_at + lease_s))

        steps = min((worker.steps for worker in self.workers.values()), default=0)
        step = max((worker.step for worker in self.workers.values()), default=-1)
        ago_s = 0.0 if steps else -1.0
        self.stream.beat(m.Beat(self.round, steps, step, ago_s, ago_s, 1.0, 1), answered)
        self._arm_beat()

    def pushed(self, body: m.AnyMessage) -> None:
        match body:
            case m.RunWorld():
                self.feed(ev.WorldReceived(body))
            case m.StopWork():
                self.feed(ev.StopReceived(body))
            case m.Fenced():
                self.feed(ev.FencedOff(body.reason))
            case m.JobEnded():
                self.feed(ev.EndReceived(body, self.vault.persister.has_unsaved))
            case _:
                assert isinstance(body, CheckpointPush), body
                self.vault.pushed(body)

    def refused(self, refusal: m.Refused) -> None:
        self.note(f"is refused: {refusal.message}")
        if refusal.kind == "stale":
            self.feed(ev.GivenUp(refusal.message))
        elif refusal.kind == "fenced":
            self.feed(ev.FencedOff(refusal.message))
        else:
            self.stage.checkers.fail(f"an agent was refused: {refusal.message}")

    # ---- life and death -------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, None, None]) -> Task:
        """Run this beside everything else, for as long as the agent lives."""
        self._tasks = [task for task in self._tasks if not task.is_over]
        task = self.stage.clock.spawn(coroutine)
        self._tasks.append(task)
        return task

    def note(self, text: str) -> None:
        self.stage.history.note(f"{self.place} {text}")

    def terminate(self) -> None:
        """SIGTERM."""
        self.feed(ev.ShutdownRequested("it was told to go", 143, self.vault.persister.has_unsaved))

    def stand_still(self, seconds: float) -> None:
        """SIGSTOP to the agent alone: its workers go on. Messages to it wait until it goes on."""
        if self._unheard is None:
            self.note("stands still")
            self._unheard = []
            self.awake = self.stage.clock.promise()
            self.stage.network.partition(self.place, (UP, DOWN), seconds)
            self.stage.clock.after(seconds, self._go_on)

    def _go_on(self) -> None:
        self.note("goes on")
        unheard, self._unheard = self._unheard or [], None
        # It hears the events of others and of its own timers in either order.
        if self.rng.random() < 0.5:
            unheard.sort(key=lambda event: isinstance(event, Tick))
        for event in unheard:
            self.feed(event)
        self.awake.keep(None)

    def kill(self) -> None:
        """SIGKILL: its workers die with it, its memory stays on the machine."""
        if self.is_alive:
            self._die(-9)

    def vanish(self) -> None:
        """The machine is gone, with everything in its memory."""
        if self.is_alive:
            self.note("is gone")
            self._end_all()
            self.stream.vanish()
            self.memory.clear()
            self.stage.checkers.copies.memory_lost(self.place)

    def _die(self, exit_code: int) -> None:
        if not self.is_alive:
            return
        self.note(f"ends with {exit_code}")
        self._end_all()
        self.stream.close()
        self._ended(self, exit_code)

    def _end_all(self) -> None:
        self.is_alive = False
        if self.stage.agents.get(self.node_id) is self:
            del self.stage.agents[self.node_id]
        self.guardian.end()
        for timer in (self._timer, self._beat_timer):
            if timer is not None:
                timer.cancel()
        for worker in self.workers.values():
            worker.cease()
        self.workers.clear()
        for task in self._tasks:
            task.cancel()
