# SPDX-License-Identifier: Apache-2.0
"""A real Kubernetes API server with its etcd, for tests. scripts/kube-testbed builds both once.

There is no kubelet, no scheduler and, unless asked for, no controller: pods stay Pending until a
test gives them a status, and what belongs to a deleted object stays.

Every cluster has a loopback address of its own (all of 127.0.0.0/8 is this machine) instead of a
port from the kernel: so the ports cannot be taken by others while a server is down for a moment.
"""

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from holdfast.platforms.kubernetes.config import Access
from tests.kube.certificates import make_authority, make_server_certificate, new_key
from tests.waiting import until

VERSION = "v1.20.2"
CACHE = Path(os.environ.get("KUBE_TESTBED_DIR") or Path.home() / ".cache/kube-testbed")
BINARIES = CACHE / VERSION
CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"

ADMIN, NODE, NOBODY, CONTROLLERS = "admin", "node", "nobody", "controllers"
USERS = {
    ADMIN: ("admin", "system:masters"),
    NODE: ("system:node:fake-node", "system:nodes"),
    NOBODY: ("nobody", ""),
    # The garbage collector must see and delete everything, custom resources too.
    CONTROLLERS: ("system:kube-controller-manager", "system:masters"),
}
"""Name and group of the users. The token of each is its key here with "-token" behind it."""

START_S = 90.0
STOP_S = 30.0


def missing() -> str:
    """Why there can be no cluster here; empty if there can be one."""
    if (BINARIES / ".complete").exists():
        return ""
    return "there is no Kubernetes API server: run scripts/kube-testbed (6-9 minutes)"


class Cluster:
    """How to reach a cluster, whoever runs it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.url = f"https://{address}:6443"
        self.authority = folder / "ca.crt"

    def kubeconfig(self, user: str = ADMIN, *, impersonate: str = "") -> Path:
        """A file that lets kubectl, and us, in as this user; or as whom it impersonates."""
        credentials = {"token": f"{user}-token", **({"as": impersonate} if impersonate else {})}
        return self._write_kubeconfig(credentials)

    def kubeconfig_of_account(self, namespace: str, name: str) -> Path:
        """The same for a ServiceAccount, with a token from the API server as pods get it."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        return self._write_kubeconfig({"token": self.post(path, body)["status"]["token"]})

    def access(self, user: str = ADMIN, *, impersonate: str = "") -> Access:
        return Access.find(self.kubeconfig(user, impersonate=impersonate))

    def post(self, path: str, body: object) -> Any:
        """Create something as the administrator, for set-ups that are no test of our own client."""
        with self._administrator() as client:
            answer = client.post(path, json=body)
            assert answer.is_success, answer.text
            return answer.json()

    def new_namespace(self) -> str:
        """One that no other test has. It is never deleted: that would need a controller."""
        name = f"test-{secrets.token_hex(5)}"
        body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        self.post("/api/v1/namespaces", body)
        return name

    def apply_crds(self) -> None:
        """Make the resources of deploy/crds known, and wait until the server serves them."""
        for file in sorted(CRDS.glob("*.yaml")):
            for crd in yaml.safe_load_all(file.read_text()):
                if crd["kind"] == "CustomResourceDefinition":
                    self.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
                    self._wait_until_served(crd["spec"])

    def _wait_until_served(self, spec: dict[str, Any]) -> None:
        version, plural = spec["versions"][0]["name"], spec["names"]["plural"]
        path = f"/apis/{spec['group']}/{version}/{plural}"
        with self._administrator() as client:
            until(lambda: client.get(path).is_success, START_S, f"{path} to be served")

    def _administrator(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.url,
            verify=self.access().tls,
            headers={"Authorization": f"Bearer {ADMIN}-token"},
            timeout=START_S,
            trust_env=False,
        )

    def _write_kubeconfig(self, credentials: dict[str, str]) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority": str(self.authority)},
                }
            ],
            "users": [{"name": "test", "user": credentials}],
        }
        path = self.folder / f"kubeconfig-{secrets.token_hex(4)}"
        path.write_text(json.dumps(config))
        return path


