# SPDX-License-Identifier: Apache-2.0
"""Which agents are let in: those that mean the same job, and whose place no other agent has."""

from msgspec.structs import replace

from holdfast.core.job.membership.node_table import NodeTable
from holdfast.model.errors import UsageError
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.protocol import messages as m

BEHIND = "the journal of the master is behind"
"""How the reason begins when a job ends because its master has forgotten something."""

NPROC_MAX = 2**20
"""More is a mistake; and the sum over all nodes must fit into the 64 bits of a frame."""


def rules_of(spec: JobSpec) -> m.JobRules:
    """The part of a spec that every node of the job must agree on."""
    return m.JobRules(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        node_unit=spec.node_unit,
        last_call_s=spec.last_call_s,
        join_timeout_s=spec.join_timeout_s,
        max_restarts=spec.worker_restarts[ExitReason.ERROR],
    )


def sized(rules: m.JobRules, size: int) -> m.JobRules:
    """The rules of a job of another size. It cannot need more nodes than it has."""
    return replace(rules, min_nodes=min(rules.min_nodes, size), max_nodes=size)


def rules_of_agent(attach: m.Attach, table: NodeTable) -> m.JobRules:
    """What an agent was started with, as the job counts its nodes.

    Where the platform has the size, an agent only knows what it was when its node was made.
    """
    if not table.wanted.nodes:
        return attach.rules
    if table.rules is None:
        return sized(attach.rules, table.wanted.nodes)
    return replace(attach.rules, min_nodes=table.rules.min_nodes, max_nodes=table.rules.max_nodes)


def refusal_of(attach: m.Attach, table: NodeTable, *, managed: bool) -> m.Refused | None:
    """Why this agent cannot be let in; None if it can."""
    rules = rules_of_agent(attach, table)
    if table.rules is not None and rules != table.rules:
        return m.Refused("usage", _differing(table.rules, rules))
    if not 1 <= attach.nproc <= NPROC_MAX:
        bound = "needs at least 1 worker" if attach.nproc < 1 else f"has at most {NPROC_MAX}"
        return m.Refused("usage", f"a node {bound}, not {attach.nproc}")
    if table.rules is None and (impossible := why_impossible(rules)):
        return m.Refused("usage", impossible)
    return _fenced(attach, table, managed=managed)


def _differing(ours: m.JobRules, theirs: m.JobRules) -> str:
    differences = ", ".join(
        f"{name} is {getattr(ours, name)}, not {getattr(theirs, name)}"
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )
    return f"this node was started with other rules than its job: {differences}"


def why_impossible(rules: m.JobRules) -> str:
    """Why no world could ever form by these rules; empty if one could."""
    try:
        JobSpec(
            min_nodes=rules.min_nodes, max_nodes=rules.max_nodes, node_unit=rules.node_unit
        ).validate()
    except UsageError as exc:
        return str(exc)
    largest = rules.max_nodes - rules.max_nodes % rules.node_unit
    if largest < rules.min_nodes:
        return (
            f"no multiple of the node unit {rules.node_unit} lies between min nodes "
            f"{rules.min_nodes} and max nodes {rules.max_nodes}: no world could ever form"
        )
    return ""


def why_behind(attach: m.Attach, table: NodeTable) -> str:
    """What this agent knows and the journal does not, as the end of the job; empty if nothing."""
    missing = table.masters.missing(attach.told)
    if not missing:
        return ""
    known = table.by_key.get(attach.agent_key)
    rank = attach.node_rank if known is None else table.nodes[known].node_rank
    who = f"of node rank {rank}" if rank >= 0 else f"on {attach.host}"
    return (
        f"{BEHIND}: the agent {who} {missing}; the disk under the state directory lost what it "
        "said it had synced, or an older copy was put there; what was decided since is not known, "
        "so start the job again in a new state directory, from its last committed checkpoint"
    )


def _fenced(attach: m.Attach, table: NodeTable, *, managed: bool) -> m.Refused | None:
    """Whether the job has gone on without this agent; None if it may come in."""
    known = table.by_key.get(attach.agent_key)
    if known is None and attach.incarnation > 0:
        why = "a newer agent has taken this node's place, or the master has lost its state"
        if attach.told is not None and attach.told.journal != table.masters.journal:
            why = "the journal of this node's master is lost: the job starts anew without it"
        return m.Refused("fenced", why)
    if known is not None and table.nodes[known].phase.is_final:
        node = table.nodes[known]
        successor = table.live_by_rank.get(node.node_rank)
        if managed or (successor is not None and attach.node_rank >= 0):
            return m.Refused(
                "fenced", f"a newer agent has taken the place of node rank {node.node_rank}"
            )
        return m.Refused("stale", "the master had given this node up: it may join anew")
    if known is None and attach.node_id < 0 and table.wanted.nodes:
        why = "the nodes of this job are made by its platform, and this agent names none of them"
        return m.Refused("usage", why)
    if known is None and attach.node_id >= 0:
        ordered = table.nodes.get(NodeId(attach.node_id))
        if ordered is None or ordered.phase.is_final or ordered.node_id in table.leaving:
            return m.Refused("fenced", f"node id {attach.node_id} is no longer wanted")
    return None
