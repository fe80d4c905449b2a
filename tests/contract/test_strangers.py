# SPDX-License-Identifier: Apache-2.0
"""Every port under connections that prove nothing: a peer that can prove itself is served.

One suite for the byte service between agents, the framed protocol (TCP, TLS, Unix socket) and HTTP
(the master's and the operator's).
"""

import asyncio
import contextlib
import functools
import selectors
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from starlette.types import ASGIApp

from holdfast.checkpoint import peer_server
from holdfast.checkpoint.wire import Wire
from holdfast.master import http as master_http
from holdfast.platforms.kubernetes.operator.health import Health
from holdfast.platforms.kubernetes.operator.leader import Leadership
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import PartBytes, PartGet
from holdfast.runtime import http
from holdfast.runtime.blocking import dial, prove_token
from holdfast.runtime.tls import Identity, new_identity
from holdfast.runtime.transport import Link, listen
from tests.integration.peer_nodes import DIRECTORY, GET, MB, PART, TOKEN, VERSION, Node, contents
from tests.integration.peer_nodes import started_in as nodes_in
from tests.waiting import until

LIMIT_S = 120.0
MORE = 40
"""How many strangers come beyond those that a port keeps."""
STRANGERS_MAX = 256
"""For ports that would keep thousands."""
VALUE_BYTES = 128 * 1024
UNSENT_BYTES_MAX = 8 * MB
IN_KERNEL_BYTES = 12 * MB
"""More than a kernel holds of the answers to a peer that reads nothing. Its limits to buffers may
be higher (32 MB in tcp_rmem are usual), but a receiver's buffer only grows as it is read."""


class Port(ABC):
    """One port under test, with the strangers it keeps and how a peer that belongs asks there."""

    def __init__(self, address: str, strangers_max: int, tls: bool = False) -> None:
        self.address = address
        self.strangers_max = strangers_max
        self.tls = tls

    def connect(self) -> socket.socket:
        return dial(self.address, LIMIT_S)

    def secured(self) -> socket.socket:
        peer = self.connect()
        return trusting().wrap_socket(peer) if self.tls else peer

    @abstractmethod
    def serve(self) -> None:
        """Ask as a peer that belongs, and be answered."""

    @abstractmethod
    def first_words(self) -> bytes:
        """The beginning of what such a peer says."""


class FramedPort(Port):
    def serve(self) -> None:
        with self.secured() as peer:
            wire = Wire(peer, idle_s=LIMIT_S)
            prove_token(self.address, TOKEN, wire.send_bytes, wire.receive)
            wire.frame_bytes_max = codec.FRAME_BYTES_MAX
            assert wire.ask(m.KvCount(1)) == m.Number(7)

    def first_words(self) -> bytes:
        return codec.encode(m.Proof(m.VERSION, bytes(32), bytes(32)))


class BytePort(FramedPort):
    def serve(self) -> None:
        with self.secured() as peer:
            wire = Wire(peer, idle_s=LIMIT_S)
            prove_token(self.address, TOKEN, wire.send_bytes, wire.receive)
            wire.frame_bytes_max = codec.FRAME_BYTES_MAX
            answer = wire.ask(PartGet(DIRECTORY, VERSION, PART, size=0))
            assert isinstance(answer, PartBytes)


class HttpPort(Port):
    def serve(self) -> None:
        with self.secured() as peer:
            peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: t\r\n\r\n")
            assert read_all(peer).startswith(b"HTTP/1.1 200")

    def first_words(self) -> bytes:
        return b"GET /healthz HTTP/1.1\r\nHost: " + b"t" * 100


def read_all(peer: socket.socket) -> bytes:
    data = bytearray()  # Bytes would be copied for each piece: for 32 MB, 8 GB in all.
    while more := peer.recv(65536):
        data += more
    return bytes(data)


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class Seven:
    """Answers every request."""

    def opened(self, link: Link) -> None:
        """Everybody may ask."""

    def received(self, link: Link, frame: m.Frame) -> None:
        link.answer(m.Number(7), frame.call)

    def closed(self, link: Link) -> None:
        """Nobody is missed."""


