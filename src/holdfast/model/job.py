# SPDX-License-Identifier: Apache-2.0
"""What a job is asked to be: its size, its limits and its patience."""

from dataclasses import dataclass, field
from fractions import Fraction

from holdfast.model.errors import UsageError
from holdfast.model.node import ExitReason
from holdfast.model.resources import NO_LIMITS, Limits, Resources
from holdfast.model.role import RoleSpec, priority_of

WORKER_RESTARTS: dict[ExitReason, int] = {
    ExitReason.ERROR: 3,
    ExitReason.OOM: 3,
    ExitReason.KILLED: 100,
    ExitReason.HARDWARE: 10,
    ExitReason.LOST: 100,
    ExitReason.STALLED: 10,
    ExitReason.UNKNOWN: 3,
}
"""How often the world is re-formed for one class of failure before the job fails."""

BUDGET_BACK_S = 6 * 3600.0
"""This much training brings a whole budget of worker restarts back, except the budgets for the
program's own failures. A budget stops a job that gets nowhere, not one that runs for months."""

NODE_RELAUNCHES: dict[ExitReason, int] = {
    ExitReason.ERROR: 0,
    ExitReason.OOM: 3,
    ExitReason.KILLED: 20,
    ExitReason.HARDWARE: 5,
    ExitReason.LOST: 20,
    ExitReason.STALLED: 5,
    ExitReason.UNKNOWN: 3,
}
"""How often one node rank is launched again for one class of failure."""

