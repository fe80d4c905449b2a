# SPDX-License-Identifier: Apache-2.0
"""Following objects through everything that a real API server and a network do to a watch."""

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.platforms.kubernetes.api import (
    CONFIG_MAPS,
    CRDS,
    WATCH_S,
    WATCH_SILENCE,
    Api,
    Expired,
    Kind,
)
from holdfast.platforms.kubernetes.watching import Listed, Seen, follow
from tests.kube.cluster import Cluster, OwnCluster
from tests.kube.line import lined

pytestmark = pytest.mark.kube

WAIT_S = 100.0


class Small(msgspec.Struct):
    data: dict[str, str] = {}


def config_map(name: str, value: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": {"value": value}}


class Follower:
    """Follows in the background and keeps what it was told."""

    def __init__(self, api: Api, namespace: str, kind: Kind = CONFIG_MAPS) -> None:
        self.values: dict[str, str] = {}
        self.gone: list[str] = []
        """Names with the value that each had at last."""
        self.told: list[str] = []
        self.said: list[str] = []
        self._heard = asyncio.Event()
        self._task = asyncio.create_task(self._follow(api, namespace, kind))

    async def _follow(self, api: Api, namespace: str, kind: Kind) -> None:
        async for item in follow(api, kind, namespace, type=Small, say=self._say):
            match item:
                case Listed(names):
                    assert {name for _, name in names} == set(self.values)
                    self.told.append("listed")
                case Seen(obj, meta, gone=True):
                    self.values.pop(meta.name, None)
                    self.gone.append(f"{meta.name}={obj.data.get('value')}")
                    self.told.append(f"-{meta.name}")
                case Seen(obj, meta):
                    self.values[meta.name] = obj.data.get("value", "")
                    self.told.append(f"+{meta.name}={self.values[meta.name]}")
            self._pulse()

    def _say(self, text: str) -> None:
        self.said.append(text)
        self._pulse()

    def _pulse(self) -> None:
        self._heard.set()
        self._heard = asyncio.Event()

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                heard = asyncio.create_task(self._heard.wait())
                await asyncio.wait([heard, self._task], return_when=asyncio.FIRST_COMPLETED)
                heard.cancel()
                if self._task.done():
                    self._task.result()
                    raise AssertionError("it ended")

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=WAIT_S)


