# SPDX-License-Identifier: Apache-2.0
"""Whole jobs in a cluster: a real operator, and pods whose masters, agents and workers are real.

What the workers do is read from their log (tests/integration/jobs.py), which is in a folder that
all node pods mount. What a person would do is done with kubectl.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, PODS, Kind
from tests.integration.jobs import ROOT, Event, Jobs, playground
from tests.kube.cluster import Cluster
from tests.kube.kubelet import Kubelet, kubelet
from tests.waiting import until

LIMIT_S = 300.0
"""A new pod imports torch on a machine that may be busy with other tests."""
KUBECTL = Path(sys.executable).parent / "kubectl"
SCRIPTS = Path(__file__).resolve().parent / "scripts"
PACE_S = 0.2
"""Between two looks: this machine has better things to do than to answer us."""
SHARED = "/shared"
"""Where node pods have the folder of the log."""


class Field:
    """One namespace with an operator, and the jobs in it."""

    def __init__(self, cluster: Cluster, namespace: str, node: Kubelet, jobs: Jobs) -> None:
        self.cluster, self.namespace, self.node, self.jobs = cluster, namespace, node, jobs
        self._config = cluster.kubeconfig()
        self._client = httpx.Client(
            base_url=cluster.url,
            verify=cluster.access().tls,
            headers={"Authorization": "Bearer admin-token"},
            timeout=LIMIT_S,
            trust_env=False,
        )
        self._pace = threading.Event()
        where = ("--kubeconfig", str(self._config), "--namespace", namespace)
        self.operator = jobs.start("operator", *where, "--lease-namespace", namespace)

    def kubectl(self, *words: str, given: object = None) -> str:
        """What kubectl prints; `given` is what it reads as a file."""
        done = subprocess.run(
            [KUBECTL, "--kubeconfig", self._config, "-n", self.namespace, *words],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, kind: Kind, name: str = "", *, labels: str = "") -> Any:
        """An object, or all of a kind that have these labels."""
        path = kind.path(self.namespace, name)
        answer = self._client.get(path, params={"labelSelector": labels} if labels else {})
        assert answer.is_success, answer.text
        return answer.json()

    def pod(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(PODS, name)
        return found

    def apply(self, manifest: Mapping[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", given=manifest)

    def nodes(self) -> dict[str, dict[str, Any]]:
        """The pods of all nodes, by name."""
        return self._pods_of("worker")

    def masters(self) -> dict[str, dict[str, Any]]:
        return self._pods_of(names.MASTER_ROLE)

    def _pods_of(self, role: str) -> dict[str, dict[str, Any]]:
        found = self.get(PODS, labels=f"{names.ROLE_LABEL}={role}")["items"]
        return {pod["metadata"]["name"]: pod for pod in found}

    def until(self, look: Callable[[], Any], what: str) -> Any:
        def slowly() -> Any:
            self._pace.wait(PACE_S)
            return look()

        try:
            return until(slowly, LIMIT_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story()}") from None

    def wait_phase(self, job: str, phase: str) -> dict[str, Any]:
        """Wait until the status of the job has this phase; the status."""

        def status() -> dict[str, Any]:
            found: dict[str, Any] = self.get(ELASTICJOBS, job).get("status", {})
            over = found.get("phase") in ("Succeeded", "Failed")
            return found if over or found.get("phase") == phase else {}

        found: dict[str, Any] = self.until(status, f"the phase {phase} of {job}")
        assert found["phase"] == phase, f"{found}\n{self.story()}"
        return found

    def wait_world(self, size: int, *, after: float = 0.0, steps: int = 3) -> dict[str, Event]:
        """Wait until a world of this size has made steps, all of them after this time.

        Returns the newest step of each pod, by its name.
        """

        def newest() -> dict[str, Event]:
            rounds: dict[int, list[Event]] = {}
            for event in self.jobs.events("step"):
                if event.t > after and event.world == size:
                    rounds.setdefault(event.round, []).append(event)
            for events in rounds.values():
                by_pod = {event.node: event for event in events}
                made = [sum(event.node == pod for event in events) for pod in by_pod]
                if len(by_pod) == size and min(made) >= steps:
                    return by_pod
            return {}

        found: dict[str, Event] = self.until(newest, f"steps of a world of {size}")
        return found

    def wait_replaced(self, lost: str, size: int, *, after: float) -> dict[str, Event]:
        """Wait until a world of this size trains without that pod."""
        world = self.wait_world(size, after=after)
        while lost in world:
            world = self.wait_world(size, after=max(event.t for event in world.values()))
        return world

    def close(self) -> None:
        self._client.close()

    def story(self) -> str:
        """All that is known, for the message of a failed test."""
        try:
            told = self.kubectl("get", "elasticjobs,scaleplans,pods,events", "-o", "wide")
        except AssertionError as error:
            told = f"kubectl: {error}"
        return f"{told}\n{self.node.story()}\n{self.jobs.story()}"


@contextmanager
def field(cluster: Cluster, folder: Path, *, hosts: int = 6) -> Iterator[Field]:
    """A namespace with an operator and a kubelet, for the block."""
    namespace = cluster.new_namespace()
    with playground() as jobs, kubelet(cluster, namespace, folder, hosts=hosts) as node:
        made = Field(cluster, namespace, node, jobs)
        try:
            yield made
        finally:
            made.close()


def elastic_job(name: str, replicas: int, template: dict[str, Any]) -> dict[str, Any]:
    """A manifest with workers that train together."""
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "replicaSpecs": {"worker": {"replicas": replicas, "template": template}},
        },
    }


def worker(folder: Path, *, command: list[str], **env: str) -> dict[str, Any]:
    """The template of nodes that run a command with the scripts of the tests at hand."""
    told = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests' / 'integration' / 'scripts'}",
        "STEPS_FOLDER": SHARED,
        "STEPS_NODE": "$(POD_NAME)",
        **env,
    }
    main = {
        "name": "main",
        "image": "registry.example/training:1",
        "command": command,
        "env": [{"name": name, "value": value} for name, value in told.items()],
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        "volumeMounts": [{"name": "shared", "mountPath": SHARED}],
    }
    volumes = [{"name": "shared", "hostPath": {"path": str(folder)}}]
    return {"spec": {"containers": [main], "volumes": volumes}}


def now() -> float:
    """On the clock of the log."""
    return time.monotonic()