PENDING_STRATEGIES = ("skip", "necessary", "all")
"""What ends the job after `pending_timeout_s`: nothing; pending nodes without which no world can
form; any pending node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """The rules of one job. A changed spec is a new record, so that a restarted master has it."""

    min_nodes: int = 1
    max_nodes: int = 1
    node_unit: int = 1
    """The world always holds a multiple of this many nodes."""

    last_call_s: float = 30.0
    """How long a world that could start waits for an expected node that is missing."""

    join_timeout_s: float = 600.0
    """How long the job may stay without a world before it fails."""

    beat_s: float = 5.0
    """How often an agent reports."""

    silence_s: float = 15.0
    """An agent that says nothing for this long is lost."""

    lease_s: float = 60.0
    """An agent that cannot reach the master for this long holds its workers still. Only after this
    long may other nodes take the place of a whole world that went silent."""

    hang_after_s: float | None = None
    """A world without any step for this long hangs. None: the pauses of the job so far decide;
    infinite: the master does not look for hangs."""

    first_step_s: float = 7200.0
    """The workers of a round have this long for their first step. After that the master reports it,
    and restarts the workers if the job has stepped before. Infinite: no limit."""

    retry_mistakes: bool = False
    """Whether a mistake in the program (model.node.is_mistake) is retried like another failure."""

    reconnect_s: float = 0.3
    """How long an agent whose stream broke may take to come back before it counts as lost."""

    managed: bool = False
    """True when a platform launches the nodes; false when people or their scheduler do."""

    spare_nodes: int = 0
    """Nodes beyond `max_nodes` that the platform keeps ready (managed jobs only)."""

    size_from_platform: bool = False
    """True: `max_nodes` is how many nodes a new job has, plans change it, and everything else that
    nodes must agree on comes from the first agent. False: the size of the job is fixed."""

    first_node_id: int = 0
    """Where node ids begin. Above 0 if an earlier master of the job, whose state is lost, may have
    used the ids below."""

    suspended: bool = False
    """A new job waits for a plan that resumes it (with `size_from_platform` only)."""

    worker_restarts: dict[ExitReason, int] = field(default_factory=lambda: dict(WORKER_RESTARTS))
    node_relaunches: dict[ExitReason, int] = field(default_factory=lambda: dict(NODE_RELAUNCHES))

    job_relaunches: int | None = None
    """How many nodes are launched again in the whole job; nodes that ended as `ExitReason.KILLED`
    do not count. None: as many as the budgets of the ranks allow."""

    critical: dict[int, int] = field(default_factory=dict)
    """Ranks without which the job ends, and how often each is launched again. The number counts as
    in `job_relaunches`, and replaces the limits of those failure classes that have any
    relaunches."""

    critical_others: int | None = None
    """The same for every other rank; None: they are not critical."""

    node_memory_mib: int = 0
    """What a node asks for by the job's description. A node that was out of memory gets twice as
    much when it is launched again. 0: not known, and it gets the same again."""

    node_cpu_milli: int = 0
    node_gpus: int = 0
    """The same for processors, in thousandths of a core, and for GPUs."""

    limits: Limits = NO_LIMITS
    """What all nodes of all roles together may ask for."""

    auto_scale: bool = True
    """Whether the job changes by itself what its nodes ask for: False means that a node that was
    out of memory is launched again as it was."""

    priority: str = ""
    """Empty, "high", "low", or the fraction of the ranks that is high ("0.5"), lowest first."""

    groups: dict[int, int] = field(default_factory=dict)
    """How many nodes each group (a rack) has. Ranks are dealt out in the order of the numbers."""

    group_pending_s: float = 300.0
    """A node of a group that was launched again and is pending for this long cannot be placed
    beside the others: the whole group is launched again elsewhere."""

    group_relaunches: int = 3
    """How often one group is launched again as a whole."""

    roles: dict[str, RoleSpec] = field(default_factory=dict)
    """Nodes that run without an agent, by the name of their role. With "worker" among them there
    are no agents at all."""

    restart_timeout_s: float = 0.0
    """A rank that was ordered and has had no agent for this long is given up, however often it was
    launched again meanwhile; 0: never, and `attach_timeout_s` applies."""

    attach_timeout_s: float = 1800.0
    """A node that its platform runs for this long without an agent counts as failed. Its command
    may have to install or fetch something first; a user who needs longer sets a restart
    time-out."""

    pending_timeout_s: float = 0.0
    """The job ends when nodes have been pending for this long, see `pending_strategy`; 0: never."""

    pending_strategy: str = "skip"
    """One of PENDING_STRATEGIES."""

    @property
    def node(self) -> Resources:
        """What a node asks for by the job's description."""
        return Resources(
            cpu_milli=self.node_cpu_milli, memory_mib=self.node_memory_mib, gpus=self.node_gpus
        )

    def critical_limit(self, rank: int) -> int | None:
        """How often this rank is launched again if it is critical; None if it is not."""
        return self.critical.get(rank, self.critical_others)

    def priority_of(self, rank: int, size: int) -> str:
        """The priority of one rank of `size`: "high", "low" or empty."""
        return priority_of(self.priority, rank, size)

    def group_of(self, rank: int) -> int:
        """The group that a rank is dealt to; -1 for none."""
        for group in sorted(self.groups):
            if rank < self.groups[group]:
                return group
            rank -= self.groups[group]
        return -1

    def validate(self) -> None:
        """Refuse a spec that no cluster could satisfy."""
        if self.min_nodes < 1:
            raise UsageError(f"a job needs at least 1 node, not {self.min_nodes}")
        if self.max_nodes < self.min_nodes:
            raise UsageError(f"max nodes {self.max_nodes} is below min nodes {self.min_nodes}")
        if self.node_unit < 1:
            raise UsageError(f"node unit must be at least 1, not {self.node_unit}")
        if self.max_nodes < self.node_unit:
            raise UsageError(
                f"max nodes {self.max_nodes} is below the node unit {self.node_unit}: "
                "no world could ever form"
            )
        if self.silence_s <= self.beat_s:
            raise UsageError(f"silence_s {self.silence_s} must be longer than beat_s {self.beat_s}")
        if self.lease_s < self.silence_s:
            raise UsageError(f"lease_s {self.lease_s} is below silence_s {self.silence_s}")
        if self.size_from_platform and not self.managed:
            raise UsageError("a job whose size comes from its platform must be managed")
        if self.pending_strategy not in PENDING_STRATEGIES:
            known = ", ".join(PENDING_STRATEGIES)
            raise UsageError(f"pending strategy {self.pending_strategy!r} is none of {known}")
        if self.priority not in ("", "high", "low") and not _is_fraction(self.priority):
            raise UsageError(
                f"priority {self.priority!r} is neither high, low nor a fraction between 0 and 1"
            )


def _is_fraction(text: str) -> bool:
    try:
        return 0 < Fraction(text) <= 1
    except (ValueError, ZeroDivisionError):
        return False