class Large(Seven):
    """Has a large value for whoever asks for one, and knows how much it has answered each."""

    def __init__(self) -> None:
        self.links: list[Link] = []
        self.answered: dict[int, int] = {}

    def opened(self, link: Link) -> None:
        self.links.append(link)
        self.answered[link.number] = 0

    def received(self, link: Link, frame: m.Frame) -> None:
        if not isinstance(frame.body, m.KvCheck):
            return super().received(link, frame)
        self.answered[link.number] += VALUE_BYTES
        link.answer(m.Value(bytes(VALUE_BYTES)), frame.call)

    def closed(self, link: Link) -> None:
        self.links.remove(link)


class LoopThread:
    """An event loop as processes of ours have it, in a thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """What comes meanwhile, the loop finds all at once."""
        stands, go_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            go_on.wait(LIMIT_S)

        self._loop.call_soon_threadsafe(stand)
        assert stands.wait(LIMIT_S)
        try:
            yield
        finally:
            go_on.set()

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()


@contextlib.contextmanager
def framed(address: str, tls: ssl.SSLContext | None) -> Iterator[Port]:
    thread = LoopThread()
    server = thread.run(listen(address, Seven(), TOKEN, tls=tls, strangers_max=STRANGERS_MAX))
    yield FramedPort(server.address, STRANGERS_MAX, tls is not None)
    thread.run(server.close())
    thread.end()


@contextlib.contextmanager
def served(application: ASGIApp, tls: ssl.SSLContext | None) -> Iterator[Port]:
    thread = LoopThread()
    server = thread.run(http.HttpServer.start("127.0.0.1:0", application, tls=tls))
    yield HttpPort(server.address, http.STRANGERS_MAX, tls is not None)
    thread.run(server.close())
    thread.end()


@contextlib.contextmanager
def master_page(tls: ssl.SSLContext | None) -> Iterator[Port]:
    thread = LoopThread()
    server = thread.run(master_http.serve("127.0.0.1:0", dict, TOKEN, tls=tls))
    yield HttpPort(server.address, http.STRANGERS_MAX, tls is not None)
    thread.run(server.close())
    thread.end()


@contextlib.contextmanager
def bytes_of(folder: Path, tls: ssl.SSLContext | None, idle_s: float = LIMIT_S) -> Iterator[Port]:
    with nodes_in(folder) as start:
        node: Node = start(tls, idle_s)
        node.shelf.save(contents(8 * MB))
        yield BytePort(node.server.address, peer_server.STRANGERS_MAX, tls is not None)


def operator_page() -> contextlib.AbstractContextManager[Port]:
    """Whether the process runs does not depend on who leads."""
    return served(Health(cast(Leadership, None)).application(), None)


@pytest.fixture(scope="module")
def identity() -> Identity:
    return new_identity()


PORTS: dict[str, Callable[[Path, ssl.SSLContext], contextlib.AbstractContextManager[Port]]] = {
    "bytes": lambda folder, tls: bytes_of(folder, None),
    "bytes-tls": lambda folder, tls: bytes_of(folder, tls),
    "master": lambda folder, tls: framed("127.0.0.1:0", None),
    "master-tls": lambda folder, tls: framed("127.0.0.1:0", tls),
    "agent": lambda folder, tls: framed(f"unix:{folder}/agent", None),
    "http": lambda folder, tls: master_page(None),
    "http-tls": lambda folder, tls: master_page(tls),
    "operator": lambda folder, tls: operator_page(),
}


@pytest.fixture(params=PORTS)
def port(request: pytest.FixtureRequest, tmp_path: Path, identity: Identity) -> Iterator[Port]:
    with PORTS[request.param](tmp_path, identity.tls) as port:
        yield port


def crowd(
    port: Port, stack: contextlib.ExitStack, words: bytes = b""
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Strangers in the order in which they came: those that are too many, and the rest."""
    peers = []
    for _ in range(port.strangers_max + MORE):
        peers.append(stack.enter_context(port.connect()))
        if words:
            peers[-1].sendall(words)
    return peers[:MORE], peers[MORE:]


def is_cut(peer: socket.socket) -> bool:
    """Wait for the end of the connection."""
    try:
        read_all(peer)
    except ConnectionError:
        return True
    return True


def is_held(peer: socket.socket) -> bool:
    """Whether the server has not closed it: what it said (a challenge) is not its end."""
    peer.setblocking(False)
    try:
        while data := peer.recv(65536):
            assert data
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except ConnectionError:
        return False
    return False


