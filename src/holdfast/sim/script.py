# SPDX-License-Identifier: Apache-2.0
"""The user's program under a real agent: it loads, reads data, steps together with others, saves.

It talks to its agent as the real client does, through a real link: the agent's vault answers
requests about checkpoints, the master answers those about data. It also counts its steps in the
key-value store, so that a request that is lost, or done twice, is noticed.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.slots import Slot
from holdfast.model.checkpoint import NONE, SHARED, Shape, Version, rank_part
from holdfast.model.errors import RejectedError, StateError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect
from holdfast.sim import keeping
from holdfast.sim.checkers import Checkers, Sample
from holdfast.sim.reading import Reader
from holdfast.sim.scenario import DIRECTORY, Scenario
from holdfast.sim.worker import GROWTH_S, parts_of
from holdfast.worker.progress import ProgressCell

NO_PID = 1 << 23
"""Above every pid of a kernel: a modelled process cannot be mistaken for a real one."""

Expected = TypeVar("Expected", bound=m.Message)


class Job:
    """What all workers of a job share: their collectives, and what they counted."""

    def __init__(
        self, scenario: Scenario, checkers: Checkers, token: bytes, say: Callable[[str], None]
    ) -> None:
        self.scenario = scenario
        self.checkers = checkers
        self.token = token
        self.say = say
        self.pids = itertools.count(NO_PID)
        self.agreed: set[int] = set()
        """Rounds that are on the master's disk."""
        self.counted = 0
        #: By generation and step: the ranks there, and whether each has nothing left to do.
        self._meetings: dict[tuple[int, int], tuple[dict[int, bool], asyncio.Event]] = {}
        self._broken: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._answers: dict[int, set[int]] = {}

    def begin(self, place: str, number: int, run: m.RunWorld) -> None:
        """A worker starts; `number` tells the agent processes of a place apart."""
        if run.round not in self.agreed:
            self.checkers.fail(f"{place} begins round {run.round}, which is not on the disk")
        self.checkers.world_received(place, number, run)

    async def meet(self, run: m.RunWorld, rank: int, step: int, *, is_finished: bool) -> bool:
        """Wait for all ranks: a step ends when all have reached its end, and only then.

        Returns whether all of them are finished.
        """
        ranks, all_there = self._meetings.setdefault((run.generation, step), ({}, asyncio.Event()))
        ranks[rank] = is_finished
        if len(ranks) == run.world_size and run.generation not in self._broken:
            all_there.set()
        await all_there.wait()
        return all(ranks.values())

    def left(self, run: m.RunWorld) -> None:
        """A worker is gone: the ranks of its world complete no more steps together."""
        self._broken.add(run.generation)

    def counts(self, run: m.RunWorld) -> None:
        """A worker asks for its step to be counted."""
        self._asked[run.round] += 1

    def counted_as(self, run: m.RunWorld, number: int) -> None:
        """The answer: each number comes once, and is no higher than the number of requests."""
        answers = self._answers.setdefault(run.round, set())
        if number in answers:
            self.checkers.fail(f"two steps of round {run.round} were counted as {number}")
        if number > self._asked[run.round]:
            self.checkers.fail(
                f"{self._asked[run.round]} steps of round {run.round} were counted {number} times"
            )
        answers.add(number)
        self.counted += 1


