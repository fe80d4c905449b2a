# SPDX-License-Identifier: Apache-2.0
"""Whether a lost node is launched again: one rule, asked once, for critical nodes as for others.

A node rank has a budget for each class of failure. For a critical rank one number takes the place
of these budgets, and the job may have a limit of its own: a node that was ended from outside counts
for neither. A node that was out of memory gets twice as much, as far as the limits of the job
allow; where the job changes nothing by itself, it is launched again as it was.
"""

from dataclasses import dataclass

from holdfast.core.job.membership.demand import Demand
from holdfast.core.job.membership.node_table import NodeState, NodeTable
from holdfast.model.job import JobSpec
from holdfast.model.node import OF_THE_PROGRAM, ExitReason
from holdfast.model.role import NOT_RAISED, raised_memory_mib


@dataclass(frozen=True, slots=True)
class Relaunch:
    """What was decided about the successor of a lost node."""

    refusal: str = ""
    """Why it is not launched again, as a clause; empty if it is."""
    counts: bool = True
    """Whether the relaunch uses up budget: not if the platform could not even start the node."""
    memory_mib: int = 0
    """If not 0, the successor must ask for this much."""


def judge(
    table: NodeTable,
    spec: JobSpec,
    demand: Demand,
    node: NodeState,
    reason: ExitReason,
    *,
    has_run: bool,
) -> Relaunch:
    """Decide over the successor of a node that was lost."""
    # A failure of the program itself counts, even if the node was never seen to run.
    counts = has_run or reason in OF_THE_PROGRAM
    refusal = _used_up(table, spec, node, reason) if counts else ""
    if reason is not ExitReason.OOM or not spec.node_memory_mib:
        return Relaunch(refusal, counts)
    before = memory_of(table, spec, node)
    if refusal or not spec.auto_scale:
        hint = "" if spec.auto_scale else f"; it has {before} MiB, and {NOT_RAISED}"
        return Relaunch(refusal and refusal + hint, counts)
    raised = raised_memory_mib(before, demand.memory_left_mib())
    if not raised:
        rank, most = node.node_rank, demand.limits.memory_mib
        why = f"all nodes together may ask for {most} MiB, which leaves nothing"
        return Relaunch(f"node rank {rank} was out of memory with {before} MiB, and {why}")
    return Relaunch("", counts, raised)


def memory_of(table: NodeTable, spec: JobSpec, node: NodeState) -> int:
    """How much memory a node asks for."""
    return max(node.memory_mib, table.wanted.memory_mib, spec.node_memory_mib)


def _used_up(table: NodeTable, spec: JobSpec, node: NodeState, reason: ExitReason) -> str:
    rank, of_class = node.node_rank, spec.node_relaunches[reason]
    critical, is_counted = spec.critical_limit(rank), _counts(reason)
    if critical is not None and is_counted and of_class > 0:
        used = sum(n for (one, r), n in table.relaunches.items() if one == rank and _counts(r))
        if used >= critical:
            return f"node rank {rank} has used the {critical} relaunches that it has as critical"
    elif table.relaunches.get((rank, reason), 0) >= of_class:
        return f"node rank {rank} has used its {of_class} relaunches for the reason {reason!s}"
    if spec.job_relaunches is None or not is_counted:
        return ""
    used = sum(n for (_, r), n in table.relaunches.items() if _counts(r))
    if used >= spec.job_relaunches:
        return f"the job has used its {spec.job_relaunches} relaunches"
    return ""


def _counts(reason: ExitReason) -> bool:
    return reason is not ExitReason.KILLED
