# SPDX-License-Identifier: Apache-2.0
"""One suite for every platform: what ports/platform.py promises, on each of them."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER, Order
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.config import Access
from holdfast.platforms.kubernetes.kinds import PODS
from holdfast.platforms.kubernetes.manifest import ElasticJob, Role
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.local import LocalPlatform
from holdfast.ports.platform import Platform
from tests.disks import small_disk
from tests.hearing import Heard
from tests.integration.faults import Disk
from tests.kube.cluster import Cluster, missing
from tests.kube.keeper import shared_cluster
from tests.sightings import WAIT_S, Sightings
from tests.waiting import until

ENDED_S = 30.0


class Ground(Protocol):
    """Where a platform's nodes live, seen from outside."""

    @asynccontextmanager
    def platform(self) -> AsyncIterator[Platform]:
        """A platform object for the same job: what each new master has."""

    async def living(self) -> list[int]:
        """The ids of the nodes that exist and have not ended."""

    async def end(self, node_id: int, code: int) -> None:
        """Let the node's program end by itself with this code."""


STUB = """
import os, sys
with open(os.path.join(os.environ["STUB_FOLDER"], os.environ["HOLDFAST_NODE_ID"])) as end:
    sys.exit(int(end.read()))
"""
"""An agent that does nothing until its test writes an exit code into its pipe."""


class LocalGround:
    """Processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.nodes = folder / "nodes"
        self.said = Heard()
        self._env = {**os.environ, "STUB_FOLDER": str(folder)}
        for node_id in range(10):
            os.mkfifo(folder / str(node_id))

    @asynccontextmanager
    async def platform(self) -> AsyncIterator[Platform]:
        command = [sys.executable, "-S", "-E", "-c", STUB]
        platform = LocalPlatform(command, self._env, self.nodes, lifeline=-1, say=self.said)
        yield platform
        await platform.close()

    async def living(self) -> list[int]:
        return [int(env["HOLDFAST_NODE_ID"]) for _, env in self._stubs()]

    async def end(self, node_id: int, code: int) -> None:
        # Opening waits for the stub to open its end.
        pipe = self._folder / str(node_id)
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(pipe.write_text, str(code))

    def clean_up(self) -> None:
        stubs = [process for process, _ in self._stubs()]
        for process in stubs:
            process.kill()
        _, alive = psutil.wait_procs(stubs, timeout=ENDED_S)
        assert not alive

    def _stubs(self) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
        for process in psutil.Process().children(recursive=True):
            env = until(partial(environment_of, process), ENDED_S, f"variables of {process}")
            if "HOLDFAST_NODE_ID" in env:
                yield process, env


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The variables of a process; for a moment after its start there are none."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            found: dict[str, str] = process.environ()
            return found
    except psutil.Error:
        pass
    return {"ENDED": "yes"}


class KubernetesGround:
    """Pods on a real API server. No kubelet runs them: the test says what becomes of them."""

    def __init__(self, access: Access, namespace: str) -> None:
        self._access = access
        template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
        self._job = ElasticJob(
            name="contract",
            namespace=namespace,
            uid="c0ffee00-0000-4000-8000-000000000000",
            roles={WORKER: Role(template=template)},
        )

    @asynccontextmanager
    async def platform(self) -> AsyncIterator[Platform]:
        async with self._api() as api:
            platform = KubernetesPlatform(api, self._job, say=print)
            yield platform
            await platform.close()

    async def living(self) -> list[int]:
        async with self._api() as api:
            found = await api.list(PODS, self._job.namespace)
        return [
            int(pod["metadata"]["labels"][names.NODE_ID_LABEL])
            for pod in found.items
            if pod["status"]["phase"] not in ("Succeeded", "Failed")
        ]

    async def end(self, node_id: int, code: int) -> None:
        name = names.node_pod_name(self._job.name, WORKER, NodeId(node_id))
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        container = {"name": "main", "image": "none", "imageID": "", "ready": False}
        status = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{**container, "restartCount": 0, "state": state}],
        }
        async with self._api() as api:
            body = {"status": status}
            await api.patch(PODS, name, body, self._job.namespace, subresource="status")

    @asynccontextmanager
    async def _api(self) -> AsyncIterator[Api]:
        api = Api(self._access)
        try:
            yield api
        finally:
            await api.close()


@pytest.fixture
def local_ground(tmp_path: Path) -> Iterator[Ground]:
    ground = LocalGround(tmp_path)
    yield ground
    ground.clean_up()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with shared_cluster() as cluster:
        yield cluster


@pytest.fixture
def kubernetes_ground(cluster: Cluster) -> Ground:
    return KubernetesGround(cluster.access(), cluster.new_namespace())


ON_KUBERNETES = (pytest.mark.kube, pytest.mark.timeout(300))
"""The first one starts the cluster, which takes its time on a busy machine."""


@pytest.fixture(params=["local", pytest.param("kubernetes", marks=ON_KUBERNETES)])
def ground(request: pytest.FixtureRequest) -> Ground:
    ground: Ground = request.getfixturevalue(f"{request.param}_ground")
    return ground


Scene = Callable[[], Coroutine[None, None, None]]


def run(scene: Scene) -> None:
    asyncio.run(scene())


def order(node_id: int) -> Order:
    return Order(node_id=NodeId(node_id), node_rank=NodeRank(node_id))


@asynccontextmanager
async def watched(ground: Ground) -> AsyncIterator[tuple[Platform, Sightings]]:
    """A platform as a master has it: made, and watched from then on."""
    async with AsyncExitStack() as ends:
        platform = await ends.enter_async_context(ground.platform())
        yield platform, await ends.enter_async_context(Sightings(platform))


def test_a_launched_node_is_seen(ground: Ground) -> None:
    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            found = await seen.of_node(1)
            assert found.phase in (Phase.PENDING, Phase.RUNNING)
            assert await ground.living() == [1]

    run(scene)


def test_launching_twice_gives_one_node(ground: Ground) -> None:
    """Prior art: a pod that exists already is a failure, repeated for ever at the queue's head."""

    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            await platform.launch(order(1))
            await seen.of_node(1)
            await platform.launch(order(1))
            await platform.launch(order(2))
            await seen.of_node(2)
            assert sorted(await ground.living()) == [1, 2]

    run(scene)