class OwnCluster(Cluster):
    """A cluster whose servers are children of this process: they can be stopped and started."""

    def __init__(self, folder: Path, *, controllers: bool = False, watch_cache: bool = True):
        numbers = [64 + secrets.randbelow(63), secrets.randbelow(256), 1 + secrets.randbelow(254)]
        super().__init__(folder, "127." + ".".join(str(number) for number in numbers))
        self._watch_cache = watch_cache
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        # In memory, because etcd waits for the disk with every write.
        memory = os.environ.get("HOLDFAST_MEMORY_DIR") or "/dev/shm"
        self._data = Path(tempfile.mkdtemp(prefix="etcd-", dir=memory))
        try:
            self._write_files()
            self._start_etcd()
            self.start_api_server()
            self.apply_crds()
            if controllers:
                self._start_controllers()
        except BaseException:
            self.stop()
            raise

    def start_api_server(self) -> None:
        """Start it, again or for the first time, and wait until it is ready.

        Only in the main thread: a server goes with the thread that started it.
        """
        self._start("kube-apiserver", *self._api_server_flags())
        with self._administrator() as client:
            until(lambda: self._is_ready(client), START_S, "a ready kube-apiserver")

    def stop_api_server(self) -> None:
        """It says nothing to its clients: their streams end."""
        self._end("kube-apiserver")

    def compact(self, revision: str) -> None:
        """Forget all history before `revision`; with `watch_cache=False` older watches get 410."""
        body = {"revision": revision, "physical": True}
        url = f"http://{self.address}:2379/v3/kv/compaction"
        httpx.post(url, json=body, timeout=START_S, trust_env=False).raise_for_status()

    def stop(self) -> None:
        for name in reversed(list(self._servers)):
            self._end(name)
        shutil.rmtree(self._data, ignore_errors=True)

    def _write_files(self) -> None:
        make_authority(self.folder)
        names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
        make_server_certificate(self.folder, names, [self.address, "127.0.0.1"])
        new_key(self.folder / "accounts.key")
        lines = [
            f"{key}-token,{user},{user}" + (f',"{group}"' if group else "")
            for key, (user, group) in USERS.items()
        ]
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")

    def _start_etcd(self) -> None:
        client, peer = f"http://{self.address}:2379", f"http://{self.address}:2380"
        self._start(
            "etcd",
            "--name=test",
            f"--data-dir={self._data}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=test={peer}",
        )

    def _api_server_flags(self) -> list[str]:
        return [
            f"--etcd-servers=http://{self.address}:2379",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            "--secure-port=6443",
            "--tls-cert-file=server.crt",
            "--tls-private-key-file=server.key",
            "--client-ca-file=ca.crt",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=accounts.key",
            "--service-account-signing-key-file=accounts.key",
            # It would refuse pods of namespaces whose ServiceAccount no controller has made.
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            f"--watch-cache={str(self._watch_cache).lower()}",
            "--cert-dir=certs",
        ]

    def _start_controllers(self) -> None:
        config = self.kubeconfig(CONTROLLERS)
        self._start(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--authentication-kubeconfig={config}",
            f"--authorization-kubeconfig={config}",
            "--leader-elect=false",
            f"--bind-address={self.address}",
            "--secure-port=10257",
            "--port=0",
            "--cert-dir=controller-certs",
            # Not the one that takes nodes without a kubelet for dead.
            "--controllers=garbagecollector,namespace,endpoint,deployment,replicaset",
            "--use-service-account-credentials=false",
        )

    def _start(self, name: str, *flags: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            # They go with this process, however it ends.
            command = ["setpriv", "--pdeathsig", "KILL", "--", str(BINARIES / name), *flags]
            self._servers[name] = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _end(self, name: str) -> None:
        server = self._servers.pop(name, None)
        if server is not None:
            server.kill()
            server.wait(STOP_S)

    def _is_ready(self, client: httpx.Client) -> bool:
        for name, server in self._servers.items():
            if server.poll() is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")
                raise AssertionError(f"{name} ended with code {server.returncode}:\n{log[-3000:]}")
        try:
            return client.get("/readyz").is_success
        except httpx.TransportError:
            return False


@contextmanager
def own_cluster(
    folder: Path, *, controllers: bool = False, watch_cache: bool = True
) -> Iterator[OwnCluster]:
    """A cluster with files in `folder`, which ends with the block."""
    cluster = OwnCluster(folder, controllers=controllers, watch_cache=watch_cache)
    try:
        yield cluster
    finally:
        cluster.stop()
