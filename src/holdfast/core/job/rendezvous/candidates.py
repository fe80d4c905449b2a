# SPDX-License-Identifier: Apache-2.0
"""Who stands ready for the next world, and who may still compute in one that is over.

Nothing here is durable: it is rebuilt as agents attach. Only the worlds that may still compute come
from the record of the present world, as they were when that was agreed.
"""

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.world import Member, in_order
from holdfast.protocol.messages import JobRules


class Candidates:
    """Nodes that are ready, nodes that are expected back, and nodes that may not be dead."""

    def __init__(self) -> None:
        self.ready: dict[NodeId, Member] = {}
        #: Alive as far as we know, without a stream.
        self.absent: set[NodeId] = set()
        #: Ready, but their workers would start cold: a healthy world is not stopped for them yet.
        self.cold: set[NodeId] = set()
        #: Told to leave: excluded from the next world.
        self.leaving: set[NodeId] = set()
        #: Ready, but another node has their rank until it goes.
        self._standing_by: dict[NodeId, NodeId] = {}
        #: Nodes that went silent and whose leases still run: they may not be dead at all.
        self._leased: set[NodeId] = set()
        #: Worlds that were replaced, and that no node has been seen to leave.
        self._unstopped: list[frozenset[NodeId]] = []

    def validate(self) -> None:
        """A node is here or away or lost, and only who is here is cold."""
        here = self.ready.keys()
        assert self.absent.isdisjoint(here), (here, self.absent)
        assert self._leased.isdisjoint(here), (here, self._leased)
        assert self.cold <= here, self.cold

    def arrived(self, member: Member, *, is_cold: bool, replaces: NodeId) -> None:
        self.ready[member.node_id] = member
        if replaces >= 0 and replaces not in self.leaving:
            self._standing_by[member.node_id] = replaces
        self.absent.discard(member.node_id)
        self._leased.discard(member.node_id)
        if is_cold:
            self.cold.add(member.node_id)
        else:
            self.cold.discard(member.node_id)

    def away(self, node_id: NodeId) -> None:
        """Its stream is gone. A node that left before has no place to keep."""
        if self.ready.pop(node_id, None) is not None:
            self.absent.add(node_id)
            self.cold.discard(node_id)

    def lost(self, node_id: NodeId, *, proven: bool) -> None:
        self.ready.pop(node_id, None)
        self.absent.discard(node_id)
        self.cold.discard(node_id)
        self.leaving.discard(node_id)
        self._standing_by.pop(node_id, None)
        self._free_places({node_id})
        if proven:
            self.stopped(node_id)
        else:
            self._leased.add(node_id)

    def leave(self, node_ids: Iterable[NodeId]) -> None:
        """These nodes are to go, and others may have their places."""
        self.leaving.update(node_ids)
        self._free_places(self.leaving)

    def _free_places(self, gone: Collection[NodeId]) -> None:
        for node_id, holder in list(self._standing_by.items()):
            if holder in gone:
                del self._standing_by[node_id]

    def _can_train(self, node_id: NodeId, *, growing: bool) -> bool:
        """Whether the next world may hold this node, which is ready."""
        if node_id in self.leaving or node_id in self._standing_by:
            return False
        return not (growing and node_id in self.cold)

    def stopped(self, node_id: NodeId) -> None:
        """The node computes in no world that was replaced: those cannot go on without it."""
        self._leased.discard(node_id)
        self._unstopped = [world for world in self._unstopped if node_id not in world]

    def unstopped_with(self, world: Iterable[NodeId]) -> tuple[tuple[NodeId, ...], ...]:
        """Worlds that may compute when this one is replaced, until a node is seen to leave them."""
        may_compute = self.ready.keys() | self.absent | self._leased
        worlds = dict.fromkeys([*self._unstopped, frozenset(world)])
        return tuple(tuple(sorted(nodes)) for nodes in worlds if nodes and nodes <= may_compute)

    def set_unstopped(self, worlds: Iterable[Iterable[int]]) -> None:
        """What was known when the present world was agreed."""
        self._unstopped = [frozenset(map(NodeId, world)) for world in worlds]

    def is_leased(self, world: Collection[NodeId]) -> bool:
        """Whether no node of the world is here to stay, and one of them may not be dead."""
        if not (self._leased or self.leaving) or self.keeps_one_of(world):
            return False
        return any(node_id in self._leased or node_id in self.leaving for node_id in world)

    def keeps_one_of(self, world: Collection[NodeId]) -> bool:
        """Whether a node of the world is here to stay."""
        return any(node_id in self.ready and node_id not in self.leaving for node_id in world)

    def has_unstopped(self) -> bool:
        """Whether a world may still compute that has no node here to be told.

        It takes all its nodes to compute: it is over if one of them is neither here nor expected
        nor under a lease, as a restarted master may find.
        """
        return any(
            all(
                node_id in self.absent or node_id in self._leased or node_id in self.leaving
                for node_id in world
            )
            for world in self._unstopped
        )

    def set_ports(
        self, node_id: NodeId, *, store_port: int | None = None, hosted_port: int | None = None
    ) -> None:
        """Which ports of the node the next round may use."""
        member = self.ready.get(node_id)
        if member is not None:
            self.ready[node_id] = replace(
                member,
                store_port=member.store_port if store_port is None else store_port,
                hosted_port=member.hosted_port if hosted_port is None else hosted_port,
            )

    def possible_size(self, rules: JobRules, *, growing: bool) -> int:
        """How many nodes the next world would have; 0 if there can be none."""
        count = len(self.ready) - (len(self.cold) if growing else 0)
        if self.leaving or self._standing_by:
            excluded = self.leaving.union(self._standing_by, self.cold if growing else ())
            count = len(self.ready.keys() - excluded)
        size = min(count, rules.max_nodes)
        size -= size % rules.node_unit
        return size if size >= max(rules.min_nodes, 1) else 0

    def is_complete(self, rules: JobRules, size: int, *, growing: bool, begins: bool) -> bool:
        """Whether every node that is expected is here."""
        if size == rules.max_nodes - rules.max_nodes % rules.node_unit:
            return not self.absent or not growing
        # At the beginning as many as the maximum are expected; later, the nodes that are known.
        return not begins and not self.absent and not growing

    def spares(self, world: Collection[NodeId]) -> list[NodeRank]:
        """The ranks of nodes that are ready and have no place in the world."""
        return sorted(one.node_rank for one in self.ready.values() if one.node_id not in world)

    def choose(self, size: int, *, growing: bool, world: Iterable[NodeId]) -> list[Member]:
        """The members of the next world, in order.

        Nodes that may still compute come first, beginning with one node of each world that may. No
        node steps in the next world before such a member has left the one before: even if that
        member is out of reach by now, unnoticed. So a newcomer never pushes a member out; and when
        a healthy world grows, the cold nodes stay where they are.
        """
        computing = [*self._unstopped, frozenset(world)]
        may_compute = frozenset[NodeId]().union(*computing)
        candidates = sorted(
            (m for m in self.ready.values() if self._can_train(m.node_id, growing=growing)),
            key=lambda member: (member.node_id not in may_compute, member.node_rank),
        )
        needed: dict[NodeId, Member] = {}
        for nodes in computing:
            first = next((m for m in candidates if m.node_id in nodes), None)
            if first is not None and nodes.isdisjoint(needed):
                needed[first.node_id] = first
        others = [member for member in candidates if member.node_id not in needed]
        return in_order([*needed.values(), *others][:size])
