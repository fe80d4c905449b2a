# SPDX-License-Identifier: Apache-2.0
"""A connection between two agents that carries frames and, between them, raw bytes of slots.

It never reads past the end of a frame, as raw bytes may follow. Every single operation has a
time-out: a peer that dies or stops in the middle of a frame, or of the bytes, causes an OSError.
"""

import contextlib
import socket
import time

from holdfast.model.errors import ProtocolError
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.runtime.blocking import HANDSHAKE_S, demand_token, dial, left, prove_token
from holdfast.runtime.doors import interrupt
from holdfast.runtime.tls import secure_pinned

IDLE_S = 10.0
"""A peer that neither sends nor takes PACE_BYTES in this time, or all that is left, is given up.

A copy that waits holds its slot, and training stops when slots run out. So this is no longer than
it takes to tell a dead peer from a busy one. The deadline limits how slow a peer may be that makes
progress."""

PACE_BYTES = 64 * 1024
"""Less is no progress: otherwise a peer that moves a byte now and then would hold a place for
ever."""

_PIECE = 1024 * 1024
_LENGTH_BYTES = 4


class Wire:
    """One connection. `deadline` is when all must be over; IDLE_S holds for each operation."""

    def __init__(
        self, peer: socket.socket, deadline: float = float("inf"), idle_s: float = IDLE_S
    ) -> None:
        self.deadline = deadline
        self.frame_bytes_max = codec.HANDSHAKE_BYTES_MAX
        self._peer = peer
        self._idle_s = idle_s
        self._sent_call = 0

    @classmethod
    def connect(
        cls,
        address: str,
        token: bytes,
        certificate: str | None,
        deadline: float,
        idle_s: float = IDLE_S,
    ) -> "Wire":
        """A connection on which both sides have proved the token; OSError if no peer answers.

        `certificate` is the fingerprint of the only one that is accepted; None: without TLS.
        """
        timeout_s = min(HANDSHAKE_S, idle_s, left(deadline))
        with contextlib.ExitStack() as undo:
            peer = dial(address, timeout_s)
            undo.callback(peer.close)
            if certificate is not None:
                peer = secure_pinned(peer, address, certificate)
                undo.callback(peer.close)
            wire = cls(peer, min(deadline, time.monotonic() + timeout_s), idle_s)
            prove_token(address, token, wire.send_bytes, wire.receive)
            undo.pop_all()
        wire.deadline = deadline
        wire.frame_bytes_max = codec.FRAME_BYTES_MAX
        return wire

    @classmethod
    def accept(cls, peer: socket.socket, token: bytes, idle_s: float = IDLE_S) -> "Wire":
        """The server's end: the client has proved the token."""
        wire = cls(peer, time.monotonic() + min(HANDSHAKE_S, idle_s), idle_s)
        demand_token(token, wire.send_bytes, wire.receive)
        wire.deadline = float("inf")
        wire.frame_bytes_max = codec.FRAME_BYTES_MAX
        return wire

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._peer.close()

    def interrupt(self) -> None:
        """Break it off from another thread: whatever waits on it gets an error at once."""
        interrupt(self._peer)

    # ---- frames ---------------------------------------------------------------------------------

    def ask(self, body: m.Call) -> m.AnyMessage:
        """Send a request and wait for its answer."""
        self._sent_call += 1
        self.send(body, self._sent_call)
        return self.answer()

    def answer(self) -> m.AnyMessage:
        """Wait for the (next) answer to the last request."""
        frame = self.receive()
        if frame.call != self._sent_call:
            raise ProtocolError(f"call {frame.call} was answered instead of {self._sent_call}")
        return frame.body

    def send(self, body: m.AnyMessage, call: int) -> None:
        self.send_bytes(codec.encode(body, call))

    def send_bytes(self, data: bytes) -> None:
        self._limit_wait(_Pace(self._idle_s))
        self._peer.sendall(data)

    def receive(self) -> m.Frame:
        """The next frame, and not a byte more."""
        prefix = bytearray(_LENGTH_BYTES)
        self.receive_into(memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > self.frame_bytes_max:
            raise ProtocolError(
                f"a frame of {length} bytes is over the limit of {self.frame_bytes_max}"
            )
        payload = bytearray(length)
        self.receive_into(memoryview(payload))
        return codec.decode(payload)

    # ---- raw bytes ------------------------------------------------------------------------------

    def receive_into(self, view: memoryview) -> None:
        """Fill the view. Anything less is an error: a closed connection never looks like data."""
        position, pace = 0, _Pace(self._idle_s)
        while position < len(view):
            self._limit_wait(pace)
            with view[position:] as rest:
                count = self._peer.recv_into(rest)
            if count == 0:
                raise ConnectionResetError("the peer closed the connection in the middle")
            position += count
            pace.moved(count)

    def send_view(self, view: memoryview) -> None:
        """Send these bytes. They may change as soon as this returns."""
        # From the mapping, not by sendfile(2): that was no faster here, cannot go through TLS, and
        # still reads the file's pages after it has returned.
        # Not by sendall(): its time-out would be for all of it, however well the peer gets on.
        position, pace = 0, _Pace(self._idle_s)
        while position < len(view):
            self._limit_wait(pace)
            with view[position : position + _PIECE] as piece:
                count = self._peer.send(piece)
            position += count
            pace.moved(count)

    def _limit_wait(self, pace: "_Pace") -> None:
        self._peer.settimeout(min(left(pace.until), left(self.deadline)))


class _Pace:
    """Until when the next PACE_BYTES have to be moved."""

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._bytes = 0
        self.until = time.monotonic() + idle_s

    def moved(self, count: int) -> None:
        self._bytes += count
        if self._bytes >= PACE_BYTES:
            self._bytes = 0
            self.until = time.monotonic() + self._idle_s
