# SPDX-License-Identifier: Apache-2.0
"""One framed transport for Unix sockets, TCP and TLS.

A `Link` is one connection on which both sides have proved the job's token. Until then a peer can
send one small frame and nothing else, has a few seconds for it, and is one of a limited number
(`doors.py`). Nothing here resolves the names of peers: a slow resolver must never stall a server.
"""

import asyncio
import os
import socket
import ssl
import struct
import weakref
from pathlib import Path
from typing import Protocol, cast

from holdfast.model.errors import AuthError, ProtocolError, RetryableError, StateError
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.protocol.codec import FrameReader
from holdfast.runtime.doors import HANDSHAKE_S, Strangers, TlsDoor, open_door

STRANGERS_MAX = 16384
"""All agents of a large job connect at once when their master is back: they must find room."""

UNSENT_BYTES_HIGH = 64 * 1024 * 1024
"""A server takes no more requests of a peer to which it owes this much."""

UNSENT_BYTES_MAX = 512 * 1024 * 1024
"""A peer that asked for more than this at once is cut off: it must not eat our memory."""

WRITE_BYTES_MAX = 4 * 1024 * 1024
"""Larger data go to the connection in pieces."""

UNREAD_S = 10.0
"""A peer to which we owe that much and that takes nothing for this long is cut off."""

UNHEARD_S = 10.0
"""A client whose bytes are not acknowledged for this long connects again. TCP alone would try less
and less often, and find a network that is back as long after as it was away."""

_PEERCRED = struct.Struct("3i")


class Handler(Protocol):
    """What a link reports to."""

    def opened(self, link: "Link") -> None:
        """The peer proved the token (server side only)."""

    def received(self, link: "Link", frame: m.Frame) -> None:
        """A frame arrived. A ProtocolError raised here closes the link."""

    def closed(self, link: "Link") -> None:
        """The link is gone; called once, and only for links that were open."""


