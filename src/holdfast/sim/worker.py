# SPDX-License-Identifier: Apache-2.0
"""A training process, modelled: it loads, reads data, steps together with the others, saves, ends.

The model knows exactly what the worker has trained on, so that the checkers can tell which samples
are in which model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.core.node.events import WorkerContinued, WorkerStopped
from holdfast.model.checkpoint import NONE, SHARED, Shape, Version, rank_part
from holdfast.model.errors import RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.sim.checkers import Sample
from holdfast.sim.clock import Promise, Task, Timer
from holdfast.sim.reading import Reader
from holdfast.sim.scenario import DIRECTORY

if TYPE_CHECKING:
    from holdfast.sim.node import Agent

GROWTH_S = 2.0
"""How often a worker looks how far a stream is written."""


class Worker:
    """One rank of one round."""

    def __init__(self, agent: "Agent", run: m.RunWorld, local_rank: int) -> None:
        self._agent = agent
        self._stage = agent.stage
        self._clock = agent.stage.clock
        self._run = run
        self.local_rank = local_rank
        self.rank = run.rank_offset + local_rank
        self.round = run.round
        self.step = 0
        self.steps = 0
        self._session = f"{agent.place}-{run.round}-{local_rank}-{self._clock.now}"
        self._seq = 0
        self._call = 0
        #: The call of the report under way, and the number of reports so far.
        self._reporting = self._reports = 0
        self._reader: Reader | None = None
        self._collective = agent.stage.collective(run.generation, run.world_size)
        self._going = self._clock.promise()
        self._going.keep(None)
        self._is_alive = True
        self._dying: Timer | None = None
        self._tasks: list[Task] = [self._clock.spawn(self._main())]

    # ---- life and death -------------------------------------------------------------------------

    def hold(self, *, is_held: bool) -> None:
        """SIGSTOP, or SIGCONT."""
        if not is_held:
            self._going.keep(None)
        elif self._going.is_kept:
            self._going = self._clock.promise()

    def stop(self, seconds: float) -> None:
        """Another program stops it with a signal, and lets it go on later."""
        self.hold(is_held=True)
        self._stage.checkers.worker_failed(self.round)
        self._agent.feed(WorkerStopped(self.local_rank, 19))
        self._clock.after(seconds, self._go_on)

    def _go_on(self) -> None:
        if self._is_alive and not self._agent.is_held and not self._agent.guardian.is_holding:
            self.hold(is_held=False)
            self._agent.feed(WorkerContinued(self.local_rank))

    def end(self, signal: int, after_s: float) -> None:
        """It gets a signal, and is gone a little later."""
        if signal == 9:
            # It executes nothing more; its end is noticed later.
            self._stop()
            self._collective.leave()
        if signal == 9 or self._dying is None:
            if self._dying is not None:
                self._dying.cancel()
            self._dying = self._clock.after(after_s, lambda: self._exit(None, signal))

    def crash(self) -> None:
        """The program fails."""
        self._exit(1, None)

    def cease(self) -> None:
        """Its agent is gone, and it with it."""
        self._is_alive = False
        self._stop()
        self._collective.leave()
        if self._dying is not None:
            self._dying.cancel()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _exit(self, code: int | None, signal: int | None) -> None:
        if self._is_alive:
            self.cease()
            self._agent.stream.forget(self._call)
            self._agent.stream.forget(self._reporting)
            self._agent.worker_exited(self, code, signal)

    # ---- the program ----------------------------------------------------------------------------

    async def _main(self) -> None:
        try:
            await self._load()
            if self._stage.scenario.samples:
                await self._open_data()
            await self._train()
        except RejectedError as exc:
            self._agent.note(f"worker {self.local_rank} fails: {exc}")
            self._clock.after(0.0, self.crash)
            return
        self._clock.after(0.0, lambda: self._exit(0, None))

    async def _train(self) -> None:
        scenario = self._stage.scenario
        while True:
            await self._clock.pause(scenario.step_s * self._agent.rng.uniform(0.8, 1.2))
            await self._going
            if self._reader is not None:
                await self._reader.read(self._agent.vault.lineage)
                is_finished = self._reader.is_finished
            else:
                is_finished = self.step + 1 >= scenario.steps
            met = await self._collective.meet(self.rank, is_finished=is_finished)
            await self._going
            if met is None:
                await self._clock.pause(self._agent.rng.uniform(0.0, 1.0))
                raise RejectedError("another rank is gone")
            is_finished = met
            self.step += 1
            self.steps += 1
            self._stage.checkers.stepped(self._agent.place, self._run, self.rank, self.step)
            if is_finished or self.step % scenario.save_every == 0:
                persist = is_finished or self.step % scenario.persist_every == 0
                await self._save(persist=persist)
            if is_finished:
                return

    async def _load(self) -> None:
        """Agree with all ranks on what to restore."""
        prepared, problem, tried = NONE, "", NONE
        while True:
            ask = c.RestoreAsk(
                DIRECTORY, self.round, self.local_rank, prepared, problem=problem, tried=tried
            )
            await self._agent.awake
            plan = await self._agent.vault.restore(ask)
            await self._going
            if isinstance(plan, RejectedError):
                raise plan
            if plan.go:
                self._stage.checkers.restored(self._run, self.rank, prepared, plan)
                self.step = max(0, plan.version.step)
                return
            prepared, problem, tried = plan.version, "", NONE
            if plan.version != NONE and not await self._agent.vault.open(
                plan.version, parts_of(plan.shape, self.rank, self._run.world_size)
            ):
                prepared, problem, tried = NONE, "a part cannot be had", plan.version

    async def _save(self, *, persist: bool) -> None:
        """Copy the state into memory; this takes a while, in which any fault may happen."""
        scenario, vault = self._stage.scenario, self._agent.vault
        version = Version(vault.lineage, self.step)
        shape = Shape(self._run.world_size, scenario.shared)
        marks: tuple[d.Mark, ...] | None = None
        trained: list[Sample] = []
        if self._reader is not None:
            marks, trained = self._reader.marks(), self._reader.trained
        self._stage.checkers.saved(version, self.rank, trained)
        own = [rank_part(self.rank)]
        for part in [SHARED, *own] if scenario.shared and self.local_rank == 0 else own:
            await self._clock.pause(self._agent.rng.uniform(0.001, 0.1))
            await self._agent.awake
            await self._going
            of_rank = marks if part != SHARED else None
            vault.sealed(version, shape, part, persist=persist, marks=of_rank)

    # ---- data -----------------------------------------------------------------------------------

    async def _ask(self, body: d.DataCall) -> m.AnyMessage:
        self._seq += 1
        promise: Promise[m.AnyMessage] = Promise(self._clock)
        self._call = self._agent.stream.call(body, promise.keep, self._session, self._seq)
        answer = await promise
        await self._going
        if isinstance(answer, m.Refused):
            if answer.kind == "fenced":
                await self._clock.promise()  # The round is over: this process is ended soon.
            raise RejectedError(f"{type(body).__name__}: {answer.message}")
        return answer

    async def _open_data(self) -> None:
        checkers = self._stage.checkers
        self._reader = Reader(self._stage.scenario, checkers, self._run, self._ask, self._tell)
        await self._reader.open()
        if self._stage.scenario.grows and self.rank == 0:
            self._tasks.append(self._clock.spawn(self._watch_stream()))

    async def _watch_stream(self) -> None:
        """Like client/data/streams.py: one process reports how far the stream is written."""
        told = 0
        while True:
            await self._clock.pause(GROWTH_S)
            await self._going
            told += 1
            ends = self._stage.scenario.written(self._clock.now)
            answered: Promise[m.AnyMessage] = Promise(self._clock)
            body = d.ShardsGrown(self.round, "train", ends)
            self._agent.stream.call(body, answered.keep, f"{self._session}-growth", told)
            await answered

    def _tell(self, body: d.DataCall, answered: Callable[[m.AnyMessage], None]) -> None:
        """Send a report, while the program goes on."""
        self._reports += 1

        def alive(answer: m.AnyMessage) -> None:
            if self._is_alive:
                answered(answer)

        session = f"{self._session}-reports"
        self._reporting = self._agent.stream.call(body, alive, session, self._reports)


def parts_of(shape: Shape, rank: int, world_size: int) -> list[str]:
    """The parts of a version that a rank needs; for another world size it needs several."""
    if shape.shared:
        return [SHARED, rank_part(rank)]
    return [rank_part(part) for part in range(rank, shape.world_size, world_size)]
