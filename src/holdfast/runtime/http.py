# SPDX-License-Identifier: Apache-2.0
"""HTTP for people, probes and Prometheus, served inside a process's own event loop.

It shares the loop with the work of the process, so a connection has one request and a few seconds
for it. Any client may ask for some of it, so every connection is a stranger (`doors.py`) from its
first byte to its last, unless its request shows a key: no client is refused for lack of room.
"""

import asyncio
import ssl

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from holdfast.model.errors import StateError, UsageError
from holdfast.runtime.doors import Strangers, TlsDoor, open_door
from holdfast.runtime.transport import join_address, split_address

STRANGERS_MAX = 256
CONNECTION_S = 10.0
"""A peer that has not sent its request and read the answer by then is cut off."""
HEADER_BYTES_MAX = 16 * 1024
FAREWELL_S = 1.0
"""How long answers that are under way may take when the server closes."""

PROVED = "proved"
"""In the state of a request: what to call when it has shown a key. Then no flood cuts it."""

_EVERY_ANSWER = [(b"connection", b"close"), (b"cache-control", b"no-store")]


class HttpServer:
    """A listening socket in the running event loop."""

    def __init__(self, door: asyncio.Server | TlsDoor, state: ServerState, address: str) -> None:
        self._door = door
        self._state = state
        self.address = address

    @classmethod
    async def start(
        cls, listen: str, application: ASGIApp, *, tls: ssl.SSLContext | None = None
    ) -> "HttpServer":
        """Serve on "HOST:PORT" (port 0: the kernel chooses). StateError if that is impossible.

        Of uvicorn only the protocol is used: its server takes over signals, polls, and ends the
        process when it cannot listen.
        """
        host, port = _parse(listen)
        config = Config(
            application,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
        )
        config.load()
        state = ServerState()
        state.default_headers = _EVERY_ANSWER

        strangers = Strangers(STRANGERS_MAX)

        def accept() -> _Connection:
            return _Connection(config, state, strangers)

        try:
            door, bound = await open_door(host, port, accept, strangers, tls=tls)
        except OSError as exc:
            raise StateError(f"cannot listen on {listen}: {exc.strerror or exc}") from exc
        return cls(door, state, join_address(host, bound))

    async def close(self) -> None:
        """Stop listening, let the answers under way out within FAREWELL_S, and cut the rest off."""
        self._door.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(set(self._state.tasks), timeout=FAREWELL_S)
        for connection in list(self._state.connections):
            connection.transport.abort()


class _Connection(H11Protocol):
    """Uvicorn's protocol with a limit to the number of connections and to the life of each."""

    def __init__(self, config: Config, state: ServerState, strangers: Strangers) -> None:
        super().__init__(config, state, {PROVED: self._proved})
        self._strangers = strangers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._strangers.enter(self, transport.abort)
        self._deadline = self.loop.call_later(CONNECTION_S, transport.abort)

    def _proved(self) -> None:
        self._strangers.leave(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.leave(self)
        self._deadline.cancel()
        super().connection_lost(exc)


def _parse(listen: str) -> tuple[str, int]:
    try:
        host, port = split_address(listen)
    except ValueError:
        host, port = "", -1
    if not host or not 0 <= port < 65536:
        raise UsageError(f"the HTTP address must be HOST:PORT, not {listen!r}")
    return host, port


async def explain(request: Request, exc: Exception) -> Response:
    """An error as JSON with one sentence: for the `exception_handlers` of an application."""
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        sentence = f"there is nothing at {request.url.path}; GET / lists what there is"
    elif exc.status_code == 405:
        sentence = f"{request.method} is not served: there is only GET"
    else:
        sentence = exc.detail
    return JSONResponse({"error": sentence}, exc.status_code, exc.headers)
