# SPDX-License-Identifier: Apache-2.0
"""A thin client of the Kubernetes API: one method per verb, JSON in and out, and named errors.

It never repeats a request: the caller knows whether that makes sense. The other modules of this
package import from here what they need of answers.py and kinds.py.
"""

import asyncio
import random
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import msgspec

from holdfast import __version__
from holdfast.model.errors import RetryableError
from holdfast.platforms.kubernetes.answers import (
    Change,
    Conflict,
    Described,
    Expired,
    Listing,
    Meta,
    NotFound,
    Page,
    Rejected,
    Status,
    T,
    Unavailable,
    decode,
    error_of,
    read_change,
)
from holdfast.platforms.kubernetes.config import Access
from holdfast.platforms.kubernetes.kinds import (
    CONFIG_MAPS,
    CRDS,
    ELASTICJOBS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SCALEPLANS,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kind,
)

__all__ = [
    "Api",
    "Change",
    "Conflict",
    "Expired",
    "Kind",
    "Listing",
    "Meta",
    "NotFound",
    "Rejected",
    "Unavailable",
    "CONFIG_MAPS",
    "CRDS",
    "ELASTICJOBS",
    "EVENTS",
    "LEASES",
    "NAMESPACES",
    "NODES",
    "PODS",
    "PVCS",
    "ROLES",
    "ROLE_BINDINGS",
    "SCALEPLANS",
    "SECRETS",
    "SERVICES",
    "SERVICE_ACCOUNTS",
]

CONNECT_S = 20.0
REQUEST_S = 30.0
WATCH_S = 60.0
"""A watch ends after this long and is begun again. A connection that a load balancer or a NAT has
forgotten, and still acknowledges, looks like a connection without events: the longer a watch may
last, the longer it hides a change. Just before its end the server sends a bookmark, so the next
watch goes on where this one was."""
WATCH_SILENCE = 1.25
"""A watch that is silent for this many times its length is given up."""
BODY_MAX = 128 * 2**20
LINE_MAX = 16 * 2**20
"""The limit for one object. etcd keeps no object over 1.5 MB."""
PAGE = 500

# A peer that vanished silently is noticed after half a minute.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)

Params = Mapping[str, str | int]


class Api:
    """A client. Of the network's errors, its methods raise only those of answers.py."""

    def __init__(self, access: Access, *, in_flight: int = 32, watch_s: float = WATCH_S) -> None:
        """At most `in_flight` requests are under way at a time; watches do not count."""
        self._watch_s = watch_s
        self._wire = _Wire(access, in_flight)

    async def get(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        type: type[T] = dict,  # type: ignore[assignment]
    ) -> T:
        """One object; NotFound if there is none."""
        return decode(await self._wire.ask("GET", kind.path(namespace, name)), type)

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = PAGE,
        type: type[T] = dict,  # type: ignore[assignment]
    ) -> Listing[T]:
        """All objects, fetched `limit` at a time; Expired if that took the server too long."""
        items: list[T] = []
        metas: list[Meta] = []
        params: dict[str, str | int] = {**_selectors(labels, fields), "limit": limit}
        while True:
            page = decode(await self._wire.ask("GET", kind.path(namespace), params), Page)
            for raw in page.items or ():
                items.append(decode(raw, type))
                metas.append(decode(raw, Described).metadata)
            if not page.metadata.next:
                return Listing(items, metas, page.metadata.resource_version)
            params["continue"] = page.metadata.next

    async def create(
        self,
        kind: Kind,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        strict: bool = False,
        dry_run: bool = False,
    ) -> dict[str, Any]:
        """Create an object; Conflict if it exists already. `strict`: unknown fields are Rejected.

        Servers before 1.25 do not know `strict` and drop such fields silently. With `dry_run` the
        server answers as if it created the object, and does not.
        """
        params = {"fieldValidation": "Strict"} if strict else {}
        if dry_run:
            params["dryRun"] = "All"
        return await self._write("POST", kind.path(namespace), body, params=params)

    async def apply(
        self,
        kind: Kind,
        name: str,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        manager: str,
        force: bool = True,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Server-side apply: the fields in `body` get these values, and belong to `manager`."""
        params = {"fieldManager": manager, "force": str(force).lower()}
        path = kind.path(namespace, name, subresource)
        return await self._write("PATCH", path, body, "application/apply-patch+yaml", params)

    async def patch(
        self,
        kind: Kind,
        name: str,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Merge patch: set the fields in `body`, and remove those that are null."""
        path = kind.path(namespace, name, subresource)
        return await self._write("PATCH", path, body, "application/merge-patch+json")

    async def replace(
        self,
        kind: Kind,
        name: str,
        body: Mapping[str, Any],
        namespace: str | None = None,
        *,
        subresource: str = "",
    ) -> dict[str, Any]:
        """Replace an object; Conflict if the body's resourceVersion is not the newest."""
        return await self._write("PUT", kind.path(namespace, name, subresource), body)

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str = "",
        grace_s: int | None = None,
    ) -> None:
        """Delete an object; no error if it is gone, or, with `uid`, replaced by a new one."""
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self._wire.ask(
                "DELETE", kind.path(namespace, name), body=msgspec.json.encode(body)
            )
        except NotFound:
            return
        except Conflict as exc:
            if not uid or "precondition" not in str(exc).lower():
                raise

    async def watch(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        type: type[T] = dict,  # type: ignore[assignment]
        opened: Callable[[], None] | None = None,
    ) -> AsyncGenerator[Change[T], None]:
        """The changes after `resource_version`, until the server ends the watch after a minute.

        `opened` is called when the server has accepted the watch: the first change may come much
        later.
        """
        # At different moments, when many watches began together.
        seconds = max(1, int(random.uniform(0.8, 1.0) * self._watch_s))
        params: dict[str, str | int] = {
            **_selectors(labels, fields),
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": seconds,
        }
        path, silence_s = kind.path(namespace), self._watch_s * WATCH_SILENCE
        async with (
            self._wire.open("GET", path, params, silence_s=silence_s) as response,
            aclosing(_read_lines(response)) as lines,
        ):
            if opened is not None:
                opened()
            async for line in lines:
                yield read_change(line, type)

    async def log(
        self,
        name: str,
        namespace: str,
        *,
        container: str = "",
        tail: int | None = None,
        since_s: int | None = None,
        follow: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """What a pod has printed, in pieces; with `follow` until the pod ends.

        Of the output so far only the last `tail` lines, or the output of the last `since_s`.
        """
        params: dict[str, str | int] = {"container": container} if container else {}
        if tail is not None:
            params["tailLines"] = tail
        if since_s is not None:
            params["sinceSeconds"] = since_s
        if follow:
            params["follow"] = "true"
        path = PODS.path(namespace, name, "log")
        # A program may print nothing for days; keep-alives notice the loss of its node.
        silence_s = None if follow else REQUEST_S
        async with self._wire.open("GET", path, params, silence_s=silence_s) as response:
            async for piece in response.aiter_raw():
                yield piece

    async def close(self) -> None:
        """End all connections."""
        await self._wire.close()

    async def _write(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any],
        content_type: str = "application/json",
        params: Params | None = None,
    ) -> dict[str, Any]:
        answer = await self._wire.ask(method, path, params, msgspec.json.encode(body), content_type)
        return decode(answer, dict)


