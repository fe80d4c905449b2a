# SPDX-License-Identifier: Apache-2.0
"""When ordered nodes are launched: a node rank that keeps failing waits longer every time.

A platform that cannot start nodes for a while would otherwise be asked again at once, as often as
the budget allows. Nothing here is durable: a restarted master launches what is still ordered.
"""

from heapq import heappop, heappush

from holdfast.model.ids import NodeId, NodeRank

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

STEADY_S = 60.0
"""A node that was ready for this long has proved itself: its successor is launched at once."""


class LaunchQueue:
    """Orders that wait for their time, and how often each rank was launched again in a row."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, NodeId]] = []
        self._in_a_row: dict[NodeRank, int] = {}
        self._ready_since: dict[NodeRank, float] = {}

    def ready(self, rank: NodeRank, now: float) -> None:
        """An agent of this rank has attached, or has come back."""
        self._ready_since.setdefault(rank, now)

    def pause_s(self, rank: NodeRank, now: float) -> float:
        """How long the successor of a node that is lost now has to wait."""
        ready_since = self._ready_since.pop(rank, now)
        if now - ready_since >= STEADY_S:
            self._in_a_row.pop(rank, None)
        before = self._in_a_row.get(rank, 0)
        self._in_a_row[rank] = before + 1
        if before == 0:
            return 0.0
        # The exponent is bounded: a rank may be launched again for weeks.
        return min(FIRST_PAUSE_S * 2.0 ** min(before - 1, 16), LONGEST_PAUSE_S)

    def put(self, node_id: NodeId, at: float) -> None:
        """Launch the node at this time, and not before."""
        heappush(self._waiting, (at, node_id))

    def take_due(self, now: float) -> list[NodeId]:
        """Nodes whose time has come."""
        due = []
        while self._waiting and self._waiting[0][0] <= now:
            due.append(heappop(self._waiting)[1])
        return due

    def clear(self) -> None:
        """Nothing is launched any more."""
        self._waiting.clear()

    def deadline(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None
