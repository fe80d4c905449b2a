# SPDX-License-Identifier: Apache-2.0
"""A pod's status becomes a sighting: phase, why it ended, and words for people."""

from typing import Any

import msgspec
import pytest

from holdfast.model.node import ExitReason, Phase
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.pods import MAIN_ANNOTATION, Pod, sighting
from holdfast.ports.platform import Sighting

Json = dict[str, Any]

LABELS = {
    names.JOB_LABEL: "job",
    names.ROLE_LABEL: "worker",
    names.NODE_ID_LABEL: "7",
    names.NODE_RANK_LABEL: "2",
}
TOLD_AT, LATER, EARLIER = "2026-03-01T10:00:00Z", "2026-03-01T10:00:05Z", "2026-03-01T09:59:00Z"
DEADLINE = "2026-03-01T10:00:30Z"
LEAVING = {"deletionTimestamp": DEADLINE, "deletionGracePeriodSeconds": 30}
"""Told to go at TOLD_AT, with 30 s to do so."""


def ended(code: int, reason: str = "Error", **more: Any) -> Json:
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": EARLIER, **more}}


def waiting(reason: str, message: str = "") -> Json:
    return {"waiting": {"reason": reason, "message": message}}


RUNNING: Json = {"running": {"startedAt": EARLIER}}


def container(name: str, state: Json) -> Json:
    return {"name": name, "image": f"{name}:1", "state": state, "ready": False, "lastState": {}}


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def pod(
    phase: str,
    main: Json | None = None,
    *,
    others: tuple[Json, ...] = (),
    init: tuple[Json, ...] = (),
    metadata: Json | None = None,
    **status: Any,
) -> Pod:
    containers = [*others, *([container("main", main)] if main is not None else [])]
    text = msgspec.json.encode(
        {
            "metadata": {"name": "job-edljob-worker-7", "labels": LABELS, **(metadata or {})},
            "spec": {"nodeName": "host-3", "containers": [{"name": "main"}]},
            "status": {
                "phase": phase,
                "containerStatuses": containers,
                "initContainerStatuses": list(init),
                **status,
            },
        }
    )
    return msgspec.json.decode(text, type=Pod)


def seen(pod: Pod, *, gone: bool = False) -> Sighting:
    found = sighting(pod, gone=gone)
    assert found is not None
    return found


def test_a_running_pod() -> None:
    assert seen(pod("Running", RUNNING)) == Sighting(node_id=7, phase=Phase.RUNNING, host="host-3")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (1, ExitReason.ERROR),
        (134, ExitReason.ERROR),
        (139, ExitReason.ERROR),
        (137, ExitReason.KILLED),
        (143, ExitReason.KILLED),
        (247, ExitReason.OOM),
        (14, ExitReason.HARDWARE),
        (201, ExitReason.HARDWARE),
        (77, ExitReason.UNKNOWN),
    ],
)
def test_the_exit_code_of_the_main_container(code: int, reason: ExitReason) -> None:
    found = seen(pod("Failed", ended(code)))
    assert (found.phase, found.reason) == (Phase.FAILED, reason)
    assert f"code {code}" in found.message


def test_a_program_s_last_words_are_in_the_message() -> None:
    found = seen(pod("Failed", ended(1, message="ValueError: no data in /data\n")))
    assert found.message == "its main container ended with code 1: ValueError: no data in /data"


def test_out_of_memory_wins_over_every_exit_code() -> None:
    """Prior art: the reason of the container wins over 143, and so over all other codes."""
    for code in (137, 143, 1):
        assert seen(pod("Failed", ended(code, "OOMKilled"))).reason is ExitReason.OOM


def test_a_worker_that_was_out_of_memory_once_does_not_spoil_a_node_that_ended_well() -> None:
    """Runtimes keep the reason from any process of the container that the kernel killed."""
    assert seen(pod("Succeeded", ended(0, "OOMKilled"))).phase is Phase.SUCCEEDED


def test_out_of_memory_wins_over_the_deletion_that_follows() -> None:
    found = seen(pod("Failed", ended(137, "OOMKilled", finishedAt=LATER), metadata=LEAVING))
    assert found.reason is ExitReason.OOM


@pytest.mark.parametrize("reason", ["StartError", "ContainerCannotRun"])
def test_a_command_that_does_not_exist_is_no_broken_hardware(reason: str) -> None:
    """It comes with the exit code 128, which stands for hardware where a program ran."""
    found = seen(pod("Failed", ended(128, reason, message="exec: trian.py: not found")))
    assert found.reason is ExitReason.ERROR
    assert "trian.py: not found" in found.message


