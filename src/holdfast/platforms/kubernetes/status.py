# SPDX-License-Identifier: Apache-2.0
"""The state of a job, as the status of its ElasticJob: a pure function of the master's view.

The master and the operator write different fields of one status. The master always writes every
field that it owns: server-side apply removes the fields that a write leaves out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from holdfast.model.node import Phase
from holdfast.model.order import WORKER
from holdfast.platforms.kubernetes import names

PENDING, RUNNING, RESTARTING = "Pending", "Running", "Restarting"
SUSPENDED, SUCCEEDED, FAILED = "Suspended", "Succeeded", "Failed"
FINAL = frozenset({SUCCEEDED, FAILED})

CONDITIONS = (RUNNING, SUSPENDED, SUCCEEDED, FAILED)
"""The master's; Created, MasterRunning and Malformed are the operator's."""

_COUNTED_AS = {
    Phase.INITIAL: "initial",
    Phase.PENDING: "pending",
    Phase.RUNNING: "active",
    Phase.SUCCEEDED: "succeeded",
    Phase.FAILED: "failed",
    Phase.GONE: "failed",
}


class _World(Struct, frozen=True):
    round: int = 0
    state: str = ""
    reason: str = ""
    nodes: tuple[int, ...] = ()
    world_size: int = 0
    starts_in_s: float = 0.0


class _Node(Struct, frozen=True):
    node_rank: int
    phase: str
    role: str = WORKER
    message: str = ""


class _Progress(Struct, frozen=True):
    step: int = -1
    goodput: float | None = None


class _Wanted(Struct, frozen=True):
    nodes: int = 0
    suspended: bool = False
    roles: dict[str, int] = {}
    """The sizes of roles without agents."""


class _View(Struct, frozen=True):
    """The part of the view of /api/v1/job that a status shows."""

    job: str
    state: str
    reason: str = ""
    restarts: dict[str, int] = {}
    world: _World = field(default_factory=_World)
    nodes: tuple[_Node, ...] = ()
    progress: _Progress = field(default_factory=_Progress)
    wanted: _Wanted = field(default_factory=_Wanted)

    def running(self, role: str) -> int:
        """How many nodes of the role run."""
        return sum(node.phase == Phase.RUNNING and node.role == role for node in self.nodes)

    def sizes(self) -> dict[str, int]:
        """The requested number of nodes of each role."""
        return {WORKER: self.wanted.nodes, **self.wanted.roles}

    def trains(self) -> bool:
        """Whether a world trains; in a job without agents, whether all its nodes run."""
        if WORKER not in self.wanted.roles:
            return self.world.state == "running"
        ended_well = [node.role for node in self.nodes if node.phase == Phase.SUCCEEDED]
        return all(
            self.running(role) + ended_well.count(role) >= size
            for role, size in self.wanted.roles.items()
        )


def status_of(
    view: Mapping[str, object], before: Mapping[str, Any], now: str, observed: Mapping[str, Any]
) -> dict[str, Any]:
    """The status for `view`.

    `before` is the status so far: it keeps the times of what has not changed. `now` is in the form
    of Kubernetes. `observed` is the part of the spec that the job follows.
    """
    job = msgspec.convert(view, _View)
    phase = _phase(job, has_started="startTime" in before)
    message = _message(job, phase)
    status: dict[str, Any] = {
        "phase": phase,
        "message": message,
        "conditions": _conditions(phase, message, before.get("conditions", ()), now),
        "replicaStatuses": _replicas(job),
        # The scale subresource reads it here, for `kubectl scale` and autoscalers.
        "replicas": job.running(WORKER),
        "selector": names.selector(job.job, WORKER),
        "restarts": sum(job.restarts.values()),
        "round": job.world.round,
        "observed": dict(observed),
        "lastReconcileTime": now,
    }
    if job.progress.goodput is not None:
        status["goodput"] = f"{job.progress.goodput:.1%}"
    if job.progress.step >= 0:
        status["step"] = job.progress.step
    if phase in (RUNNING, SUCCEEDED) or "startTime" in before:
        status["startTime"] = before.get("startTime", now)
    if phase in FINAL:
        status["completionTime"] = before.get("completionTime", now)
    return status


def _phase(job: _View, *, has_started: bool) -> str:
    if job.state in ("succeeded", "failed"):
        return SUCCEEDED if job.state == "succeeded" else FAILED
    if job.wanted.suspended:
        return SUSPENDED
    if job.trains():
        return RUNNING
    # Nodes ran before and do not now: the job is on its way back, not on its way up.
    return RESTARTING if has_started or job.world.round > 0 else PENDING


def _message(job: _View, phase: str) -> str:
    """The state of the job, in one sentence."""
    sizes = job.sizes()
    counts = [f"{job.running(role)} of {size} {role}" for role, size in sizes.items()]
    of_nodes = ", ".join(counts) + " nodes run"
    if phase in FINAL:
        return job.reason
    if phase == SUSPENDED:
        running = sum(job.running(role) for role in sizes)
        going = f"; {running} nodes are still going" if running else ""
        return f"suspended: no node runs until it is resumed{going}"
    if phase == RUNNING and WORKER in job.wanted.roles:
        return of_nodes
    if phase == RUNNING:
        nodes, workers = len(job.world.nodes), job.world.world_size
        return f"round {job.world.round} trains on {nodes} nodes with {workers} workers"
    why = _why_nodes_wait(job)
    reason = f" ({job.world.reason})" if job.world.round > 0 else ""
    waiting = "in a pause after a failed start" if job.world.starts_in_s else "waiting for nodes"
    return f"{waiting}{reason}: {of_nodes}{why}"


def _why_nodes_wait(job: _View) -> str:
    """What the platform says about the first node that it cannot start."""
    for node in job.nodes:
        if node.phase == Phase.PENDING and node.message:
            return f"; {node.role} {node.node_rank}: {node.message}"
    return ""


def _conditions(
    phase: str, message: str, before: Sequence[Mapping[str, Any]], now: str
) -> list[dict[str, Any]]:
    """One condition per type that was ever true, so that a reader sees the past too."""
    known = {one.get("type"): one for one in before}
    found = []
    for kind in CONDITIONS:
        holds = kind == phase
        old = known.get(kind)
        if not holds and old is None:
            continue
        word = "True" if holds else "False"
        has_changed = old is None or old.get("status") != word
        found.append(
            {
                "type": kind,
                "status": word,
                "reason": phase,
                # While a condition holds, its first message stays: progress has its own fields.
                "message": message if has_changed else (old or {}).get("message", message),
                "lastTransitionTime": now if has_changed else (old or {})["lastTransitionTime"],
            }
        )
    return found


def _replicas(job: _View) -> dict[str, dict[str, Any]]:
    """How many nodes of each role are in which phase."""
    counts: dict[str, dict[str, Any]] = {}
    for node in job.nodes:
        role = counts.setdefault(node.role, _nobody(job.job, node.role))
        role[_COUNTED_AS[Phase(node.phase)]] += 1
    counts.setdefault(WORKER, _nobody(job.job, WORKER))
    return counts


def _nobody(job: str, role: str) -> dict[str, Any]:
    zero: dict[str, Any] = dict.fromkeys(_COUNTED_AS.values(), 0)
    return {**zero, "labelSelector": names.selector(job, role)}
