# SPDX-License-Identifier: Apache-2.0
"""The job in numbers, for Prometheus, derived from the view whenever they are asked for.

They carry counts and durations only, because anyone who reaches the port may read them: no names of
jobs or hosts, no reasons.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client import generate_latest as render
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.master.view import CheckpointsView, JobView, ProgressView, SavingView
from holdfast.model.node import Phase

CONTENT_TYPE = CONTENT_TYPE_LATEST

_JOB_STATES = ("running", "succeeded", "stopped", "failed")
_SOURCES = ("memory", "peer", "parity", "storage")


class Metrics:
    """The text of /metrics: the job and the master's own process."""

    def __init__(self, view: Callable[[], dict[str, object]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_JobCollector(view))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return render(self._registry)


class _JobCollector(Collector):
    def __init__(self, view: Callable[[], dict[str, object]]) -> None:
        self._view = view

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry would otherwise collect once at its creation to learn the names."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        job = msgspec.convert(self._view(), JobView)
        yield from _of_the_job(job)
        yield from _of_the_progress(job.progress)
        yield from _of_the_checkpoints(job.saving, job.checkpoints)


def _of_the_job(job: JobView) -> Iterator[Metric]:
    states = {state: float(state == job.state) for state in _JOB_STATES}
    yield _gauges("holdfast_job_state", "1 for the state the job is in.", "state", states)
    yield _gauge("holdfast_round", "Number of the present round.", job.world.round)
    yield _gauge("holdfast_generation", "The fence of the present round.", job.world.generation)
    yield _gauge("holdfast_world_size", "Workers in the world.", job.world.world_size)
    phases = Counter({str(phase): 0 for phase in Phase})
    phases.update(node.phase for node in job.nodes)
    yield _gauges("holdfast_nodes", "Nodes by phase.", "phase", phases)
    yield _gauge("holdfast_attached_agents", "Agents with an open stream.", job.attached)
    restarts = CounterMetricFamily(
        "holdfast_restarts", "Worlds that failed, by reason.", labels=["reason"]
    )
    for reason, count in job.restarts.items():
        restarts.add_metric([reason], count)
    yield restarts
    yield _gauge("holdfast_store_keys", "Keys in the key-value store.", job.store.keys)


def _of_the_progress(progress: ProgressView) -> Iterator[Metric]:
    yield _gauge("holdfast_step", "The step the script reported, -1 if none.", progress.step)
    yield CounterMetricFamily(
        "holdfast_steps", "Steps finished, those done again included.", value=progress.steps_total
    )
    # A gauge: when steps turn out to be lost, their seconds leave "productive", and a counter that
    # falls would be taken for a restart of the master.
    yield _gauges(
        "holdfast_seconds_total",
        "Seconds of the job by use. Seconds move to lost when their steps have to be done again.",
        "use",
        progress.seconds,
    )
    if progress.goodput is not None:
        text = "Productive share of the seconds; nothing before the first step."
        yield _gauge("holdfast_goodput_ratio", text, progress.goodput)
    count = max((incident.number for incident in progress.incidents), default=0)
    yield CounterMetricFamily("holdfast_incidents", "Interruptions of the job.", value=count)
    # Of an incident that was followed by the next one before any step, the last stage is missing.
    closed = [one.stages for one in progress.incidents if one.closed and "restore" in one.stages]
    yield _gauges(
        "holdfast_recovery_seconds",
        "Stages of the last recovery that is complete; their sum is the recovery time.",
        "stage",
        closed[-1] if closed else {},
    )


def _of_the_checkpoints(
    saving: SavingView, directories: tuple[CheckpointsView, ...]
) -> Iterator[Metric]:
    counters = {
        "memory_saves": ("Steps saved to memory.", saving.saves),
        "memory_save_seconds": ("Seconds that the training waited for these.", saving.waited_s),
        "written_bytes": ("Bytes brought to storage, by all nodes.", saving.written_bytes),
        "write_seconds": ("Seconds spent on that, by all nodes.", saving.written_s),
        "commits": ("Steps committed on storage.", saving.commits),
        "failed_attempts": ("Steps that did not reach storage.", saving.failures),
        "failed_saves": ("Steps that could not be saved, by all nodes.", saving.failed_saves),
    }
    for name, (text, value) in counters.items():
        yield CounterMetricFamily(f"holdfast_checkpoint_{name}", text, value=value)
    restored = CounterMetricFamily(
        "holdfast_checkpoint_restored_parts", "Parts restored, by source.", labels=["source"]
    )
    for source in _SOURCES:
        restored.add_metric([source], saving.restored.get(source, 0))
    yield restored
    safe = max((one.safe for one in directories), default=-1)
    steps = {"storage": max((one.committed for one in directories), default=-1)}
    # A restarted master does not know yet that there is no such step.
    if saving.memory_step >= 0 or saving.memory_confirmed:
        steps["memory"] = saving.memory_step
    if safe >= 0 or all(one.safe_confirmed for one in directories):
        steps["peers"] = safe
    yield _gauges(
        "holdfast_checkpoint_step",
        "The newest step by tier, or -1; nothing where that is not known.",
        "tier",
        steps,
    )
    ages = {"memory": saving.memory_age_s, "storage": saving.storage_age_s}
    yield _gauges(
        "holdfast_checkpoint_age_seconds",
        "How old the newest step of the tier is; nothing where that is not known.",
        "tier",
        {tier: age_s for tier, age_s in ages.items() if age_s >= 0},
    )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