@pytest.mark.parametrize(
    ("pod_reason", "reason"),
    [
        ("Evicted", ExitReason.KILLED),
        ("Preempting", ExitReason.KILLED),
        ("Preempted", ExitReason.KILLED),
        ("NodeShutdown", ExitReason.KILLED),
        ("Terminated", ExitReason.KILLED),
        ("DeadlineExceeded", ExitReason.KILLED),
        ("OutOfcpu", ExitReason.KILLED),
        ("NodeLost", ExitReason.LOST),
        ("UnexpectedAdmissionError", ExitReason.HARDWARE),
    ],
)
@pytest.mark.parametrize("main", [None, ended(137), ended(1), ended(0, "Completed")])
def test_the_reason_of_the_whole_pod(
    pod_reason: str, reason: ExitReason, main: Json | None
) -> None:
    """Also for a node that ended well when it was told to: it has not finished its work."""
    found = seen(pod("Failed", main, reason=pod_reason, message="The node was low on memory."))
    assert (found.phase, found.reason) == (Phase.FAILED, reason)
    assert pod_reason in found.message
    assert "low on memory" in found.message


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("PreemptionByScheduler", ExitReason.KILLED),
        ("EvictionByEvictionAPI", ExitReason.KILLED),
        ("TerminationByKubelet", ExitReason.KILLED),
        ("DeletionByTaintManager", ExitReason.KILLED),
        ("DeletionByPodGC", ExitReason.LOST),
    ],
)
def test_a_disruption(why: str, reason: ExitReason) -> None:
    conditions = [condition("DisruptionTarget", "True", why, "a more important pod came")]
    for main in (ended(137), ended(0, "Completed")):
        found = seen(pod("Failed", main, conditions=conditions))
        assert (found.phase, found.reason) == (Phase.FAILED, reason)
        assert why in found.message
    assert "more important" in seen(pod("Running", RUNNING, conditions=conditions)).message
    assert seen(pod("Running", RUNNING, conditions=conditions), gone=True).reason is reason


# ---- several containers ----------------------------------------------------------------------


def test_only_the_main_container_counts_not_the_first_one() -> None:
    """Prior art: only the first container's status is read."""
    sidecar = container("a-sidecar", ended(0, "Completed"))
    found = seen(pod("Failed", ended(1), others=(sidecar,)))
    assert (found.phase, found.reason) == (Phase.FAILED, ExitReason.ERROR)


def test_a_sidecar_that_still_runs_does_not_keep_the_node_alive() -> None:
    sidecar = container("a-sidecar", RUNNING)
    assert seen(pod("Running", ended(1), others=(sidecar,))).phase is Phase.FAILED
    done = pod("Running", ended(0, "Completed"), others=(sidecar,))
    assert seen(done).phase is Phase.SUCCEEDED


def test_only_an_ordinary_sidecar_holds_a_pod_up() -> None:
    """One of the kind that Kubernetes ends by itself is an init container that goes on."""
    sidecar = container("a-sidecar", RUNNING)
    assert pod("Running", ended(1), others=(sidecar,)).is_held_up
    assert not pod("Running", ended(1), init=(sidecar,)).is_held_up
    assert not pod("Running", RUNNING, others=(sidecar,)).is_held_up
    assert not pod("Failed", ended(1), others=(container("a-sidecar", ended(0)),)).is_held_up


def test_a_sidecar_that_failed_does_not_spoil_a_node_that_ended_well() -> None:
    sidecar = container("a-sidecar", ended(2))
    assert seen(pod("Failed", ended(0, "Completed"), others=(sidecar,))).phase is Phase.SUCCEEDED


def test_a_container_put_in_by_the_cluster_is_not_taken_for_the_main_one() -> None:
    """The template had one container of any name; a mesh added its own to the pod."""
    others = (container("mesh", RUNNING), container("trainer", ended(1)))
    metadata = {"annotations": {MAIN_ANNOTATION: "trainer"}}
    assert seen(pod("Running", others=others, metadata=metadata)).reason is ExitReason.ERROR


def test_a_main_container_that_waits_beside_a_running_sidecar_is_pending() -> None:
    sidecar = container("a-sidecar", RUNNING)
    found = seen(pod("Running", waiting("ImagePullBackOff"), others=(sidecar,)))
    assert found.phase is Phase.PENDING


def test_a_failed_init_container() -> None:
    init = (container("fetch", ended(0, "Completed")), container("unpack", ended(1)))
    found = seen(pod("Failed", waiting("PodInitializing"), init=init))
    assert (found.phase, found.reason) == (Phase.FAILED, ExitReason.ERROR)
    assert "init container unpack ended with code 1" in found.message


def test_an_init_container_out_of_memory() -> None:
    init = (container("unpack", ended(137, "OOMKilled")),)
    assert seen(pod("Failed", None, init=init)).reason is ExitReason.OOM


# ---- leaving ---------------------------------------------------------------------------------


def test_a_pod_that_is_deleted_runs_until_its_grace_is_over() -> None:
    found = seen(pod("Running", RUNNING, metadata=LEAVING))
    assert found.phase is Phase.RUNNING
    assert "deleted, with 30 s" in found.message


