# SPDX-License-Identifier: Apache-2.0
"""The status of an ElasticJob says what the master's view says."""

from typing import Any

from holdfast.platforms.kubernetes.status import status_of

NOW = "2026-11-16T10:30:00Z"
LATER = "2026-11-16T10:31:00Z"
OBSERVED = {"generation": 1, "replicas": {"worker": 3}, "suspend": False}


def node(rank: int, phase: str, message: str = "") -> dict[str, Any]:
    return {"node_id": rank + 10, "node_rank": rank, "phase": phase, "message": message}


def view(*nodes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "job": "j",
        "state": "running",
        "reason": "",
        "restarts": {},
        "wanted": {"nodes": 3, "suspended": False},
        "world": {"round": 0, "state": "waiting for nodes", "reason": "the job starts"},
        "nodes": list(nodes),
        "progress": {"step": -1, "goodput": 0.0},
        **changes,
    }


WAITING = view(
    node(0, "running"),
    node(1, "pending", "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."),
    node(2, "initial"),
)
TRAINING = view(
    *(node(rank, "running") for rank in range(3)),
    node(1, "failed", "OOMKilled"),
    world={"round": 2, "state": "running", "reason": "x", "nodes": [0, 1, 2], "world_size": 24},
    progress={"step": 170, "goodput": 0.9731},
    restarts={"oom": 1, "killed": 2},
)
BROKEN = view(
    node(0, "running"),
    world={"round": 2, "state": "broken", "reason": "node rank 1 was evicted"},
    progress={"step": 170, "goodput": 0.97},
)
SUSPENDED = view(node(0, "gone"), wanted={"nodes": 3, "suspended": True})
FAILED = view(node(0, "failed"), state="failed", reason="rank 3 raised ValueError")
SUCCEEDED = view(node(0, "succeeded"), state="succeeded", reason="every worker finished")


def status(of: dict[str, Any], before: dict[str, Any] | None = None, now: str = NOW) -> Any:
    return status_of(of, before or {}, now, OBSERVED)


def condition(found: dict[str, Any], kind: str) -> dict[str, Any] | None:
    (one,) = [one for one in found["conditions"] if one["type"] == kind] or [None]
    return one


def test_a_job_that_waits_for_nodes_says_for_what() -> None:
    assert status(WAITING) == {
        "phase": "Pending",
        "message": "waiting for nodes: 1 of 3 worker nodes run; worker 1: "
        "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        "conditions": [],
        "replicaStatuses": {
            "worker": {
                "initial": 1,
                "pending": 1,
                "active": 1,
                "succeeded": 0,
                "failed": 0,
                "labelSelector": "elasticjob.dlrover/name=j,elasticjob.dlrover/replica-type=worker",
            }
        },
        "replicas": 1,
        "selector": "elasticjob.dlrover/name=j,elasticjob.dlrover/replica-type=worker",
        "restarts": 0,
        "round": 0,
        "goodput": "0.0%",
        "observed": OBSERVED,
        "lastReconcileTime": NOW,
    }


def test_a_job_that_trains() -> None:
    found = status(TRAINING)
    assert found == {
        "phase": "Running",
        "message": "round 2 trains on 3 nodes with 24 workers",
        "conditions": [
            {
                "type": "Running",
                "status": "True",
                "reason": "Running",
                "message": "round 2 trains on 3 nodes with 24 workers",
                "lastTransitionTime": NOW,
            }
        ],
        "replicaStatuses": {
            "worker": {
                "initial": 0,
                "pending": 0,
                "active": 3,
                "succeeded": 0,
                "failed": 1,
                "labelSelector": "elasticjob.dlrover/name=j,elasticjob.dlrover/replica-type=worker",
            }
        },
        "replicas": 3,
        "selector": "elasticjob.dlrover/name=j,elasticjob.dlrover/replica-type=worker",
        "restarts": 3,
        "round": 2,
        "step": 170,
        "goodput": "97.3%",
        "startTime": NOW,
        "observed": OBSERVED,
        "lastReconcileTime": NOW,
    }


