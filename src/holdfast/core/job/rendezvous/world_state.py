# SPDX-License-Identifier: Apache-2.0
"""The durable part of `rendezvous`: the world that was agreed, and how records change it."""

from collections.abc import Collection, Iterable, Iterator

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Push
from holdfast.core.kernel import Record
from holdfast.model.ids import Generation, NodeId, Round
from holdfast.model.world import Member, World
from holdfast.protocol import messages as m


class WorldState:
    """The present world, and whether it still holds."""

    def __init__(self) -> None:
        self.generation = Generation(0)
        self.round = Round(0)
        self.world: World | None = None
        self.broken = ""
        #: Whether nothing had failed when it broke: all its nodes were to go.
        self.broken_by_plan = False
        self.done: set[NodeId] = set()
        self.why = ""
        self.planned = False
        self.restarts = 0
        #: Worlds that may still have computed when this one was agreed.
        self.unstopped: tuple[tuple[int, ...], ...] = ()
        #: Derived from the world: the position and the first worker rank of each node.
        self.index: dict[NodeId, int] = {}
        self.offsets: dict[NodeId, int] = {}
        self.size = 0

    def holds(self, member: Member) -> bool:
        """Whether this incarnation of the node is part of the world."""
        index = self.index.get(member.node_id)
        return (
            self.world is not None
            and index is not None
            and self.world.members[index].incarnation == member.incarnation
        )

    def unused(self, offer: ev.StoreOffered) -> int | None:
        """The port of an offered store; None if the workers of the present world meet there.

        An offer that is sent again after the stream broke may come when its round has begun.
        """
        if self.world is not None and offer.port > 0:
            first = self.world.members[0]
            if (first.node_id, first.hosted_port) == (offer.node_id, offer.port):
                return None
        return offer.port

    @property
    def is_healthy(self) -> bool:
        return self.world is not None and not self.broken

    @property
    def breaks(self) -> int:
        """How many worlds have failed, with the present one if it has."""
        return self.restarts + (bool(self.broken) and not self.broken_by_plan)

    def run_world(self, node_id: NodeId) -> m.RunWorld:
        """What a member is told. Of constant size, however many members there are."""
        assert self.world is not None
        first = self.world.members[0]
        return m.RunWorld(
            round=self.round,
            generation=self.world.generation,
            group_rank=self.index[node_id],
            group_size=len(self.index),
            rank_offset=self.offsets[node_id],
            world_size=self.size,
            store_host=first.host,
            store_port=first.hosted_port or first.store_port,
            store_hosted=first.hosted_port > 0,
            restarts=self.restarts,
            reason=self.why,
            planned=self.planned,
        )

    def stop_work(self) -> m.StopWork:
        return m.StopWork(self.round, self.broken or "this node has no place in the world")

    def pushes(self, before: Iterable[NodeId], ready: Collection[NodeId]) -> Iterator[Push]:
        """What to tell the members of a new world, and present members of the one before."""
        for node_id in self.index:
            yield Push(node_id, self.run_world(node_id))
        for node_id in before:
            if node_id in ready and node_id not in self.index:
                yield Push(node_id, self.stop_work())

    def apply(self, record: Record) -> None:
        match record:
            case rec.GenerationSet():
                self.generation = Generation(record.generation)
            case rec.WorldAgreed():
                self.world = record.world
                self.round, self.generation = record.world.round, record.world.generation
                self.index = {member.node_id: i for i, member in enumerate(record.world.members)}
                self.offsets = record.world.rank_offsets()
                self.size = record.world.size
                self.broken = ""
                self.why, self.planned = record.reason, record.planned
                self.restarts, self.unstopped = record.restarts, record.unstopped
                self.done = set()
            case rec.RoundBroken():
                self.broken, self.broken_by_plan = record.reason, record.by_plan
            case rec.NodeDone():
                self.done.add(NodeId(record.node_id))
            case _:
                raise TypeError(f"{record!r} is not a record of the rendezvous")

    def validate(self) -> None:
        """What is derived from the world fits this world, and a world has nodes."""
        if self.world is None:
            assert (self.round, self.index, self.done) == (0, {}, set()), self.round
            return
        assert self.world.members, self.world
        assert self.world.round == self.round, (self.world, self.round)
        assert self.world.generation <= self.generation, self.generation
        assert list(self.index) == [member.node_id for member in self.world.members], self.index
        assert self.done <= self.index.keys(), self.done

    def snapshot(self) -> Iterable[Record]:
        if self.world is not None:
            yield rec.WorldAgreed(self.world, self.why, self.planned, self.restarts, self.unstopped)
            if self.broken:
                yield rec.RoundBroken(self.round, self.broken, self.broken_by_plan)
            for node_id in sorted(self.done):
                yield rec.NodeDone(node_id, self.round)
        yield rec.GenerationSet(self.generation)

    def view(self) -> dict[str, object]:
        """The world as people see it."""
        members = self.world.members if self.world is not None else ()
        return {
            "round": self.round,
            "generation": self.generation,
            "state": self.word,
            "reason": self.broken or self.why or "the job starts",
            "nodes": [member.node_rank for member in members],
            "world_size": self.size,
        }

    @property
    def word(self) -> str:
        """The state of the world as people call it."""
        if self.world is None:
            return "waiting for nodes"
        return "broken" if self.broken else "running"