class _Wire:
    """Requests and answers as bytes, and the errors that an answer may be."""

    def __init__(self, access: Access, in_flight: int) -> None:
        self._access = access
        self._slots = asyncio.Semaphore(in_flight)
        headers = {
            "User-Agent": f"holdfast/{__version__}",
            "Accept": "application/json",
            # Packing costs both sides more than the network inside a cluster.
            "Accept-Encoding": "identity",
        }
        # The address of a tunnel, for example, differs from the name in the server's certificate.
        self._extensions = {"sni_hostname": access.server_name} if access.server_name else {}
        if access.impersonate:
            headers["Impersonate-User"] = access.impersonate
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=in_flight)
        transport = httpx.AsyncHTTPTransport(
            verify=access.tls,
            limits=limits,
            proxy=access.proxy,
            trust_env=False,
            socket_options=_KEEPALIVE,
        )
        self._client = httpx.AsyncClient(
            base_url=access.server, headers=headers, transport=transport, trust_env=False
        )

    async def ask(
        self,
        method: str,
        path: str,
        params: Params | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        """One request and its whole answer."""
        opened = self.open(method, path, params, body, content_type, silence_s=REQUEST_S)
        async with self._slots:
            try:
                async with asyncio.timeout(REQUEST_S), opened as response:
                    return await _read_body(response)
            except TimeoutError as exc:
                raise self._unavailable(f"did not answer within {REQUEST_S:g} s") from exc

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        params: Params | None = None,
        body: bytes | None = None,
        content_type: str = "application/json",
        *,
        silence_s: float | None,
    ) -> AsyncIterator[httpx.Response]:
        """A good answer whose body is still to be read."""
        headers = await self._proof()
        if body is not None:
            headers["Content-Type"] = content_type
        request = self._client.build_request(
            method,
            path,
            params=params,
            content=body,
            headers=headers,
            timeout=httpx.Timeout(CONNECT_S, read=silence_s),
            extensions=self._extensions,
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                if not response.is_success:
                    raise self._error(response, await _read_body(response))
                yield response
            finally:
                await response.aclose()
        except httpx.TimeoutException as exc:
            raise self._unavailable("does not answer") from exc
        except httpx.TransportError as exc:
            why = str(exc) or type(exc).__name__
            raise self._unavailable(f"cannot be reached ({why})") from exc

    async def _proof(self) -> dict[str, str]:
        try:
            token = await self._access.credential.token()
        except RetryableError as exc:
            raise Unavailable(str(exc)) from exc
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _unavailable(self, text: str) -> Unavailable:
        return Unavailable(f"the API server {self._access.server} {text}")

    def _error(self, response: httpx.Response, answer: bytes) -> Exception:
        try:
            status = msgspec.json.decode(answer, type=Status)
        except msgspec.DecodeError:
            status = Status(message=answer[:200].decode(errors="replace"))
        if response.status_code == 401:
            self._access.credential.refused()
        said = response.headers.get("Retry-After", "")
        return error_of(status, response.status_code, float(said) if said.isdigit() else 0.0)

    async def close(self) -> None:
        await self._client.aclose()


def _selectors(labels: str, fields: str) -> dict[str, str]:
    params = {"labelSelector": labels, "fieldSelector": fields}
    return {name: value for name, value in params.items() if value}


async def _read_body(response: httpx.Response) -> bytes:
    answer = bytearray()
    async for piece in response.aiter_raw():
        answer += piece
        if len(answer) > BODY_MAX:
            raise Rejected(f"the API server's answer is over {BODY_MAX} bytes")
    return bytes(answer)


async def _read_lines(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, each as soon as it arrives. An unfinished last line is dropped."""
    start = b""
    async for piece in response.aiter_raw():
        *whole, rest = piece.split(b"\n")
        for line in whole:
            yield start + line
            start = b""
        start += rest
        if len(start) > LINE_MAX:
            raise Rejected(f"the API server sends an object of over {LINE_MAX} bytes")
