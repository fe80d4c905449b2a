# SPDX-License-Identifier: Apache-2.0
"""Where the cluster is and which user this process is there, found where kubectl looks for it.

Inside a pod the kubelet has put a token and the cluster's authority into a folder. Elsewhere a
kubeconfig says it: the named file, or those in KUBECONFIG, or ~/.kube/config. The proxies of the
environment are not used; a kubeconfig may name one (`proxy-url`).
"""

import asyncio
import base64
import binascii
import contextlib
import os
import ssl
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from holdfast.model.errors import RetryableError, UsageError
from holdfast.runtime.observe import wall_clock
from holdfast.runtime.settings import environment

POD_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PLUGIN_S = 60.0
PLUGIN_SPARE_S = 60.0
"""A plugin's token is replaced this long before it expires."""


class Credential(Protocol):
    """What authenticates this process."""

    async def token(self) -> str:
        """A token that is valid now; empty if the user is not authenticated by a token."""

    def refused(self) -> None:
        """The server rejected the token: get another one for the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to reach an API server."""

    server: str
    tls: ssl.SSLContext = field(repr=False)
    credential: Credential = field(repr=False)
    namespace: str = "default"
    """The namespace of requests that name none."""
    impersonate: str = ""
    """The other user that this process acts as."""
    server_name: str = ""
    """The name in the server's certificate, if it differs from the one in the address."""
    proxy: str | None = None

    @classmethod
    def find(
        cls,
        kubeconfig: Path | None = None,
        context: str = "",
        *,
        environ: Mapping[str, str] | None = None,
        pod_folder: Path = POD_FOLDER,
    ) -> Self:
        """The named access, else the pod's own, else the user's kubeconfig; UsageError if none."""
        env = environment() if environ is None else environ
        if kubeconfig is not None:
            return cls._from_files([kubeconfig], context)
        if not context and "KUBERNETES_SERVICE_HOST" in env and pod_folder.exists():
            return cls._from_pod(env, pod_folder)
        home = Path(env.get("HOME") or Path.home())
        named = [Path(name) for name in env.get("KUBECONFIG", "").split(os.pathsep) if name]
        files = [path for path in named or [home / ".kube" / "config"] if path.exists()]
        if not files:
            raise UsageError(
                "there is no Kubernetes cluster to speak to: this is no pod, and there is no "
                f"kubeconfig at {' or '.join(map(str, named)) or home / '.kube' / 'config'}"
            )
        return cls._from_files(files, context)

    @classmethod
    def _from_pod(cls, env: Mapping[str, str], folder: Path) -> Self:
        host, port = env["KUBERNETES_SERVICE_HOST"], env.get("KUBERNETES_SERVICE_PORT", "443")
        if ":" in host:
            host = f"[{host}]"
        return cls(
            server=f"https://{host}:{port}",
            tls=_trust((folder / "ca.crt").read_text()),
            credential=_TokenFile(folder / "token"),
            namespace=(folder / "namespace").read_text().strip(),
        )

    @classmethod
    def _from_files(cls, files: Sequence[Path], context: str) -> Self:
        config = _Kubeconfig(files)
        chosen = config.context(context)
        cluster, user = config.cluster(chosen), config.user(chosen)
        if "server" not in cluster:
            raise UsageError(f"the kubeconfig {files[0]} names no server for its cluster")
        tls = _trust(_text(cluster, "certificate-authority"))
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        certificate, key = _text(user, "client-certificate"), _text(user, "client-key")
        if certificate is not None and key is not None:
            _show(tls, certificate, key)
        return cls(
            server=str(cluster["server"]).rstrip("/"),
            tls=tls,
            credential=_credential(user, tls),
            namespace=str(chosen.get("namespace") or "default"),
            impersonate=str(user.get("as") or ""),
            server_name=str(cluster.get("tls-server-name") or ""),
            proxy=cluster.get("proxy-url"),
        )


