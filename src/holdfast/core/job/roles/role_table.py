# SPDX-License-Identifier: Apache-2.0
"""The durable part of `roles`: which nodes without agents there are, and how records change that.

Of each rank only the newest node counts. An older one is kept for as long as it has to be removed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import ExitReason, Phase

Place = tuple[str, NodeRank]
"""A role and a rank in it."""


@dataclass(slots=True)
class RoleNodeState:
    """What is known of one node id."""

    planned: rec.RoleNodePlanned
    phase: Phase = Phase.INITIAL
    machine: str = ""
    message: str = ""
    #: It is to go: whatever happens to it is no failure.
    leaves: bool = False

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.planned.node_id)

    @property
    def place(self) -> Place:
        return self.planned.role, NodeRank(self.planned.node_rank)

    @property
    def is_live(self) -> bool:
        return not self.phase.is_final and not self.leaves


class RoleTable:
    """Every node that matters, the newest of each rank, and what people asked for."""

    def __init__(self, first_node_id: int) -> None:
        self.nodes: dict[NodeId, RoleNodeState] = {}
        self.newest: dict[Place, NodeId] = {}
        #: Ranks that are to have a node until it has ended well.
        self.wanted: set[Place] = set()
        #: Ranks that are not launched again, as their budgets are used up.
        self.given_up: set[Place] = set()
        self.used: dict[tuple[Place, ExitReason], int] = {}
        #: Memory and processors of nodes to come, where people asked for others.
        self.asked: dict[str, tuple[int, int]] = {}
        self.settled: dict[str, rec.RolePlanSettled] = {}
        self.is_suspended = False
        self.has_begun = False
        self.next_node_id = first_node_id

    def newest_of(self, place: Place) -> RoleNodeState | None:
        node_id = self.newest.get(place)
        return None if node_id is None else self.nodes[node_id]

    def wanted_of(self, role: str) -> list[Place]:
        """The wanted ranks of a role, lowest first."""
        return sorted(place for place in self.wanted if place[0] == role)

    def ranks_of(self, role: str) -> int:
        """How many ranks a role has, the unwanted below the highest wanted one included."""
        return max((rank + 1 for _, rank in self.wanted_of(role)), default=0)

    def live(self) -> Iterator[RoleNodeState]:
        return (node for node in self.nodes.values() if node.is_live)

    def has_ended_well(self, place: Place) -> bool:
        node = self.newest_of(place)
        return node is not None and node.phase is Phase.SUCCEEDED

    def validate(self) -> None:
        """The newest node of a rank is known, and an older one only as long as it lives."""
        for place, node_id in self.newest.items():
            assert self.nodes[node_id].place == place, (place, node_id)
        for node_id, node in self.nodes.items():
            assert node.node_id == node_id < self.next_node_id, node
            is_newest = self.newest[node.place] == node_id
            assert is_newest or (node_id < self.newest[node.place] and not node.phase.is_final)

    def apply(self, record: Record) -> None:
        match record:
            case rec.RoleNodePlanned():
                node = RoleNodeState(record)
                self.nodes[node.node_id] = node
                older = self.newest.get(node.place)
                self.newest[node.place] = node.node_id
                if older is not None:
                    self._forget_if_over(older)
                self.next_node_id = max(self.next_node_id, record.node_id + 1)
            case rec.RoleNodeChanged():
                node = self.nodes[NodeId(record.node_id)]
                node.phase, node.leaves = Phase(record.phase), record.leaves
                node.machine, node.message = record.machine, record.message
                self._forget_if_over(node.node_id)
            case rec.RoleRankSet():
                self._set_rank((record.role, NodeRank(record.node_rank)), record)
            case rec.RoleRelaunched():
                place = (record.role, NodeRank(record.node_rank))
                key = (place, ExitReason(record.reason))
                self.used[key] = self.used.get(key, 0) + record.count
            case rec.RoleAsked():
                self.asked[record.role] = (record.memory_mib, record.cpu_milli)
            case rec.RolePlanSettled():
                self.settled[record.plan_id] = record
            case rec.RolesSet():
                self.is_suspended, self.has_begun = record.is_suspended, True
                self.next_node_id = max(self.next_node_id, record.next_node_id)
            case _:
                raise TypeError(f"{record!r} is not a record of the roles")

    def _set_rank(self, place: Place, record: rec.RoleRankSet) -> None:
        (self.wanted.add if record.is_wanted else self.wanted.discard)(place)
        (self.given_up.add if record.is_given_up else self.given_up.discard)(place)

    def _forget_if_over(self, node_id: NodeId) -> None:
        node = self.nodes[node_id]
        if node.phase.is_final and self.newest[node.place] != node_id:
            del self.nodes[node_id]

    def snapshot(self) -> Iterable[Record]:
        if not self.has_begun:
            return
        for place in sorted(self.wanted | self.given_up):
            yield rec.RoleRankSet(*place, place in self.wanted, place in self.given_up)
        for node_id in sorted(self.nodes):
            yield self.nodes[node_id].planned
        for node in self.nodes.values():
            yield changed(node, node.phase, message=node.message)
        for (place, reason), count in self.used.items():
            yield rec.RoleRelaunched(*place, reason, count)
        for role, (memory_mib, cpu_milli) in self.asked.items():
            yield rec.RoleAsked(role, memory_mib, cpu_milli)
        yield from self.settled.values()
        yield rec.RolesSet(self.is_suspended, self.next_node_id)

    def view(self) -> list[dict[str, object]]:
        """The table as people see it, live nodes first."""
        rows = sorted(self.nodes.values(), key=lambda node: (not node.is_live, node.place))
        return [
            {
                "node_id": node.node_id,
                "role": node.planned.role,
                "node_rank": node.planned.node_rank,
                "phase": str(node.phase),
                "machine": node.machine,
                "relaunches": node.planned.relaunches,
                "memory_mib": node.planned.memory_mib,
                "message": node.message,
            }
            for node in rows
        ]


def changed(
    node: RoleNodeState, phase: Phase, *, message: str = "", machine: str = "", leaves: bool = False
) -> rec.RoleNodeChanged:
    """The record of a node's change. It keeps where the node is, and that it is to go."""
    return rec.RoleNodeChanged(
        node.node_id, phase, machine or node.machine, message, leaves or node.leaves
    )