def test_a_job_on_its_way_back_is_not_one_that_never_started() -> None:
    """A weakness of the prior art: its stage `running` is never set, and nobody can tell."""
    trained = status(TRAINING)
    found = status(BROKEN, trained, LATER)
    assert found["phase"] == "Restarting"
    assert found["message"].startswith("waiting for nodes (node rank 1 was evicted): 1 of 3")
    assert found["startTime"] == NOW
    running = condition(found, "Running")
    assert running is not None
    assert (running["status"], running["lastTransitionTime"]) == ("False", LATER)


def test_a_job_in_a_pause_does_not_say_that_it_waits_for_nodes() -> None:
    world = {"round": 2, "state": "broken", "reason": "rank 0 exited with code 1"}
    found = status({**BROKEN, "world": {**world, "starts_in_s": 4.0}})
    assert found["message"].startswith("in a pause after a failed start (rank 0 exited with code 1")


def test_times_of_what_has_not_changed_are_kept() -> None:
    trained = status(TRAINING)
    more = {**TRAINING, "progress": {"step": 200, "goodput": 0.98}}
    found = status(more, trained, LATER)
    assert found["conditions"] == trained["conditions"]
    assert (found["startTime"], found["step"]) == (NOW, 200)
    assert found["lastReconcileTime"] == LATER


def test_conditions_of_the_operator_are_left_to_it() -> None:
    created = {"type": "Created", "status": "True", "lastTransitionTime": NOW}
    found = status(TRAINING, {"conditions": [created], "phase": "Created"}, LATER)
    assert [one["type"] for one in found["conditions"]] == ["Running"]


def test_suspended_and_resumed() -> None:
    found = status(SUSPENDED, status(TRAINING), LATER)
    assert found["phase"] == "Suspended"
    held = condition(found, "Suspended")
    assert held is not None
    assert held["status"] == "True"
    again = status(TRAINING, found, LATER)
    resumed = condition(again, "Suspended")
    assert resumed is not None
    assert (again["phase"], resumed["status"]) == ("Running", "False")
    assert again["startTime"] == NOW


def test_the_end_has_its_reason_and_its_time() -> None:
    failed = status(FAILED, status(TRAINING), LATER)
    assert (failed["phase"], failed["completionTime"]) == ("Failed", LATER)
    ended = condition(failed, "Failed")
    assert ended is not None
    assert ended["message"] == failed["message"] == "rank 3 raised ValueError"
    assert status(FAILED, failed, "2026-11-16T11:00:00Z")["completionTime"] == LATER
    succeeded = status(SUCCEEDED, status(TRAINING), LATER)
    assert (succeeded["phase"], succeeded["message"]) == ("Succeeded", "every worker finished")
    assert succeeded["replicaStatuses"]["worker"]["succeeded"] == 1


def test_a_job_of_parameter_servers_has_no_world_and_trains_all_the_same() -> None:
    servers = [{**node(0, "running"), "role": "ps"}, {**node(0, "running"), "role": "worker"}]
    roles = {"nodes": 1, "suspended": False, "roles": {"ps": 1, "worker": 2}}
    waiting = status(view(*servers, wanted=roles))
    assert (waiting["phase"], waiting["message"]) == (
        "Pending",
        "waiting for nodes: 1 of 2 worker, 1 of 1 ps nodes run",
    )
    ended = {**node(1, "succeeded"), "role": "worker"}
    running = status(view(*servers, ended, wanted=roles))
    assert (running["phase"], running["replicas"]) == ("Running", 1)
    assert running["replicaStatuses"]["ps"]["active"] == 1
    assert status(view(*servers, wanted=roles), running)["phase"] == "Restarting"


def test_a_view_of_another_version_is_understood() -> None:
    """Fields that are not known are ignored, missing ones have defaults."""
    found = status({"job": "j", "state": "running", "later": {"x": 1}})
    assert (found["phase"], found["replicaStatuses"]["worker"]["active"]) == ("Pending", 0)
