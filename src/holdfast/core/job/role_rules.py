# SPDX-License-Identifier: Apache-2.0
"""The rules for nodes without agents: what may be launched again, and what people may ask for."""

from itertools import islice

from holdfast.core.job import role_records as rec
from holdfast.core.job.role_table import Place, RoleNodeState, RoleTable
from holdfast.model.ids import NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import OF_THE_PROGRAM, ExitReason, Phase
from holdfast.model.order import Order, Plan
from holdfast.model.role import RoleSpec, priority_of

OF_OTHERS = frozenset({ExitReason.KILLED, ExitReason.LOST})
"""Evictions and lost machines say nothing about the program: growing pauses bound them."""


def name_of(place: Place) -> str:
    """As people call it: "ps 0"."""
    role, rank = place
    return f"{role} {rank}"


def order_of(node: RoleNodeState, table: RoleTable, spec: JobSpec) -> Order:
    """What the platform is asked for."""
    role, rank = node.place
    size = len(table.wanted_of(role))
    return Order(
        node_id=node.node_id,
        node_rank=rank,
        role=role,
        size=size,
        relaunches=node.planned.relaunches,
        memory_mib=node.planned.memory_mib,
        cpu_milli=node.planned.cpu_milli,
        priority=priority_of(spec.roles[role].priority, rank, size),
    )


def plan_node(
    place: Place, table: RoleTable, now: float, memory_mib: int, cpu_milli: int
) -> rec.RoleNodePlanned:
    """The next node of a rank, with so much memory and processor time if either is given."""
    role, rank = place
    older = table.newest_of(place)
    asked_memory_mib, asked_cpu_milli = table.asked.get(role, (0, 0))
    # What was raised once stays raised.
    before_mib = 0 if older is None else older.planned.memory_mib
    return rec.RoleNodePlanned(
        table.next_node_id,
        role,
        rank,
        relaunches=0 if older is None else older.planned.relaunches + 1,
        memory_mib=memory_mib or max(asked_memory_mib, before_mib),
        cpu_milli=cpu_milli or asked_cpu_milli,
        at_s=now,
    )


def resized(wanted: list[Place], role: str, nodes: int) -> tuple[list[Place], list[Place]]:
    """Which ranks come, the lowest free ones, and which go, the highest, for so many nodes."""
    free = (place for rank in range(nodes) if (place := (role, NodeRank(rank))) not in wanted)
    return list(islice(free, max(0, nodes - len(wanted)))), wanted[nodes:]


def is_at_work(table: RoleTable, spec: JobSpec) -> bool:
    """Whether somebody still does what the job is for; servers alone do not."""
    return any(
        spec.roles[place[0]].ends_the_job
        and not table.has_ended_well(place)
        and place not in table.given_up
        for place in table.wanted
    )


def over_budget(place: Place, table: RoleTable, asked: RoleSpec, reason: ExitReason) -> str:
    """Why a rank that was lost is not launched again; empty if it is."""
    if reason in OF_OTHERS:
        return ""
    limit, used = asked.relaunches[reason], table.used.get((place, reason), 0)
    critical = asked.critical_limit(place[1])
    if critical is not None and limit > 0:
        limit, used = critical, sum(table.used.get((place, other), 0) for other in ExitReason)
    if used < limit:
        return ""
    hint = ", as it would fail again" if reason in OF_THE_PROGRAM and limit == 0 else ""
    return f"it may be launched again {limit} times for the reason {reason!s}{hint}"


def longest_waiting(table: RoleTable, spec: JobSpec) -> RoleNodeState | None:
    """Of the nodes that the job ends for if they get no machine, the one that has waited longest.

    Which these are, the job's `pending_strategy` says.
    """
    strategy = spec.pending_strategy
    if strategy == "skip" or spec.pending_timeout_s <= 0:
        return None
    waiting = (
        node
        for node in table.live()
        if node.phase in (Phase.INITIAL, Phase.PENDING)
        and (
            strategy == "all"
            or spec.roles[node.planned.role].critical_limit(node.planned.node_rank) is not None
        )
    )
    return min(waiting, key=lambda node: node.planned.at_s, default=None)


def problem_of(plan: Plan, table: RoleTable) -> str:
    """Why the plan cannot be done; empty if it can."""
    left = len(table.wanted_of(plan.role)) if plan.nodes is None else plan.nodes
    left -= len(set(plan.remove))
    if left < 1 and (plan.nodes is not None or plan.remove):
        return f"it would leave the job without any node of role {plan.role}"
    for node_id in (*plan.remove, *(move.node_id for move in plan.migrate)):
        node = table.nodes.get(node_id)
        if node is None or not node.is_live or node.planned.role != plan.role:
            return f"there is no node {node_id} of role {plan.role}"
    return ""


def asked_by(plan: Plan, table: RoleTable) -> rec.RoleAsked:
    """What nodes of the plan's role get from now on."""
    memory_mib, cpu_milli = table.asked.get(plan.role, (0, 0))
    return rec.RoleAsked(plan.role, plan.memory_mib or memory_mib, plan.cpu_milli or cpu_milli)
