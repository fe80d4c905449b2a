# SPDX-License-Identifier: Apache-2.0
"""The same mistake on every node: a typo, a module that is missing, a wrong flag.

If one node cannot import a module, its mount may be late. If no node can, the program has a
mistake, which no restart mends. So the report of a node on which every worker made a mistake before
any step stays unanswered until every node of the world has reported the same, something else
happened, or `WAIT_S` have passed. Nothing here is durable: the next master gets the reports again.
"""

from dataclasses import dataclass

from holdfast.core.job.commands import Reply
from holdfast.core.job.events import FailureReported
from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m

WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Failure:
    """What a world failed by."""

    first: FailureReported
    is_everywhere: bool = False
    """Every worker of the world made this mistake."""


class Mistakes:
    """Reports of the present round that wait for the same from the other nodes."""

    def __init__(self) -> None:
        self._held: dict[NodeId, FailureReported] = {}
        self.deadline: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether any report waits."""
        return bool(self._held)

    def take(self, event: FailureReported, nodes: int, now: float) -> Failure | None:
        """What the world, which has this many nodes, failed by; None while that is not known."""
        first = next(iter(self._held.values()), event)
        mine, theirs = event.report.failures[0], first.report.failures[0]
        is_same = (mine.message, mine.traceback) == (theirs.message, theirs.traceback)
        if not mine.alike or not is_same:
            return Failure(first)
        if len(self._held.keys() | {event.node_id}) == nodes:
            return Failure(first, is_everywhere=True)
        self._held[event.node_id] = event
        if self.deadline is None:
            self.deadline = now + WAIT_S
        return None

    def give_up(self, now: float) -> Failure | None:
        """The others have had their time: what the world failed by, if it is up."""
        if self.deadline is None or self.deadline > now:
            return None
        self.deadline = None
        return Failure(next(iter(self._held.values())))

    def answers(self) -> list[Reply]:
        """The world is judged: nothing waits any more."""
        held, self._held, self.deadline = self._held, {}, None
        return [Reply(event.link, event.call, m.Done()) for event in held.values()]