class Line:
    """A worker's connection to its agent: requests, each alone in its session."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._link: Link | None = None
        self._calls = 0
        self._seqs: Counter[str] = Counter()
        self._waiting: dict[int, asyncio.Future[m.AnyMessage]] = {}

    async def open(self, address: str, token: bytes) -> None:
        self._link = await connect(address, self, token)

    def ask(self, body: m.AnyMessage, session: str = "") -> asyncio.Future[m.AnyMessage]:
        """Send a request; a request that changes something names its session."""
        assert self._link is not None
        self._calls += 1
        self._seqs[session] += bool(session)
        answer = self._waiting[self._calls] = asyncio.get_running_loop().create_future()
        name = f"{self._name} {session}" if session else ""
        self._link.send(body, self._calls, name, self._seqs[session])
        return answer

    def received(self, link: Link, frame: m.Frame) -> None:
        answer = self._waiting.pop(frame.call)
        if not answer.done():
            answer.set_result(frame.body)

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def closed(self, link: Link) -> None:
        """The agent is gone, and this worker with it."""

    def abort(self) -> None:
        if self._link is not None:
            self._link.abort()


class Script:
    """One rank of one round."""

    def __init__(
        self, job: Job, run: m.RunWorld, place: str, rank: int, line: Line, rng: Random
    ) -> None:
        self._job = job
        self._checkers = job.checkers
        self._scenario = job.scenario
        self._run = run
        self._place = place
        self._rank = rank
        self._local_rank = rank - run.rank_offset
        self._line = line
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        #: Cleared while another program has stopped the process.
        self.may_run = asyncio.Event()
        self.may_run.set()
        self._tasks: list[asyncio.Task[None]] = []
        self._reader: Reader | None = None
        self._lineage = -1
        self._step = 0
        self._count: asyncio.Future[m.AnyMessage] | None = None

    def begin(self, main: Coroutine[Any, Any, None]) -> None:
        """Run this until the process ends."""
        task = self._loop.create_task(main)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail loudly on an error of the model: otherwise the job would only never end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._checkers.fail(f"the model of a worker broke: {error!r}")

    def end(self) -> None:
        """End it: nothing of it runs any more."""
        for task in self._tasks:
            task.cancel()

    async def run(self, cell: ProgressCell) -> None:
        """The program, from its load to its last save; RejectedError if a request is refused."""
        series = c.SeriesOpen(
            keeping.SERIES, self._local_rank, self._rank, self._run.world_size, self._run.round
        )
        await self._ask(series, m.Done)
        await self._load()
        if self._scenario.samples:
            await self._open_data()
        is_finished = False
        while not is_finished:
            is_finished = await self._train(cell)
            self._count_step()
            if is_finished or self._step % self._scenario.save_every == 0:
                is_due = self._step % self._scenario.persist_every == 0
                await self._save(persist=is_finished or is_due)
        if self._count is not None:
            await self._count

    async def _train(self, cell: ProgressCell) -> bool:
        """Make one step; whether it was the last."""
        await self._pause(self._scenario.step_s * self._rng.uniform(0.9, 1.1))
        if self._reader is not None:
            await self._reader.read(self._lineage)
            is_finished = self._reader.is_finished
        else:
            is_finished = self._step + 1 >= self._scenario.steps
        is_finished = await self._job.meet(
            self._run, self._rank, self._step + 1, is_finished=is_finished
        )
        await self._unless_held()
        self._step += 1
        cell.advance(self._loop.time())
        cell.report(self._step, self._loop.time())
        self._checkers.stepped(self._place, self._run, self._rank, self._step)
        return is_finished

    def _count_step(self) -> None:
        """Have the step counted while training goes on, one request at a time."""
        if self._count is not None and not self._count.done():
            return

        def counted(answer: asyncio.Future[m.AnyMessage]) -> None:
            if not answer.cancelled() and isinstance(number := answer.result(), m.Number):
                self._job.counted_as(self._run, number.number)

        self._job.counts(self._run)
        self._count = self._line.ask(m.KvAdd(self._run.round, "steps", 1), "counts")
        self._count.add_done_callback(counted)

    # ---- waiting --------------------------------------------------------------------------------

    async def _unless_held(self) -> None:
        while not self.may_run.is_set():
            await self.may_run.wait()

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self._unless_held()

    async def _answer(self, body: m.AnyMessage, session: str = "") -> m.AnyMessage:
        answer = await self._line.ask(body, session)
        await self._unless_held()
        if isinstance(answer, m.Refused):
            if answer.kind in ("fenced", "stale"):
                await self._loop.create_future()  # The round is over: this process is ended soon.
            raise RejectedError(f"{type(body).__name__}: {answer.message}")
        return answer

    async def _ask(self, body: c.VaultCall, expected: type[Expected]) -> Expected:
        """Ask the vault."""
        answer = await self._answer(body)
        assert isinstance(answer, expected), answer
        return answer

    # ---- checkpoints ----------------------------------------------------------------------------

    async def _load(self) -> None:
        """Agree with all ranks on what to restore, and read it."""
        prepared, problem, tried = NONE, "", NONE
        while True:
            ask = c.RestoreAsk(
                DIRECTORY, self._run.round, self._local_rank, prepared, problem, tried
            )
            plan = await self._ask(ask, c.RestorePlan)
            if plan.go:
                self._checkers.restored(self._run, self._rank, prepared, plan)
                self._step, self._lineage = max(0, plan.version.step), plan.lineage
                return
            prepared, problem, tried = plan.version, "", NONE
            if plan.version == NONE:
                continue
            try:
                await self._open_parts(plan)
            except RejectedError as exc:
                prepared, problem, tried = NONE, str(exc), plan.version

    async def _open_parts(self, plan: c.RestorePlan) -> None:
        """Read the parts of the plan; RejectedError if they are wrong.

        As torch/checkpoint/restore.py does.
        """
        version = plan.version
        parts = tuple(parts_of(plan.shape, self._rank, self._run.world_size))
        ask = c.PartsOpen(DIRECTORY, version, parts, self._local_rank)
        bad: list[str] = []
        try:
            opened_parts = (await self._ask(ask, c.PartsOpened)).parts
            await self._pause(self._rng.uniform(0.001, 0.5))
            for opened in opened_parts:
                data = keeping.taken(opened.path)
                if opened.digest not in (-1, digest_of(data)):
                    bad.append(opened.part)
                elif not keeping.is_whole(data, version, opened.part):
                    self._checkers.fail(f"{opened.part} of {version} is restored with wrong bytes")
        except (RejectedError, StateError) as exc:
            # A part is not available; or another rank found it bad, and it was dropped.
            await self._ask(c.PartsClose(DIRECTORY, self._local_rank, tuple(bad)), m.Done)
            raise RejectedError(str(exc)) from exc
        await self._ask(c.PartsClose(DIRECTORY, self._local_rank, tuple(bad)), m.Done)
        if bad:
            raise RejectedError(f"{', '.join(bad)} of {version} changed in memory")

    async def _save(self, *, persist: bool) -> None:
        """Copy the state into memory; this takes a while, in which any fault may happen."""
        version = Version(self._lineage, self._step)
        trained: list[Sample] = []
        marks: tuple[d.Mark, ...] = ()
        if self._reader is not None:
            marks, trained = self._reader.marks(), self._reader.trained
        self._checkers.saved(version, self._rank, trained)
        if self._scenario.shared and self._local_rank == 0:
            await self._save_part(version, SHARED, persist=persist)
        await self._save_part(version, rank_part(self._rank), persist=persist, marks=marks)

    async def _save_part(
        self, version: Version, part: str, *, persist: bool, marks: tuple[d.Mark, ...] = ()
    ) -> None:
        shape = Shape(self._run.world_size, self._scenario.shared)
        ask = c.SlotAsk(DIRECTORY, part, version.step, keeping.size_of(part))
        grant = await self._ask(ask, c.SlotGrant)
        with Slot.open(grant.path, writable=True) as slot:
            slot.begin(version)
            await self._pause(self._rng.uniform(0.001, 0.1))
            keeping.fill(slot, version, shape, part)
        follows = self._reader is not None and part != SHARED
        sealed = c.SlotSealed(
            DIRECTORY, part, version, shape, grant.path, persist, follows=follows, marks=marks
        )
        await self._ask(sealed, m.Done)

    # ---- data -----------------------------------------------------------------------------------

    async def _open_data(self) -> None:
        self._reader = Reader(
            self._scenario, self._checkers, self._run, self._ask_data, self._tell_data
        )
        await self._reader.open()
        if self._scenario.grows and self._rank == 0:
            self.begin(self._watch_stream())

    async def _ask_data(self, body: d.DataCall) -> m.AnyMessage:
        return await self._answer(body, "data")

    def _tell_data(self, body: d.DataCall, answered: Callable[[m.AnyMessage], None]) -> None:
        def told(answer: asyncio.Future[m.AnyMessage]) -> None:
            if not answer.cancelled():
                answered(answer.result())

        self._line.ask(body, "reports").add_done_callback(told)

    async def _watch_stream(self) -> None:
        """Like client/data/streams.py: one process reports how far the stream is written."""
        while True:
            await self._pause(GROWTH_S)
            ends = self._scenario.written(self._loop.time())
            await self._line.ask(d.ShardsGrown(self._run.round, "train", ends), "growth")