def test_the_oldest_of_too_many_silent_connections_is_cut(port: Port) -> None:
    with contextlib.ExitStack() as stack:
        oldest, newest = crowd(port, stack)
        assert all(is_cut(peer) for peer in oldest)
        for _ in range(5):
            port.serve()
        # Each that was served was a stranger for a moment, and so has cost one its place.
        assert all(is_held(peer) for peer in newest[5:])
    port.serve()


def test_connections_that_say_a_byte_at_a_time_keep_nobody_out(port: Port) -> None:
    with contextlib.ExitStack() as stack:
        words = port.first_words()
        oldest, newest = crowd(port, stack, words[:1])
        assert all(is_cut(peer) for peer in oldest)
        for number in range(1, 20):
            for peer in newest:
                with contextlib.suppress(ConnectionError):  # Cut, by then, for one that belongs.
                    peer.sendall(words[number : number + 1])
            port.serve()


def test_connections_that_come_again_at_once_keep_nobody_out(port: Port) -> None:
    over = threading.Event()

    def flood() -> None:
        with selectors.DefaultSelector() as cut:
            for _ in range(port.strangers_max + MORE):
                cut.register(port.connect(), selectors.EVENT_READ)
            while not over.is_set():
                for key, _ in cut.select(0.05):
                    peer = key.fileobj
                    assert isinstance(peer, socket.socket)
                    if not is_held(peer):
                        cut.unregister(peer)
                        peer.close()
                        cut.register(port.connect(), selectors.EVENT_READ)
            for key in list(cut.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(10):
            served_at_last(port)
    finally:
        over.set()
        flooding.join(LIMIT_S)


def served_at_last(port: Port) -> None:
    """As clients do: one that was cut in a flood comes again."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return port.serve()
        except (ConnectionError, ssl.SSLEOFError):
            assert time.monotonic() < deadline


@pytest.mark.parametrize("name", ["http", "http-tls", "operator"])
def test_those_who_never_read_their_answer_keep_nobody_out(
    name: str, tmp_path: Path, identity: Identity
) -> None:
    with PORTS[name](tmp_path, identity.tls) as port, contextlib.ExitStack() as stack:
        request = b"GET / HTTP/1.1\r\nHost: t\r\n\r\n"
        for _ in range(port.strangers_max + MORE):
            stack.enter_context(port.secured()).sendall(request)
        for _ in range(5):
            port.serve()


@pytest.mark.parametrize("takes", [0, 1], ids=["nothing", "a byte at a time"])
def test_peers_that_hardly_read_do_not_hold_the_byte_service(tmp_path: Path, takes: int) -> None:
    """They hold the token, too: stopped processes, or worse."""
    over = threading.Event()

    def read_slowly(peers: list[socket.socket]) -> None:
        while not over.wait(0.05):
            for peer in peers:
                with contextlib.suppress(OSError):
                    peer.recv(takes)

    with bytes_of(tmp_path, None, idle_s=0.5) as port, contextlib.ExitStack() as stack:
        peers = []
        for _ in range(2 * peer_server.ANSWERS_MAX):
            peer = stack.enter_context(port.connect())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire = Wire(peer, idle_s=LIMIT_S)
            prove_token(port.address, TOKEN, wire.send_bytes, wire.receive)
            wire.send(GET, 1)
            peers.append(peer)
        reading = threading.Thread(target=read_slowly, args=(peers,))
        reading.start()
        try:
            served_at_last(port)
        finally:
            over.set()
            reading.join(LIMIT_S)


def test_peers_that_ask_for_nothing_hold_no_place(tmp_path: Path) -> None:
    with bytes_of(tmp_path, None) as port, contextlib.ExitStack() as stack:
        for _ in range(2 * peer_server.ANSWERS_MAX):
            wire = Wire(stack.enter_context(port.connect()), idle_s=LIMIT_S)
            prove_token(port.address, TOKEN, wire.send_bytes, wire.receive)
        port.serve()


def test_no_flood_cuts_a_request_that_shows_the_key() -> None:
    """Its answer is long and not read to the end when the flood comes."""
    secret = master_http.http_key(TOKEN)
    text = "x" * (32 * MB)
    thread = LoopThread()
    server = thread.run(master_http.serve("127.0.0.1:0", lambda: {"job": text}, TOKEN))
    port = HttpPort(server.address, http.STRANGERS_MAX)
    try:
        with contextlib.ExitStack() as stack:
            peer = stack.enter_context(port.connect())
            request = (
                f"GET /api/v1/job HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {secret}\r\n\r\n"
            )
            peer.sendall(request.encode())
            assert peer.recv(12) == b"HTTP/1.1 200"
            crowd(port, stack)
            assert len(read_all(peer)) > len(text)
    finally:
        thread.run(server.close())
        thread.end()


@contextlib.contextmanager
def asked_for(
    burst_bytes: int, tls: ssl.SSLContext | None, unread_s: float
) -> Iterator[tuple[socket.socket, Large]]:
    """A peer that has asked for much more than a server owes gladly, all in one turn of it."""
    thread, large = LoopThread(), Large()
    patience = functools.partial(listen, unsent_bytes_high=UNSENT_BYTES_MAX, unread_s=unread_s)
    server = thread.run(patience("127.0.0.1:0", large, TOKEN, tls=tls))
    port = FramedPort(server.address, STRANGERS_MAX, tls is not None)
    try:
        with port.secured() as peer:
            wire = Wire(peer, idle_s=LIMIT_S)
            prove_token(port.address, TOKEN, wire.send_bytes, wire.receive)
            until(lambda: large.links, LIMIT_S, "the server to know it")
            with thread.held():
                asked = burst_bytes // VALUE_BYTES
                wire.send_bytes(codec.encode(m.KvCheck(1, ("large",)), 1) * asked)
            yield peer, large
    finally:
        thread.run(server.close())
        thread.end()


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_who_reads_nothing_of_much_is_cut(has_tls: bool, identity: Identity) -> None:
    """With TLS all of it went out in one write, behind which nobody counted it."""
    burst_bytes = UNSENT_BYTES_MAX + 2 * IN_KERNEL_BYTES
    with asked_for(burst_bytes, identity.tls if has_tls else None, 1.0) as (_, large):
        until(lambda: not large.links, LIMIT_S, "the link to be cut")


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_who_reads_much_slowly_gets_all_of_it(has_tls: bool, identity: Identity) -> None:
    """More than it takes during the server's patience is owed to it long after that."""
    burst_bytes, patience_s, pause = 96 * MB, 4.0, threading.Event()
    with asked_for(burst_bytes, identity.tls if has_tls else None, patience_s) as (peer, _):
        got, slow_until = 0, time.monotonic() + 2 * patience_s
        while got < burst_bytes:
            data = peer.recv(MB)
            assert data, f"cut after {got} bytes"
            got += len(data)
            if time.monotonic() < slow_until:
                pause.wait(len(data) / (6 * MB))


@pytest.mark.parametrize("name", ["master", "master-tls", "agent"])
def test_who_asks_and_never_reads_is_cut(name: str, tmp_path: Path, identity: Identity) -> None:
    """It holds the token: a worker gone mad, or worse. Asked for is far more than the limit."""
    address = f"unix:{tmp_path}/agent" if name == "agent" else "127.0.0.1:0"
    tls = identity.tls if name == "master-tls" else None
    thread, large = LoopThread(), Large()
    server = thread.run(listen(address, large, TOKEN, tls=tls, unsent_bytes_max=UNSENT_BYTES_MAX))
    port = FramedPort(server.address, STRANGERS_MAX, tls is not None)
    try:
        for _ in range(3):
            with port.secured() as peer:
                wire = Wire(peer, idle_s=LIMIT_S)
                prove_token(port.address, TOKEN, wire.send_bytes, wire.receive)
                until(lambda: large.links, LIMIT_S, "the server to know it")
                with thread.held():
                    wire.send_bytes(codec.encode(m.KvCheck(1, ("large",)), 1) * 500)
                port.serve()
                most = UNSENT_BYTES_MAX + VALUE_BYTES + IN_KERNEL_BYTES
                assert max(large.answered.values()) <= most
                # Without a byte read: an answer that was taken would be owed no longer.
                until(lambda: not large.links, LIMIT_S, "the link to be cut")
        port.serve()
    finally:
        thread.run(server.close())
        thread.end()
