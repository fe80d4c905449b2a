# SPDX-License-Identifier: Apache-2.0
"""What the operator sees of one job: its manifest, its status, and what exists for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.platforms.kubernetes import names, pods
from holdfast.platforms.kubernetes.fields import Problem
from holdfast.platforms.kubernetes.manifest import ElasticJob, read_job
from holdfast.platforms.kubernetes.operator.objects import DIGEST_ANNOTATION
from holdfast.platforms.kubernetes.times import seconds_of


class Camel(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Decodes only the fields that it declares."""


class Meta(pods.Meta, frozen=True, rename="camel", kw_only=True):
    """The metadata of a pod, and further fields that the operator needs."""

    namespace: str = ""
    creation_timestamp: str = ""


class MasterPod(pods.Pod, frozen=True, rename="camel", kw_only=True):
    """A pod in which a master runs, or ran."""

    metadata: Meta = Meta()

    @property
    def number(self) -> int:
        """Its place in the sequence of the job's masters; -1 if unknown."""
        number = self.metadata.name.rpartition("-")[2]
        return int(number) if number.isascii() and number.isdigit() else -1

    @property
    def created_at(self) -> float:
        return seconds_of(self.metadata.creation_timestamp) or 0.0

    @property
    def ended_at(self) -> float:
        """When its main container ended; its creation if that is unknown."""
        ended = self.main().state.terminated
        told = seconds_of(ended.finished_at) if ended and ended.finished_at else None
        return self.created_at if told is None else told

    def count(self, annotation: str) -> int:
        """A number that its annotations carry; 0 if they do not."""
        text = self.metadata.annotations.get(annotation, "")
        return int(text) if text.isascii() and text.isdigit() else 0


class Child(Camel, frozen=True):
    """Any other object around a master: that it exists, and for which content it was made."""

    metadata: Meta = Meta()

    @property
    def digest(self) -> str:
        return self.metadata.annotations.get(DIGEST_ANNOTATION, "")


class Condition(Camel, frozen=True):
    """One statement about a job."""

    type: str
    status: str = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""


class MasterCount(Camel, frozen=True):
    """Counts that outlive the pods they are about."""

    launches: int = 0
    errors: int = 0


class JobStatus(Camel, frozen=True):
    """The status of an ElasticJob, whether the master or the operator wrote it."""

    phase: str = ""
    conditions: tuple[Condition, ...] = ()
    completion_time: str | None = None
    master: MasterCount = MasterCount()

    def condition(self, kind: str) -> Condition:
        """The condition of that kind; an unknown one if there is none."""
        return next((c for c in self.conditions if c.type == kind), Condition(type=kind))


_NO_STATUS = JobStatus()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One job and what exists for it."""

    job: ElasticJob
    problems: tuple[Problem, ...] = ()
    status: JobStatus = _NO_STATUS
    resource_version: str = ""
    is_going: bool = False
    """The job was deleted; owner references do the rest."""
    pods: tuple[MasterPod, ...] = ()
    """The pods of its masters, the newest first."""
    digests: Mapping[str, str] | None = None
    """The digests of its other objects, by the plural of their kind."""
    foreign: tuple[str, ...] = ()
    """Objects that have its names and belong to another job: an older one of the same name."""


def observe(
    obj: Mapping[str, Any],
    pods: Sequence[MasterPod] = (),
    children: Mapping[str, Child] | None = None,
) -> Observed:
    """What the operator sees of the job `obj`, given every object that carries its name."""
    job, problems = read_job(obj)
    metadata = obj.get("metadata") or {}
    try:
        status = msgspec.convert(obj.get("status") or {}, JobStatus)
    except msgspec.ValidationError:
        # Whichever client broke it, the operator's next write repairs it.
        status = JobStatus()
    own, foreign = [], []
    for pod in pods:
        if pod.is_of(job.uid):
            own.append(pod)
        else:
            foreign.append(f"pod {pod.metadata.name}")
    digests = {}
    for plural, child in (children or {}).items():
        if any(owner.uid == job.uid for owner in child.metadata.owner_references):
            digests[plural] = child.digest
        else:
            foreign.append(f"{plural} {child.metadata.name}")
    return Observed(
        job=job,
        problems=problems,
        status=status,
        resource_version=str(metadata.get("resourceVersion", "")),
        is_going=bool(metadata.get("deletionTimestamp")),
        pods=tuple(sorted(own, key=lambda pod: pod.number, reverse=True)),
        digests=digests,
        foreign=tuple(foreign),
    )


SELECTOR = f"{names.ROLE_LABEL}={names.MASTER_ROLE}"
"""The label selector of everything around masters."""
