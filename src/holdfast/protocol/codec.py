# SPDX-License-Identifier: Apache-2.0
"""Frames to bytes and back: a 4-byte little-endian length, then MessagePack of one `Frame`."""

import hashlib
import hmac
import struct
from collections.abc import Iterator

import msgspec

from holdfast.model.errors import ProtocolError
from holdfast.protocol.messages import NONCE_BYTES as NONCE_BYTES
from holdfast.protocol.messages import VERSION, AnyMessage, Frame

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""No message of ours comes near; more is a mistake or an attack."""

HANDSHAKE_BYTES_MAX = 1024
"""The limit until the peer has proved the token."""

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(
    body: AnyMessage, call: int = 0, session: str = "", seq: int = 0, position: int = 0
) -> bytes:
    """One frame, ready to be written."""
    payload = _encoder.encode(Frame(call, body, session, seq, position))
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"{type(body).__name__} of {len(payload)} bytes is over the frame limit "
            f"of {FRAME_BYTES_MAX} bytes"
        )
    return _LENGTH.pack(len(payload)) + payload


def decode(payload: bytes | bytearray | memoryview) -> Frame:
    """One frame from its payload. Validates everything and executes nothing."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"not a frame of ours: {exc}") from exc


class FrameReader:
    """Cuts a byte stream into frames. Holds at most one frame and what follows it."""

    def __init__(self, limit: int = FRAME_BYTES_MAX) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes; raises ProtocolError on bytes that are not ours."""
        buffer = self._buffer
        buffer += data
        position = 0
        while len(buffer) - position >= 4:
            (length,) = _LENGTH.unpack_from(buffer, position)
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit}")
            end = position + 4 + length
            if len(buffer) < end:
                break
            payload = bytes(buffer[position + 4 : end])
            position = end
            # Consumed before it is handed out, so that a reader that stops half-way loses nothing.
            if position == len(buffer):
                buffer.clear()
                position = 0
            yield decode(payload)
        if position:
            del buffer[:position]


def client_mac(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What a client proves: it holds the token, for this server's challenge."""
    return _mac(token, b"client", server_nonce, client_nonce)


def server_mac(token: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """What a server proves. The label differs, so that no side can echo the other's proof."""
    return _mac(token, b"server", server_nonce, client_nonce)


def _mac(token: bytes, label: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = b"holdfast/%d/%b/%b/%b" % (VERSION, label, server_nonce, client_nonce)
    return hmac.digest(token, text, hashlib.sha256)


def same_mac(one: bytes, other: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(one, other)
