# SPDX-License-Identifier: Apache-2.0
"""A master process on a real API server. The test is the kubelet: it runs a pod's agent itself."""

import asyncio
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, EVENTS, PODS
from holdfast.runtime.token import make_token
from tests.integration.jobs import SCRIPTS, Command, Jobs, MasterCommand, playground
from tests.kube.cluster import Cluster, OwnCluster
from tests.waiting import until

pytestmark = pytest.mark.kube

WAIT_S = 120.0
NODE_ID = "elasticjob.dlrover/replica-index"


class Stage:
    """One ElasticJob, its masters and its agents."""

    def __init__(
        self, cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner, jobs: Jobs
    ) -> None:
        self.jobs, self.namespace = jobs, namespace
        self._cluster, self._api, self._runner = cluster, api, runner
        self._token_file = jobs.folder / "token"
        make_token(self._token_file)
        template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
        self.do(
            api.create(
                ELASTICJOBS,
                {
                    "apiVersion": "elastic.iml.github.io/v1alpha1",
                    "kind": "ElasticJob",
                    "metadata": {"name": "j"},
                    "spec": {"replicaSpecs": {"worker": {"replicas": 2, "template": template}}},
                },
                namespace,
            )
        )

    def do(self, request: Any) -> Any:
        return self._runner.run(request)

    def _options(self) -> list[str]:
        return [
            *("--platform", "kubernetes", "--namespace", self.namespace, "--http", "off"),
            *("--kubeconfig", str(self._cluster.kubeconfig())),
            *("--token-file", str(self._token_file)),
        ]

    def master(self, state: str = "state", listen: str = "127.0.0.1:0") -> MasterCommand:
        """Start a master and wait until it serves."""
        folder = self.jobs.folder / state
        return self.jobs.master(*self._options(), job="j", state=folder, listen=listen)

    def start_master(self, state: str) -> Command:
        """Start one that may not come to serve."""
        folder = str(self.jobs.folder / state)
        return self.jobs.start("master", "--job", "j", "--state", folder, *self._options())

    def pods(self) -> list[dict[str, Any]]:
        listing = self.do(self._api.list(PODS, self.namespace))
        return sorted(listing.items, key=lambda pod: int(pod["metadata"]["labels"][NODE_ID]))

    def wait_pods(self, *node_ids: int) -> list[dict[str, Any]]:
        def as_expected() -> list[dict[str, Any]]:
            pods = self.pods()
            found = tuple(int(pod["metadata"]["labels"][NODE_ID]) for pod in pods)
            return pods if found == node_ids else []

        return until(as_expected, WAIT_S, f"the pods {node_ids}")

    def set_status(self, pod: dict[str, Any], status: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        patch = self._api.patch(
            PODS, name, {"status": status}, self.namespace, subresource="status"
        )
        self.do(patch)

    def run(self, pod: dict[str, Any], address: str) -> Command:
        """The agent of a pod, as its container would start it."""
        command = self.jobs.run(
            *("--nnodes", "1:2", str(SCRIPTS / "steps.py")),
            HOLDFAST_MASTER=address,
            HOLDFAST_TOKEN_FILE=str(self._token_file),
            HOLDFAST_NODE_ID=pod["metadata"]["labels"][NODE_ID],
        )
        self.set_status(pod, {"phase": "Running", "podIP": "127.0.0.1"})
        return command

    def wait_status(self, is_so: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        def status() -> dict[str, Any] | None:
            found = self.do(self._api.get(ELASTICJOBS, "j", self.namespace)).get("status", {})
            return found if is_so(found) else None

        try:
            found = until(status, WAIT_S, what)
        except AssertionError as error:
            last = self.do(self._api.get(ELASTICJOBS, "j", self.namespace)).get("status")
            raise AssertionError(f"{error}; the last is {last}\n{self.jobs.story()}") from None
        assert found is not None
        return found

    def wait_phase(self, phase: str) -> dict[str, Any]:
        return self.wait_status(lambda status: status.get("phase") == phase, f"phase {phase}")

    def events(self) -> list[tuple[str, str]]:
        listing = self.do(self._api.list(EVENTS, self.namespace))
        return [(event["reason"], event["message"]) for event in listing.items]

    def delete_job(self) -> None:
        self.do(self._api.delete(ELASTICJOBS, "j", self.namespace))


@pytest.fixture
def stage(cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner) -> Iterator[Stage]:
    with playground() as jobs:
        yield Stage(cluster, api, namespace, runner, jobs)


def test_a_job_from_pending_pods_to_its_end_over_the_death_of_its_master(stage: Stage) -> None:
    master = stage.master()
    pods = stage.wait_pods(0, 1)
    stage.wait_phase("Pending")
    words = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    unschedulable = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": words,
    }
    stage.set_status(pods[0], {"conditions": [unschedulable]})
    stage.wait_status(lambda status: words in status.get("message", ""), "why it waits")

    nodes = [stage.run(pod, master.address) for pod in pods]
    before = stage.jobs.wait_world(2)
    running = stage.wait_phase("Running")
    stage.wait_status(lambda status: status.get("replicas") == 2, "both nodes")
    assert running["observed"]["replicas"] == {"worker": 2}

    master.kill()
    second = stage.master(listen=master.address)
    for rank in range(2):
        second.wait_line(f"node rank {rank} came back")
    stage.jobs.finish()
    for command in (second, *nodes):
        command.succeeds()
    ended = stage.wait_phase("Succeeded")
    assert ended["completionTime"]
    assert ended["startTime"] == running["startTime"]
    assert {event.round for event in stage.jobs.steps()} == {before[0].round}
    assert any(reason == "JobSucceeded" for reason, _ in stage.events())

    # Even a master that has lost everything does not train a second time.
    again = stage.start_master("another")
    again.succeeds()
    assert "the job has ended: every worker finished" in again.text


def test_a_master_that_is_told_to_go_leaves_the_job_alone(stage: Stage) -> None:
    """Its pod was deleted or evicted: the next master goes on. Deleting the job ends it."""
    master = stage.master()
    pods = stage.wait_pods(0, 1)
    nodes = [stage.run(pod, master.address) for pod in pods]
    before = stage.jobs.wait_world(2)
    stage.wait_phase("Running")
    master.send(signal.SIGTERM)
    assert master.wait() == 143
    stage.wait_phase("Running")
    assert all(node.is_running() for node in nodes)

    second = stage.master(listen=master.address)
    second.wait_line("node rank 0 came back")
    second.wait_line("node rank 1 came back")
    assert {event.round for event in stage.jobs.steps()} == {before[0].round}
    stage.delete_job()
    assert second.wait() == 1
    assert "the job was deleted" in second.text
    for node in nodes:
        assert node.wait() == 1
        assert "the job was deleted" in node.text


def test_a_master_that_is_told_to_go_goes_without_an_api_server(
    private_cluster: Callable[..., OwnCluster], runner: asyncio.Runner
) -> None:
    own = private_cluster()
    api = Api(own.access())
    with playground() as jobs:
        stage = Stage(own, api, own.new_namespace(), runner, jobs)
        master = stage.master()
        stage.wait_pods(0, 1)
        own.stop_api_server()
        master.wait_line("cannot be reached")
        master.send(signal.SIGTERM)
        assert master.wait() == 143
    runner.run(api.close())


def test_a_master_without_its_state_starts_the_job_anew(stage: Stage) -> None:
    """Its volume died with its pod: never two worlds, and no node id is used twice."""
    master = stage.master()
    nodes = [stage.run(pod, master.address) for pod in stage.wait_pods(0, 1)]
    before = stage.jobs.wait_world(2)
    stage.wait_phase("Running")
    master.kill()

    second = stage.master("another", listen=master.address)
    second.wait_line("2 nodes of it are left: they are removed")
    # Nobody runs these pods: their agents are still there, and learn that they are not wanted.
    for node in nodes:
        assert node.wait() == 1
        assert "the journal of this node's master is lost" in node.text
    # The new master counts rounds from 1 again, and the scripts meet by their round.
    shutil.rmtree(stage.jobs.folder / "meetings")
    successors = [stage.run(pod, master.address) for pod in stage.wait_pods(2, 3)]
    after = stage.jobs.wait_for("main", lambda event: event.agent in {s.pid for s in successors})
    old = {event.pid for event in before}
    last_step = max(event.t for event in stage.jobs.steps() if event.pid in old)
    assert last_step < min(event.t for event in after)
    stage.jobs.finish()
    for node in successors:
        node.succeeds()
    second.succeeds()
    stage.wait_phase("Succeeded")