def test_an_order_for_a_node_that_has_ended_is_answered(ground: Ground) -> None:
    """A master that lost its journal gives the same ids again, and must not wait for ever."""

    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            await seen.of_node(1)
            await ground.end(1, 1)
            await seen.end_of(1)
        async with watched(ground) as (platform, seen):
            await platform.launch(order(2))
            await seen.of_node(2)
            before = len(seen.of(1))
            await platform.launch(order(1))
            await seen.until(lambda _: len(seen.of(1)) > before)

    run(scene)


def test_a_removed_node_ends(ground: Ground) -> None:
    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            await seen.of_node(1)
            await platform.remove(NodeId(1))
            assert (await seen.end_of(1)).reason is ExitReason.KILLED
            assert await ground.living() == []

    run(scene)


def test_removing_twice_or_what_is_not_there_is_no_error(ground: Ground) -> None:
    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.remove(NodeId(7))
            await platform.launch(order(1))
            await seen.of_node(1)
            await platform.remove(NodeId(1))
            await platform.remove(NodeId(1))
            await seen.end_of(1)
            await platform.remove(NodeId(1))
            await platform.launch(order(2))
            await seen.of_node(2)
            assert await ground.living() == [2]

    run(scene)


def test_a_node_that_is_removed_at_once_does_not_stay(ground: Ground) -> None:
    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            await platform.remove(NodeId(1))
            await seen.end_of(1)
            # Whatever was under way has happened by the time that a later one is there.
            await platform.launch(order(2))
            await seen.of_node(2)
            assert await ground.living() == [2]

    run(scene)


