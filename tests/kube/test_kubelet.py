# SPDX-License-Identifier: Apache-2.0
"""The fake kubelet does what a real one does, as far as whole jobs need it."""

import asyncio
import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.platforms.kubernetes.api import (
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Api,
    NotFound,
)
from tests.kube.cluster import Cluster
from tests.kube.kubelet import Kubelet, kubelet, missing
from tests.waiting import until

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]
LIMIT_S = 60.0


class Pods:
    """Makes pods in the test's namespace and looks at them."""

    def __init__(self, api: Api, runner: asyncio.Runner, namespace: str) -> None:
        self._api, self._runner, self._namespace = api, runner, namespace

    def make(self, name: str, script: str = "", **more: Any) -> None:
        """A pod that runs a shell script; `more` are further fields of its spec, or labels."""
        main = {"name": "main", "image": "any", "command": ["sh", "-c"], "args": [script]}
        main |= more.pop("main", {})
        spec = {"restartPolicy": "Never", "containers": [main], **more.pop("spec", {})}
        body = {"metadata": {"name": name, **more}, "spec": spec}
        self.create(PODS, {"apiVersion": "v1", "kind": "Pod", **body})

    def create(self, kind: Any, body: dict[str, Any]) -> None:
        self._runner.run(self._api.create(kind, body, self._namespace))

    def get(self, name: str) -> dict[str, Any]:
        """The pod; empty if there is none."""
        try:
            return self._runner.run(self._api.get(PODS, name, self._namespace))
        except NotFound:
            return {}

    def delete(self, name: str, grace_s: int) -> None:
        self._runner.run(self._api.delete(PODS, name, self._namespace, grace_s=grace_s))

    def wait_phase(self, name: str, phase: str) -> dict[str, Any]:
        def status() -> dict[str, Any]:
            found: dict[str, Any] = self.get(name)["status"]
            return found if found.get("phase") == phase else {}

        return until(status, LIMIT_S, f"{name} to be {phase}")

    def wait_gone(self, name: str) -> None:
        until(lambda: not self.get(name), LIMIT_S, f"the end of {name}")


@pytest.fixture
def pods(api: Api, runner: asyncio.Runner, namespace: str) -> Pods:
    return Pods(api, runner, namespace)


@pytest.fixture
def node(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Kubelet]:
    if reason := missing():
        pytest.skip(f"no pods can run here: {reason}")
    with kubelet(cluster, namespace, tmp_path, hosts=2) as made:
        yield made


def ended(status: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = status["containerStatuses"][0]["state"]["terminated"]
    return found


def prints(node: Kubelet, pod: str, text: str) -> Callable[[], bool]:
    return lambda: text in node.log(pod)


def test_a_container_sees_what_its_pod_says(node: Kubelet, pods: Pods) -> None:
    token = base64.b64encode(b"abc").decode()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}}
    pods.create(SECRETS, {**secret, "data": {"token": token, "other": token}})
    env = [
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "WHERE", "value": "$(ADDRESS):1 $(NOTHING) $$(ADDRESS)"},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}},
    ]
    mounts = [
        {"name": "secret", "mountPath": "/var/run/deep/down", "readOnly": True},
        {"name": "empty", "mountPath": "/data"},
    ]
    volumes = [
        {"name": "secret", "secret": {"secretName": "s", "items": [{"key": "token", "path": "t"}]}},
        {"name": "empty", "emptyDir": {}},
    ]
    script = (
        "echo $WHERE $KEY $(cat /data/from-init) $(ls /var/run/deep/down) $(hostname) user $(id -u)"
        "; touch /var/run/deep/down/x || echo read-only; ip -4 addr show eth0; exit 3"
    )
    pods.make(
        "one",
        script,
        main={"env": env, "volumeMounts": mounts, "securityContext": {"runAsUser": 1234}},
        spec={
            "volumes": volumes,
            "initContainers": [
                {
                    "name": "init",
                    "image": "any",
                    "command": ["sh", "-c", "echo hello > /data/from-init"],
                    "volumeMounts": mounts,
                }
            ],
        },
    )
    status = pods.wait_phase("one", "Failed")
    assert ended(status)["exitCode"] == 3
    assert ended(status)["reason"] == "Error"
    address, log = status["podIP"], node.log("one")
    assert f"{address}:1 $(NOTHING) $(ADDRESS) abc hello t one user 1234\n" in log
    assert "read-only\n" in log
    assert f"inet {address}/" in log


