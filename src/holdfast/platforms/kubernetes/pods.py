# SPDX-License-Identifier: Apache-2.0
"""What a pod says about the node that runs in it. Pure: a pod in, a sighting out.

Only the *main* container is the node. A sidecar that still runs does not keep a node alive whose
main container has ended, and a failed sidecar does not spoil a node whose main container ended
well.
"""

from collections.abc import Iterator
from datetime import datetime, timedelta

import msgspec

from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase, classify_exit
from holdfast.platforms.kubernetes import names
from holdfast.ports.platform import Sighting

MAIN_ANNOTATION = "holdfast.io/main-container"
"""Which container is the main one. Other programs may add containers after the pod was made."""

OF_THE_POD = {
    "Evicted": ExitReason.KILLED,
    "Preempted": ExitReason.KILLED,
    "Preempting": ExitReason.KILLED,
    "NodeShutdown": ExitReason.KILLED,
    "Shutdown": ExitReason.KILLED,
    "Terminated": ExitReason.KILLED,
    "DeadlineExceeded": ExitReason.KILLED,
    "NodeAffinity": ExitReason.KILLED,
    "OutOfcpu": ExitReason.KILLED,
    "OutOfmemory": ExitReason.KILLED,
    "OutOfpods": ExitReason.KILLED,
    "NodeLost": ExitReason.LOST,
    # The machine accepted the pod and could not give it its devices.
    "UnexpectedAdmissionError": ExitReason.HARDWARE,
}
"""Reasons of the end, by the reason that the pod as a whole gives."""

OF_THE_DISRUPTION = {"DeletionByPodGC": ExitReason.LOST}
"""By the reason of a pod's condition DisruptionTarget; all others are kills: preemption, eviction,
a taint. The garbage collector deletes the pods of machines that are gone."""

OF_THE_CONTAINER = {
    # These come with the exit codes 127 and 128, which mean something else if a program ran.
    "ContainerCannotRun": ExitReason.ERROR,
    "StartError": ExitReason.ERROR,
    "ContainerStatusUnknown": ExitReason.LOST,
}
"""Reasons of the end, by the reason that the runtime gives for a container."""

WAITING_WORDS = {
    "ErrImagePull": "cannot be pulled",
    "ImagePullBackOff": "cannot be pulled",
    "ErrImageNeverPull": "is not there and must not be pulled",
    "InvalidImageName": "has an invalid name",
}
"""Words for the reasons for which a container waits for its image."""

NORMAL_WAITING = frozenset({"", "ContainerCreating", "PodInitializing"})

MESSAGE_LENGTH_MAX = 500


