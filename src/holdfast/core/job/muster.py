# SPDX-License-Identifier: Apache-2.0
"""Who stands ready for the next world. Nothing here is durable: it is rebuilt as agents attach."""

from collections.abc import Container, Iterable

from msgspec.structs import replace

from holdfast.model.ids import NodeId
from holdfast.model.world import Member, in_order
from holdfast.protocol.messages import JobRules


class Muster:
    """Nodes that are ready, nodes that are expected back, and nodes that may not be dead."""

    def __init__(self) -> None:
        self.ready: dict[NodeId, Member] = {}
        #: Alive as far as we know, without a stream.
        self.absent: set[NodeId] = set()
        #: Ready, but their workers would start cold: a healthy world is not stopped for them yet.
        self.cold: set[NodeId] = set()
        #: Nodes of the last world that went silent and whose leases still run.
        self.leased: set[NodeId] = set()
        #: Worlds that were replaced, and that nobody has been seen to leave.
        self._unstopped: list[frozenset[NodeId]] = []

    def arrived(self, member: Member, *, is_cold: bool) -> None:
        self.ready[member.node_id] = member
        self.absent.discard(member.node_id)
        self.leased.discard(member.node_id)
        if is_cold:
            self.cold.add(member.node_id)
        else:
            self.cold.discard(member.node_id)

    def away(self, node_id: NodeId) -> None:
        """Its stream is gone. A node that left before has no place to keep."""
        if self.ready.pop(node_id, None) is not None:
            self.absent.add(node_id)
            self.cold.discard(node_id)

    def lost(self, node_id: NodeId) -> None:
        self.ready.pop(node_id, None)
        self.absent.discard(node_id)
        self.cold.discard(node_id)

    def replaced(self, world: Iterable[NodeId]) -> None:
        """A world is replaced; until one of its nodes has left it, it may still be computing."""
        may_compute = self.ready.keys() | self.absent | self.leased
        nodes = frozenset(world)
        if nodes and nodes <= may_compute:
            self._unstopped.append(nodes)

    def stopped(self, node_id: NodeId) -> None:
        """The node computes in no world that was replaced: those cannot go on without it."""
        self.leased.discard(node_id)
        self._unstopped = [world for world in self._unstopped if node_id not in world]

    def has_unstopped(self) -> bool:
        """Whether a world may still compute of which nobody is here to be told."""
        return any(world.isdisjoint(self.ready) for world in self._unstopped)

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
        size = min(count, rules.max_nodes)
        size -= size % rules.node_unit
        return size if size >= max(rules.min_nodes, 1) else 0

    def is_full(self, rules: JobRules, size: int) -> bool:
        """Whether no larger world could ever form."""
        return size == rules.max_nodes - rules.max_nodes % rules.node_unit

    def choose(self, size: int, *, growing: bool, world: Container[NodeId]) -> list[Member]:
        """The members of the next world, in order.

        When a healthy world grows its members come first, so that a newcomer never pushes one out,
        and the cold stay where they are.
        """
        candidates = sorted(
            (m for m in self.ready.values() if not (growing and m.node_id in self.cold)),
            key=lambda member: (growing and member.node_id not in world, member.node_rank),
        )
        return in_order(candidates[:size])
