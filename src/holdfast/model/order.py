# SPDX-License-Identifier: Apache-2.0
"""Orders for nodes, and the changes that people ask of a running job."""

from dataclasses import dataclass

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.resources import Limits

WORKER = "worker"
"""The role of the nodes that train together. Others (ps, chief, evaluator) are names as given."""

NODES_MAX = 100_000
"""The most nodes of a role. More is a mistake, and each of them would be ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A node that the platform is asked for. The id makes the order idempotent."""

    node_id: NodeId
    node_rank: NodeRank
    role: str = WORKER
    size: int = 0
    """How many nodes of this role the job wants now; 0 where they are not counted."""
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
    """A node that another one replaces, with other resources if some are given."""

    node_id: NodeId
    memory_mib: int = 0
    cpu_milli: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A change that is asked of a running job. It is done once, however often it is sent."""

    plan_id: str
    role: str = WORKER
    nodes: int | None = None
    """The new number of nodes of the role."""
    add: tuple[NodeRank, ...] = ()
    """Ranks to add; a rank that exists is left alone."""
    remove: tuple[NodeId, ...] = ()
    """Nodes to remove and not to replace."""
    migrate: tuple[Move, ...] = ()
    memory_mib: int = 0
    """For every node of the role launched from now on; 0 leaves it as it is."""
    cpu_milli: int = 0
    suspend: bool | None = None
    """True: every node goes, and the job waits; False: it goes on where it was."""
    limits: Limits | None = None
    """What all nodes of the job together may ask for from now on; None leaves it as it is."""
    others: tuple["Plan", ...] = ()
    """Parts for other roles: all parts are done, or none. There is one answer, to this plan."""
