# SPDX-License-Identifier: Apache-2.0
"""A kubelet and a scheduler for the pods of one namespace: their containers really run.

Each pod has a network address of its own and each container a root, a process table and a memory
limit (pod_network.py, pod_container.py); the image is this virtual environment. What a real
kubelet does and this one does not: restart containers, probe them, run hooks. Tests say what fails:
`evict`, `lose`, `kill`.
"""

import asyncio
import itertools
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from holdfast.platforms.kubernetes.api import (
    NODES,
    PODS,
    SERVICES,
    Api,
    Conflict,
    Kind,
    NotFound,
    Unavailable,
)
from holdfast.platforms.kubernetes.watching import Listed, follow
from tests.kube import pod_container, pod_network, pod_spec
from tests.kube.cluster import Cluster
from tests.kube.pod_network import GATEWAY, Network
from tests.kube.pod_run import PAUSE_S, PodRun, stamp
from tests.kube.pod_volumes import Volumes

LIMIT_S = 60.0
BINDINGS = Kind("", "v1", "bindings")
Result = TypeVar("Result")


class Kubelet:
    """Runs what is in one namespace, on hosts that are names only. Its methods may be called from
    any thread; the rest happens in one of its own."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, hosts: int) -> None:
        run = secrets.token_hex(3)
        self.hosts = [f"host-{run}-{number}" for number in range(hosts)]
        self._cluster, self._namespace, self._folder = cluster, namespace, folder
        self._lost: set[str] = set()
        self._runs: dict[str, PodRun] = {}
        """By uid; those that have ended stay, for their logs."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._unplaced: dict[str, dict[str, Any]] = {}
        self._bound: dict[str, str] = {}
        """By uid: the host of a pod that was given one and does not run there yet."""
        self._services: dict[str, dict[str, Any]] = {}
        self._leads_to: dict[str, PodRun] = {}
        """By Service: the pod that answers to its address."""
        self._turn = itertools.count()
        self._loop = asyncio.new_event_loop()
        # One for each container that runs, and some for short errands.
        self._threads = ThreadPoolExecutor(max_workers=64)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        pod_container.remove_remains()
        self._network = Network((cluster.address, 6443))
        self._call(self._start())

    # ---- what tests do --------------------------------------------------------------------------

    def evict(self, pod: str, message: str = "The node was low on resource: memory.") -> None:
        """As a host that runs out of something does: the pod fails with this reason."""
        self._call(self._with(pod, lambda run: run.evict(message)))

    def kill(self, pod: str, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to the first process of the pod's containers."""
        self._call(self._with(pod, lambda run: run.kill(number)))

    def lose(self, host: str) -> None:
        """The machine is gone with all its pods, without a word to anybody, and the cluster has
        noticed it: the machine is NotReady, and its pods are taken off the list."""
        self._call(self._lose(host))

    def log(self, pod: str) -> str:
        """What the newest pod of this name has printed so far."""
        found = [run for run in list(self._runs.values()) if run.name == pod]
        return found[-1].log() if found else ""

    def story(self) -> str:
        """What all pods have printed, for the message of a failed test."""
        runs = list(self._runs.values())
        return "\n".join(f"--- {run.name} on {run.host}\n{run.log()[-4000:]}" for run in runs)

    def close(self) -> None:
        self._call(self._stop())
        self._network.close()
        self._threads.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    # ---- its own thread -------------------------------------------------------------------------

    def _call(self, doing: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(doing, self._loop).result(LIMIT_S)

    async def _start(self) -> None:
        self._api = Api(self._cluster.access())
        self._volumes = Volumes(self._api, self._namespace, self._folder, self._cluster.authority)
        for host in self.hosts:
            await self._api.create(NODES, node(host))
            await self._say_node(host, "True")
        self._followers = [self._task(self._follow_pods()), self._task(self._follow_services())]

    def _task(self, doing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs it; a failure of the kubelet itself is not to go unseen."""
        task = self._loop.create_task(doing)
        task.add_done_callback(lambda task: task.cancelled() or task.result())
        return task

    async def _stop(self) -> None:
        for follower in self._followers:
            follower.cancel()
        for run in self._runs.values():
            run.lose()
        for follower in self._followers:
            await asyncio.wait([follower])
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._api.close()

    async def _with(self, pod: str, doing: Any) -> None:
        found = [run for run in self._runs.values() if run.name == pod]
        assert found, f"there is no pod {pod}"
        doing(found[-1])

    async def _lose(self, host: str) -> None:
        self._lost.add(host)
        await self._say_node(host, "Unknown")
        for run in [run for run in self._runs.values() if run.host == host]:
            if run.is_running and run.port is not None:
                await self._loop.run_in_executor(self._threads, run.port.cut)
            run.lose()
            await self._api.delete(
                PODS, run.name, self._namespace, uid=run.pod["metadata"]["uid"], grace_s=0
            )

    async def _say_node(self, host: str, ready: str) -> None:
        body = {"status": node_status(ready)}
        await self._api.patch(NODES, host, body, subresource="status")

    # ---- pods -----------------------------------------------------------------------------------

    async def _follow_pods(self) -> None:
        async for seen in follow(self._api, PODS, self._namespace):
            if not isinstance(seen, Listed):
                pod: dict[str, Any] = seen.obj
                await (self._gone(pod) if seen.gone else self._seen(pod))

    async def _seen(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._runs:
            self._runs[uid].changed(pod)
        elif pod["spec"].get("nodeName") in self.hosts:
            self._unplaced.pop(uid, None)
            if pod.get("status", {}).get("phase") == "Pending":
                self._begin(uid, pod)
        elif not pod["spec"].get("nodeName"):
            self._unplaced[uid] = pod
        await self._place()

    async def _gone(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        self._unplaced.pop(uid, None)
        self._bound.pop(uid, None)
        if uid in self._runs:
            self._runs[uid].vanished()
        await self._place()

    def _begin(self, uid: str, pod: dict[str, Any]) -> None:
        run = PodRun(
            pod,
            api=self._api,
            network=self._network,
            volumes=self._volumes,
            folder=self._folder / "pods" / f"{next(self._turn)}-{pod['metadata']['name']}",
            threads=self._threads,
        )
        self._runs[uid] = run
        self._bound.pop(uid, None)
        self._tasks[uid] = self._task(self._live(run))

    async def _live(self, run: PodRun) -> None:
        living = asyncio.create_task(run.live(self._write_hosts))
        await run.ready.wait()
        await self._settle_services()
        await living
        await self._settle_services()

    async def _place(self) -> None:
        """Give every pod a host that has none, if there is one for it: the emptiest."""
        for uid, pod in list(self._unplaced.items()):
            free = [
                host
                for host in self.hosts
                if host not in self._lost
                and pod_spec.is_allowed(pod, node(host)["metadata"]["labels"])
            ]
            if not free:
                continue
            living = (self._runs[one].host for one, task in self._tasks.items() if not task.done())
            load = Counter([*living, *self._bound.values()])
            await self._bind(uid, pod, min(free, key=lambda host: load[host]))

    async def _bind(self, uid: str, pod: dict[str, Any], host: str) -> None:
        name = pod["metadata"]["name"]
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": host},
        }
        self._unplaced.pop(uid)
        self._bound[uid] = host
        try:
            await self._api.create(BINDINGS, body, self._namespace)
        except (NotFound, Conflict):
            self._bound.pop(uid, None)  # It went away meanwhile, or has a host.
        except Unavailable:
            self._bound.pop(uid, None)
            self._unplaced[uid] = pod
            self._loop.call_later(PAUSE_S, lambda: self._task(self._place()))

    # ---- services -------------------------------------------------------------------------------

    async def _follow_services(self) -> None:
        async for seen in follow(self._api, SERVICES, self._namespace):
            if isinstance(seen, Listed):
                continue
            service: dict[str, Any] = seen.obj
            name = service["metadata"]["name"]
            if seen.gone:
                self._services.pop(name, None)
            else:
                self._services[name] = service
            await self._settle_services()

    async def _settle_services(self) -> None:
        """Each Service's address goes to the newest pod that it selects and that runs."""
        running = [run for run in self._runs.values() if run.is_running]
        for name, service in self._services.items():
            chosen = [run for run in running if pod_spec.selects(service, run.pod)]
            old, new = self._leads_to.get(name), chosen[-1] if chosen else None
            if new is None or new is old:
                continue
            self._leads_to[name] = new
            address = service["spec"]["clusterIP"]
            if address == "None":
                continue
            for run in running:
                assert run.port is not None
                if run is new:
                    run.port.take(address)
                elif run is old:
                    run.port.release(address)
                run.port.forget(address)
        for run in running:
            self._write_hosts(run)

    def _write_hosts(self, run: PodRun) -> None:
        """All names that this pod can resolve now, in the one file that it sees."""
        reached = []
        for name, service in self._services.items():
            address = service["spec"]["clusterIP"]
            if address == "None":
                target = self._leads_to.get(name)
                if target is None or target.port is None:
                    continue
                address = target.port.address
            reached.append((service, address))
        assert run.port is not None
        text = pod_spec.hosts_file((run.port.address, run.name), reached)
        # In one write and never shorter, because the pod may be reading it.
        before = run.hosts.stat().st_size if run.hosts.exists() else 0
        with run.hosts.open("r+b" if before else "wb") as file:
            file.write(text.encode().ljust(before, b"\n"))


def missing() -> str:
    """Why pods cannot run here; empty if they can."""
    return pod_container.reason_against() or pod_network.reason_against()


def node(host: str) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": host}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": host, "labels": labels}}


def node_status(ready: str) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "reason": "FakeKubelet"}
    condition |= {"lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    return {
        "conditions": [condition],
        "addresses": [{"type": "InternalIP", "address": GATEWAY}],
        "capacity": amounts,
        "allocatable": amounts,
    }


@contextmanager
def kubelet(cluster: Cluster, namespace: str, folder: Path, *, hosts: int = 6) -> Iterator[Kubelet]:
    """A kubelet for the block, with this many hosts."""
    made = Kubelet(cluster, namespace, folder, hosts)
    try:
        yield made
    finally:
        made.close()
