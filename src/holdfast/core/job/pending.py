# SPDX-License-Identifier: Apache-2.0
"""Nodes that their platform has no place for: when the job ends for want of them, and when a group
of nodes is launched again elsewhere because one of them found no place beside the others.

Time counts from when a node was first seen pending, in job time: it goes on across restarts of the
master.
"""

from itertools import islice

from holdfast.core.job.node_table import NodeState, NodeTable
from holdfast.model.job import JobSpec


def stops_at(table: NodeTable, spec: JobSpec, min_nodes: int) -> float | None:
    """When the job ends for want of nodes, if nothing changes; None if it does not."""
    if not spec.pending_timeout_s or spec.pending_strategy == "skip":
        return None
    # So many may stay pending for ever: the others are enough.
    spared = max(0, table.staying - min_nodes) if spec.pending_strategy == "necessary" else 0
    since = next(islice(table.pending.values(), spared, None), None)
    return None if since is None else since + spec.pending_timeout_s


def why_stopped(table: NodeTable, spec: JobSpec, min_nodes: int) -> str:
    """The reason of that end, for people."""
    longest = table.nodes[next(iter(table.pending))]
    said = f": {longest.message}" if longest.message else ""
    needed = f"at least {min_nodes} are needed" if spec.pending_strategy == "necessary" else ""
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
