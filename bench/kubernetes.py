# SPDX-License-Identifier: Apache-2.0
"""What Kubernetes costs us, on a real API server: following a large job's pods, replacing many.

The server and its etcd run on this machine beside what is measured (scripts/kube-testbed builds
them); pods are API objects that no kubelet runs. Watch: a process follows all pods while their
states change, each once in ten seconds. Its memory is the peak, the first list included; its CPU
time is that of one change times the changes of a second, so that a slow server does not flatter it.
Relaunch: all pods of a job are deleted at once; for each that is seen to be gone a new one is asked
for, as the master does. The time runs from the first deletion until the last new pod is seen.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common import (
    CONSOLE,
    ROOT,
    Bar,
    Spread,
    describe_machine,
    finish,
    print_machine,
    print_table,
    standard_parser,
    wait_for,
)
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import Phase
from holdfast.model.order import WORKER, Order
from holdfast.platforms.kubernetes.api import PODS, Api
from holdfast.platforms.kubernetes.manifest import ElasticJob, Role
from holdfast.platforms.kubernetes.names import node_pod_name
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.ports.platform import Sighting

# The test cluster is part of the tests, which are no package of ours.
sys.path.append(str(ROOT))
from tests.kube.cluster import OwnCluster, missing, own_cluster

PODS_WATCHED = 2000
PERIOD_S = 10.0
"""In which every pod changes once."""
IN_FLIGHT = 32
LIMIT_S = 300.0

MEMORY_MB_MAX = 100.0
CPU_PERCENT_MAX = 20.0

PODS_RELAUNCHED = 500
RELAUNCH_S_MAX = 30.0


def pod(name: str) -> dict[str, Any]:
    """As large as those of real jobs: some 40 variables, volumes and mounts."""
    variables = [{"name": f"VARIABLE_{n}", "value": f"value-{n}" * 4} for n in range(40)]
    main = {
        "name": "main",
        "image": "registry.example.com/team/training:latest",
        "command": ["holdfast", "run", "--nnodes=1:2000", "train.py"],
        "env": variables,
        "resources": {"limits": {"cpu": "8", "memory": "64Gi"}},
        "volumeMounts": [{"name": f"v{n}", "mountPath": f"/mnt/{n}"} for n in range(4)],
    }
    labels = {"app": "holdfast", "elasticjob.dlrover/name": "bench"}
    volumes = [{"name": f"v{n}", "emptyDir": {}} for n in range(4)]
    return {
        "metadata": {"name": name, "labels": labels, "annotations": {"note": "x" * 500}},
        "spec": {"containers": [main], "volumes": volumes, "restartPolicy": "Never"},
    }


def running(number: int) -> dict[str, Any]:
    """A pod's state, different each time."""
    state = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    container = {
        "name": "main",
        "ready": True,
        "restartCount": number,
        "image": "training",
        "imageID": "sha256:" + "0" * 64,
        "containerID": f"containerd://{number:064d}",
        "state": state,
    }
    return {"status": {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [container]}}


