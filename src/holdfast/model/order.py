# SPDX-License-Identifier: Apache-2.0
"""Nodes that shall exist, and changes that people ask of a running job."""

from dataclasses import dataclass

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.resources import Limits

WORKER = "worker"
"""The role of the nodes that train together. Others (ps, chief, evaluator) are names as given."""

NODES_MAX = 100_000
"""Of a role. More is a mistake, and each of them would be ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A node that shall exist. The id makes it idempotent."""

    node_id: NodeId
    node_rank: NodeRank
    role: str = WORKER
    size: int = 0
    """How many nodes of this role the job wants now; 0 where nobody counts them."""
    roles: tuple[tuple[str, int], ...] = ()
    """How many ranks each role without agents has now; empty where there are no such roles."""
    relaunches: int = 0
    """How often this rank was launched before."""
    memory_mib: int = 0
    """At least this much memory; 0 for what the job's own description says."""
    cpu_milli: int = 0
    """In thousandths of a core; 0 for what the job's own description says."""
    priority: str = ""
    """"high", "low", or empty for what the job's own description says."""
    group: int = -1
    """The rack or node group that it belongs to; -1 for none."""
    avoid_hosts: tuple[str, ...] = ()
    """Hosts on which nodes of this job failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A node whose place another takes, with other resources if some are given."""

    node_id: NodeId
    memory_mib: int = 0
    cpu_milli: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A change that somebody asks of a running job. It is done once, whoever tells it again."""

    plan_id: str
    role: str = WORKER
    nodes: int | None = None
    """The new number of nodes of the role."""
    add: tuple[NodeRank, ...] = ()
    """Ranks that shall exist in addition; a rank that does is left alone."""
    remove: tuple[NodeId, ...] = ()
    """Nodes that shall go and not be replaced."""
    migrate: tuple[Move, ...] = ()
    memory_mib: int = 0
    """For every node of the role launched from now on; 0 leaves it as it is."""
    cpu_milli: int = 0
    suspend: bool | None = None
    """True: every node goes, and the job waits; False: it goes on where it was."""
    limits: Limits | None = None
    """What all nodes of the job together may ask for from now on; None leaves it as it is."""
    others: tuple["Plan", ...] = ()
    """Parts for other roles: all of it is done, or nothing. There is one answer, to this plan."""
