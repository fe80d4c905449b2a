# SPDX-License-Identifier: Apache-2.0
"""The synchronous client of the training process.

It asks the agent (or, in tools and tests, the master itself) over blocking sockets: no thread and
no event loop are started in the process of the user. A request whose connection broke is sent
again under the same session and number, so that the server carries it out once.
"""

import functools
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from holdfast.model.errors import ProtocolError, RetryableError
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.runtime.blocking import HANDSHAKE_S, dial, left, prove_token, refusal
from holdfast.runtime.settings import WorkerSettings, worker_settings
from holdfast.runtime.token import read_token

MARGIN_S = 10.0
"""How much later than its limit a request may end: for a server that is slow or just restarts."""

LONGEST_WAIT_S = 14 * 24 * 3600.0
"""Limits above this count as this: no wait is endless, and poll(2) counts in 32 bits."""

_RECEIVE_BYTES = 64 * 1024

Expected = TypeVar("Expected", bound=m.Message)


class AgentClient:
    """Asks for keys, queues and barriers of one scope. Any thread and any forked child may use it.

    Each request has a connection to itself while it lasts. Connections are pooled rather than kept
    per thread: a thread of C++ has a new Python identity at every call and would always reconnect.
    """

    def __init__(self, address: str, token: bytes, *, scope: int, returns: bool = True) -> None:
        """`address` is "unix:PATH" or "tcp:HOST:PORT". Nothing is opened before the first call.

        `returns` is false for a server that, once it is gone, is gone for good.
        """
        self.scope = scope
        self._address = address
        self._token = token
        self._returns = returns
        self._idle: list[_Connection] = []
        self._pid = os.getpid()

    def call(self, body: m.Call, timeout_s: float) -> m.Answer:
        """Send one request and wait for its answer, over as many connections as it takes.

        `timeout_s` limits the whole call, plus MARGIN_S. RetryableError: no answer came.
        """
        connection = self._take()
        answer: m.Answer | None = None
        try:
            answer = connection.ask(body, min(timeout_s, LONGEST_WAIT_S))
        finally:
            # Also when a signal interrupts: no caller waits any more for an answer that is still to
            # come.
            if answer is None:
                connection.close()
            else:
                self._idle.append(connection)
        if isinstance(answer, m.Refused):
            raise refusal(answer)
        return answer

    def ask(self, body: m.Call, expected: type[Expected], timeout_s: float) -> Expected:
        """`call` for a request whose answer has one type."""
        answer = self.call(body, timeout_s)
        if not isinstance(answer, expected):
            raise ProtocolError(f"{type(body).__name__} was answered {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Close the connections that are not in use. A later call opens a new one."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> "_Connection":
        if self._pid != os.getpid():
            # A forked child would read its parent's answers: it has to open its own connections.
            self._pid, self._idle = os.getpid(), []
        try:
            return self._idle.pop()
        except IndexError:
            return _Connection(self._address, self._token, returns=self._returns)


class _Connection:
    """One session with the server: one request at a time, over one socket after another."""

    def __init__(self, address: str, token: bytes, *, returns: bool) -> None:
        self._address = address
        self._token = token
        self._returns = returns
        self._session = os.urandom(16).hex()
        self._calls = 0
        self._socket: socket.socket | None = None
        self._reader = codec.FrameReader()
        self._frames: deque[m.Frame] = deque()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ask(self, body: m.Call, timeout_s: float) -> m.Answer:
        self._calls += 1
        deadline = time.monotonic() + timeout_s
        give_up_at = deadline + MARGIN_S
        pauses_s = _pauses()
        while True:
            try:
                return self._exchange(body, give_up_at)
            except OSError as exc:
                self.close()
                if not self._returns and isinstance(
                    exc, ConnectionRefusedError | FileNotFoundError
                ):
                    raise RetryableError(f"{self._address} is gone: {exc}") from exc
                pause_s = next(pauses_s)
                if time.monotonic() + pause_s >= give_up_at:
                    raise RetryableError(
                        f"{self._address} did not answer within {timeout_s + MARGIN_S:g} s: {exc}"
                    ) from exc
            time.sleep(pause_s)
            body = _shortened(body, deadline - time.monotonic())

    def _exchange(self, body: m.Call, give_up_at: float) -> m.Answer:
        if self._socket is None:
            self._socket = self._connect(give_up_at)
        number = self._calls
        self._send(codec.encode(body, number, self._session, number), give_up_at)
        frame = self._receive(give_up_at)
        if frame.call != number or not isinstance(frame.body, m.Answer):
            raise ProtocolError(
                f"{type(frame.body).__name__} came as call {frame.call} in answer to {number}"
            )
        return frame.body

    def _connect(self, give_up_at: float) -> socket.socket:
        """A socket on which both sides have proved the token."""
        until = min(time.monotonic() + HANDSHAKE_S, give_up_at)
        self._reader = codec.FrameReader(codec.HANDSHAKE_BYTES_MAX)
        self._frames.clear()
        self._socket = connected = dial(self._address, left(until))
        prove_token(
            self._address,
            self._token,
            lambda data: self._send(data, until),
            lambda: self._receive(until),
        )
        self._reader.limit = codec.FRAME_BYTES_MAX
        return connected

    def _send(self, data: bytes, until: float) -> None:
        assert self._socket is not None
        self._socket.settimeout(left(until))
        self._socket.sendall(data)

    def _receive(self, until: float) -> m.Frame:
        assert self._socket is not None
        while not self._frames:
            self._socket.settimeout(left(until))
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._frames.extend(self._reader.feed(data))
        return self._frames.popleft()


def current() -> AgentClient | None:
    """The client of this worker, in the scope of its round; None if Holdfast did not start it."""
    settings = worker_settings()
    return None if settings is None else _client(settings)


@functools.lru_cache(maxsize=1)
def _client(settings: WorkerSettings) -> AgentClient:
    token = read_token(Path(settings.token_file))
    return AgentClient(settings.socket, token, scope=settings.round)


def _pauses() -> Iterator[float]:
    """How long to wait before each new connection: at once, then ever longer, up to 1 s."""
    yield 0.0
    pause_s = 0.05
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, 1.0)


def _shortened(body: m.Call, left_s: float) -> m.Call:
    """A request that is sent again waits for what is left of its time only.

    A request that limits how long it waits does so in a field `timeout_s`.
    """
    if hasattr(body, "timeout_s"):
        return msgspec.structs.replace(body, timeout_s=max(0.0, min(body.timeout_s, left_s)))
    return body
