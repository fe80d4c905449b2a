# SPDX-License-Identifier: Apache-2.0
"""Nodes that are waited for: for how long, and what follows.

- Nodes that their platform has no place for: when the job ends for want of them, and when a group
  of nodes is launched again elsewhere because one of them found no place beside the others.
- Ranks without an agent: after the restart time-out they are given up. Their time counts from the
  first order, or from when the last agent was lost; a relaunch does not restart it.
- Nodes that run and start no agent: after the attach time-out each counts as failed. Otherwise a
  job whose command starts none would wait for ever: the join time-out counts from the first agent.

All time is job time: it goes on across restarts of the master.
"""

from itertools import islice

from holdfast.core.job.membership.node_table import NOBODY, NodeState, NodeTable
from holdfast.model.job import JobSpec
from holdfast.model.node import Phase

LOOK_S = 30.0
"""For this long a restarted master gives no rank up: what it knows of the waiting is as old as the
end of the last master, and the platform and the agents report within seconds."""


def least_nodes(table: NodeTable, spec: JobSpec) -> int:
    """The number of nodes without which the job cannot go on."""
    return spec.min_nodes if table.rules is None else table.rules.min_nodes


def stops_at(table: NodeTable, spec: JobSpec) -> float | None:
    """When the job ends for want of nodes, if nothing changes; None if it does not."""
    if not spec.pending_timeout_s or spec.pending_strategy == "skip":
        return None
    # This many may stay pending for ever: the others are enough.
    spared = max(0, table.staying - least_nodes(table, spec))
    spared = spared if spec.pending_strategy == "necessary" else 0
    since = next(islice(table.pending.values(), spared, None), None)
    return None if since is None else since + spec.pending_timeout_s


def why_stopped(table: NodeTable, spec: JobSpec) -> str:
    """Why the job ends for want of nodes, for people."""
    longest = table.nodes[next(iter(table.pending))]
    said = f": {longest.message}" if longest.message else ""
    needed = ""
    if spec.pending_strategy == "necessary":
        needed = f"at least {least_nodes(table, spec)} are needed"
    return (
        f"{len(table.pending)} of {len(table.live_by_rank)} nodes are pending, node rank "
        f"{longest.node_rank} for more than {spec.pending_timeout_s:g} s{said}"
        f"{'; ' if needed else ''}{needed}"
    )


def stuck_group(table: NodeTable, spec: JobSpec) -> tuple[float, NodeState] | None:
    """The first relaunched node that is pending without its group, and when that is too long."""
    if not spec.groups:
        return None
    for node_id, since in table.pending.items():
        node = table.nodes[node_id]
        has_moves = table.wanted.moves(node.group) < spec.group_relaunches
        if node.group >= 0 and node.relaunches > 0 and has_moves:
            return since + spec.group_pending_s, node
    return None


def longest_down(table: NodeTable, spec: JobSpec) -> tuple[float, NodeState] | None:
    """The node whose rank is given up next for want of an agent, and when."""
    longest = table.down.longest()
    if longest is None or not spec.restart_timeout_s:
        return None
    since, node_id = longest
    return since + spec.restart_timeout_s, table.nodes[node_id]


def longest_mute(table: NodeTable, spec: JobSpec) -> tuple[float, NodeState] | None:
    """The node that counts as failed next because it runs and starts no agent, and when."""
    longest = table.mute.longest()
    if longest is None or spec.restart_timeout_s or not spec.attach_timeout_s:
        return None
    since, node_id = longest
    return since + spec.attach_timeout_s, table.nodes[node_id]


def why_given_up(table: NodeTable, spec: JobSpec, node: NodeState) -> str:
    """Why a rank is not waited for any longer, and what is known of it, as a clause."""
    before = table.nodes.get(table.ended_by_rank.get(node.node_rank, NOBODY))
    known = {
        Phase.PENDING: f"it is pending{f' ({node.message})' if node.message else ''}",
        Phase.RUNNING: "it runs and has started no agent",
    }.get(node.phase, "it was ordered, and its platform has not shown it yet")
    if before is not None and before.message:
        known += f"; the node before it ended: {before.message}"
    return (
        f"node rank {node.node_rank} has had no agent for its restart time-out of "
        f"{spec.restart_timeout_s:g} s: {known}"
    )


def why_mute(spec: JobSpec) -> str:
    """What is wrong with a node that runs and starts no agent."""
    return (
        f"it has run for {spec.attach_timeout_s:g} s and no agent of Holdfast has attached: "
        "does its command start `holdfast run`?"
    )
