# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s logs` and a real API server; a kubelet of the test has the logs."""

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from holdfast.platforms.kubernetes.api import ELASTICJOBS, NODES, PODS, Api
from tests.kube.cluster import Cluster
from tests.kube.commands import WAIT_S, Command, make_pod, manifest, set_status

pytestmark = pytest.mark.kube

Hold = Callable[..., int]
Start = Callable[..., Command]


class Host:
    """A machine of the cluster that has logs. One that is followed ends when the test says so."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.name = name
        self._ends: dict[str, threading.Event] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(cluster.folder / "server.crt", cluster.folder / "server.key")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.port = self._server.server_port

    def end_log(self, pod: str) -> None:
        self._end_of(pod).set()

    def close(self) -> None:
        for end in self._ends.values():
            end.set()
        self._server.shutdown()
        self._thread.join(WAIT_S)
        self._server.server_close()

    def _end_of(self, pod: str) -> threading.Event:
        return self._ends.setdefault(pod, threading.Event())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        end_of = self._end_of

        class Kubelet(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(f"I am {self.path}\n".encode())
                self.wfile.flush()
                if "follow=true" in self.path:
                    end_of(self.path.split("/")[3]).wait(WAIT_S)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Kubelet


@pytest.fixture
def host(cluster: Cluster, api: Api, runner: asyncio.Runner, namespace: str) -> Iterator[Host]:
    host = Host(cluster, f"host-{namespace}")
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": host.name}}
    runner.run(api.create(NODES, node))
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": host.port}},
    }
    runner.run(api.patch(NODES, host.name, {"status": status}, subresource="status"))
    yield host
    host.close()


@pytest.fixture
def job(api: Api, runner: asyncio.Runner, namespace: str) -> str:
    """The uid of a job."""
    created = runner.run(api.create(ELASTICJOBS, manifest(), namespace))
    return str(created["metadata"]["uid"])


def test_logs_are_those_of_the_newest_pod_of_a_rank(
    k8s: Hold,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    host: Host,
    job: str,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    for node_id in (9, 10):
        make_pod(api, runner, namespace, job, node_id, host.name)
    make_pod(api, runner, namespace, "of-an-older-job", 11, host.name)
    assert k8s("logs", "job", "--tail=5") == 0
    said = capfdbinary.readouterr().out.decode()
    assert said.startswith(f"I am /containerLogs/{namespace}/job-edljob-worker-10/main?")
    assert "tailLines=5" in said
    assert k8s("logs", "job", "--rank=3") == 1
    assert b"has no pod of worker 3 now" in capfdbinary.readouterr().err
    assert k8s("logs", "job", "--rank=3", "-f") == 1
    assert b"has no pod of worker 3 now" in capfdbinary.readouterr().err


class Pods:
    """The pods of worker 0 of a job, as a kubelet would speak of them."""

    def __init__(
        self, api: Api, runner: asyncio.Runner, namespace: str, host: Host, job: str
    ) -> None:
        self._api, self._runner, self._namespace = api, runner, namespace
        self._host, self._job = host, job

    def start(self, node_id: int) -> None:
        make_pod(self._api, self._runner, self._namespace, self._job, node_id, self._host.name)
        self._say(node_id, "Running", {"running": {"startedAt": "2026-01-01T00:00:00Z"}})

    def end(self, node_id: int, code: int) -> None:
        phase = "Failed" if code else "Succeeded"
        self._say(node_id, phase, {"terminated": {"exitCode": code}})

    def _say(self, node_id: int, phase: str, state: dict[str, Any]) -> None:
        rest = {"image": "train", "imageID": "", "ready": False, "restartCount": 0}
        container = {**rest, "name": "main", "state": state}
        body = {"status": {"phase": phase, "containerStatuses": [container]}}
        name = f"job-edljob-worker-{node_id}"
        patch = self._api.patch(PODS, name, body, self._namespace, subresource="status")
        self._runner.run(patch)


@pytest.fixture
def pods(api: Api, runner: asyncio.Runner, namespace: str, host: Host, job: str) -> Pods:
    return Pods(api, runner, namespace, host, job)


def test_followed_logs_go_on_with_the_next_pod_until_the_job_is_over(
    start_k8s: Start,
    api: Api,
    runner: asyncio.Runner,
    namespace: str,
    host: Host,
    pods: Pods,
) -> None:
    """Also if a machine is lost without a word, so that the log of its pod never ends."""
    following = start_k8s("logs", "job", "-f", "--tail=5")
    assert "waits for the first pod of worker 0" in following.remark()
    pods.start(3)
    assert "job-edljob-worker-3/main?follow=true&tailLines=5" in following.line()

    pods.end(3, code=1)
    host.end_log("job-edljob-worker-3")
    pods.start(7)
    assert "job-edljob-worker-7 follows job-edljob-worker-3" in following.remark()
    assert following.line().endswith("job-edljob-worker-7/main?follow=true")

    # Its machine is lost: nothing of it ends.
    pods.start(9)
    assert "job-edljob-worker-9 follows job-edljob-worker-7" in following.remark()
    assert following.line().endswith("job-edljob-worker-9/main?follow=true")

    set_status(api, runner, namespace, {"phase": "Succeeded"})
    host.end_log("job-edljob-worker-9")
    pods.end(9, code=0)
    assert following.end() == 0
    assert following.remarks() == ""


def test_a_log_whose_connection_breaks_goes_on(
    start_k8s: Start, k8s: Hold, host: Host, pods: Pods
) -> None:
    pods.start(3)
    following = start_k8s("logs", "job", "-f")
    assert following.line().endswith("main?follow=true")
    # The pod still runs.
    host.end_log("job-edljob-worker-3")
    assert "of the log of job-edljob-worker-3 may come twice" in following.remark()
    assert "main?follow=true&sinceSeconds=" in following.line()
    assert k8s("delete", "job") == 0
    assert following.end() == 0


def test_ctrl_c_ends_a_followed_log_without_a_word(start_k8s: Start, pods: Pods) -> None:
    pods.start(3)
    following = start_k8s("logs", "job", "-f")
    following.line()
    following.interrupt()
    assert following.end() == 130
    assert following.remarks() == ""
