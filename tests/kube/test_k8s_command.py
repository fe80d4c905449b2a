# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s` and a real API server; the tests play operator, master and kubelet."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import ELASTICJOBS, EVENTS, SCALEPLANS, Api
from tests.kube.cluster import Cluster
from tests.kube.commands import Command, make_pod, manifest, set_status

pytestmark = pytest.mark.kube

Hold = Callable[..., int]
Start = Callable[..., Command]


def write(path: Path, *objects: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump_all(objects))
    return str(path)


def test_submit_creates_every_document(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = {
        "apiVersion": names.API_VERSION,
        "kind": "ScalePlan",
        "metadata": {"name": "more"},
        "spec": {"ownerJob": "job", "replicaResourceSpecs": {"worker": {"replicas": 4}}},
    }
    file = write(tmp_path / "both.yaml", manifest(), plan)
    assert k8s("submit", file) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"elasticjob/job created in the namespace {namespace}",
        f"scaleplan/more created in the namespace {namespace}",
    ]
    assert runner.run(api.get(ELASTICJOBS, "job", namespace))
    assert runner.run(api.get(SCALEPLANS, "more", namespace))
    assert k8s("submit", file) == 1
    assert "there is elasticjob/job" in capsys.readouterr().err


def test_nothing_is_created_if_one_document_has_a_mistake(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = manifest("second")
    bad["spec"]["replicaSpecs"]["worker"]["replica"] = 3
    assert k8s("submit", write(tmp_path / "two.yaml", manifest(), bad)) == 2
    assert "elasticjob/second: spec.replicaSpecs.worker.replica:" in capsys.readouterr().err
    assert runner.run(api.list(ELASTICJOBS, namespace)).items == []


def test_two_namespaces_for_one_job_are_refused(
    k8s: Hold, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    obj = manifest()
    obj["metadata"]["namespace"] = "elsewhere"
    assert k8s("submit", write(tmp_path / "job.yaml", obj)) == 2
    assert "says that its namespace is elsewhere" in capsys.readouterr().err


def test_a_namespace_that_is_not_there(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "job.yaml", manifest())
    where = [f"--kubeconfig={cluster.kubeconfig()}", "--namespace=nowhere"]
    assert main(["k8s", "submit", file, *where]) == 1
    assert "there is no namespace nowhere" in capsys.readouterr().err


def test_submit_can_wait_for_the_end(
    start_k8s: Start,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    tmp_path: Path,
) -> None:
    submission = start_k8s("submit", write(tmp_path / "job.yaml", manifest()), "--wait")
    assert submission.line() == f"elasticjob/job created in the namespace {namespace}"
    assert submission.line() == "elasticjob/job Created"
    set_status(api, runner, namespace, {"phase": "Running", "message": "3 nodes train"})
    assert submission.line() == "elasticjob/job Running: 3 nodes train"
    set_status(api, runner, namespace, {"phase": "Succeeded", "message": "the end"})
    assert submission.line() == "elasticjob/job Succeeded: the end"
    assert submission.end() == 0


def test_waiting_ends_badly_if_a_job_fails_is_malformed_or_is_deleted(
    start_k8s: Start,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    tmp_path: Path,
    k8s: Hold,
) -> None:
    jobs = ["fails", "malformed", "deleted"]
    file = write(tmp_path / "jobs.yaml", *(manifest(name) for name in jobs))
    submission = start_k8s("submit", file, "--wait")
    created = {f"elasticjob/{name} created in the namespace {namespace}" for name in jobs}
    assert {submission.line() for _ in jobs} == created
    assert {submission.line() for _ in jobs} == {f"elasticjob/{name} Created" for name in jobs}
    set_status(api, runner, namespace, {"phase": "Failed", "message": "the end"}, "fails")
    assert submission.line() == "elasticjob/fails Failed: the end"
    condition = {"type": "Malformed", "status": "True", "message": "spec.x: unknown field"}
    set_status(api, runner, namespace, {"conditions": [condition]}, "malformed")
    assert submission.line() == "elasticjob/malformed Malformed: spec.x: unknown field"
    assert k8s("delete", "deleted") == 0
    assert submission.line() == "elasticjob/deleted was deleted"
    assert submission.end() == 1


def test_waiting_has_a_limit(k8s: Hold, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert k8s("submit", write(tmp_path / "job.yaml", manifest()), "--wait", "--timeout=1") == 1
    assert "the jobs are not over after 1 s; they go on" in capsys.readouterr().err


def test_status_shows_a_job_with_its_conditions_nodes_and_events(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert k8s("status") == 0
    assert capsys.readouterr().out == f"there are no jobs in the namespace {namespace}\n"
    created = runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    uid = created["metadata"]["uid"]
    status = {
        "phase": "Running",
        "message": "1 of 3 nodes",
        "step": 41234,
        "replicas": 1,
        "replicaStatuses": {"worker": {"active": 1, "pending": 2}},
        "conditions": [
            {"type": "Running", "status": "True", "reason": "WorldFormed", "message": "it trains"}
        ],
    }
    set_status(api, runner, namespace, status)
    make_pod(api, runner, namespace, uid, 7)
    make_pod(api, runner, namespace, "another-job", 8)
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "job.1", "namespace": namespace},
        "involvedObject": {"kind": "ElasticJob", "namespace": namespace, "name": "job", "uid": uid},
        "reason": "NodeLost",
        "message": "node 3 was evicted",
        "type": "Warning",
        "count": 2,
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    runner.run(api.create(EVENTS, event, namespace))

    assert k8s("status") == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "phase", "workers", "active", "step", "age", "message"]
    assert row.split()[:5] == ["job", "Running", "3", "1", "41,234"]

    assert k8s("status", "job") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        f"{namespace}/job Running",
        "worker 1 active, 2 pending",
        "Running True WorldFormed",
        "worker 0 job-edljob-worker-7 pending 0",
        "NodeLost",
        "node 3 was evicted",
    ):
        assert part in shown
    assert "job-edljob-worker-8" not in shown

    assert k8s("status", "job", "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"]["step"] == 41234
    assert k8s("status", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_scale_changes_the_number_of_nodes(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    assert k8s("scale", "job", "--replicas=8") == 0
    assert capsys.readouterr().out == "elasticjob/job: worker 3 -> 8\n"
    job = runner.run(api.get(ELASTICJOBS, "job", namespace))
    assert job["spec"]["replicaSpecs"]["worker"]["replicas"] == 8
    assert k8s("scale", "job", "--replicas=0") == 2
    assert "at least 1 worker" in capsys.readouterr().err
    assert k8s("scale", "job", "--role=ps", "--replicas=1") == 2
    assert "has no nodes of the role ps" in capsys.readouterr().err
    set_status(api, runner, namespace, {"phase": "Succeeded"})
    assert k8s("scale", "job", "--replicas=2") == 1
    assert "is over" in capsys.readouterr().err


def test_suspend_waits_until_all_nodes_are_gone_and_resume_until_the_job_trains(
    start_k8s: Start, api: Api, runner: asyncio.Runner, namespace: str
) -> None:
    created = runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    before = {"generation": created["metadata"]["generation"]}

    def say(phase: str, active: int, observed: dict[str, int], **more: str) -> None:
        counts = {"worker": {"active": active}}
        status = {"phase": phase, "replicaStatuses": counts, "observed": observed, **more}
        set_status(api, runner, namespace, status)

    def spec_of_job() -> tuple[bool, dict[str, int]]:
        job = runner.run(api.get(ELASTICJOBS, "job", namespace))
        return job["spec"]["suspend"], {"generation": job["metadata"]["generation"]}

    say("Suspended", 0, before, message="of another time")
    suspending = start_k8s("suspend", "job")
    assert suspending.line() == "elasticjob/job is to be suspended"
    assert suspending.line() == "elasticjob/job Suspended: of another time"
    suspend, generation = spec_of_job()
    assert suspend
    say("Suspended", 2, generation, message="2 nodes are still going")
    assert suspending.line() == "elasticjob/job Suspended: 2 nodes are still going"
    say("Suspended", 0, generation, message="nobody runs")
    assert suspending.line() == "elasticjob/job Suspended: nobody runs"
    assert suspending.end() == 0

    resuming = start_k8s("resume", "job")
    assert resuming.line() == "elasticjob/job is to go on"
    assert resuming.line() == "elasticjob/job Suspended: nobody runs"
    suspend, generation = spec_of_job()
    assert not suspend
    say("Restarting", 0, generation, message="waiting for nodes")
    assert resuming.line() == "elasticjob/job Restarting: waiting for nodes"
    say("Running", 3, generation, message="3 nodes train")
    assert resuming.line() == "elasticjob/job Running: 3 nodes train"
    assert resuming.end() == 0


def test_what_can_go_wrong_with_suspend_is_said(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert k8s("suspend", "job") == 1
    assert f"there is no job job in the namespace {namespace}" in capsys.readouterr().err
    runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    assert k8s("suspend", "job", "--no-wait") == 0
    assert capsys.readouterr().out == "elasticjob/job is to be suspended\n"
    assert runner.run(api.get(ELASTICJOBS, "job", namespace))["spec"]["suspend"] is True
    assert k8s("resume", "job", "--timeout=1") == 1
    assert "after 1 s elasticjob/job is still to go on" in capsys.readouterr().err
    set_status(api, runner, namespace, {"phase": "Failed"})
    for command in ("suspend", "resume"):
        assert k8s(command, "job") == 1
        assert "the job job is over: it has failed" in capsys.readouterr().err


def test_delete(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    assert k8s("delete", "job", "other") == 1
    assert capsys.readouterr().err == (
        f"holdfast: there is no job other in the namespace {namespace}\n"
    )
    assert k8s("delete", "job") == 0
    assert capsys.readouterr().out == "elasticjob/job deleted\n"
    assert runner.run(api.list(ELASTICJOBS, namespace)).items == []


def test_a_cluster_that_cannot_be_reached_is_said_in_one_sentence(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = cluster.kubeconfig().read_text().replace(":6443", ":1")
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(text)
    assert main(["k8s", "status", f"--kubeconfig={elsewhere}"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