def test_first_everything_is_listed_then_every_change_comes_once(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.create(CONFIG_MAPS, config_map("a", "1"), namespace)
        await api.create(CONFIG_MAPS, config_map("b", "1"), namespace)
        follower = Follower(api, namespace)
        await follower.until(lambda: "listed" in follower.told)
        await api.patch(CONFIG_MAPS, "a", {"data": {"value": "2"}}, namespace)
        await api.delete(CONFIG_MAPS, "b", namespace)
        await api.create(CONFIG_MAPS, config_map("c", "1"), namespace)
        await follower.until(lambda: "c" in follower.values)
        assert follower.told == ["+a=1", "+b=1", "listed", "+a=2", "-b", "+c=1"]
        assert follower.said == []
        await follower.end()

    runner.run(scene())


def test_after_a_short_cut_it_goes_on_where_it_was(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Nothing is lost, doubled or taken for gone, and people hear of it once."""

    async def scene() -> None:
        for name in ("a", "b", "c"):
            await api.create(CONFIG_MAPS, config_map(name, "1"), namespace)
        async with lined(cluster, tmp_path) as (line, far):
            follower = Follower(far, namespace)
            await follower.until(lambda: "listed" in follower.told)
            line.cut()
            await follower.until(lambda: follower.said)
            before = list(follower.told)
            await api.delete(CONFIG_MAPS, "a", namespace)
            await api.patch(CONFIG_MAPS, "b", {"data": {"value": "2"}}, namespace)
            await api.create(CONFIG_MAPS, config_map("d", "1"), namespace)
            assert follower.told == before == ["+a=1", "+b=1", "+c=1", "listed"]
            line.mend()
            await follower.until(lambda: "d" in follower.values)
            assert follower.told == [*before, "-a", "+b=2", "+d=1"]
            assert len(follower.said) == 2
            assert "configmaps cannot be watched" in follower.said[0]
            assert "()" not in follower.said[0]
            assert "configmaps are watched again" in follower.said[1]
            await follower.end()

    runner.run(scene())


def test_a_restarted_server_loses_nothing(
    private_cluster: Callable[..., OwnCluster], runner: asyncio.Runner, tmp_path: Path
) -> None:
    """It forgets what happened before its start (410): what is gone since then is told as gone."""
    cluster = private_cluster()
    namespace = cluster.new_namespace()

    async def scene() -> None:
        api = Api(cluster.access())
        for name in ("gone", "kept", "new"):
            await api.create(CONFIG_MAPS, config_map(name, "1"), namespace)
        near = Follower(api, namespace)
        async with lined(cluster, tmp_path) as (line, cut_off):
            far = Follower(cut_off, namespace)
            for follower in (near, far):
                await follower.until(lambda f=follower: "listed" in f.told)
            line.cut()
            await api.delete(CONFIG_MAPS, "gone", namespace)
            await api.delete(CONFIG_MAPS, "new", namespace)
            await api.create(CONFIG_MAPS, config_map("new", "2"), namespace)
            await near.until(lambda: near.values == {"kept": "1", "new": "2"})
            cluster.stop_api_server()
            for follower in (near, far):
                await follower.until(lambda f=follower: f.said)
            assert near.values == {"kept": "1", "new": "2"}
            assert far.values == {"gone": "1", "kept": "1", "new": "1"}
            cluster.start_api_server()
            line.mend()
            await api.create(CONFIG_MAPS, config_map("last", "1"), namespace)
            for follower in (near, far):
                await follower.until(lambda f=follower: "last" in f.values)
                assert follower.values == {"kept": "1", "new": "2", "last": "1"}
                assert sorted(follower.gone) == ["gone=1", "new=1"]
            await far.end()
        await near.end()
        await api.close()

    runner.run(scene())


def test_a_compacted_history_is_listed_again(
    private_cluster: Callable[..., OwnCluster], runner: asyncio.Runner, tmp_path: Path
) -> None:
    cluster = private_cluster(watch_cache=False)
    namespace = cluster.new_namespace()

    async def scene() -> None:
        api = Api(cluster.access())
        await api.create(CONFIG_MAPS, config_map("a", "1"), namespace)
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        async with lined(cluster, tmp_path) as (line, far):
            follower = Follower(far, namespace)
            await follower.until(lambda: "listed" in follower.told)
            line.cut()
            await follower.until(lambda: follower.said)
            await api.delete(CONFIG_MAPS, "a", namespace)
            made = await api.create(CONFIG_MAPS, config_map("b", "1"), namespace)
            cluster.compact(made["metadata"]["resourceVersion"])
            with pytest.raises(Expired, match="410"):
                async for _ in api.watch(CONFIG_MAPS, namespace, resource_version=start):
                    pass
            line.mend()
            await follower.until(lambda: follower.told.count("listed") == 2)
            assert follower.told == ["+a=1", "listed", "-a", "+b=1", "listed"]
            await follower.end()
        await api.close()

    runner.run(scene())


def test_a_kind_that_does_not_exist_yet_is_waited_for(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    group = f"g{secrets.token_hex(4)}.example.com"
    things = Kind(group, "v1", "things")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }
    crd = {
        "apiVersion": CRDS.api_version,
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"things.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "things", "kind": "Thing"},
            "versions": [version],
        },
    }

    async def scene() -> None:
        follower = Follower(api, namespace, things)
        await follower.until(lambda: follower.said)
        assert "things cannot be watched" in follower.said[0]
        await api.create(CRDS, crd)
        await follower.until(lambda: "listed" in follower.told)
        assert follower.told == ["listed"]
        await follower.end()

    runner.run(scene())


def test_a_watch_that_falls_silent_is_begun_again(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """A connection that was forgotten on the way hid every change for five minutes."""
    assert WATCH_S * WATCH_SILENCE <= 90.0

    async def scene() -> None:
        await api.create(CONFIG_MAPS, config_map("a", "1"), namespace)
        async with lined(cluster, tmp_path, watch_s=4.0) as (line, far):
            follower = Follower(far, namespace)
            await follower.until(lambda: "listed" in follower.told)
            line.forget()
            await api.patch(CONFIG_MAPS, "a", {"data": {"value": "2"}}, namespace)
            await follower.until(lambda: follower.values["a"] == "2")
            await follower.end()

    runner.run(scene())