class _Kubeconfig:
    """Several files as one: the first value of a name counts, as for kubectl."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._current = ""
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        for path in files:
            self._read(path)

    def _read(self, path: Path) -> None:
        # Imported here: in a pod it is not needed.
        import yaml

        try:
            content = yaml.safe_load(path.read_text()) or {}
        except (OSError, ValueError, yaml.YAMLError) as exc:
            raise UsageError(f"the kubeconfig {path} cannot be read: {exc}") from exc
        try:
            self._current = self._current or content.get("current-context") or ""
            for kind in ("cluster", "user", "context"):
                for entry in content.get(f"{kind}s") or ():
                    # Relative paths are relative to the file that contains them.
                    told = {**(entry.get(kind) or {}), "": path.parent}
                    self._entries.setdefault((kind, entry["name"]), told)
        except (AttributeError, KeyError, TypeError) as exc:
            raise UsageError(f"the file {path} is not a kubeconfig") from exc

    def context(self, name: str) -> dict[str, Any]:
        if not (name or self._current):
            raise UsageError(f"the kubeconfig {self._files[0]} has no current context: name one")
        return self._entry("context", name or self._current)

    def cluster(self, context: Mapping[str, Any]) -> dict[str, Any]:
        return self._entry("cluster", context.get("cluster"))

    def user(self, context: Mapping[str, Any]) -> dict[str, Any]:
        return self._entry("user", context["user"]) if context.get("user") else {}

    def _entry(self, kind: str, name: object) -> dict[str, Any]:
        entry = self._entries.get((kind, str(name)))
        if entry is None:
            known = ", ".join(sorted(n for k, n in self._entries if k == kind)) or "none"
            files = ", ".join(map(str, self._files))
            raise UsageError(f"the kubeconfig {files} has no {kind} {name!r} (it has: {known})")
        return entry


def _text(entry: Mapping[str, Any], name: str) -> str | None:
    """The value of a field, inline (`NAME-data`) or from a file; None if it is missing."""
    if inline := entry.get(f"{name}-data"):
        try:
            return base64.b64decode(str(inline), validate=True).decode("ascii")
        except (binascii.Error, ValueError) as exc:
            raise UsageError(f"{name}-data in the kubeconfig is not valid base64") from exc
    if not entry.get(name):
        return None
    path = Path(entry[""]) / str(entry[name])
    try:
        return path.read_text()
    except OSError as exc:
        raise UsageError(f"the {name} of the kubeconfig cannot be read: {exc}") from exc


def _credential(user: Mapping[str, Any], tls: ssl.SSLContext) -> Credential:
    if user.get("token"):
        return _Token(user["token"])
    if user.get("tokenFile"):
        return _TokenFile(Path(user[""]) / user["tokenFile"])
    if user.get("exec") is not None:
        return _Plugin(user["exec"], Path(user[""]), tls)
    for name in ("auth-provider", "username"):
        if user.get(name):
            raise UsageError(
                f"the kubeconfig uses {name!r}, which Kubernetes has removed: "
                "use a token, a client certificate or an exec plugin"
            )
    return _Token("")


def _trust(authority: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=authority)
    except (ssl.SSLError, ValueError) as exc:
        raise UsageError(f"the cluster's certificate authority cannot be used: {exc}") from exc


def _show(tls: ssl.SSLContext, certificate: str, key: str) -> None:
    """Show this certificate to the server from the next connection on."""
    # The ssl module reads them only from files: this file has no name, and is in memory.
    with open(os.memfd_create("client"), "w") as file:
        file.write(f"{certificate}\n{key}\n")
        file.flush()
        try:
            tls.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except ssl.SSLError as exc:
            raise UsageError(f"the client certificate cannot be used: {exc}") from exc


class _Token:
    """A token that never changes."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token

    def refused(self) -> None:
        """Nothing to do: there is no other token."""


class _TokenFile:
    """A token that the kubelet replaces every hour or so: each use reads it, which costs little."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def token(self) -> str:
        try:
            return self._path.read_text().strip()
        except OSError as exc:
            raise RetryableError(f"the token file cannot be read: {exc}") from exc

    def refused(self) -> None:
        """Nothing to do: the next use reads the file again."""


class _PluginStatus(msgspec.Struct, rename="camel"):
    token: str = ""
    client_certificate_data: str = ""
    client_key_data: str = ""
    expiration_timestamp: datetime | None = None


class _PluginAnswer(msgspec.Struct):
    status: _PluginStatus


class _Plugin:
    """A program of the user that prints a token, or a certificate, valid for some time."""

    def __init__(self, config: Mapping[str, Any], folder: Path, tls: ssl.SSLContext) -> None:
        command = str(config.get("command") or "")
        if not command:
            raise UsageError("the exec plugin of the kubeconfig has no command")
        # As kubectl: a path with a slash is relative to the file, a bare word is searched in PATH.
        self._command = str(folder / command) if "/" in command else command
        self._arguments = [str(word) for word in config.get("args") or ()]
        self._extra = {entry["name"]: entry["value"] for entry in config.get("env") or ()}
        self._version = str(config.get("apiVersion") or "client.authentication.k8s.io/v1")
        self._hint = str(config.get("installHint") or "")
        self._tls = tls
        self._lock = asyncio.Lock()
        self._answer: _PluginStatus | None = None

    async def token(self) -> str:
        async with self._lock:
            if self._answer is None or self._has_ended(self._answer):
                self._answer = await asyncio.to_thread(self._run)
                if self._answer.client_certificate_data:
                    key = self._answer.client_key_data
                    _show(self._tls, self._answer.client_certificate_data, key)
            return self._answer.token

    def refused(self) -> None:
        self._answer = None

    def _has_ended(self, answer: _PluginStatus) -> bool:
        ends_at = answer.expiration_timestamp
        return ends_at is not None and ends_at.timestamp() - PLUGIN_SPARE_S < wall_clock()

    def _run(self) -> _PluginStatus:
        info = {
            "apiVersion": self._version,
            "kind": "ExecCredential",
            "spec": {"interactive": False},
        }
        told = msgspec.json.encode(info).decode()
        with _plugin_errors(self._command, self._hint):
            ran = subprocess.run(
                [self._command, *self._arguments],
                env={**environment(), **self._extra, "KUBERNETES_EXEC_INFO": told},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=PLUGIN_S,
                check=True,
            )
            return msgspec.json.decode(ran.stdout, type=_PluginAnswer).status


@contextlib.contextmanager
def _plugin_errors(command: str, hint: str) -> Iterator[None]:
    """Explain a plugin's failure in words; its output may hold a token and is not shown."""
    said = f"the kubeconfig's exec plugin {command}"
    try:
        yield
    except FileNotFoundError as exc:
        raise UsageError(f"{said} is not there{': ' + hint if hint else ''}") from exc
    except OSError as exc:
        raise UsageError(f"{said} cannot be started: {exc}") from exc
    except subprocess.TimeoutExpired as exc:
        raise RetryableError(f"{said} did not end within {PLUGIN_S:g} s") from exc
    except subprocess.CalledProcessError as exc:
        raise RetryableError(f"{said} failed with exit code {exc.returncode}") from exc
    except msgspec.DecodeError as exc:
        raise RetryableError(f"{said} printed something that is no credential") from exc
