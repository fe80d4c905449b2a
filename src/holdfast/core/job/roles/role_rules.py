# SPDX-License-Identifier: Apache-2.0
"""The rules for nodes without agents: what may be launched again, and what people may ask for."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from holdfast.core.job import records as rec
from holdfast.core.job.commands import LaunchNode, RemoveNode
from holdfast.core.job.membership.demand import NO_CHANGE, STAYS
from holdfast.core.job.roles.role_table import Place, RoleNodeState, RoleTable
from holdfast.core.kernel import Command
from holdfast.model.ids import NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import OF_THE_PROGRAM, ExitReason, Phase
from holdfast.model.order import NODES_MAX, Order, Plan
from holdfast.model.resources import NOTHING, Resources
from holdfast.model.role import NOT_RAISED, RoleSpec, priority_of, raised_memory_mib

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
        roles=tuple((name, table.ranks_of(name)) for name in spec.roles),
        relaunches=node.planned.relaunches,
        memory_mib=node.planned.memory_mib,
        cpu_milli=node.planned.cpu_milli,
        priority=priority_of(spec.roles[role].priority, rank, size),
    )


def given_again(table: RoleTable, spec: JobSpec) -> Iterator[Command]:
    """Repeats what an earlier master had decided, and the platform may not have heard."""
    for node in table.nodes.values():
        if node.leaves:
            yield RemoveNode(node.node_id)
        elif node.phase is Phase.INITIAL:
            yield LaunchNode(order_of(node, table, spec))


def plan_node(
    place: Place,
    table: RoleTable,
    now: float,
    *,
    memory_mib: int = 0,
    cpu_milli: int = 0,
    down_since_s: float | None = None,
) -> rec.RoleNodePlanned:
    """The next node of a rank, with this much memory and processor time if either is given.

    `down_since_s` is given where the rank is launched again: its clock goes on from there.
    """
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
        down_since_s=now if down_since_s is None else down_since_s,
    )


def resized(
    wanted: list[Place], given_up: Collection[Place], role: str, nodes: int
) -> tuple[list[Place], list[Place]]:
    """Which ranks come, the lowest free ones, and which go, the highest, to have `nodes` nodes.

    Another size is also a new try for ranks that were given up. The present size is not.
    """
    if nodes == len(wanted):
        return [], []
    again = [place for place in wanted[:nodes] if place in given_up]
    free = (place for rank in range(nodes) if (place := (role, NodeRank(rank))) not in wanted)
    return again + list(islice(free, max(0, nodes - len(wanted)))), wanted[nodes:]


def is_at_work(table: RoleTable, spec: JobSpec) -> bool:
    """Whether a node still does what the job is for; servers alone do not."""
    return any(
        spec.roles[place[0]].ends_the_job
        and not table.has_ended_well(place)
        and place not in table.given_up
        for place in table.wanted
    )


@dataclass(frozen=True, slots=True)
class RoleLoss:
    """A node that has ended, and how."""

    node: RoleNodeState
    reason: ExitReason
    message: str
    down_since_s: float
    """Since when its rank does not run."""


def judge(
    loss: RoleLoss, table: RoleTable, asked: RoleSpec, left_mib: int | None
) -> tuple[str, int]:
    """Why the rank of a lost node is not launched again, and with how much memory if it is."""
    memory_mib = loss.node.planned.memory_mib
    why_not = over_budget(loss.node.place, table, asked, loss.reason)
    if loss.reason is ExitReason.OOM and asked.auto_scale and not why_not:
        before_mib = max(memory_mib, asked.node_memory_mib)
        memory_mib = raised_memory_mib(before_mib, left_mib)
        if before_mib and not memory_mib:
            why_not = f"it has {before_mib} MiB of memory and may not have more"
    return why_not, memory_mib


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
    if reason is ExitReason.OOM and not asked.auto_scale:
        node = table.newest_of(place)
        memory_mib = max(asked.node_memory_mib, 0 if node is None else node.planned.memory_mib)
        hint = f"; it has {memory_mib} MiB, and {NOT_RAISED}"
    return f"it may be launched again {limit} times for the reason {reason!s}{hint}"


def _waiting(table: RoleTable) -> Iterator[RoleNodeState]:
    """Nodes that are to run and do not yet."""
    return (node for node in table.live() if node.phase in (Phase.INITIAL, Phase.PENDING))


def _longest_waiting(table: RoleTable, spec: JobSpec) -> RoleNodeState | None:
    """Of the nodes that the job ends for if they get no machine, the one that has waited longest.

    Which these are, the job's `pending_strategy` says.
    """
    strategy = spec.pending_strategy
    if strategy == "skip" or spec.pending_timeout_s <= 0:
        return None
    needed = (
        node
        for node in _waiting(table)
        if strategy == "all"
        or spec.roles[node.planned.role].critical_limit(node.planned.node_rank) is not None
    )
    return min(needed, key=lambda node: node.planned.at_s, default=None)


def why_stopped(table: RoleTable, spec: JobSpec, now: float) -> str:
    """Why the job ends now for want of a machine; empty if it does not."""
    node = _longest_waiting(table, spec)
    if node is None or now < node.planned.at_s + spec.pending_timeout_s:
        return ""
    waited = f"has been waiting for a machine for {now - node.planned.at_s:.0f} s"
    return f"{name_of(node.place)} {waited}: {node.message or 'it is pending'}"


def _down(table: RoleTable, spec: JobSpec) -> Iterator[tuple[float, RoleNodeState]]:
    """Nodes whose rank is given up if it does not run in time, and when that is."""
    for node in _waiting(table):
        timeout_s, since_s = spec.roles[node.place[0]].restart_timeout_s, node.planned.down_since_s
        if timeout_s and since_s >= 0:
            yield since_s + timeout_s, node


def down_too_long(table: RoleTable, spec: JobSpec, now: float) -> list[tuple[RoleNodeState, str]]:
    """Nodes whose rank has not run for its restart time-out, each with that as a reason."""
    return [(node, _why_down(node, spec)) for at, node in _down(table, spec) if at <= now]


def _why_down(node: RoleNodeState, spec: JobSpec) -> str:
    timeout_s, relaunches = spec.roles[node.place[0]].restart_timeout_s, node.planned.relaunches
    said = f" ({node.message})" if node.message else ""
    known = f"it is {'pending' if node.phase is Phase.PENDING else 'ordered'}{said}"
    again = f", launched again {relaunches} times" if relaunches else ""
    late = f"has not run for its restart time-out of {timeout_s:g} s"
    return f"{name_of(node.place)} {late}: {known}{again}"


def next_overdue(table: RoleTable, spec: JobSpec) -> float | None:
    """When some node will have been waited for too long, if nothing changes."""
    times = [at for at, _ in _down(table, spec)]
    longest = _longest_waiting(table, spec)
    if longest is not None:
        times.append(longest.planned.at_s + spec.pending_timeout_s)
    return min(times, default=None)


def problem_of(plan: Plan, table: RoleTable, asked: RoleSpec) -> str:
    """Why the plan cannot be done; empty if it can."""
    if asked.holds_variables and (problem := _problem_of_servers(plan, table)):
        return problem
    if plan.migrate and (table.is_suspended or plan.suspend):
        return f"a suspended job has no nodes to move: {_other_resources(plan.role)}, and resume it"
    left = len(table.wanted_of(plan.role)) if plan.nodes is None else plan.nodes
    left -= len(set(plan.remove))
    if left < 1 and (plan.nodes is not None or plan.remove):
        return f"it would leave the job without any node of role {plan.role}"
    if max((plan.nodes or 0, *(rank + 1 for rank in plan.add))) > NODES_MAX:
        return f"a role has at most {NODES_MAX} nodes"
    for node_id in (*plan.remove, *(move.node_id for move in plan.migrate)):
        node = table.nodes.get(node_id)
        if node is None or not node.is_live or node.planned.role != plan.role:
            return f"there is no node {node_id} of role {plan.role}"
    gone = {table.nodes[node_id].place for node_id in plan.remove}
    if plan.nodes is not None:
        left_over = [place for place in table.wanted_of(plan.role) if place not in gone]
        gone.update(resized(left_over, table.given_up, plan.role, plan.nodes)[1])
    for move in plan.migrate:
        if table.nodes[move.node_id].place in gone:
            return f"node id {move.node_id} cannot be moved: by the same plan it has to go"
    return ""


def _problem_of_servers(plan: Plan, table: RoleTable) -> str:
    """Why the plan would leave nodes with different ideas of which one serves which variables."""
    role, now = plan.role, len(table.wanted_of(plan.role))
    if plan.remove or plan.add:
        return f"single nodes of role {role} cannot come or go: ask for another number of replicas"
    if table.is_suspended or plan.suspend:
        return ""
    if plan.migrate:
        return (
            f"a node of role {role} cannot be moved: the variables in its memory would be lost. "
            f"{_INSTEAD.format(_other_resources(role))}"
        )
    if plan.nodes is not None and plan.nodes != now:
        return (
            f"the number of {role} nodes cannot change while the job runs: its nodes were started "
            f"with the addresses of {now}. {_INSTEAD.format('change this')}"
        )
    return ""


_INSTEAD = "Save a checkpoint, suspend the job, {}, and resume it"


def _other_resources(role: str) -> str:
    """What to do in place of a move, which goes for the whole role."""
    return f"give `resource` for role {role}"


def asked_by(plan: Plan, table: RoleTable) -> rec.RoleAsked:
    """What nodes of the plan's role get from now on."""
    memory_mib, cpu_milli = table.asked.get(plan.role, (0, 0))
    return rec.RoleAsked(plan.role, plan.memory_mib or memory_mib, plan.cpu_milli or cpu_milli)