async def all_of(requests: Iterable[Awaitable[Any]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*requests)


# ---- watch ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Watch:
    """A process that follows pods: one figure of each run."""

    pods: int
    list_s: list[float] = field(default_factory=list)
    list_cpu_s: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    changes_per_s: list[float] = field(default_factory=list)
    cpu_percent: list[float] = field(default_factory=list)
    """Of one core, at `pods / PERIOD_S` changes a second."""


class WatchProcess:
    """bench/toy_watch.py, and what the kernel says about it."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        argv = [sys.executable, str(ROOT / "bench" / "toy_watch.py"), str(kubeconfig), namespace]
        self._child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._process = psutil.Process(self._child.pid)

    def line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line:
            raise RuntimeError("the process that follows the pods has ended")
        return line

    def changes(self) -> int:
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()
        return int(self.line())

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def peak_mb(self) -> float:
        for line in Path(f"/proc/{self._child.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise RuntimeError("the kernel does not say how much memory was used")

    def end(self) -> None:
        self._child.kill()
        self._child.communicate()


async def measure_watch(cluster: OwnCluster, into: Watch, seconds: float) -> None:
    """Follow `into.pods` pods through `seconds` of changes."""
    api = Api(cluster.access(), in_flight=IN_FLIGHT)
    namespace = cluster.new_namespace()
    names = [f"bench-edljob-worker-{number}" for number in range(into.pods)]
    await all_of(api.create(PODS, pod(name), namespace) for name in names)
    began = time.monotonic()
    follower = WatchProcess(cluster.kubeconfig(), namespace)
    try:
        assert follower.line() == f"listed {into.pods}"
        into.list_s.append(time.monotonic() - began)
        into.list_cpu_s.append(follower.cpu_s())
        cpu_before, began = follower.cpu_s(), time.monotonic()
        changes = await change_for(seconds, api, names, namespace)
        wait_for("the last change", lambda: follower.changes() >= changes, LIMIT_S)
        took_s, cpu_s = time.monotonic() - began, follower.cpu_s() - cpu_before
        into.changes_per_s.append(changes / took_s)
        into.cpu_percent.append(100 * cpu_s / changes * into.pods / PERIOD_S)
        into.peak_mb.append(follower.peak_mb())
    finally:
        follower.end()
    await api.close()


async def change_for(seconds: float, api: Api, names: list[str], namespace: str) -> int:
    """Change one pod after the other at the rate of a large job; answers how many changes."""
    pause_s = PERIOD_S / PODS_WATCHED
    loop = asyncio.get_running_loop()
    requests: set[asyncio.Task[Any]] = set()
    began, count = loop.time(), 0
    while loop.time() - began < seconds:
        name = names[count % len(names)]
        patch = api.patch(PODS, name, running(count), namespace, subresource="status")
        requests.add(asyncio.create_task(patch))
        count += 1
        await asyncio.sleep(max(0.0, began + count * pause_s - loop.time()))
        if len(requests) >= IN_FLIGHT:
            _, requests = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
    await all_of(requests)
    return count


def print_watch(watch: Watch) -> None:
    columns = ["pods", "first list, s", "its CPU, s", "peak, MB", "changes/s", "CPU, % of a core"]
    figures = (watch.list_s, watch.list_cpu_s, watch.peak_mb, watch.changes_per_s)
    cells = [str(Spread.of(values)) for values in (*figures, watch.cpu_percent)]
    print_table("following pods", columns, [[str(watch.pods), *cells]])


def watch_bars(watch: Watch) -> list[Bar]:
    cpu_percent = statistics.median(watch.cpu_percent)
    return [
        Bar("watch, peak MB", max(watch.peak_mb), MEMORY_MB_MAX, at_least=False),
        Bar("watch, % of a core", cpu_percent, CPU_PERCENT_MAX, at_least=False),
    ]


# ---- relaunch ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Relaunch:
    """A job that loses all its pods: one figure of each run."""

    pods: int
    launch_s: list[float] = field(default_factory=list)
    """Until all were there for the first time."""
    delete_s: list[float] = field(default_factory=list)
    """Until the server had taken the last deletion."""
    relaunch_s: list[float] = field(default_factory=list)
    """Until all were there again, the deletions included."""


def job_of(namespace: str) -> ElasticJob:
    return ElasticJob(
        name="bench",
        namespace=namespace,
        uid="bench000-0000-4000-8000-000000000000",
        roles={WORKER: Role(template=pod(""))},
    )


async def measure_relaunch(cluster: OwnCluster, into: Relaunch) -> None:
    """Launch `into.pods` nodes, delete all of them, and launch each again under a new id."""
    api, outsider = Api(cluster.access()), Api(cluster.access())
    namespace = cluster.new_namespace()
    platform = KubernetesPlatform(api, job_of(namespace), say=CONSOLE.print)
    sightings = platform.watch()
    began = time.monotonic()
    for rank in range(into.pods):
        await platform.launch(order(rank, rank))
    await until_there(platform, sightings, into.pods, first_id=0)
    into.launch_s.append(time.monotonic() - began)
    began = time.monotonic()
    names = [node_pod_name("bench", WORKER, NodeId(number)) for number in range(into.pods)]
    deletions = asyncio.create_task(
        all_of(outsider.delete(PODS, name, namespace, grace_s=0) for name in names)
    )
    deletions.add_done_callback(lambda _: into.delete_s.append(time.monotonic() - began))
    await until_there(platform, sightings, into.pods, first_id=into.pods)
    into.relaunch_s.append(time.monotonic() - began)
    await deletions
    await platform.close()
    await asyncio.gather(api.close(), outsider.close())


def order(node_id: int, rank: int) -> Order:
    return Order(node_id=NodeId(node_id), node_rank=NodeRank(rank))


async def until_there(
    platform: KubernetesPlatform, sightings: AsyncIterator[Sighting], count: int, first_id: int
) -> None:
    """Replace what is gone until `count` nodes with ids from `first_id` on are there."""
    there: set[int] = set()
    async with asyncio.timeout(LIMIT_S):
        async for seen in sightings:
            if seen.phase is Phase.GONE:
                await platform.launch(order(seen.node_id + count, seen.node_id % count))
            elif seen.node_id >= first_id:
                there.add(seen.node_id)
            if len(there) == count:
                return


def print_relaunch(relaunch: Relaunch) -> None:
    columns = ["pods", "launched after, s", "deleted after, s", "there again after, s"]
    figures = (relaunch.launch_s, relaunch.delete_s, relaunch.relaunch_s)
    cells = [str(Spread.of(values)) for values in figures]
    print_table("all pods lost at once", columns, [[str(relaunch.pods), *cells]])


def relaunch_bars(relaunch: Relaunch) -> list[Bar]:
    took_s = statistics.median(relaunch.relaunch_s)
    return [Bar("relaunch, s", took_s, RELAUNCH_S_MAX, at_least=False)]


# ---- all of it -----------------------------------------------------------------------------------


def main() -> int:
    args = standard_parser(__doc__.splitlines()[0]).parse_args()
    if reason := missing():
        CONSOLE.print(f"skipped: {reason}")
        return 0
    machine = describe_machine()
    print_machine(machine)
    watch = Watch(200 if args.quick else PODS_WATCHED)
    relaunch = Relaunch(50 if args.quick else PODS_RELAUNCHED)
    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder,
        own_cluster(Path(folder)) as cluster,
    ):
        for _ in range(1 if args.quick else 3):
            asyncio.run(measure_relaunch(cluster, relaunch))
            asyncio.run(measure_watch(cluster, watch, 3.0 if args.quick else 20.0))
    print_relaunch(relaunch)
    print_watch(watch)
    document = {"machine": machine, "watch": asdict(watch), "relaunch": asdict(relaunch)}
    return finish([*relaunch_bars(relaunch), *watch_bars(watch)], document, args)


if __name__ == "__main__":
    sys.exit(main())
