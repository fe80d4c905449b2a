# SPDX-License-Identifier: Apache-2.0
"""The client against a real API server: every verb, and what each refusal becomes."""

import asyncio
import base64
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.platforms.kubernetes.api import (
    CONFIG_MAPS,
    NAMESPACES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    Api,
    Change,
    Conflict,
    NotFound,
    Rejected,
    Unavailable,
)
from holdfast.platforms.kubernetes.config import Access
from tests.kube.certificates import make_client_certificate
from tests.kube.cluster import NOBODY, Cluster

pytestmark = pytest.mark.kube

WAIT_S = 60.0


def config_map(name: str, value: str = "1", **labels: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"value": value},
    }


def pod(name: str) -> dict[str, Any]:
    spec = {"containers": [{"name": "main", "image": "none"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Small(msgspec.Struct):
    """Only what is needed of an object is kept."""

    data: dict[str, str]


def test_an_object_is_made_read_changed_and_removed(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        made = await api.create(CONFIG_MAPS, config_map("a"), namespace)
        assert made["metadata"]["namespace"] == namespace
        await api.patch(CONFIG_MAPS, "a", {"data": {"more": "2"}}, namespace)
        seen = await api.get(CONFIG_MAPS, "a", namespace, type=Small)
        assert seen == Small({"value": "1", "more": "2"})
        with pytest.raises(Conflict, match="modified"):
            await api.replace(CONFIG_MAPS, "a", made, namespace)
        await api.delete(CONFIG_MAPS, "a", namespace)
        with pytest.raises(NotFound, match='"a" not found'):
            await api.get(CONFIG_MAPS, "a", namespace)
        await api.delete(CONFIG_MAPS, "a", namespace)

    runner.run(scene())


def test_what_is_there_already_is_a_conflict(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.create(CONFIG_MAPS, config_map("a"), namespace)
        with pytest.raises(Conflict) as refused:
            await api.create(CONFIG_MAPS, config_map("a"), namespace)
        assert refused.value.reason == "AlreadyExists"

    runner.run(scene())


def test_a_delete_by_uid_spares_the_successor_of_the_same_name(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        for kind, body in ((CONFIG_MAPS, config_map("a")), (PODS, pod("a"))):
            old = (await api.create(kind, body, namespace))["metadata"]["uid"]
            await api.delete(kind, "a", namespace, uid=old)
            new = (await api.create(kind, body, namespace))["metadata"]["uid"]
            assert new != old
            await api.delete(kind, "a", namespace, uid=old)
            assert (await api.get(kind, "a", namespace))["metadata"]["uid"] == new

    runner.run(scene())


def test_server_side_apply_knows_who_owns_a_field(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        await api.apply(CONFIG_MAPS, "a", config_map("a", "1"), namespace, manager="one")
        with pytest.raises(Conflict, match="one"):
            await api.apply(
                CONFIG_MAPS, "a", config_map("a", "2"), namespace, manager="two", force=False
            )
        forced = await api.apply(CONFIG_MAPS, "a", config_map("a", "2"), namespace, manager="two")
        assert forced["data"] == {"value": "2"}

    runner.run(scene())


def test_a_list_has_all_pages_and_heeds_selectors(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        names = [f"c{number}" for number in range(7)]
        for name in names:
            await api.create(CONFIG_MAPS, config_map(name, side=f"s{len(name)}"), namespace)
        listing = await api.list(CONFIG_MAPS, namespace, labels="side=s2", limit=3, type=Small)
        assert [meta.name for meta in listing.metas] == names
        assert listing.items == [Small({"value": "1"})] * len(names)
        one = await api.list(CONFIG_MAPS, namespace, fields="metadata.name=c4")
        assert [meta.name for meta in one.metas] == ["c4"]

    runner.run(scene())


def test_a_malformed_object_is_rejected_in_the_servers_words(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        with pytest.raises(Rejected, match=r"spec\.containers: Required value.*422") as refused:
            await api.create(PODS, pod("p") | {"spec": {}}, namespace)
        assert refused.value.status == 422

    runner.run(scene())


def test_what_is_not_allowed_is_rejected(
    cluster: Cluster, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        stranger = Api(cluster.access(NOBODY))
        with pytest.raises(Rejected, match=r"nobody.* cannot list resource") as refused:
            await stranger.list(PODS, namespace)
        assert refused.value.status == 403
        await stranger.close()

    runner.run(scene())


def test_a_service_account_may_do_what_its_role_says(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner
) -> None:
    """With its own token, and by impersonation: both ways the same answers."""
    role = {
        "metadata": {"name": "reader"},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}],
    }
    binding = {
        "metadata": {"name": "reader"},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": namespace}],
        "roleRef": {"apiGroup": ROLES.group, "kind": "Role", "name": "reader"},
    }

    async def allowed(access: Access) -> None:
        account = Api(access)
        async with asyncio.timeout(WAIT_S):
            while True:  # The server learns of a new role by a watch of its own.
                try:
                    assert (await account.list(CONFIG_MAPS, namespace)).items == []
                    break
                except Rejected:
                    await api.get(ROLES, "reader", namespace)
        with pytest.raises(Rejected, match=f"system:serviceaccount:{namespace}:reader"):
            await account.list(PODS, namespace)
        await account.close()

    async def scene() -> None:
        await api.create(SERVICE_ACCOUNTS, {"metadata": {"name": "reader"}}, namespace)
        await api.create(ROLES, role, namespace)
        await api.create(ROLE_BINDINGS, binding, namespace)
        await allowed(Access.find(cluster.kubeconfig_of_account(namespace, "reader")))
        user = f"system:serviceaccount:{namespace}:reader"
        await allowed(cluster.access(impersonate=user))

    runner.run(scene())


def test_a_watch_tells_every_change_in_order(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        await api.create(CONFIG_MAPS, config_map("a"), namespace)
        await api.patch(CONFIG_MAPS, "a", {"data": {"value": "2"}}, namespace)
        await api.delete(CONFIG_MAPS, "a", namespace)
        seen: list[Change[Small]] = []
        async with asyncio.timeout(WAIT_S):
            watch = api.watch(CONFIG_MAPS, namespace, resource_version=start, type=Small)
            async for change in watch:
                seen.append(change)
                if change.verb == "DELETED":
                    break
        assert [(change.verb, change.meta.name) for change in seen] == [
            ("ADDED", "a"),
            ("MODIFIED", "a"),
            ("DELETED", "a"),
        ]
        assert [change.obj and change.obj.data["value"] for change in seen] == ["1", "2", "2"]
        versions = [int(change.meta.resource_version) for change in seen]
        assert versions == sorted(set(versions))

    runner.run(scene())


def test_a_bookmark_moves_the_version_on(
    cluster: Cluster, namespace: str, runner: asyncio.Runner
) -> None:
    """The server sends one shortly before the watch ends, if there were changes for others."""

    async def keep_changing(api: Api) -> None:
        for number in itertools.count():
            await api.patch(CONFIG_MAPS, "a", {"data": {"value": str(number)}}, namespace)

    async def scene() -> None:
        api = Api(cluster.access(), watch_s=6.0)
        start = (await api.list(CONFIG_MAPS, namespace)).resource_version
        made = await api.create(CONFIG_MAPS, config_map("a"), namespace)
        changing = asyncio.create_task(keep_changing(api))
        changes: list[Change[dict[str, Any]]] = []
        async with asyncio.timeout(WAIT_S):
            while not changes:
                watch = api.watch(
                    CONFIG_MAPS, namespace, resource_version=start, labels="is=not-there"
                )
                changes = [change async for change in watch]
        changing.cancel()
        assert {(change.verb, change.obj) for change in changes} == {("BOOKMARK", None)}
        version = int(changes[-1].meta.resource_version)
        assert version >= int(made["metadata"]["resourceVersion"])
        await api.close()

    runner.run(scene())


@pytest.mark.parametrize("by_plugin", [False, True], ids=["inline", "by a plugin"])
def test_a_client_certificate_says_who_we_are(
    cluster: Cluster, namespace: str, runner: asyncio.Runner, tmp_path: Path, by_plugin: bool
) -> None:
    for name in ("ca.crt", "ca.key"):
        shutil.copy(cluster.folder / name, tmp_path)
    certificate, key = make_client_certificate(tmp_path, "ann", "system:masters")
    config = json.loads(cluster.kubeconfig().read_text())
    if by_plugin:
        status = {
            "clientCertificateData": certificate.read_text(),
            "clientKeyData": key.read_text(),
        }
        (tmp_path / "answer").write_text(json.dumps({"status": status}))
        plugin = {"command": "cat", "args": [str(tmp_path / "answer")]}
        config["users"][0]["user"] = {"exec": plugin}
    else:
        config["users"][0]["user"] = {
            "client-certificate-data": base64.b64encode(certificate.read_bytes()).decode(),
            "client-key": key.name,
        }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))

    async def scene() -> None:
        api = Api(Access.find(tmp_path / "kubeconfig"))
        assert (await api.list(CONFIG_MAPS, namespace)).items == []
        await api.close()

    runner.run(scene())


def test_nobody_there_is_unknown_and_not_missing(
    cluster: Cluster, namespace: str, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """Prior art takes every failed look-up for "there is none"."""
    text = cluster.kubeconfig().read_text().replace(":6443", ":6444")
    elsewhere = tmp_path / "kubeconfig"
    elsewhere.write_text(text)

    async def scene() -> None:
        api = Api(Access.find(elsewhere))
        with pytest.raises(Unavailable, match="cannot be reached"):
            await api.get(CONFIG_MAPS, "a", namespace)
        with pytest.raises(Unavailable, match="cannot be reached"):
            async for _ in api.watch(CONFIG_MAPS, namespace, resource_version="1"):
                pass
        await api.close()

    runner.run(scene())


def test_an_unknown_token_is_read_again_next_time(
    cluster: Cluster, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """The tokens of pods are replaced while they run; a token is never in an error's words."""
    token = tmp_path / "token"
    token.write_text("of-yesterday")
    for name, text in (("ca.crt", cluster.authority.read_text()), ("namespace", "here\n")):
        (tmp_path / name).write_text(text)
    environ = {"KUBERNETES_SERVICE_HOST": cluster.address, "KUBERNETES_SERVICE_PORT": "6443"}
    access = Access.find(environ=environ, pod_folder=tmp_path)
    assert access.namespace == "here"

    async def scene() -> None:
        api = Api(access)
        with pytest.raises(Unavailable, match="Unauthorized") as unknown:
            await api.get(NAMESPACES, "default")
        assert "of-yesterday" not in f"{unknown.value!r} {access!r}"
        token.write_text("admin-token\n")
        assert (await api.get(NAMESPACES, "default"))["metadata"]["name"] == "default"
        await api.close()

    runner.run(scene())
