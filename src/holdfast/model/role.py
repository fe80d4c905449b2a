# SPDX-License-Identifier: Apache-2.0
"""What a job asks of the nodes of one role that run without an agent."""

from dataclasses import dataclass, field
from fractions import Fraction

from holdfast.model.node import ExitReason
from holdfast.model.resources import Resources


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """Nodes that run the user's program as it is: parameter servers and the nodes that use them."""

    nodes: int
    relaunches: dict[ExitReason, int]
    """How often one rank is launched again for one class of failure."""

    ends_the_job: bool = True
    """The job is over when all nodes of such roles have ended well; servers end with the job."""

    holds_variables: bool = False
    """Parameter servers: their memory holds the model, and every other node was told at its start
    how many there are. While the job runs their number stays, and none of them is moved."""

    critical: dict[int, int] = field(default_factory=dict)
    """Ranks without which the job ends, and how often each is launched again in all. Nodes that
    ended as `ExitReason.KILLED` or `ExitReason.LOST` do not count."""

    critical_others: int | None = None
    """The same for every other rank; None: they are not critical."""

    restart_timeout_s: float = 0.0
    """A rank that was ordered and has not run for this long is given up, however often it was
    launched again meanwhile; 0: never."""

    node_memory_mib: int = 0
    """What a node asks for by the job's description; one that was out of memory gets twice as much
    when it is launched again. 0: not known, and it gets the same again."""

    node_cpu_milli: int = 0
    node_gpus: int = 0
    """The same for processors, in thousandths of a core, and for GPUs."""

    auto_scale: bool = True
    """Whether the job changes by itself what these nodes ask for, as `JobSpec.auto_scale`."""

    priority: str = ""
    """Empty, "high", "low", or the fraction of the ranks that is high ("0.5"), lowest first."""

    @property
    def node(self) -> Resources:
        """What a node asks for by the job's description."""
        return Resources(
            cpu_milli=self.node_cpu_milli, memory_mib=self.node_memory_mib, gpus=self.node_gpus
        )

    def critical_limit(self, rank: int) -> int | None:
        """How often this rank is launched again if it is critical; None if it is not."""
        return self.critical.get(rank, self.critical_others)


def priority_of(priority: str, rank: int, size: int) -> str:
    """The priority of one rank of `size`: "high", "low" or empty."""
    if priority in ("", "high", "low"):
        return priority
    # Rounds half up: half of 5 is 3. With a float, 0.29 of 50 would be 14 instead of 15.
    high = (Fraction(priority) * size + Fraction(1, 2)) // 1
    return "high" if rank < high else "low"


def raised_memory_mib(before_mib: int, left_mib: int | None) -> int:
    """What a node that was out of memory gets next time; 0 if it cannot have more.

    `left_mib` is what the job may still ask for beside what it has; None: any amount.
    """
    if left_mib is None:
        return 2 * before_mib
    return before_mib + min(before_mib, left_mib) if left_mib > 0 else 0


NOT_RAISED = "its memory is not raised (autoScale is off, or optimizeMode manual)"
"""Told to people when a node was out of memory and gets no more."""