@pytest.mark.parametrize(
    ("code", "phase", "reason"),
    [(1, Phase.FAILED, ExitReason.ERROR), (0, Phase.SUCCEEDED, None)],
)
def test_how_a_node_ended_is_seen(
    ground: Ground, code: int, phase: Phase, reason: ExitReason | None
) -> None:
    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            await seen.of_node(1)
            await ground.end(1, code)
            found = await seen.end_of(1)
            assert (found.phase, found.reason) == (phase, reason)
            if code:
                assert f"code {code}" in found.message

    run(scene)


def test_the_watch_begins_with_what_is_there(ground: Ground) -> None:
    async def scene() -> None:
        async with ground.platform() as platform:
            await platform.launch(order(1))
            await platform.launch(order(2))
            async with Sightings(platform) as seen:
                assert not (await seen.of_node(1)).phase.is_final
                assert not (await seen.of_node(2)).phase.is_final

    run(scene)


def test_closing_leaves_the_nodes_and_the_next_master_sees_them(ground: Ground) -> None:
    """Prior art: after a restart the master knows of its nodes only what it happens to be told."""

    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            for node_id in (1, 2, 3):
                await platform.launch(order(node_id))
                await seen.of_node(node_id)
        assert sorted(await ground.living()) == [1, 2, 3]
        async with watched(ground) as (platform, seen):
            for node_id in (1, 2, 3):
                assert not (await seen.of_node(node_id)).phase.is_final
            await platform.launch(order(2))
            await platform.remove(NodeId(3))
            await seen.end_of(3)
            assert sorted(await ground.living()) == [1, 2]

    run(scene)


def test_a_node_that_ended_while_no_master_was_there(ground: Ground) -> None:
    async def scene() -> None:
        async with watched(ground) as (platform, seen):
            await platform.launch(order(1))
            await seen.of_node(1)
        await ground.end(1, 1)
        async with watched(ground) as (platform, seen):
            assert (await seen.end_of(1)).phase is Phase.FAILED

    run(scene)


# ---- notes of births, which only local nodes have ------------------------------------------------


def test_a_node_that_cannot_be_noted_is_started_once_when_it_can(tmp_path: Path) -> None:
    """It was started at once and again with each order, and was neither seen nor removed."""
    with small_disk(tmp_path / "state", "size=1m,nr_inodes=20") as state:
        disk = Disk(state)
        ground = LocalGround(tmp_path)
        ground.nodes = state / "nodes"

        async def scene() -> None:
            async with watched(ground) as (platform, seen):
                disk.fill_inodes()
                orders = [asyncio.create_task(platform.launch(order(n))) for n in (1, 1, 2)]
                for node_id in (1, 2):
                    found = await seen.of_node(node_id)
                    assert found.phase is Phase.PENDING
                    assert "No space left on device" in found.message
                await platform.remove(NodeId(2))
                assert (await seen.end_of(2)).phase is Phase.GONE
                assert await ground.living() == []
                disk.clear()
                async with asyncio.timeout(WAIT_S):
                    await asyncio.gather(*orders)
                assert await ground.living() == [1]
                assert len(ground.said) == 2
                assert all("free some space" in line for line in ground.said)
            async with watched(ground) as (platform, seen):
                await seen.of_node(1)
                await platform.launch(order(1))
                disk.fill_inodes()
                await platform.remove(NodeId(1))
                assert (await seen.end_of(1)).reason is ExitReason.KILLED
            assert await ground.living() == []

        try:
            run(scene)
        finally:
            ground.clean_up()


def test_a_node_whose_start_broke_off_is_gone_and_foreign_files_are_none(
    local_ground: LocalGround,
) -> None:
    local_ground.nodes.mkdir()
    for name in ("1", "notes", "1.2", "-3"):
        (local_ground.nodes / f"{name}.json").write_text(" " * 128)

    async def scene() -> None:
        async with watched(local_ground) as (platform, seen):
            assert (await seen.end_of(1)).reason is ExitReason.LOST
            await platform.launch(order(2))
            await seen.of_node(2)
            assert {sighting.node_id for sighting in seen.all} == {1, 2}

    run(scene)
