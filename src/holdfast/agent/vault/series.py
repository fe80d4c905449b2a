# SPDX-License-Identifier: Apache-2.0
"""One series on this node: slots for its workers, the restore agreement, what they have saved."""

import asyncio
from pathlib import Path

from msgspec.structs import replace

from holdfast.agent.vault.copies import Copies
from holdfast.agent.vault.fetch import Fetcher
from holdfast.agent.vault.marking import Marking
from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import ROOM_S, Memory
from holdfast.agent.vault.open import Opener
from holdfast.agent.vault.persist import Persister
from holdfast.agent.vault.storage import Depot
from holdfast.checkpoint.arena import PartKey
from holdfast.core.node.saver import RestoreMeeting, SavedSteps, Turn
from holdfast.model.checkpoint import NONE, SHARED, Series, Shape, Stored, Version, rank_part
from holdfast.model.errors import FencedError, HoldfastError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.runtime.observe import Level

_Asked = asyncio.Future[c.RestorePlan]


class SeriesKeeper:
    """Everything about one directory, for the workers of one round after the other."""

    def __init__(self, means: Means, memory: Memory, series: Series, nproc: int) -> None:
        self.series = series
        self.depot = Depot(means, series)
        self.copies = Copies(means, memory, series)
        self._marking = Marking(means, memory, series.directory)
        self._means = means
        self._memory = memory
        self._nproc = nproc
        self._opener = Opener(means, memory, Fetcher(means, memory, self.depot))
        self.persister = Persister(means, memory, self.depot, self._opener.wait_for_readers)
        self._steps = SavedSteps()
        self._meeting: RestoreMeeting[_Asked] = RestoreMeeting(nproc)
        self._round = 0
        self._lineage = -1
        self._plan: c.RestorePlan | None = None
        self._stored: tuple[Stored, ...] | None = None
        self._storage_problem = ""
        #: The slot that the writer of each part was given last.
        self._granted: dict[str, Path] = {}
        self._saved_since_restore = 0

    def open(self, request: c.SeriesOpen) -> None:
        """A worker of the present round has opened the series."""
        self.series = self.depot.series = self.copies.series = request.series
        if request.round > self._round:
            self.begin_round(request.round)
        self._steps.rank_is(request.local_rank, request.rank)

    def begin_round(self, round: int) -> None:
        """The previous workers are gone: their slots, their opened parts and their questions are
        void."""
        self._round, self._lineage, self._plan, self._stored = round, -1, None, None
        for path in self._granted.values():
            self._memory.give_back(path)
        self._granted.clear()
        self._opener.close_all()
        for asked in self._meeting.answered():
            _fail(asked, FencedError(f"round {round} has begun"))
        self._meeting = RestoreMeeting(self._nproc)
        self.persister.overtaken(self._steps.begin_round())
        self.copies.begin_round(round)
        self._marking.begin_round()

    # ---- slots ----------------------------------------------------------------------------------

    def reserve(self, part: str, size: int) -> c.SlotsReserved:
        """Set memory aside that a part will need."""
        key = PartKey(self.series.directory, part)
        paths = self._memory.reserve(key, size, self.series.slots)
        return c.SlotsReserved(tuple(str(path) for path in paths))

    async def grant(self, ask: c.SlotAsk) -> c.SlotGrant:
        """A slot for a part of a step; the slot that the writer was given before is void."""
        if self._lineage < 0:
            raise RejectedError(
                f"step {ask.step} cannot be saved yet: the ranks have not agreed where to begin"
            )
        before = self._granted.pop(ask.part, None)
        if before is not None:
            self._memory.give_back(before)
        key = PartKey(self.series.directory, ask.part)
        watch = self._means.spawn(self.copies.while_a_save_waits(), "looking for the master")
        try:
            path = await self._memory.grant(
                key,
                ask.size,
                self.series.slots,
                avoid=frozenset(ask.untouched),
                give_up=self.copies.give_up_oldest,
                give_up_s=0.0 if self.copies.is_stalled else ROOM_S,
                on_disk=ask.persist,
                # The slots of a series have room for one on its way to storage.
                more=lambda: max(0, self.persister.held - 1),
            )
        finally:
            watch.cancel()
        self._granted[ask.part] = path
        return c.SlotGrant(str(path), self._lineage)

    def sealed(self, report: c.SlotSealed) -> None:
        """A worker has sealed a slot."""
        version = report.version
        if version.lineage != self._lineage:
            raise FencedError(
                f"lineage {version.lineage} of step {version.step} is over: the ranks agreed on "
                f"{self._lineage}"
            )
        self._granted.pop(report.part, None)
        self._memory.sealed(Path(report.path), version, report.digest)
        self._means.tally.sealed(version, report.waited_s)
        if report.persist:
            self.persister.part_sealed(version, report.part)
        if self.copies.is_due(version):
            self.copies.part_sealed(version, report.part)
        marks = report.marks if report.follows else None
        step = self._steps.sealed(version, report.shape, report.part, report.persist, marks)
        if step is None:
            return
        self._means.tally.saved(
            self.series.directory,
            step,
            is_first_node=self._means.group_rank == 0,
            is_in_memory=not self._is_on_disk(version),
        )
        overtaken = self._steps.overtaken(version)
        self.persister.overtaken(overtaken)
        self.copies.overtaken(overtaken)
        if step.follows or (self._plan is not None and self._plan.follows):
            # First: a version without a position does not go to storage.
            self._marking.saved(step, self._round)
        if step.persist:
            self.persister.saved(step, self._round)
        if self.copies.is_due(version):
            self.copies.saved(step)
        self._forget_strangers(step.shape)

    def _is_on_disk(self, version: Version) -> bool:
        """Whether a part of it found no room in memory."""
        held = self._memory.held(self.series.directory)
        return any(h.meta.version == version and self._memory.is_on_disk(h.path) for h in held)

    def _forget_strangers(self, shape: Shape) -> None:
        """Remove parts of ranks that have moved to other nodes, once no restore can want them any
        more."""
        self._saved_since_restore += 1
        if self._saved_since_restore != self.series.slots + 1:
            return
        own = set(self._steps.own_parts(shape))
        for held in self._memory.held(self.series.directory):
            is_old = held.meta.version.lineage < self._lineage
            if held.key.node < 0 and is_old and held.key.part not in own:
                self._memory.drop_if_free(held.path)

    def newest_held(self) -> Version:
        """The newest version with a part in the memory of this node; NONE if there is none."""
        held = self._memory.held(self.series.directory)
        return max((one.meta.version for one in held), default=NONE)

    # ---- the restore agreement ------------------------------------------------------------------

    async def restore(self, ask: c.RestoreAsk) -> c.RestorePlan:
        """One turn of one rank; answered when the master has heard all ranks of all nodes."""
        if ask.round < self._round:
            raise FencedError(f"round {ask.round} is over: round {self._round} has begun")
        if ask.problem:
            # No copy is blamed for it: those that are bad were found when they were opened or read.
            self._means.say(
                f"local rank {ask.local_rank} cannot restore step {ask.tried.step}: {ask.problem}",
                Level.WARNING,
            )
        answer: _Asked = asyncio.get_running_loop().create_future()
        turn = self._meeting.ask(answer, ask)
        if turn is not None:
            disagreement = self._meeting.disagreement()
            if disagreement:
                for asked in self._meeting.answered():
                    _fail(asked, RejectedError(disagreement))
            else:
                self._means.spawn(self._take_turn(turn), "the ranks did not agree on a checkpoint")
        return await answer

    async def _take_turn(self, turn: Turn) -> None:
        meeting = self._meeting
        if no_room := self._opener.take_no_room():
            # A lack of room must not make the job go back to an older state, or begin from nothing.
            for asked in meeting.answered():
                _fail(asked, RejectedError(no_room))
            return
        try:
            body = await self._node_restore(turn)
            if meeting is not self._meeting:
                return  # A new round began meanwhile: its ranks ask for themselves.
            plan = await self._means.ask(body, c.RestorePlan)
        except (HoldfastError, OSError) as exc:
            for asked in meeting.answered():
                _fail(asked, RejectedError(str(exc)))
            return
        if meeting is not self._meeting:
            return
        if plan.version == NONE and self._storage_problem and not turn.fresh:
            # To begin from nothing because storage is out of order would be a disaster.
            for asked in meeting.answered():
                _fail(asked, RejectedError(self._storage_problem))
            return
        self._plan = plan
        if plan.go:
            self._begin_lineage(plan, was_newest=turn.step < 0)
        for asked in meeting.answered():
            if not asked.done():
                asked.set_result(plan)

    async def _node_restore(self, turn: Turn) -> c.NodeRestore:
        directory = self.series.directory
        holdings = self._memory.holdings(directory)
        if self._stored is None:
            self._stored = await self._look_at_storage(is_needed=not holdings)
        stored = tuple(
            # Positions may be large: one is enough, see NodeRestore.
            entry if entry.version == turn.prepared else replace(entry, positions=())
            for entry in self._stored
        )
        return c.NodeRestore(
            directory=directory,
            round=self._round,
            holdings=holdings,
            stored=stored,
            prepared=turn.prepared,
            wants=self._steps.own_parts(Shape(0, shared=True)),
            bad=tuple(self._opener.bad),
            fresh=turn.fresh,
            step=turn.step,
            breakpoint=self.series.breakpoint,
            lineage=self._lineage,
            mixed=turn.mixed,
        )

    async def _look_at_storage(self, *, is_needed: bool) -> tuple[Stored, ...]:
        """What is committed, as the first node sees it. If storage fails, memory alone may be
        enough."""
        self._storage_problem = ""
        if self._means.group_rank > 0:
            return ()
        try:
            return await self.depot.stored()
        except (HoldfastError, OSError) as exc:
            if is_needed:
                raise
            self._storage_problem = str(exc)
            self._means.say(f"only what is in memory can be restored: {exc}", Level.WARNING)
            return ()

    def _begin_lineage(self, plan: c.RestorePlan, *, was_newest: bool) -> None:
        """All ranks go on from one version: if it is the newest whole one, newer ones are void."""
        self._lineage = plan.lineage
        self._stored = None
        self._saved_since_restore = 0
        self._means.tally.went_back(self.series.directory, plan.version)
        if plan.version == NONE or not was_newest:
            return
        own = self._steps.own_parts(Shape(0, shared=True))
        for held in self._memory.held(self.series.directory):
            if plan.version < held.meta.version:
                if held.key.node < 0 and held.key.part in own:
                    self._memory.empty_if_free(held.path)
                else:
                    self._memory.drop_if_free(held.path)

    # ---- parts ----------------------------------------------------------------------------------

    async def open_parts(self, ask: c.PartsOpen) -> c.PartsOpened:
        """Make parts readable here."""
        plan = self._plan
        sources = plan.sources if plan is not None and plan.version == ask.version else ()
        return await self._opener.open(self.series, ask, sources)

    def close_parts(self, close: c.PartsClose) -> None:
        """A rank has read what it opened."""
        own = self._steps.own_parts(Shape(0, shared=True))
        self._opener.close(close.local_rank, own, close.bad)

    def newest_of(self, rank: int) -> list[str]:
        """The newest slots of this rank's own part and of the one that all ranks share."""
        newest: dict[str, Path] = {}
        for held in self._memory.held(self.series.directory):
            if held.key.node < 0 and held.key.part in (rank_part(rank), SHARED):
                newest.setdefault(held.key.part, held.path)
        return [str(path) for path in newest.values()]

    async def verify_newest(self) -> None:
        """Verify the newest slots while the next workers start, so that they need not wait for
        it."""
        checked: set[PartKey] = set()
        for held in self._memory.held(self.series.directory):
            if held.key in checked:
                continue
            checked.add(held.key)
            pin = self._memory.pin(held.path, "it is being verified")
            try:
                await self._memory.verify(held.path, held.meta.version)
            finally:
                self._memory.unpin(pin)


def _fail(asked: _Asked, error: Exception) -> None:
    if not asked.done():
        asked.set_exception(error)
