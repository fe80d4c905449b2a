# SPDX-License-Identifier: Apache-2.0
"""What `holdfast sim` predicts: faults for a cluster, a simulated job per policy, its figures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.model.use import Use
from holdfast.runtime.collector import without_collector
from holdfast.sim import failures, traces
from holdfast.sim.control import Control, CoreControl, RulesControl
from holdfast.sim.failures import DAY_S, HOUR_S, Fault
from holdfast.sim.goodput import Cluster, Job
from holdfast.sim.policies import STAGES, Policy

CORE, RULES = "core", "rules"
"""What decides: the master's real core, or the short form of its rules."""

WINDOW_S, WINDOW_EVERY_S = HOUR_S, 300.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """One simulated job: its figures, and its goodput over time as (seconds, last hour's share)."""

    figures: Mapping[str, object]
    sliding: Sequence[tuple[float, float]]

    @property
    def goodput(self) -> float:
        goodput = self.figures["goodput"]
        assert isinstance(goodput, float)
        return goodput


def faults_of(source: str, servers: int, machines: int, span_s: float, seed: int) -> list[Fault]:
    """The faults of a preset, or of a trace file of `servers` servers."""
    if source in failures.presets() or not source.endswith(".json"):
        return failures.draw(failures.preset(source), machines, span_s, seed)
    outages = traces.read(Path(source), servers)
    # A trace says which server was away when; how a fault shows is drawn from its cluster's model.
    return traces.replay(outages, failures.preset("stepfun"), machines, span_s, seed, servers)


def predict(
    cluster: Cluster,
    policy: Policy,
    engine: str,
    faults: Sequence[Fault],
    progress: Callable[[float], None] = lambda share: None,
) -> Prediction:
    """Simulate one job."""
    job = Job(cluster, policy, _control(cluster, policy, engine))
    with without_collector():
        job.run(faults, progress)
    sliding = job.training.timeline.sliding(WINDOW_S, WINDOW_EVERY_S)
    figures = {
        "goodput": _round(job.training.saves.work_s / cluster.span_s),
        "goodput_1h": _spread([share for _, share in sliding]),
        **_times(job, cluster),
        "engine": engine,
        "faults": sum(fault.at_s > 0 for fault in faults),
        "interruptions": job.interruptions,
        "hours_between_interruptions": _round(
            cluster.span_s / HOUR_S / job.interruptions if job.interruptions else 0.0
        ),
        "recovery_s": _recovery(job.recoveries),
        "rounds": job.rounds,
        "growths": job.growths,
        "spares_used": job.spares_used,
        "smallest_world": job.size_min,
        "restores_from_storage": job.training.from_storage,
        "checkpoints": _checkpoints(job, cluster, policy),
        "events": job.events,
        "stages": {name: getattr(policy, name) for name in STAGES},
    }
    return Prediction(figures, sliding)


def _control(cluster: Cluster, policy: Policy, engine: str) -> Control:
    nodes, grace_s = cluster.nodes, policy.grace_s
    min_nodes = cluster.min_nodes if policy.elastic else nodes
    if engine == CORE:
        return CoreControl(nodes, min_nodes, cluster.spares, grace_s, cluster.rack_machines)
    return RulesControl(nodes, min_nodes, cluster.spares, grace_s)


def _times(job: Job, cluster: Cluster) -> dict[str, object]:
    seconds = {use: _round(s) for use, s in job.training.timeline.seconds().items()}
    causes = {cause: _round(s) for cause, s in job.training.timeline.causes().items()}
    return {"days": cluster.span_s / DAY_S, "seconds": seconds, "lost_by_cause": causes}


def _spread(shares: list[float]) -> dict[str, float]:
    ordered = sorted(shares)
    if not ordered:
        return {}
    return {
        "min": _round(ordered[0]),
        "p1": _round(_quantile(ordered, 0.01)),
        "median": _round(_quantile(ordered, 0.5)),
    }


def _recovery(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    found = {f"p{percent}": _quantile(ordered, percent / 100) for percent in (10, 50, 90, 99)}
    found |= {"mean": sum(ordered) / len(ordered), "max": ordered[-1]}
    return {name: _round(value) for name, value in found.items()}


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _checkpoints(job: Job, cluster: Cluster, policy: Policy) -> dict[str, float]:
    """How many saves there were, and where the checkpoints went, over all nodes."""
    one_gb = policy.state_gb * cluster.nodes
    stored_gb = job.training.saves.persists * one_gb
    return {
        "saves": job.training.saves.saves,
        "persists": job.training.saves.persists,
        "memory_gb": _round(job.training.saves.saves * one_gb),
        "peers_gb": _round(job.training.saves.saves * one_gb if policy.peers else 0.0),
        "storage_gb": _round(stored_gb),
        "storage_gb_per_s": _round(stored_gb / cluster.span_s),
    }


def lost_share(prediction: Prediction, use: str) -> float:
    """The share of the time that went to one use."""
    seconds = prediction.figures["seconds"]
    assert isinstance(seconds, dict)
    total = sum(seconds.values())
    return float(seconds[use] / total) if total else 0.0


def uses() -> tuple[str, ...]:
    """The uses of time besides work, in the order of a failure."""
    named = (Use.CHECKPOINT, Use.DETECT, Use.IDLE, Use.RENDEZVOUS, Use.RESTART, Use.RESTORE)
    return (*map(str, named), str(Use.LOST), "slow", "fewer nodes")


def _round(value: float) -> float:
    return round(value, 6)
