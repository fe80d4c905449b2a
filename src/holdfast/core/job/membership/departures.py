# SPDX-License-Identifier: Apache-2.0
"""Nodes that are to go, and what they hold in memory until then.

A part of `nodes`. A node that has a place in the world keeps it until a world without it has formed
and made a step: its parts of the newest checkpoint may be nowhere else. Only then is the platform
asked to remove it, with the grace in which its agent brings what it still holds to storage.
"""

from collections.abc import Iterable

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import RemoveNode
from holdfast.core.job.membership.node_table import NodeState, NodeTable
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase

LEAVE_S = 60.0
"""How long a node without a place in the new world is kept if no step is heard of."""


class Departures:
    """Which node goes when. That a node is to go is durable, in the node table."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        #: The nodes of the present world while it holds.
        self.world: frozenset[NodeId] = frozenset()
        #: When nodes that are to go, and have no place in it, are removed at the latest.
        self._leave_at: float | None = None
        #: Those whose removal this master has asked for.
        self._removed: set[NodeId] = set()

    def leave(
        self, outcome: Outcome, node_ids: Iterable[NodeId], why: str, *, at_once: bool = False
    ) -> None:
        """Have nodes go; the world forms without them first, unless it must be at once."""
        leaving: list[NodeId] = []
        for node_id in node_ids:
            node = self._table.nodes.get(node_id)
            if node is None or node.phase.is_final or node_id in self._table.leaving:
                continue
            if node.agent_key:
                self._table.commit(outcome, rec.NodeLeaves(node_id))
                leaving.append(node_id)
            else:
                self._drop(outcome, node, why)
        if leaving:
            outcome.facts.append(ev.NodesLeaving(tuple(leaving), why))
        for node_id in leaving:
            if at_once or node_id not in self.world:
                self._remove(outcome, node_id)

    def make_room(self, outcome: Outcome, newcomer: NodeState) -> None:
        """A node is ready that was ordered in another's place: the other goes."""
        if self._table.is_live(newcomer.replaces):
            why = f"node rank {newcomer.node_rank} moves to node id {newcomer.node_id}"
            self.leave(outcome, (newcomer.replaces,), why)

    def _drop(self, outcome: Outcome, node: NodeState, why: str) -> None:
        """End a node of which no agent has come: it holds nothing that is needed."""
        self._table.end(outcome, node, Phase.GONE, ExitReason.KILLED, why, proven=True)
        outcome.commands.append(RemoveNode(node.node_id))

    def _remove(self, outcome: Outcome, node_id: NodeId) -> None:
        if node_id not in self._removed:
            self._removed.add(node_id)
            outcome.commands.append(RemoveNode(node_id))

    def let_go(self, outcome: Outcome) -> None:
        """Remove those without a place in the world: what they hold is not needed any more."""
        self._leave_at = None
        for node_id in self._table.leaving:
            if node_id not in self.world:
                self._remove(outcome, node_id)

    def formed(self, world: Iterable[NodeId], now: float) -> None:
        """A world of these nodes holds."""
        self.world = frozenset(world)
        if any(node_id not in self.world for node_id in self._table.leaving):
            self._leave_at = now + LEAVE_S

    def broke(self, outcome: Outcome) -> None:
        """No world holds any node any more."""
        self.world = frozenset()
        self.let_go(outcome)

    def resume(self, outcome: Outcome, now: float) -> None:
        """A new master does not know whom the last one has asked to go."""
        if self._table.leaving:
            why = "nodes had been told to go before the master restarted"
            outcome.facts.append(ev.NodesLeaving(tuple(self._table.leaving), why))
            self._leave_at = now

    def tick(self, outcome: Outcome, now: float) -> None:
        if self._leave_at is not None and self._leave_at <= now:
            self.let_go(outcome)

    def deadline(self) -> float | None:
        return self._leave_at