class _Camel(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Decodes only the fields that it declares: a watch of thousands of pods must stay small."""


class Owner(_Camel, frozen=True):
    uid: str = ""


class Meta(_Camel, frozen=True):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[Owner, ...] = ()
    deletion_timestamp: str = ""
    deletion_grace_period_seconds: int = 0


class Ended(_Camel, frozen=True):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    finished_at: str | None = None


class Waiting(_Camel, frozen=True):
    reason: str = ""
    message: str = ""


class State(_Camel, frozen=True):
    waiting: Waiting | None = None
    terminated: Ended | None = None


class Container(_Camel, frozen=True):
    name: str = ""
    image: str = ""
    state: State = State()


class Condition(_Camel, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Status(_Camel, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[Condition, ...] = ()
    init_container_statuses: tuple[Container, ...] = ()
    container_statuses: tuple[Container, ...] = ()

    def condition(self, kind: str) -> Condition:
        """The condition of that kind; an empty one if there is none."""
        return next((found for found in self.conditions if found.type == kind), Condition())


class Spec(_Camel, frozen=True):
    node_name: str = ""


class Pod(_Camel, frozen=True):
    """The part of a pod that describes its node."""

    metadata: Meta = Meta()
    spec: Spec = Spec()
    status: Status = Status()

    @property
    def node_id(self) -> NodeId | None:
        """None for a pod that is no node: the master's, or one whose labels are broken."""
        label = self.metadata.labels.get(names.NODE_ID_LABEL, "")
        is_master = self.metadata.labels.get(names.ROLE_LABEL) == names.MASTER_ROLE
        if is_master or not (label.isascii() and label.isdigit()):
            return None
        return NodeId(int(label))

    @property
    def slot(self) -> tuple[str, str]:
        """Role and rank: what it shares with its successor."""
        labels = self.metadata.labels
        return labels.get(names.ROLE_LABEL, ""), labels.get(names.NODE_RANK_LABEL, "")

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to end. It runs on until its grace period is over."""
        return bool(self.metadata.deletion_timestamp)

    @property
    def is_over(self) -> bool:
        """Whether nothing in it runs any more."""
        return self.status.phase in ("Failed", "Succeeded")

    @property
    def is_held_up(self) -> bool:
        """Whether its node has ended and a sidecar runs on, with all that the pod reserves."""
        others = [state for state in self.status.container_statuses if state is not self.main()]
        return self.main().state.terminated is not None and any(
            other.state.terminated is None for other in others
        )

    def is_of(self, job_uid: str) -> bool:
        """Whether it belongs to this job, not to an older one of the same name."""
        return any(owner.uid == job_uid for owner in self.metadata.owner_references)

    def main(self) -> Container:
        """The main container; one without a state if the pod has none yet."""
        found = self.status.container_statuses
        name = self.metadata.annotations.get(MAIN_ANNOTATION, "main")
        alone = found[0] if len(found) == 1 else Container()
        return next((container for container in found if container.name == name), alone)


def sighting(pod: Pod, *, gone: bool = False) -> Sighting | None:
    """What the pod says about its node; None if it is not the pod of a node.

    `gone` says that the pod does not exist any more, and `pod` is how it was seen last.
    """
    node_id = pod.node_id
    if node_id is None:
        return None
    phase, reason, message = _gone(pod) if gone else seen(pod)
    return Sighting(
        node_id=node_id,
        phase=phase,
        reason=reason,
        message=message[:MESSAGE_LENGTH_MAX],
        host=pod.spec.node_name,
    )


_Seen = tuple[Phase, ExitReason | None, str]


def seen(pod: Pod) -> _Seen:
    """Phase, reason of the end, and words about the main container."""
    ended = pod.main().state.terminated
    if pod.status.phase == "Failed" or ended is not None:
        return _ended(pod)
    if pod.status.phase == "Succeeded":
        return Phase.SUCCEEDED, None, ""
    if pod.status.phase == "Running" and pod.main().state.waiting is None:
        return Phase.RUNNING, None, _leaving_words(pod)
    # "Unknown" too: a phase never goes back, so this takes nothing from a node that ran.
    return Phase.PENDING, None, _leaving_words(pod) or _pending_words(pod)


def _ended(pod: Pod) -> _Seen:
    ended = pod.main().state.terminated
    was_sent_away = _was_sent_away(pod, ended)
    ended_well = ended is not None and ended.exit_code == 0 and not ended.signal
    if ended_well and not was_sent_away:
        return Phase.SUCCEEDED, None, ""
    return Phase.FAILED, *_failure(pod, ended, was_sent_away=was_sent_away)


def _was_sent_away(pod: Pod, ended: Ended | None) -> bool:
    """Whether the cluster or a user ended it. Its exit code then says nothing: a node that saved
    its state and ended in peace has not finished its work."""
    if pod.status.reason in OF_THE_POD or pod.status.condition("DisruptionTarget").status == "True":
        return True
    if not pod.is_leaving or ended is None or ended.finished_at is None:
        return pod.is_leaving
    grace = timedelta(seconds=pod.metadata.deletion_grace_period_seconds)
    try:
        told_at = datetime.fromisoformat(pod.metadata.deletion_timestamp) - grace
        return datetime.fromisoformat(ended.finished_at) >= told_at
    except (TypeError, ValueError):
        return True  # Times that cannot be compared prove nothing.


def _failure(pod: Pod, ended: Ended | None, *, was_sent_away: bool) -> tuple[ExitReason, str]:
    """Why it failed. What the kernel and the cluster know overrides the meaning of an exit code."""
    if ended is not None and ended.reason == "OOMKilled":
        return ExitReason.OOM, "its main container ran out of memory"
    if pod.status.reason in OF_THE_POD:
        text = f"its pod ended ({pod.status.reason}): {pod.status.message}"
        return OF_THE_POD[pod.status.reason], text.removesuffix(": ")
    if was_sent_away:
        return _sent_away_reason(pod), _leaving_words(pod)
    if ended is not None:
        return _of_exit(ended), f"its main container {_how(ended)}"
    for container in pod.status.init_container_statuses:
        failed = container.state.terminated
        if failed is not None and (failed.exit_code or failed.signal):
            return _of_exit(failed), f"its init container {container.name} {_how(failed)}"
    why = pod.status.message or pod.status.reason or "it did not say why"
    return ExitReason.UNKNOWN, f"its pod failed: {why}"


def _of_exit(ended: Ended) -> ExitReason:
    known = OF_THE_CONTAINER.get(ended.reason)
    if known is not None:
        return known
    oom = ended.reason == "OOMKilled"
    return classify_exit(ended.exit_code, ended.signal or None, oom=oom)


def _how(ended: Ended) -> str:
    """How a container ended, with its message: usually the program's last lines."""
    how = f"ended with code {ended.exit_code}"
    if ended.reason not in ("", "Error", "Completed"):
        how = f"{how} ({ended.reason})"
    return f"{how}: {ended.message.strip()}" if ended.message.strip() else how


def _gone(pod: Pod) -> _Seen:
    if pod.main().state.terminated is not None or pod.is_over:
        _, reason, message = _ended(pod)
        return Phase.GONE, reason, message
    return Phase.GONE, _sent_away_reason(pod), _leaving_words(pod) or "its pod was deleted"


def _sent_away_reason(pod: Pod) -> ExitReason:
    if _machine_is_silent(pod):
        return ExitReason.LOST
    disruption = pod.status.condition("DisruptionTarget")
    return OF_THE_DISRUPTION.get(disruption.reason, ExitReason.KILLED)


def _machine_is_silent(pod: Pod) -> bool:
    """Whether the cluster took readiness away from a pod because its machine does not answer.

    Some clusters give a reason for it. Most give none, which a machine that answers never does.
    """
    ready = pod.status.condition("Ready")
    is_unexplained = not ready.reason and pod.status.condition("ContainersReady").status == "True"
    return ready.status == "False" and (ready.reason == "NodeNotReady" or is_unexplained)


def _leaving_words(pod: Pod) -> str:
    """Why it is ending; empty for a pod that stays."""
    disruption = pod.status.condition("DisruptionTarget")
    if disruption.status == "True":
        return f"its pod is taken away ({disruption.reason}): {disruption.message}"
    if _machine_is_silent(pod):
        return f"its machine {pod.spec.node_name} does not answer"
    if pod.is_leaving:
        return f"its pod is deleted, with {pod.metadata.deletion_grace_period_seconds} s to end"
    return ""


def _pending_words(pod: Pod) -> str:
    """Why it does not run yet, in words for people."""
    scheduled = pod.status.condition("PodScheduled")
    if scheduled.status == "False":
        return f"it has no machine yet: {scheduled.message or scheduled.reason}"
    return next(_waits(pod), "")


def _waits(pod: Pod) -> Iterator[str]:
    for container in (*pod.status.init_container_statuses, *pod.status.container_statuses):
        waiting = container.state.waiting
        if waiting is None or waiting.reason in NORMAL_WAITING:
            continue
        if waiting.reason in WAITING_WORDS:
            what = f"the image {container.image} {WAITING_WORDS[waiting.reason]}"
        else:
            what = f"container {container.name} cannot start ({waiting.reason})"
        yield f"{what}: {waiting.message}".removesuffix(": ")
