# SPDX-License-Identifier: Apache-2.0
"""What a plan comes to: which ranks are wanted, which nodes go, which are replaced.

A plan is done as a whole or refused as a whole, in one sentence. When a job shrinks, ranks without
a node go first, then nodes whose agent has not attached yet, then spares, then the highest ranks;
critical ones never. When it grows, it takes the lowest ranks that are not wanted yet.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from holdfast.core.job.membership.admission import sized, why_impossible
from holdfast.core.job.membership.demand import of_ranks
from holdfast.core.job.membership.node_table import NodeTable
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.order import NODES_MAX, WORKER, Move, Plan
from holdfast.model.resources import NOTHING, Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be done, all of it."""

    nodes: int
    """The size of the job from now on."""
    want: tuple[NodeRank, ...] = ()
    drop: tuple[NodeRank, ...] = ()
    move: tuple[Move, ...] = ()
    asks_more: Resources = NOTHING
    """How much more the nodes of the job ask for after the change."""
    text: str = "nothing had to change"


def change_for(
    plan: Plan,
    table: NodeTable,
    spec: JobSpec,
    world: Collection[NodeId],
) -> Change | str:
    """What the plan comes to, or why it cannot be done; this does not check the limits."""
    refusal = _refusal(plan, table, spec)
    if refusal:
        return refusal
    removed = {table.nodes[node_id].node_rank for node_id in plan.remove}
    ranks = (table.wanted.ranks - removed) | set(plan.add)
    before = table.wanted.nodes
    target = before + len(ranks) - len(table.wanted.ranks) if plan.nodes is None else plan.nodes
    if plan.nodes is not None:
        places = target + spec.spare_nodes - _given_up_for_good(plan, table, spec)
        ranks |= set(_lowest_free(ranks, places - len(ranks)))
        surplus = len(ranks) - target - spec.spare_nodes
        spared = ranks - set(plan.add)
        in_order = sorted(spared, key=lambda rank: _going_order(rank, table, spec, world))
        dropped = in_order[: max(0, surplus)]
        if critical := [rank for rank in dropped if spec.critical_limit(rank) is not None]:
            return f"{target} nodes would be less than the critical ones: rank {critical[0]} is one"
        ranks -= set(dropped)
    for move in plan.migrate:
        if table.nodes[move.node_id].node_rank not in ranks:
            return f"node id {move.node_id} cannot be moved: by the same plan it has to go"
    if refusal := _too_few(target, table, spec):
        return refusal
    asks_before = of_ranks(table, spec, table.wanted.ranks)
    asks_more = of_ranks(table, spec, ranks, plan).less(asks_before)
    want = tuple(sorted(ranks - table.wanted.ranks))
    drop = tuple(sorted(table.wanted.ranks - ranks))
    change = Change(nodes=target, want=want, drop=drop, move=plan.migrate, asks_more=asks_more)
    return replace(change, text=_text(plan, change, table) or change.text)


def _given_up_for_good(plan: Plan, table: NodeTable, spec: JobSpec) -> int:
    """How many ranks that were given up stay so; they count as nodes of the job.

    A plan for another size, or one that resumes the job, asks for them again. A plan that repeats
    the present size beside some other change does not: they would only be lost again.
    """
    wanted = table.wanted
    if plan.nodes not in (None, wanted.nodes) or (wanted.suspended and plan.suspend is False):
        return 0
    return max(0, wanted.nodes + spec.spare_nodes - len(wanted.ranks))


def _refusal(plan: Plan, table: NodeTable, spec: JobSpec) -> str:
    """Why a plan makes no sense at all; empty if it does."""
    if not spec.size_from_platform:
        return "the size of this job is fixed: it was started with it"
    if plan.role != WORKER:
        return f"this job has no nodes of the role {plan.role!r} that a plan could change"
    if plan.nodes is not None and not 1 <= plan.nodes <= NODES_MAX:
        return f"a job has 1 to {NODES_MAX} nodes, not {plan.nodes}; suspend it to have none"
    for rank in plan.add:
        if not 0 <= rank < NODES_MAX:
            return f"a node rank is between 0 and {NODES_MAX - 1}, not {rank}"
    for what, node_id in [
        *(("removed", node_id) for node_id in plan.remove),
        *(("moved", move.node_id) for move in plan.migrate),
    ]:
        node = table.nodes.get(node_id)
        if node is None or node.phase.is_final or node_id in table.leaving:
            return f"node id {node_id} cannot be {what}: it is not part of the job, or about to go"
        if what == "removed" and spec.critical_limit(node.node_rank) is not None:
            return f"node id {node_id} cannot be removed: its rank {node.node_rank} is critical"
        if table.successor(node) is not None or table.live_by_rank[node.node_rank] != node_id:
            return f"node id {node_id} cannot be {what}: another takes its place already"
    return ""


def _lowest_free(taken: Collection[NodeRank], count: int) -> list[NodeRank]:
    found: list[NodeRank] = []
    rank = 0
    while len(found) < count:
        if NodeRank(rank) not in taken:
            found.append(NodeRank(rank))
        rank += 1
    return found


def _going_order(
    rank: NodeRank, table: NodeTable, spec: JobSpec, world: Collection[NodeId]
) -> tuple[int, int]:
    """Sorts ranks: the first one goes first."""
    node_id = table.live_by_rank.get(rank)
    node = table.nodes[node_id] if node_id is not None else None
    if spec.critical_limit(rank) is not None:
        place = 4
    elif node is None or node_id in table.leaving:
        place = 0
    elif not node.agent_key:
        place = 1
    else:
        place = 3 if node_id in world else 2
    return place, -rank


def _too_few(target: int, table: NodeTable, spec: JobSpec) -> str:
    """Why no world could form of `target` nodes; empty if one could."""
    if table.rules is None:
        return ""
    if target < table.rules.min_nodes:
        least = f"its nodes were started with at least {table.rules.min_nodes}"
        return f"the job cannot go on with {_nodes(target)}: {least}"
    return why_impossible(sized(table.rules, target))


def _text(plan: Plan, change: Change, table: NodeTable) -> str:
    parts, before = [], table.wanted.nodes
    if change.nodes != before:
        parts.append(f"the job has {_nodes(change.nodes)} now, {before} before")
    if plan.migrate:
        ids = ", ".join(str(move.node_id) for move in plan.migrate)
        parts.append(f"node id {ids} goes when another has taken its place")
    if plan.suspend is not None and plan.suspend is not table.wanted.suspended:
        parts.append("the job is suspended" if plan.suspend else "the job is resumed")
    if plan.limits is not None:
        parts.append("the job has other limits from now on")
    if plan.memory_mib or plan.cpu_milli:
        parts.append("nodes are launched with other resources from now on")
    parts += [f"the part for role {part.role} is done" for part in plan.others]
    return "; ".join(parts)


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
