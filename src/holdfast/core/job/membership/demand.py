# SPDX-License-Identifier: Apache-2.0
"""What all nodes of a job together ask for, how much of its limits that leaves, and whether a plan
can be done.

Of every wanted rank one node counts: the newest, with what the rank is launched with from now on. A
node that is about to go does not count, and neither does a rank that was given up.
"""

from collections.abc import Callable, Collection

from holdfast.core.job.membership.node_table import NOBODY, NodeTable
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.order import WORKER, Move, Plan
from holdfast.model.resources import NO_LIMITS, NOTHING, Limits, Resources

NO_CHANGE = Plan(plan_id="")
STAYS = Move(node_id=NOBODY)


Judge = Callable[[Plan], str | Resources]
"""Why a plan cannot be done, or how much more the nodes ask for by it. For a plan for the nodes of
another judge: nothing more."""


class Demand:
    """The sum over all askers, against the limits of the job.

    The limits are volatile: each master begins with those of the job's description.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._askers: list[Callable[[], Resources]] = []
        self._judges: list[Judge] = []

    def count(self, asker: Callable[[], Resources], judge: Judge) -> None:
        """Count what this asker asks for, too, and ask `judge` about plans."""
        self._askers.append(asker)
        self._judges.append(judge)

    def follow(self, plan: Plan) -> None:
        """Go by the limits that a plan brings, if it brings any."""
        if plan.limits is not None:
            self.limits = plan.limits

    def refusal(self, plan: Plan) -> str:
        """Why the plan, with its parts for other roles, cannot be done; empty if it can."""
        more = NOTHING
        for part in (plan, *plan.others):
            for judge in self._judges:
                judged = judge(part)
                if isinstance(judged, str):
                    return judged
                more += judged
        if self.limits == NO_LIMITS:
            return ""
        total = self._total()
        return self.limits.refusal(total + more, total)

    def memory_left_mib(self) -> int | None:
        """How much more memory may be asked for; None: any amount."""
        most = self.limits.memory_mib
        return None if most is None else max(0, most - self._total().memory_mib)

    def _total(self) -> Resources:
        return sum((asker() for asker in self._askers), NOTHING)


def described(spec: JobSpec) -> Resources:
    """What a new job asks for, by its description."""
    has_agents = WORKER not in spec.roles
    total = spec.node.times(spec.max_nodes + spec.spare_nodes) if has_agents else NOTHING
    return sum((role.node.times(role.nodes) for role in spec.roles.values()), total)


def of_ranks(
    table: NodeTable, spec: JobSpec, ranks: Collection[NodeRank], plan: Plan = NO_CHANGE
) -> Resources:
    """What the nodes of these ranks ask for, once the plan is done."""
    moves = {move.node_id: move for move in plan.migrate}
    # One walk that is cheap for nodes without amounts of their own: ten thousand may run out of
    # memory one after the other. Nodes inherit what the one before them had: the newest decides.
    own: dict[NodeRank, tuple[NodeId, int, int]] = {}
    for node in table.nodes.values():
        if node.memory_mib or node.cpu_milli or node.node_id in moves:
            move = moves.get(node.node_id, STAYS)
            memory_mib, cpu_milli = move.memory_mib, move.cpu_milli
            asked = (node.node_id, memory_mib or node.memory_mib, cpu_milli or node.cpu_milli)
            own[node.node_rank] = max(asked, own.get(node.node_rank, asked))
    memory_mib = max(plan.memory_mib or table.wanted.memory_mib, spec.node_memory_mib)
    cpu_milli = plan.cpu_milli or table.wanted.cpu_milli or spec.node_cpu_milli
    usual = Resources(memory_mib=memory_mib, cpu_milli=cpu_milli, gpus=spec.node_gpus)
    special = [asked for rank, asked in own.items() if rank in ranks]
    return usual.times(len(ranks)) + Resources(
        memory_mib=sum(max(mib - memory_mib, 0) for _, mib, _ in special),
        cpu_milli=sum(milli - cpu_milli for _, _, milli in special if milli),
    )