class Link(asyncio.Protocol):
    """One connection, either end of it."""

    _next_number = 0

    def __init__(
        self,
        handler: Handler,
        token: bytes,
        *,
        strangers: Strangers | None = None,
        same_user_only: bool = False,
        unsent_bytes_high: int = UNSENT_BYTES_HIGH,
        unsent_bytes_max: int = UNSENT_BYTES_MAX,
        unread_s: float = UNREAD_S,
    ) -> None:
        """A server's end has `strangers`, which it leaves once the peer has proved the token."""
        Link._next_number += 1
        self.number = Link._next_number
        self.is_open = False
        self._handler = handler
        self._token = token
        self._strangers = strangers
        self._is_server = strangers is not None
        self._same_user_only = same_user_only
        self._unsent_bytes_high = min(unsent_bytes_high, unsent_bytes_max)
        self._unsent_bytes_max = unsent_bytes_max
        self._unread_s = unread_s
        self._nonce = os.urandom(codec.NONCE_BYTES)
        self._peer_nonce = b""
        self._reader = FrameReader(codec.HANDSHAKE_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        #: Frames of this turn of the loop: they leave as one write at its end.
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        #: All that `_flush` has handed to the connection.
        self._written_bytes = 0
        #: Set while the peer takes less than we send.
        self._patience: asyncio.TimerHandle | None = None
        #: Client side: done when the handshake is, one way or the other.
        self.ready: asyncio.Future[None] = self._loop.create_future()

    # ---- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._unsent_bytes_high)
        self._deadline = self._loop.call_later(HANDSHAKE_S, self._handshake_late)
        if self._strangers is None:
            _tune(transport.get_extra_info("socket"), unheard_s=UNHEARD_S)
            return
        self._strangers.enter(self, self.abort)
        if self._same_user_only and not _is_same_user(transport.get_extra_info("socket")):
            self._refuse("auth", "this socket belongs to another user")
        else:
            self._write(m.Challenge(m.VERSION, self._nonce))

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                if self._is_cut_off():
                    return  # By what it asked for just now: the rest is not even looked at.
                if self.is_open:
                    self._handler.received(self, frame)
                else:
                    self._shake_hands(frame.body)
        except ProtocolError as exc:
            self._fail(exc)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._patience):
            if timer is not None:
                timer.cancel()
        if self._strangers is not None:
            self._strangers.leave(self)
        if not self.ready.done():
            self.ready.set_exception(RetryableError("the connection broke during the handshake"))
        # On a server no caller may wait for the handshake: mark a failed one as seen.
        self.ready.cancelled() or self.ready.exception()
        if self.is_open:
            self.is_open = False
            self._handler.closed(self)

    def pause_writing(self) -> None:
        # A burst of large answers to many workers is no crime: a peer that reads them gets them.
        # Only servers stop reading meanwhile: if both sides did, each would wait for the other.
        assert self._transport is not None
        if self._is_server and not self._transport.is_closing():
            self._transport.pause_reading()
        self._be_patient()

    def resume_writing(self) -> None:
        assert self._transport is not None
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._is_server and not self._transport.is_closing():
            self._transport.resume_reading()

    def _be_patient(self) -> None:
        self._patience = self._loop.call_later(
            self._unread_s, self._lose_patience, self._taken_bytes()
        )

    def _lose_patience(self, before: int) -> None:
        if self._taken_bytes() > before:
            self._be_patient()
        else:
            self.abort()

    def _taken_bytes(self) -> int:
        """How many bytes the connection has passed on. The bytes that it still has say nothing
        about the peer: they grow with each answer, and while a burst is still being written."""
        assert self._transport is not None
        return self._written_bytes - self._transport.get_write_buffer_size()

    # ---- our side -------------------------------------------------------------------------------

    def send(
        self,
        body: m.AnyMessage,
        call: int = 0,
        session: str = "",
        seq: int = 0,
        position: int = 0,
    ) -> None:
        """Queue one frame; silently nothing if the link is gone."""
        if self.is_open and not self._is_cut_off():
            data = codec.encode(body, call, session, seq, position)
            if not self._unsent:
                self._loop.call_soon(self._flush)
            self._unsent.append(data)
            self._unsent_bytes += len(data)
            if self._unsent_bytes > self._unsent_bytes_high or self._patience is not None:
                self._check_debt()

    def answer(self, body: m.AnyMessage, call: int, position: int = 0) -> None:
        """Queue the answer to a request; one that no frame can hold becomes a refusal."""
        try:
            self.send(body, call, position=position)
        except ProtocolError as exc:
            self.send(m.Refused("rejected", str(exc)), call)

    def peer_pid(self) -> int:
        """The process that connected to this Unix socket."""
        assert self._transport is not None
        pid, _ = _credentials(self._transport.get_extra_info("socket"))
        return pid

    def close(self) -> None:
        """Close once everything queued is sent."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()

    def _is_cut_off(self) -> bool:
        """Whether nothing more goes out; the news that the link is closed may still be to come."""
        return self._transport is None or self._transport.is_closing()

    def _check_debt(self) -> None:
        assert self._transport is not None
        owed = self._unsent_bytes + self._transport.get_write_buffer_size()
        if owed > self._unsent_bytes_max:
            self._unsent.clear()
            self.abort()

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            data = self._unsent[0] if len(self._unsent) == 1 else b"".join(self._unsent)
            self._unsent.clear()
            self._unsent_bytes = 0
            # TLS hands on at once what it takes in one write, and never calls `pause_writing` for
            # it. After a piece that the peer does not take, it keeps the others, and counts them.
            with memoryview(data) as view:
                for begin in range(0, len(view), WRITE_BYTES_MAX):
                    piece = view[begin : begin + WRITE_BYTES_MAX]
                    self._written_bytes += len(piece)  # First: it may call `pause_writing`.
                    self._transport.write(piece)

    def _write(self, body: m.AnyMessage) -> None:
        assert self._transport is not None
        self._transport.write(codec.encode(body))

    def _shake_hands(self, body: m.AnyMessage) -> None:
        match body:
            case m.Proof() if self._is_server:
                expected = codec.client_mac(self._token, self._nonce, body.nonce)
                if body.version != m.VERSION:
                    self._refuse("usage", f"protocol {body.version} is not {m.VERSION}")
                elif not codec.same_mac(expected, body.mac):
                    self._refuse("auth", "wrong token: this is not the token of the job")
                else:
                    mac = codec.server_mac(self._token, self._nonce, body.nonce)
                    self._write(m.Welcome(mac))
                    self._open()
                    self._handler.opened(self)
            case m.Challenge() if not self._is_server and not self._peer_nonce:
                self._peer_nonce = body.nonce
                mac = codec.client_mac(self._token, body.nonce, self._nonce)
                self._write(m.Proof(m.VERSION, self._nonce, mac))
            case m.Welcome() if not self._is_server and self._peer_nonce:
                expected = codec.server_mac(self._token, self._peer_nonce, self._nonce)
                if not codec.same_mac(expected, body.mac):
                    self._fail(AuthError("the server does not hold the token of the job"))
                else:
                    self._open()
            case m.Refused() if not self._is_server:
                self._fail(AuthError(body.message))
            case _:
                self._fail(ProtocolError(f"{type(body).__name__} came during the handshake"))

    def _open(self) -> None:
        self.is_open = True
        self._reader.limit = codec.FRAME_BYTES_MAX
        if self._strangers is not None:
            self._strangers.leave(self)
        if self._deadline is not None:
            self._deadline.cancel()
        if not self.ready.done():
            self.ready.set_result(None)

    def _handshake_late(self) -> None:
        self._fail(RetryableError(f"no handshake within {HANDSHAKE_S:g} s"))

    def _refuse(self, kind: str, message: str) -> None:
        self._write(m.Refused(kind, message))
        self.close()

    def _fail(self, exc: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(exc)
        self.abort()


def _tune(peer: socket.socket, unheard_s: float = 0.0) -> None:
    """Small messages at once, and a dead host noticed even on an idle stream.

    Every connection inherits what is set on the listening socket that accepts it.
    """
    if peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(unheard_s * 1000))


def _is_same_user(peer: socket.socket) -> bool:
    _, uid = _credentials(peer)
    return uid in (os.getuid(), 0)


def _credentials(peer: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket, when it connected."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    pid, uid, _ = _PEERCRED.unpack(raw)
    return pid, uid


class Server:
    """A listening socket whose links report to one handler."""

    def __init__(
        self,
        server: asyncio.Server | TlsDoor,
        links: weakref.WeakSet[Link],
        address: str,
    ) -> None:
        self._server = server
        self._links = links
        self.address = address

    async def close(self) -> None:
        """Stop listening and close every link."""
        self._server.close()
        # A set of references has no order of its own.
        for link in sorted(self._links, key=lambda link: link.number):
            link.abort()
        await asyncio.sleep(0)


async def listen(
    address: str,
    handler: Handler,
    token: bytes,
    *,
    tls: ssl.SSLContext | None = None,
    strangers_max: int = STRANGERS_MAX,
    unsent_bytes_high: int = UNSENT_BYTES_HIGH,
    unsent_bytes_max: int = UNSENT_BYTES_MAX,
    unread_s: float = UNREAD_S,
) -> Server:
    """Listen on "HOST:PORT" (port 0: the kernel chooses) or "unix:PATH"."""
    loop = asyncio.get_running_loop()
    links: weakref.WeakSet[Link] = weakref.WeakSet()
    strangers = Strangers(strangers_max)
    is_local = address.startswith("unix:")

    def accept() -> Link:
        link = Link(
            handler,
            token,
            strangers=strangers,
            same_user_only=is_local,
            unsent_bytes_high=unsent_bytes_high,
            unsent_bytes_max=unsent_bytes_max,
            unread_s=unread_s,
        )
        links.add(link)
        return link

    try:
        if is_local:
            path = Path(address.removeprefix("unix:"))
            server = await loop.create_unix_server(accept, str(path), backlog=1024)
            path.chmod(0o600)
            return Server(server, links, address)
        host, port = split_address(address)
        door, bound = await open_door(host, port, accept, strangers, tls=tls, tune=_tune)
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno else str(exc)
        raise StateError(f"cannot listen on {address}: {why}") from exc
    return Server(door, links, join_address(host, bound))


async def connect(
    address: str,
    handler: Handler,
    token: bytes,
    *,
    tls: ssl.SSLContext | None = None,
    timeout_s: float = 10.0,
) -> Link:
    """A link on which both sides have proved the token.

    RetryableError if no server answers, AuthError if the tokens differ.
    """
    loop = asyncio.get_running_loop()

    def make() -> Link:
        return Link(handler, token)

    link: Link | None = None
    try:
        async with asyncio.timeout(timeout_s):
            if address.startswith("unix:"):
                path = address.removeprefix("unix:")
                _, link = await loop.create_unix_connection(make, path)
            else:
                host, port = split_address(address)
                _, link = await loop.create_connection(
                    make, host, port, ssl=tls, server_hostname=host if tls else None
                )
            await link.ready
            return link
    except ssl.SSLError as exc:
        raise AuthError(_tls_problem(exc)) from exc
    except (OSError, TimeoutError) as exc:
        if link is not None:
            link.abort()
        why = exc.strerror if isinstance(exc, OSError) and exc.strerror else "no answer in time"
        if link is not None and tls is None:
            why += " on an open connection; does it want TLS?"
        raise RetryableError(f"{address}: {why}") from exc


def _tls_problem(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted here ({error.verify_message})"
    if error.reason == "WRONG_VERSION_NUMBER":
        return "it does not speak TLS"
    return f"TLS failed ({error.reason or error})"


def split_address(address: str) -> tuple[str, int]:
    """ "HOST:PORT" or "[V6]:PORT" in its parts."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The parts as one text, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