def test_memory_limit_eviction_and_a_lost_host(node: Kubelet, pods: Pods) -> None:
    eat = "import itertools; kept = [bytes(1 << 20) * 8 for _ in itertools.count()]"
    limits = {"resources": {"limits": {"memory": "64Mi"}}}
    pods.make("eats", main={"command": ["python", "-c", eat], "args": [], **limits})
    pods.make("evicted", "exec sleep 600")
    pods.make("lost", "exec sleep 600")
    pods.wait_phase("evicted", "Running")
    pods.wait_phase("lost", "Running")

    end = ended(pods.wait_phase("eats", "Failed"))
    assert (end["reason"], end["exitCode"]) == ("OOMKilled", 137)

    node.evict("evicted", "The node was low on resource: memory.")
    status = pods.wait_phase("evicted", "Failed")
    assert (status["reason"], status["message"]) == (
        "Evicted",
        "The node was low on resource: memory.",
    )

    host = pods.get("lost")["spec"]["nodeName"]
    node.lose(host)
    pods.wait_gone("lost")
    for name in ("new-1", "new-2"):
        pods.make(name, "exit 0")
        pods.wait_phase(name, "Succeeded")
        assert pods.get(name)["spec"]["nodeName"] != host


def test_deletion_gives_a_pod_its_grace(node: Kubelet, pods: Pods) -> None:
    pods.make("orderly", "trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done")
    pods.make("stubborn", "trap 'echo no' TERM; echo up; while :; do sleep 0.1; done")
    for name in ("orderly", "stubborn"):
        until(prints(node, name, "up"), LIMIT_S)
    pods.delete("orderly", grace_s=50)
    pods.delete("stubborn", grace_s=1)
    until(prints(node, "stubborn", "no"), LIMIT_S)
    pods.wait_gone("orderly")
    pods.wait_gone("stubborn")
    assert "saved" in node.log("orderly")


def test_a_service_follows_its_pod(node: Kubelet, pods: Pods) -> None:
    ports = [{"port": 8000}]
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}}
    spec = {"selector": {"app": "web"}, "ports": ports}
    pods.create(SERVICES, {**service, "spec": spec})
    serve = "echo {} > here; exec python -m http.server 8000"
    client = (
        "import time, urllib.request\n"
        "from itertools import count\n"
        "for _ in count():\n"
        "    try:\n"
        "        url = 'http://web:8000/here'\n"
        "        print(urllib.request.urlopen(url, timeout=5).read().decode(), flush=True)\n"
        "    except OSError as error:\n"
        "        print(error, flush=True)\n"
        "    time.sleep(0.1)\n"
    )
    pods.make("client", main={"command": ["python", "-c", client], "args": []})
    for name in ("first", "second"):
        pods.make(name, serve.format(name), labels={"app": "web"}, main={"workingDir": "/web"})
        until(prints(node, "client", name), LIMIT_S, f"an answer of the {name}")
        pods.delete(name, grace_s=0)


def test_a_pod_speaks_to_the_api_server_as_its_service_account(
    node: Kubelet, pods: Pods, namespace: str
) -> None:
    meta = {"metadata": {"name": "reader"}}
    pods.create(SERVICE_ACCOUNTS, {"apiVersion": "v1", "kind": "ServiceAccount", **meta})
    rbac = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    pods.create(ROLES, {"apiVersion": f"{rbac}/v1", "kind": "Role", **meta, "rules": rules})
    binding = {
        "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
    }
    pods.create(
        ROLE_BINDINGS, {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", **meta, **binding}
    )
    ask = (
        "import asyncio\n"
        "from holdfast.platforms.kubernetes.api import PODS, SECRETS, Api, Rejected\n"
        "from holdfast.platforms.kubernetes.config import Access\n"
        "async def main():\n"
        "    access = Access.find()\n"
        "    api = Api(access)\n"
        "    listing = await api.list(PODS, access.namespace)\n"
        "    print([pod['metadata']['name'] for pod in listing.items])\n"
        "    try:\n"
        "        await api.list(SECRETS, access.namespace)\n"
        "    except Rejected as error:\n"
        "        print(error)\n"
        "asyncio.run(main())\n"
    )
    pods.make(
        "asks",
        main={"command": ["python", "-c", ask], "args": []},
        spec={"serviceAccountName": "reader"},
    )
    until(lambda: pods.get("asks")["status"].get("phase") in ("Succeeded", "Failed"), LIMIT_S)
    assert "['asks']" in node.log("asks")
    assert "secrets is forbidden" in node.log("asks")
