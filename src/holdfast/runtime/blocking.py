# SPDX-License-Identifier: Apache-2.0
"""Blocking connections: for threads, and for processes that run no event loop of ours.

What both ends have in common is here: dialling, the handshake, time-outs, and which error a refusal
is. The caller decides how frames are read: one that gets raw bytes between frames must not read
ahead.
"""

import os
import socket
import time
from collections.abc import Callable

from holdfast.model.errors import (
    AuthError,
    FencedError,
    HoldfastError,
    ProtocolError,
    RejectedError,
    TimedOutError,
    UsageError,
)
from holdfast.protocol import codec
from holdfast.protocol import messages as m

HANDSHAKE_S = 10.0

_ERRORS: dict[str, type[HoldfastError]] = {
    "timeout": TimedOutError,
    "fenced": FencedError,
    "stale": FencedError,
    "auth": AuthError,
    "usage": UsageError,
}

Send = Callable[[bytes], None]
Receive = Callable[[], m.Frame]


def dial(address: str, timeout_s: float) -> socket.socket:
    """A connection to "unix:PATH", "tcp:HOST:PORT" or "HOST:PORT"; OSError if there is none."""
    if address.startswith("unix:"):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(timeout_s)
        try:
            peer.connect(address.removeprefix("unix:"))
        except OSError:
            peer.close()
            raise
        return peer
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    peer = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    tune(peer)
    return peer


def tune(peer: socket.socket) -> None:
    """Small messages at once, and the loss of the other host noticed even during a long wait."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def left(until: float) -> float:
    """The seconds until this moment of the monotonic clock; TimeoutError once it has passed."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("no answer in time")
    return left_s


def prove_token(address: str, token: bytes, send: Send, receive: Receive) -> None:
    """The client's side of the handshake: both ends hold the token, or an error says what is
    wrong."""
    challenge = receive().body
    if isinstance(challenge, m.Refused):
        raise refusal(challenge)
    if not isinstance(challenge, m.Challenge):
        raise ProtocolError(f"{type(challenge).__name__} came instead of a challenge")
    if challenge.version != m.VERSION:
        raise ProtocolError(
            f"{address} speaks protocol {challenge.version}, this client {m.VERSION}"
        )
    nonce = os.urandom(codec.NONCE_BYTES)
    mac = codec.client_mac(token, challenge.nonce, nonce)
    send(codec.encode(m.Proof(m.VERSION, nonce, mac)))
    welcome = receive().body
    if isinstance(welcome, m.Refused):
        raise refusal(welcome)
    expected = codec.server_mac(token, challenge.nonce, nonce)
    if not isinstance(welcome, m.Welcome) or not codec.same_mac(expected, welcome.mac):
        raise AuthError(f"{address} does not hold the token of the job")


def demand_token(token: bytes, send: Send, receive: Receive) -> None:
    """The server's side of the handshake; a client that fails it is told why, and an error is
    raised."""
    nonce = os.urandom(codec.NONCE_BYTES)
    send(codec.encode(m.Challenge(m.VERSION, nonce)))
    proof = receive().body
    if not isinstance(proof, m.Proof):
        raise ProtocolError(f"{type(proof).__name__} came instead of a proof")
    if proof.version != m.VERSION:
        problem = m.Refused("usage", f"protocol {proof.version} is not {m.VERSION}")
    elif not codec.same_mac(codec.client_mac(token, nonce, proof.nonce), proof.mac):
        problem = m.Refused("auth", "wrong token: this is not the token of the job")
    else:
        send(codec.encode(m.Welcome(codec.server_mac(token, nonce, proof.nonce))))
        return
    send(codec.encode(problem))
    raise refusal(problem)


def refusal(refused: m.Refused) -> HoldfastError:
    """The error that a refusal means for the caller."""
    return _ERRORS.get(refused.kind, RejectedError)(refused.message)
