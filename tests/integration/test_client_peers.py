# SPDX-License-Identifier: Apache-2.0
"""The worker's client against servers that refuse, hang up or are not what they should be."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.client import AgentClient, connection
from holdfast.model.errors import (
    AuthError,
    FencedError,
    HoldfastError,
    ProtocolError,
    RejectedError,
    RetryableError,
    TimedOutError,
    UsageError,
)
from holdfast.protocol import codec
from holdfast.protocol import messages as m

LIMIT_S = 120.0
TOKEN = b"0123456789abcdef"


def add(client: AgentClient, timeout_s: float = LIMIT_S) -> None:
    client.ask(m.KvAdd(client.scope, "count", 1), m.Number, timeout_s)


class Peer:
    """Plays a server's part on a Unix socket, one connection after another."""

    def __init__(self, path: Path, play: Callable[["Peer"], None]) -> None:
        self.address = f"unix:{path}"
        self._play = play
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._reader = codec.FrameReader()
        self._link = self._listener
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                self._link, _ = self._listener.accept()
            except OSError:
                return
            self._reader = codec.FrameReader()
            with self._link:
                self._play(self)

    def send(self, data: bytes) -> None:
        self._link.sendall(data)

    def receive(self) -> m.Frame | None:
        while data := self._link.recv(1 << 16):
            for frame in self._reader.feed(data):
                return frame
        return None

    def shake_hands(self, token: bytes = TOKEN) -> None:
        nonce = os.urandom(codec.NONCE_BYTES)
        self.send(codec.encode(m.Challenge(m.VERSION, nonce)))
        proof = self.receive()
        assert proof is not None
        assert isinstance(proof.body, m.Proof)
        assert codec.client_mac(TOKEN, nonce, proof.body.nonce) == proof.body.mac
        self.send(codec.encode(m.Welcome(codec.server_mac(token, nonce, proof.body.nonce))))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT_S)


@pytest.fixture
def playing(tmp_path: Path) -> Iterator[Callable[[Callable[[Peer], None]], AgentClient]]:
    with contextlib.ExitStack() as stack:

        def start(play: Callable[[Peer], None]) -> AgentClient:
            peer = Peer(tmp_path / "socket", play)
            stack.callback(peer.close)
            client = AgentClient(peer.address, TOKEN, scope=1)
            stack.callback(client.close)
            return client

        yield start


Playing = Callable[[Callable[[Peer], None]], AgentClient]


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("timeout", TimedOutError),
        ("fenced", FencedError),
        ("stale", FencedError),
        ("auth", AuthError),
        ("usage", UsageError),
        ("rejected", RejectedError),
        ("unheard of", RejectedError),
    ],
)
def test_a_refusal_names_the_reaction(
    playing: Playing, kind: str, error: type[HoldfastError]
) -> None:
    def play(peer: Peer) -> None:
        peer.shake_hands()
        while frame := peer.receive():
            peer.send(codec.encode(m.Refused(kind, "because"), frame.call))

    client = playing(play)
    with pytest.raises(error, match="because") as caught:
        add(client)
    assert type(caught.value) is error


def test_a_request_is_repeated_under_its_session_and_number(playing: Playing) -> None:
    seen: list[tuple[str, int]] = []

    def play(peer: Peer) -> None:
        peer.shake_hands()
        while frame := peer.receive():
            seen.append((frame.session, frame.seq))
            if len(seen) < 4:
                return
            peer.send(codec.encode(m.Number(1), frame.call))

    client = playing(play)
    add(client)
    add(client)
    (session, seq), *_ = seen
    assert session
    assert seen == [(session, seq)] * 4 + [(session, seq + 1)]


def test_a_server_without_the_token_is_not_believed(playing: Playing) -> None:
    client = playing(lambda peer: peer.shake_hands(b"another token"))
    with pytest.raises(AuthError, match="does not hold the token"):
        add(client)


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        codec.encode(m.Done()),
        codec.encode(m.Challenge(m.VERSION + 1, b"x" * codec.NONCE_BYTES)),
        b"\x02\x00\x00\x00\xc1\xc1",
    ],
    ids=["another protocol", "wrong message", "newer version", "no MessagePack"],
)
def test_a_stranger_is_a_protocol_error(playing: Playing, greeting: bytes) -> None:
    def play(peer: Peer) -> None:
        peer.send(greeting)
        peer.receive()

    with pytest.raises(ProtocolError):
        add(playing(play))


def test_an_answer_to_another_call_is_a_protocol_error(playing: Playing) -> None:
    def play(peer: Peer) -> None:
        peer.shake_hands()
        while frame := peer.receive():
            peer.send(codec.encode(m.Number(1), frame.call + 1))

    with pytest.raises(ProtocolError):
        add(playing(play))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up soon."""
    monkeypatch.setattr(connection, "MARGIN_S", 0.5)


@pytest.mark.usefixtures("impatient")
def test_an_absent_server_is_retryable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    client = AgentClient(f"tcp:127.0.0.1:{port}", TOKEN, scope=1)
    with pytest.raises(RetryableError, match=rf"127.0.0.1:{port} did not answer"):
        add(client, timeout_s=0.1)


@pytest.mark.usefixtures("impatient")
def test_a_silent_server_is_retryable() -> None:
    """It accepts, and then says nothing: a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = AgentClient(f"tcp:127.0.0.1:{server.getsockname()[1]}", TOKEN, scope=1)
        with pytest.raises(RetryableError):
            add(client, timeout_s=0.1)
