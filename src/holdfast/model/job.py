# SPDX-License-Identifier: Apache-2.0
"""What a job is asked to be: its size, its limits and its patience."""

from dataclasses import dataclass, field

from holdfast.model.errors import UsageError
from holdfast.model.node import ExitReason

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
"""This much training brings a whole budget of worker restarts back, except those of the program's
own failures: a budget is to stop a job that comes to nothing, not one that goes on for months."""

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
    """An agent that cannot reach the master for this long holds its workers still, and only after
    this long may somebody else take the place of a whole world that went silent."""

    hang_after_s: float | None = None
    """A world without any step for this long hangs. None: the pauses of the job so far decide;
    infinite: nobody looks."""

    reconnect_s: float = 0.3
    """How long an agent whose stream broke may take to come back before it counts as lost."""

    managed: bool = False
    """True when a platform launches the nodes; false when people or their scheduler do."""

    spare_nodes: int = 0
    """Nodes beyond `max_nodes` that the platform keeps ready (managed jobs only)."""

    worker_restarts: dict[ExitReason, int] = field(default_factory=lambda: dict(WORKER_RESTARTS))
    node_relaunches: dict[ExitReason, int] = field(default_factory=lambda: dict(NODE_RELAUNCHES))

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
