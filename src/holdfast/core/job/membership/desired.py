# SPDX-License-Identifier: Apache-2.0
"""What people ask of a managed job: its size, its ranks, their resources, whether it runs at all.

Durable, as a part of the node table. A rank that is wanted and has no node gets one; that is how a
plan that was written down is carried out even if the master dies before it has given any order.
"""

from collections.abc import Iterable

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.ids import NodeRank

PLANS_KEPT = 1000
"""How many answered plans are remembered: an answered plan is not told again for ever."""

FIRST_MOVED_GROUP = 1001
"""Groups that were launched again elsewhere are numbered from here on."""


class Desired:
    """The size of the job, its ranks, and the plans that led to them."""

    def __init__(self) -> None:
        #: 0 in a job whose size is fixed, and before the first start of any other.
        self.nodes = 0
        self.suspended = False
        #: For nodes launched from now on; 0 for what the job's description says.
        self.memory_mib = 0
        self.cpu_milli = 0
        self.ranks: set[NodeRank] = set()
        self.plans: dict[str, rec.PlanSettled] = {}
        self._moved: dict[int, int] = {}

    def group_now(self, group: int) -> int:
        """The number that a group has by now."""
        while group in self._moved:
            group = self._moved[group]
        return group

    def next_group(self) -> int:
        """A number that no group has had."""
        return max(self._moved.values(), default=FIRST_MOVED_GROUP - 1) + 1

    def moves(self, group: int) -> int:
        """How often the group that has this number now was launched again as a whole."""
        before = {successor: one for one, successor in self._moved.items()}
        count = 0
        while group in before:
            group, count = before[group], count + 1
        return count

    def apply(self, record: Record) -> None:
        match record:
            case rec.JobSized():
                self.nodes, self.suspended = record.nodes, record.suspended
                self.memory_mib, self.cpu_milli = record.memory_mib, record.cpu_milli
            case rec.RankWanted():
                if record.is_wanted:
                    self.ranks.add(NodeRank(record.node_rank))
                else:
                    self.ranks.discard(NodeRank(record.node_rank))
            case rec.PlanSettled():
                self.plans[record.plan_id] = record
                if len(self.plans) > PLANS_KEPT:
                    del self.plans[next(iter(self.plans))]
            case rec.GroupMoved():
                self._moved[record.group] = record.successor
            case _:
                raise TypeError(f"{record!r} is not a record of the nodes")

    def snapshot(self, planned: Iterable[NodeRank]) -> Iterable[Record]:
        """Everything except the wanted ranks that follow from the orders of `planned` ranks."""
        told = set(planned)
        for rank in sorted(self.ranks ^ told):
            yield rec.RankWanted(rank, rank in self.ranks)
        if self.nodes:
            yield rec.JobSized(self.nodes, self.suspended, self.memory_mib, self.cpu_milli)
        yield from self.plans.values()
        for group, successor in self._moved.items():
            yield rec.GroupMoved(group, successor)
