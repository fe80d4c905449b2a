# SPDX-License-Identifier: Apache-2.0
"""The durable changes of nodes without agents."""

from holdfast.core.kernel import Record


class RoleNodePlanned(Record, frozen=True):
    """A node without an agent was ordered from the platform."""

    node_id: int
    role: str
    node_rank: int
    relaunches: int = 0
    """How often its rank was launched before."""
    memory_mib: int = 0
    cpu_milli: int = 0
    at_s: float = 0.0
    down_since_s: float = -1.0
    """Since when its rank does not run, whoever was launched meanwhile; -1: nobody knows."""


class RoleNodeChanged(Record, frozen=True):
    """What the platform saw of it, or that it shall go."""

    node_id: int
    phase: str
    machine: str = ""
    message: str = ""
    leaves: bool = False


class RoleRankSet(Record, frozen=True):
    """Whether a rank shall have a node, and whether it is not launched again any more."""

    role: str
    node_rank: int
    is_wanted: bool
    is_given_up: bool = False


class RoleRelaunched(Record, frozen=True):
    """One unit of a rank's budget for a failure class was used (`count` in snapshots)."""

    role: str
    node_rank: int
    reason: str
    count: int = 1


class RoleAsked(Record, frozen=True):
    """What nodes of a role get that are launched from now on; 0 for the job's description."""

    role: str
    memory_mib: int
    cpu_milli: int


class RolePlanSettled(Record, frozen=True):
    """A plan for a role was done, or refused for good; it is not done again."""

    plan_id: str
    ok: bool
    text: str


class RolesSet(Record, frozen=True):
    """The nodes of all roles were ordered once; since then they may have been suspended."""

    is_suspended: bool = False
    next_node_id: int = 0