def of_places(table: RoleTable, spec: JobSpec, plan: Plan = NO_CHANGE) -> Resources:
    """What the nodes without agents ask for, once the plan is done."""
    moves = {move.node_id: move for move in plan.migrate}
    total = NOTHING
    for place in _places(table, plan):
        role, node = spec.roles[place[0]], table.newest_of(place)
        memory_mib, cpu_milli = table.asked.get(place[0], (0, 0))
        if place[0] == plan.role:
            memory_mib, cpu_milli = plan.memory_mib or memory_mib, plan.cpu_milli or cpu_milli
        if node is not None:
            move = moves.get(node.node_id, STAYS)
            memory_mib = max(memory_mib, move.memory_mib or node.planned.memory_mib)
            cpu_milli = move.cpu_milli or max(cpu_milli, node.planned.cpu_milli)
        total += Resources(
            cpu_milli=cpu_milli or role.node_cpu_milli,
            memory_mib=max(memory_mib, role.node_memory_mib),
            gpus=role.node_gpus,
        )
    return total


def _places(table: RoleTable, plan: Plan) -> Collection[Place]:
    """The ranks that have a node or get one, once the plan is done."""
    places = table.wanted - {table.nodes[node_id].place for node_id in plan.remove}
    new = {(plan.role, rank) for rank in plan.add}
    if plan.nodes is not None:
        of_role = sorted(place for place in places if place[0] == plan.role)
        come, go = resized(of_role, table.given_up, plan.role, plan.nodes)
        places, new = places - set(go), new | set(come)
    at_work = {place for place in places if place not in table.given_up} | new
    return {place for place in at_work if not table.has_ended_well(place)}
