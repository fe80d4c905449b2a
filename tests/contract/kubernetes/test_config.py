# SPDX-License-Identifier: Apache-2.0
"""Where the cluster is and who we are: every way in which a kubeconfig or a pod says it."""

import asyncio
import base64
import json
import ssl
from pathlib import Path
from typing import Any

import certifi
import pytest

from holdfast.model.errors import RetryableError, UsageError
from holdfast.platforms.kubernetes.config import Access

SERVER = "https://10.0.0.1:6443"


def write(path: Path, user: dict[str, Any], **more: Any) -> Path:
    """A kubeconfig with one context."""
    config = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
        ],
        "clusters": [{"name": "c", "cluster": {"server": SERVER} | more.pop("cluster", {})}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(config | more))
    return path


def token_of(access: Access) -> str:
    return asyncio.run(access.credential.token())


def plugin(folder: Path, *lines: str) -> dict[str, Any]:
    script = folder / "plugin"
    script.write_text("\n".join(["#!/bin/sh", *lines]))
    script.chmod(0o700)
    return {"exec": {"command": "./plugin", "env": [{"name": "FOLDER", "value": str(folder)}]}}


def test_a_kubeconfig_names_server_namespace_and_token(tmp_path: Path) -> None:
    access = Access.find(write(tmp_path / "config", {"token": "t1", "as": "somebody"}))
    assert (access.server, access.namespace, access.impersonate) == (SERVER, "team", "somebody")
    assert token_of(access) == "t1"
    assert access.tls.verify_mode is ssl.CERT_REQUIRED


def test_a_token_is_not_shown(tmp_path: Path) -> None:
    assert "t1" not in repr(Access.find(write(tmp_path / "config", {"token": "t1"})))


def test_a_token_file_is_read_again(tmp_path: Path) -> None:
    """Tokens of pods are replaced while they run. The path is relative to the kubeconfig."""
    (tmp_path / "token").write_text("t1\n")
    access = Access.find(write(tmp_path / "config", {"tokenFile": "token"}))
    assert token_of(access) == "t1"
    (tmp_path / "token").write_text("t2\n")
    assert token_of(access) == "t2"
    (tmp_path / "token").unlink()
    with pytest.raises(RetryableError, match="token file cannot be read"):
        token_of(access)


def test_a_plugin_runs_once_until_its_token_is_refused(tmp_path: Path) -> None:
    count = 'echo x >> "$FOLDER/runs"; n=$(wc -l < "$FOLDER/runs")'
    answer = r'echo "{\"status\": {\"token\": \"t$n\"}}"'
    access = Access.find(write(tmp_path / "config", plugin(tmp_path, count, answer)))

    async def scene() -> list[str]:
        tokens = [await access.credential.token() for _ in range(2)]
        access.credential.refused()
        return [*tokens, await access.credential.token()]

    assert asyncio.run(scene()) == ["t1", "t1", "t2"]


def test_a_plugins_token_that_has_ended_is_replaced(tmp_path: Path) -> None:
    count = 'echo x >> "$FOLDER/runs"; n=$(wc -l < "$FOLDER/runs")'
    ended = r"\"expirationTimestamp\": \"2020-01-01T00:00:00Z\""
    answer = rf'echo "{{\"status\": {{\"token\": \"t$n\", {ended}}}}}"'
    access = Access.find(write(tmp_path / "config", plugin(tmp_path, count, answer)))

    async def scene() -> list[str]:
        return [await access.credential.token() for _ in range(2)]

    assert asyncio.run(scene()) == ["t1", "t2"]


def test_a_plugin_that_fails_is_named_and_its_output_is_not_shown(tmp_path: Path) -> None:
    access = Access.find(write(tmp_path / "config", plugin(tmp_path, "echo secret", "exit 3")))
    with pytest.raises(RetryableError, match="plugin failed with exit code 3") as failed:
        token_of(access)
    assert "secret" not in str(failed.value)


def test_a_plugin_that_is_not_there_comes_with_its_hint(tmp_path: Path) -> None:
    user = {"exec": {"command": "no-such-plugin", "installHint": "install it"}}
    access = Access.find(write(tmp_path / "config", user))
    with pytest.raises(UsageError, match="no-such-plugin is not there: install it"):
        token_of(access)


def test_files_in_kubeconfig_are_one_and_the_first_word_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "first", {"token": "t1"})
    other = {"name": "there", "context": {"cluster": "far", "user": "u"}}
    cluster = {"name": "far", "cluster": {"server": "https://far"}}
    second = write(tmp_path / "second", {"token": "t2"}, contexts=[other], clusters=[cluster])
    environ = {"KUBECONFIG": f"{first}:{tmp_path / 'missing'}:{second}"}
    assert Access.find(environ=environ).server == SERVER
    there = Access.find(context="there", environ=environ)
    assert (there.server, token_of(there)) == ("https://far", "t1")


def test_the_kubeconfig_of_the_home_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    write(tmp_path / ".kube" / "config", {"token": "t1"})
    assert Access.find(environ={"HOME": str(tmp_path)}).server == SERVER


def test_a_pod_knows_its_cluster(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t1")
    (tmp_path / "namespace").write_text("team\n")
    (tmp_path / "ca.crt").write_text(Path(certifi.where()).read_text())
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    access = Access.find(environ=environ, pod_folder=tmp_path)
    assert (access.server, access.namespace) == ("https://[fd00::1]:443", "team")
    assert token_of(access) == "t1"


def test_the_server_may_go_unchecked_only_if_the_kubeconfig_says_so(tmp_path: Path) -> None:
    cluster = {"insecure-skip-tls-verify": True, "tls-server-name": "api", "proxy-url": "http://p"}
    access = Access.find(write(tmp_path / "config", {"token": "t1"}, cluster=cluster))
    assert access.tls.verify_mode is ssl.CERT_NONE
    assert (access.server_name, access.proxy) == ("api", "http://p")


@pytest.mark.parametrize(
    ("user", "more", "words"),
    [
        ({"auth-provider": {"name": "gcp"}}, {}, "uses 'auth-provider', which Kubernetes has"),
        ({"username": "u", "password": "p"}, {}, "uses 'username', which Kubernetes has"),
        ({"exec": {}}, {}, "exec plugin of the kubeconfig has no command"),
        ({}, {"current-context": "nowhere"}, "has no context 'nowhere' .it has: here"),
        ({}, {"current-context": ""}, "has no current context"),
        ({}, {"clusters": []}, "has no cluster 'c'"),
        ({}, {"users": []}, "has no user 'u'"),
        ({}, {"clusters": [{"name": "c", "cluster": {}}]}, "names no server"),
        ({}, {"cluster": {"certificate-authority-data": "!"}}, "not valid base64"),
        (
            {},
            {"cluster": {"certificate-authority-data": base64.b64encode(b"x").decode()}},
            "certificate authority cannot be used",
        ),
        ({}, {"cluster": {"certificate-authority": "none"}}, "certificate-authority of the kube"),
        ({}, {"contexts": "here"}, "is not a kubeconfig"),
    ],
)
def test_what_cannot_be_used_is_said_in_words(
    tmp_path: Path, user: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Access.find(write(tmp_path / "config", user, **more))


def test_no_cluster_at_all_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Kubernetes cluster to speak to"):
        Access.find(environ={"HOME": str(tmp_path)}, pod_folder=tmp_path / "none")


def test_a_file_that_is_no_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("a: [")
    with pytest.raises(UsageError, match="config cannot be read"):
        Access.find(tmp_path / "config")
