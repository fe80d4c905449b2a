# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s` and a real API server; the tests play operator, master and kubelet."""

import asyncio
import json
import queue
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import ELASTICJOBS, EVENTS, NODES, PODS, SCALEPLANS, Api
from tests.kube.cluster import Cluster

pytestmark = pytest.mark.kube

WAIT_S = 60
Hold = Callable[..., int]


def manifest(name: str = "job") -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": "train"}]}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"replicaSpecs": {"worker": {"replicas": 3, "template": template}}},
    }


@pytest.fixture
def k8s(cluster: Cluster, namespace: str) -> Hold:
    """Runs the command in this test's namespace; the answer is its exit code."""
    where = [f"--kubeconfig={cluster.kubeconfig()}", f"--namespace={namespace}"]

    def run(action: str, *words: str) -> int:
        return main(["k8s", action, *words, *where])

    return run


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


class Submission:
    """`holdfast k8s submit --wait` as a process, and the lines that it prints."""

    def __init__(self, cluster: Cluster, namespace: str, file: str, *words: str) -> None:
        where = [f"--kubeconfig={cluster.kubeconfig()}", f"--namespace={namespace}"]
        program = [sys.executable, "-m", "holdfast.cli", "k8s", "submit", file, "--wait"]
        self._process = subprocess.Popen(
            [*program, *words, *where], stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def line(self) -> str:
        """The next one."""
        return self._lines.get(timeout=WAIT_S)

    def end(self) -> int:
        return self._process.wait(WAIT_S)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(WAIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line.rstrip())


@pytest.fixture
def submit(cluster: Cluster, namespace: str) -> Iterator[Callable[..., Submission]]:
    started: list[Submission] = []

    def start(file: str, *words: str) -> Submission:
        started.append(Submission(cluster, namespace, file, *words))
        return started[-1]

    yield start
    for submission in started:
        submission.kill()


def set_status(
    api: Api, runner: asyncio.Runner, namespace: str, status: dict[str, Any], name: str = "job"
) -> None:
    body = {"status": status}
    runner.run(api.patch(ELASTICJOBS, name, body, namespace, subresource="status"))


def test_submit_can_wait_for_the_end(
    submit: Callable[..., Submission],
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    tmp_path: Path,
) -> None:
    submission = submit(write(tmp_path / "job.yaml", manifest()))
    assert submission.line() == f"elasticjob/job created in the namespace {namespace}"
    assert submission.line() == "elasticjob/job Created"
    set_status(api, runner, namespace, {"phase": "Running", "message": "3 nodes train"})
    assert submission.line() == "elasticjob/job Running: 3 nodes train"
    set_status(api, runner, namespace, {"phase": "Succeeded", "message": "the end"})
    assert submission.line() == "elasticjob/job Succeeded: the end"
    assert submission.end() == 0


def test_waiting_ends_badly_if_a_job_fails_is_malformed_or_is_deleted(
    submit: Callable[..., Submission],
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    tmp_path: Path,
    k8s: Hold,
) -> None:
    jobs = ["fails", "malformed", "deleted"]
    submission = submit(write(tmp_path / "jobs.yaml", *(manifest(name) for name in jobs)))
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


def make_pod(
    api: Api, runner: asyncio.Runner, namespace: str, uid: str, node_id: int, host: str = ""
) -> None:
    """The pod of worker 0 with this id, as the platform would make it."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"job-edljob-worker-{node_id}",
            "labels": {
                names.JOB_LABEL: "job",
                names.ROLE_LABEL: "worker",
                names.NODE_ID_LABEL: str(node_id),
                names.NODE_RANK_LABEL: "0",
                names.RELAUNCHES_LABEL: "0",
            },
            "ownerReferences": [names.owner_reference("job", uid)],
        },
        "spec": {
            "containers": [{"name": "main", "image": "train"}],
            **({"nodeName": host} if host else {}),
        },
    }
    runner.run(api.create(PODS, pod, namespace))


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


class _Kubelet(BaseHTTPRequestHandler):
    """Answers the API server as a kubelet does: with the log of a container."""

    def do_GET(self) -> None:
        body = f"I am {self.path}\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def host(cluster: Cluster, api: Api, runner: asyncio.Runner, namespace: str) -> Iterator[str]:
    """A node of the cluster that has logs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Kubelet)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cluster.folder / "server.crt", cluster.folder / "server.key")
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    name = f"host-{namespace}"
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    runner.run(api.create(NODES, node))
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": server.server_port}},
    }
    runner.run(api.patch(NODES, name, {"status": status}, subresource="status"))
    yield name
    server.shutdown()
    thread.join()
    server.server_close()


def test_logs_are_those_of_the_newest_pod_of_a_rank(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    host: str,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    created = runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    for node_id in (9, 10):
        make_pod(api, runner, namespace, created["metadata"]["uid"], node_id, host)
    assert k8s("logs", "job", "--tail=5") == 0
    said = capfdbinary.readouterr().out.decode()
    assert said.startswith(f"I am /containerLogs/{namespace}/job-edljob-worker-10/main?")
    assert "tailLines=5" in said
    assert k8s("logs", "job", "--rank=3") == 1
    assert b"has no pod of worker 3 now" in capfdbinary.readouterr().err


def test_a_cluster_that_cannot_be_reached_is_said_in_one_sentence(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = cluster.kubeconfig().read_text().replace(":6443", ":1")
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(text)
    assert main(["k8s", "status", f"--kubeconfig={elsewhere}"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
