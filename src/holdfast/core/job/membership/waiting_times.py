# SPDX-License-Identifier: Apache-2.0
"""Since when each of some nodes waits, and which of them has waited longest.

A successor goes on with the clock of the node before it, so a node that came last may have waited
longest: a heap finds the longest wait, however many nodes there are.
"""

from heapq import heappop, heappush

from holdfast.model.ids import NodeId


class WaitingTimes:
    """Nodes, and since when each of them waits for the same thing."""

    def __init__(self) -> None:
        self._since: dict[NodeId, float] = {}
        #: (since, node): entries that are no longer true are skipped when they surface.
        self._heap: list[tuple[float, NodeId]] = []

    def begin(self, node_id: NodeId, at_s: float) -> None:
        """The node waits since `at_s`; below 0 that is not known, and the node does not count."""
        if at_s >= 0.0:
            self._since[node_id] = at_s
            heappush(self._heap, (at_s, node_id))

    def end(self, node_id: NodeId) -> None:
        self._since.pop(node_id, None)

    def longest(self) -> tuple[float, NodeId] | None:
        """Since when the longest wait lasts, and which node waits; None if no node waits."""
        while self._heap and self._since.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0] if self._heap else None
