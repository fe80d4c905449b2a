# SPDX-License-Identifier: Apache-2.0
"""The checkpoint memory of a node and its requests to the master, with the real node decisions
(core/node/saver.py, core/node/marks.py). No bytes move: a copy exists or not, and is good or
rotten.

It does what agent/vault does: the restore agreement, writes to storage, copies on other nodes, the
marks of data.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.core.node.marks import Marks, merged
from holdfast.core.node.saver import RestoreMeeting, SavedStep, SavedSteps, Turn
from holdfast.model.checkpoint import NONE, Holding, Shape, Stored, Version
from holdfast.model.errors import FencedError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.data import DataMarked
from holdfast.sim.clock import Promise
from holdfast.sim.copies import Copies
from holdfast.sim.network import DOWN, UP
from holdfast.sim.persister import Persister
from holdfast.sim.scenario import DIRECTORY

if TYPE_CHECKING:
    from holdfast.sim.node import Agent

SLOTS = 2
Asked = Promise[c.RestorePlan | RejectedError]


@dataclass(slots=True)
class Copy:
    """A sealed slot."""

    shape: Shape
    is_rotten: bool = False


class Memory:
    """The slots of one machine. They outlive the agent, and are lost with the machine."""

    def __init__(self) -> None:
        self.copies: dict[tuple[Version, str], Copy] = {}
        self.pins: Counter[Version] = Counter()

    def clear(self) -> None:
        self.copies.clear()

    def keep(self, version: Version, part: str, shape: Shape, safe: Version = NONE) -> None:
        """Seal a slot: of each part the newest copies stay, and pinned or safe versions."""
        self.copies[version, part] = Copy(shape)
        mine = sorted((v for v, p in self.copies if p == part), reverse=True)
        for old in mine[SLOTS:]:
            if not self.pins[old] and old != safe:
                del self.copies[old, part]

    def versions(self) -> set[Version]:
        return {version for version, _ in self.copies}

    def holdings(self) -> tuple[Holding, ...]:
        return tuple(
            Holding(version, copy.shape, part, 4096, version.step)
            for (version, part), copy in sorted(self.copies.items(), key=lambda item: item[0])
        )


class Vault:
    """The checkpoints of one agent."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._stage = agent.stage
        self._clock = agent.stage.clock
        self._memory = agent.memory
        self._memory.pins.clear()
        self._run: m.RunWorld | None = None
        self._steps = SavedSteps()
        self._meeting: RestoreMeeting[Asked] = RestoreMeeting(self._stage.scenario.nproc)
        self._lineage = -1
        self._plan: c.RestorePlan | None = None
        self._stored: tuple[Stored, ...] | None = None
        self._bad: list[c.BadCopy] = []
        self.persister = Persister(agent)
        self._said: dict[Version, dict[int, Marks]] = {}
        self.copies = Copies(agent)

    def begin_round(self, run: m.RunWorld) -> None:
        """The workers of the last round are gone: their requests are void."""
        for asked in self._meeting.answered():
            asked.keep(FencedError(f"round {run.round} has begun"))
        self._meeting = RestoreMeeting(self._stage.scenario.nproc)
        self._run, self._lineage, self._plan, self._stored = run, -1, None, None
        self._steps.begin_round()
        for local_rank in range(self._stage.scenario.nproc):
            self._steps.rank_is(local_rank, run.rank_offset + local_rank)
        self._bad.clear()
        self._said.clear()
        self.copies.begin_round(run.round)

    @property
    def round(self) -> int:
        return 0 if self._run is None else self._run.round

    # ---- the restore agreement ------------------------------------------------------------------

    def restore(self, ask: c.RestoreAsk) -> Asked:
        """One turn of one rank; answered when the master has heard all ranks of all nodes."""
        asked: Asked = Promise(self._clock)
        turn = self._meeting.ask(asked, ask)
        if turn is not None:
            self._agent.spawn(self._take_turn(turn))
        return asked

    async def _take_turn(self, turn: Turn) -> None:
        meeting = self._meeting
        answer: c.RestorePlan | RejectedError
        try:
            answer = await self._agent.stream.ask(self._node_restore(turn), c.RestorePlan)
        except RejectedError as exc:
            answer = RejectedError(str(exc))
        if meeting is not self._meeting:
            return
        if isinstance(answer, c.RestorePlan):
            self._plan = answer
            if answer.go:
                self._begin_lineage(answer)
        for asked in meeting.answered():
            asked.keep(answer)

    def _node_restore(self, turn: Turn) -> c.NodeRestore:
        assert self._run is not None
        stored: tuple[Stored, ...] = ()
        if self._run.group_rank == 0:
            stored = self._stage.storage.stored(turn.prepared)
        return c.NodeRestore(
            directory=DIRECTORY,
            round=self.round,
            holdings=self._memory.holdings(),
            stored=stored,
            prepared=turn.prepared,
            wants=self._steps.own_parts(Shape(0, shared=True)),
            bad=tuple(self._bad),
            fresh=turn.fresh,
            step=turn.step,
            lineage=self._lineage,
            mixed=turn.mixed,
        )

    def _begin_lineage(self, plan: c.RestorePlan) -> None:
        """All ranks go on from one version: newer ones are void."""
        self._lineage = plan.lineage
        for key in [key for key in self._memory.copies if plan.version < key[0]]:
            if plan.version != NONE and not self._memory.pins[key[0]]:
                del self._memory.copies[key]

    async def open(self, version: Version, parts: Iterable[str]) -> bool:
        """Bring parts here; False if one is not available: the next turn reports it."""
        known: dict[str, c.Source] = {}
        if self._plan is not None and self._plan.version == version:
            known = {source.asked: source for source in self._plan.sources}
        unknown = tuple(part for part in parts if part not in known)
        if unknown:
            ask = c.PartsLocate(DIRECTORY, version, unknown)
            try:
                located = await self._agent.stream.ask(ask, c.PartsLocated)
            except RejectedError:
                return False
            known.update((source.asked, source) for source in located.sources)
        shape = Shape(0, False) if self._plan is None else self._plan.shape
        for part in parts:
            source = known.get(part)
            if source is None or not await self._open_one(version, shape, source):
                return False
        return True

    async def _open_one(self, version: Version, shape: Shape, source: c.Source) -> bool:
        key, own = (version, source.part), self._agent.node_id
        here = self._memory.copies.get(key)
        if here is None:
            await self._clock.pause(self._agent.rng.uniform(0.01, 0.5))
            if self._fetch(key, source):
                self._memory.keep(version, source.part, shape)
                return True
        elif not here.is_rotten:
            return True
        else:
            del self._memory.copies[key]
        node_id = own if here is not None else source.node_id
        self._bad.append(c.BadCopy(version, source.part, node_id, "it cannot be read"))
        self._stage.checkers.copies.unreadable(self.round)
        return False

    def _fetch(self, key: tuple[Version, str], source: c.Source) -> bool:
        if source.kind == "storage":
            return self._stage.storage.has(*key)
        peer = self._stage.agents.get(source.node_id)
        if peer is None or not self.can_reach(peer):
            return False
        copy = peer.memory.copies.get(key)
        return copy is not None and not copy.is_rotten

    def can_reach(self, peer: "Agent") -> bool:
        """Whether no partition cuts off either machine."""
        network = self._stage.network
        ends = (self._agent.place, peer.place)
        return not any(network.is_cut_off(end, way) for end in ends for way in (UP, DOWN))

    # ---- saving ---------------------------------------------------------------------------------

    @property
    def lineage(self) -> int:
        return self._lineage

    def sealed(
        self, version: Version, shape: Shape, part: str, *, persist: bool, marks: Marks | None
    ) -> None:
        """A worker has sealed a slot."""
        if version.lineage != self._lineage:
            return
        self._memory.keep(version, part, shape)
        step = self._steps.sealed(version, shape, part, persist, marks)
        if step is None:
            return
        self._steps.overtaken(version)
        if step.follows or (self._plan is not None and self._plan.follows):
            self._mark(step)
        if step.persist:
            work = self.persister.persist(step, self.round)
            self.persister.begin(f"save {version}", work, version)
        if self._stage.scenario.replicas:
            self.copies.saved(step)

    def _mark(self, step: SavedStep) -> None:
        """Report the data positions, with those that the master has not confirmed before."""
        self._said[step.version] = dict(step.marks)
        marks = {
            rank: merged(said.get(rank, ()) for said in self._said.values()) for rank in step.marks
        }
        held = tuple(sorted(self._memory.versions()))
        body = DataMarked(DIRECTORY, self.round, step.version, marks, step.shape.world_size, held)
        self._agent.spawn(self._tell(body))

    async def _tell(self, body: DataMarked) -> None:
        try:
            await self._agent.stream.ask(body, m.Done)
        except RejectedError:
            return
        for version in [one for one in self._said if one <= body.version]:
            del self._said[version]

    def pushed(self, body: c.CheckpointPush) -> None:
        persister = self.persister
        match body:
            case c.PersistOrder():
                name = f"write {body.attempt} {body.parts}"
                persister.begin(name, persister.obey(body), body.version)
            case c.CommitOrder():
                persister.begin(f"commit {body.attempt}", persister.commit(body), body.version)
            case c.InventoryWanted():
                held, writing = self._memory.holdings(), persister.writing
                taken = c.InventoryTaken(DIRECTORY, body.number, held, writing)
                self._agent.stream.call(taken, lambda answer: None)
