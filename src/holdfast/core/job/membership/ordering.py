# SPDX-License-Identifier: Apache-2.0
"""Orders of nodes. What a node is ordered with follows from the table, the spec and the plans."""

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import LaunchNode
from holdfast.core.job.membership.launch_queue import LaunchQueue
from holdfast.core.job.membership.node_table import NOBODY, NodeState, NodeTable
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import Phase
from holdfast.model.order import Move, Order


def next_node(
    table: NodeTable, spec: JobSpec, rank: NodeRank, memory_mib: int, down_since_s: float
) -> rec.NodePlanned:
    """The node that comes next on a rank. It inherits what was learned from the one before."""
    group = table.wanted.group_now(spec.group_of(rank))
    node_id = NodeId(table.next_node_id)
    before = table.nodes.get(table.ended_by_rank.get(rank, NOBODY))
    if before is None:
        return rec.NodePlanned(
            node_id, rank, memory_mib=memory_mib, group=group, down_since_s=down_since_s
        )
    return rec.NodePlanned(
        node_id,
        rank,
        relaunches=before.relaunches + 1,
        memory_mib=memory_mib or before.memory_mib,
        cpu_milli=before.cpu_milli,
        group=group,
        down_since_s=down_since_s,
    )


def moved_node(table: NodeTable, old: NodeState, move: Move, now: float) -> rec.NodePlanned:
    """The node that takes another's place, with other resources if some were asked."""
    return rec.NodePlanned(
        NodeId(table.next_node_id),
        old.node_rank,
        relaunches=old.relaunches + 1,
        memory_mib=move.memory_mib or old.memory_mib,
        cpu_milli=move.cpu_milli or old.cpu_milli,
        group=old.group,
        replaces=old.node_id,
        down_since_s=now,
    )


def down_since(node: NodeState, now: float) -> float:
    """Since when the rank of a node that has ended has no agent."""
    if node.agent_key:
        return node.phase_at_s or now
    return node.down_since_s if node.down_since_s >= 0 else now


def order_of(node: NodeState, table: NodeTable, spec: JobSpec, now: float) -> Order:
    """The order as the platform gets it."""
    size = table.wanted.nodes or spec.max_nodes
    return Order(
        node_id=node.node_id,
        node_rank=node.node_rank,
        size=size,
        relaunches=node.relaunches,
        memory_mib=max(node.memory_mib, table.wanted.memory_mib),
        cpu_milli=node.cpu_milli or table.wanted.cpu_milli,
        priority=spec.priority_of(node.node_rank, size),
        group=node.group,
        avoid_hosts=table.hosts.avoided(table.machines, now),
    )


class Orders:
    """Orders that were placed, and those that wait for their time."""

    def __init__(self, spec: JobSpec, table: NodeTable) -> None:
        self._spec = spec
        self._table = table
        self._launches = LaunchQueue()

    def order(
        self,
        outcome: Outcome,
        rank: NodeRank,
        reason: str,
        now: float,
        *,
        pause_s: float = 0.0,
        memory_mib: int = 0,
        down_since_s: float | None = None,
    ) -> None:
        """Order the next node of a rank, with at least this much memory.

        `down_since_s` is given where the rank is launched again: its clock goes on from there.
        """
        since_s = now if down_since_s is None else down_since_s
        planned = next_node(self._table, self._spec, rank, memory_mib, since_s)
        self.place(outcome, planned, reason, now, pause_s=pause_s)

    def place(
        self,
        outcome: Outcome,
        planned: rec.NodePlanned,
        reason: str,
        now: float,
        *,
        pause_s: float = 0.0,
    ) -> None:
        """Order this very node."""
        node_id, rank = NodeId(planned.node_id), NodeRank(planned.node_rank)
        self._table.commit(outcome, planned)
        outcome.facts.append(ev.NodeOrdered(node_id, rank, reason, pause_s))
        self._launches.put(node_id, now + pause_s)
        self.launch_due(outcome, now)

    def fill(self, outcome: Outcome, reason: str, now: float, *, is_relaunch: bool = False) -> None:
        """Order a node for every wanted rank that has none."""
        table = self._table
        for rank in sorted(table.wanted.ranks - table.live_by_rank.keys()):
            before = table.nodes.get(table.ended_by_rank.get(rank, NOBODY))
            since_s = down_since(before, now) if before is not None and is_relaunch else now
            self.order(outcome, rank, reason, now, down_since_s=since_s)

    def give_again(self, outcome: Outcome, now: float) -> None:
        """Launch again the nodes that an earlier master had ordered and that were not seen yet."""
        for node in self._table.nodes.values():
            if node.phase is Phase.INITIAL:
                outcome.commands.append(self._launch(node, now))

    def launch_due(self, outcome: Outcome, now: float) -> None:
        """Launch the nodes whose time has come."""
        for node_id in self._launches.take_due(now):
            node = self._table.nodes.get(node_id)
            if node is not None and node.phase is Phase.INITIAL:
                outcome.commands.append(self._launch(node, now))

    def _launch(self, node: NodeState, now: float) -> LaunchNode:
        return LaunchNode(order_of(node, self._table, self._spec, now))

    def ready(self, rank: NodeRank, now: float) -> None:
        """An agent of this rank has attached, or has come back."""
        self._launches.ready(rank, now)

    def pause_s(self, rank: NodeRank, now: float) -> float:
        """How long the successor of a node that is lost now has to wait."""
        return self._launches.pause_s(rank, now)

    def clear(self) -> None:
        """Nothing is launched any more."""
        self._launches.clear()

    def deadline(self) -> float | None:
        return self._launches.deadline()