@pytest.mark.parametrize("code", [0, 1, 143])
def test_how_a_node_ends_after_it_was_told_to_go_says_nothing_about_its_program(code: int) -> None:
    for finished_at in (TOLD_AT, LATER, None):
        found = seen(pod("Failed", ended(code, finishedAt=finished_at), metadata=LEAVING))
        assert (found.phase, found.reason) == (Phase.FAILED, ExitReason.KILLED)


def test_a_node_that_ended_before_its_pod_was_deleted_keeps_its_own_end() -> None:
    assert seen(pod("Succeeded", ended(0), metadata=LEAVING)).phase is Phase.SUCCEEDED
    assert seen(pod("Failed", ended(1), metadata=LEAVING)).reason is ExitReason.ERROR


def test_a_deleted_pod_is_gone_whatever_its_last_phase_was() -> None:
    """Prior art: a force-deleted pod whose last phase is Running never triggers a relaunch."""
    found = seen(pod("Running", RUNNING), gone=True)
    assert (found.phase, found.reason) == (Phase.GONE, ExitReason.KILLED)
    assert seen(pod("Pending"), gone=True).phase is Phase.GONE
    assert seen(pod("Failed", ended(1)), gone=True).reason is ExitReason.ERROR
    assert seen(pod("Succeeded", ended(0)), gone=True).reason is None


@pytest.mark.parametrize(
    "conditions",
    [
        [condition("Ready", "False", "NodeNotReady")],
        # What the node controller leaves behind: it takes readiness away and gives no reason.
        [condition("Ready", "False"), condition("ContainersReady", "True")],
    ],
)
def test_a_machine_that_does_not_answer(conditions: list[Json]) -> None:
    silent = pod("Running", RUNNING, conditions=conditions, metadata=LEAVING)
    assert seen(silent).phase is Phase.RUNNING
    assert "host-3 does not answer" in seen(silent).message
    assert seen(silent, gone=True).reason is ExitReason.LOST


def test_a_pod_whose_own_probe_fails_is_not_on_a_silent_machine() -> None:
    conditions = [
        condition("Ready", "False", "ContainersNotReady"),
        condition("ContainersReady", "False", "ContainersNotReady"),
    ]
    assert seen(pod("Running", RUNNING, conditions=conditions)).message == ""


# ---- pending ---------------------------------------------------------------------------------


def test_why_a_pod_has_no_machine() -> None:
    why = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    found = seen(pod("Pending", conditions=[condition("PodScheduled", "False", message=why)]))
    assert found.phase is Phase.PENDING
    assert found.message == f"it has no machine yet: {why}"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("ErrImagePull", "the image main:1 cannot be pulled: manifest unknown"),
        ("ImagePullBackOff", "the image main:1 cannot be pulled: manifest unknown"),
        ("InvalidImageName", "the image main:1 has an invalid name: manifest unknown"),
        (
            "CreateContainerConfigError",
            "container main cannot start (CreateContainerConfigError): manifest unknown",
        ),
    ],
)
def test_why_a_container_does_not_start(reason: str, words: str) -> None:
    found = seen(pod("Pending", waiting(reason, "manifest unknown")))
    assert (found.phase, found.message) == (Phase.PENDING, words)


def test_a_container_that_is_being_made_is_no_news() -> None:
    assert seen(pod("Pending", waiting("ContainerCreating"))).message == ""


def test_nobody_knows_the_phase() -> None:
    """PENDING takes nothing back: a phase only moves forward."""
    assert seen(pod("Unknown", RUNNING)).phase is Phase.PENDING
    assert Phase.RUNNING.after(Phase.PENDING) is Phase.RUNNING


# ---- pods that are no nodes --------------------------------------------------------------------


@pytest.mark.parametrize(
    "labels",
    [
        {},
        {names.JOB_LABEL: "job"},
        {**LABELS, names.NODE_ID_LABEL: ""},
        {**LABELS, names.NODE_ID_LABEL: "-1"},
        {**LABELS, names.NODE_ID_LABEL: "seven"},
        {**LABELS, names.NODE_ID_LABEL: "\u0667"},
        {**LABELS, names.ROLE_LABEL: names.MASTER_ROLE},
    ],
)
def test_a_pod_with_missing_or_broken_labels_is_passed_over(labels: dict[str, str]) -> None:
    """Prior art: a missing label raises, and one bad pod ends the watch for good."""
    assert sighting(pod("Running", RUNNING, metadata={"labels": labels})) is None


def test_a_pod_without_requests_or_status_is_no_error() -> None:
    """Prior art: a pod without cpu or memory requests raises."""
    bare = msgspec.json.decode(msgspec.json.encode({"metadata": {"labels": LABELS}}), type=Pod)
    assert seen(bare).phase is Phase.PENDING
