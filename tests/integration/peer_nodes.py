# SPDX-License-Identifier: Apache-2.0
"""Nodes that hold parts, and a network between them that fails on demand, for test_peers.py."""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.parity import BlockBuilder
from holdfast.checkpoint.peer_server import PeerServer, SlotReader
from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.receivers import AlreadyKept, ImageReceiver, Receiver
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.model.checkpoint import Shape, Version, rank_part
from holdfast.model.errors import HoldfastError, RejectedError, StateError
from holdfast.model.parity import Block
from holdfast.protocol.checkpoints import PartGet, PartPut

LIMIT_S = 120.0
TOKEN = b"0123456789abcdef"
DIRECTORY = "/checkpoints"
VERSION = Version(2, 2**24 + 1)
SHAPE = Shape(world_size=8, shared=False)
PART = rank_part(3)
MB = 2**20
GET = PartGet(DIRECTORY, VERSION, PART)


@dataclass
class Shelf:
    """The slots of one node: what the vault is for the service, in its simplest form."""

    folder: Path
    quota: int = 10**12
    sealed: dict[str, SlotReader] = field(default_factory=dict)
    partial: dict[tuple[str, str], ImageReceiver] = field(default_factory=dict)
    builders: dict[str, BlockBuilder] = field(default_factory=dict)
    opened: list[Slot] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def room(self, size: int) -> Slot:
        with self.lock:
            slot = Slot.create(self.folder / str(len(self.opened)), size)
            self.opened.append(slot)
        return slot

    def save(self, contents: dict[str, bytes], part: str = PART) -> SlotReader:
        """A part as a worker would leave it, with its digest."""
        files, length = lay_out((name, len(content)) for name, content in contents.items())
        slot = self.room(length)
        slot.begin(VERSION)
        for file in files:
            slot.data[file.offset : file.offset + file.length] = contents[file.name]
        slot.seal(SlotMeta(DIRECTORY, part, VERSION, SHAPE, files))
        return self.keep(slot)

    def keep(self, slot: Slot, digest: int | None = None) -> SlotReader:
        meta = slot.read()
        assert meta is not None
        if digest is None:
            with slot.data[: meta.data_length] as data:
                digest = digest_of(data)
        reader = self.sealed[meta.part] = SlotReader(slot, meta, digest)
        return reader

    @contextlib.contextmanager
    def reading(self, get: PartGet) -> Iterator[SlotReader]:
        found = self.sealed.get(get.part)
        if found is None or found.offer.holding.version != get.version:
            raise RejectedError(f"{get.part} of step {get.version.step} is not here")
        yield found

    @contextlib.contextmanager
    def receiving(self, put: PartPut) -> Iterator[Receiver]:
        if put.block:
            block = Block.parse(put.block)
            assert block is not None
            with self.lock:
                builder = self.builders.get(put.block)
                if builder is None:
                    builder = self.builders[put.block] = BlockBuilder(block, put, self.room)
            yield builder.receiver(put)
            if builder.is_sealed and builder.slot is not None:
                self.keep(builder.slot)
            return
        kept = self.sealed.get(put.holding.part)
        if kept is not None and kept.offer.holding == put.holding:
            yield AlreadyKept(put.total)
            return
        if put.total > self.quota:
            raise RejectedError(f"no room for {put.total} bytes")
        key = (put.holding.part, put.block)
        receiver = self.partial.get(key)
        if receiver is None:
            receiver = self.partial[key] = ImageReceiver(self.room(put.holding.length), put)
        yield receiver
        if receiver.is_sealed:
            self.keep(self.partial.pop(key).slot)

    def close(self) -> None:
        for slot in self.opened:
            with contextlib.suppress(StateError):
                slot.close()


@dataclass
class Node:
    """One agent's shelf and its service."""

    shelf: Shelf
    server: PeerServer

    def client(self, address: str = "", idle_s: float = 10.0, token: bytes = TOKEN) -> PeerClient:
        return PeerClient(address or self.server.address, token, None, idle_s)


@dataclass(frozen=True)
class Fault:
    """What happens on one connection, after so many bytes in one direction."""

    kind: str
    """ "cut", "flip" (one bit of the next byte) or "stall"."""
    after: int
    upload: bool = False


class Proxy:
    """Stands between two agents; one fault per connection, then none."""

    def __init__(self, address: str, *faults: Fault) -> None:
        self._to = address
        self._faults = list(faults)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.carried = 0
        """Bytes in the direction of the fault, or of the download."""
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for each in (self._listener, *self._sockets):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self._to.rpartition(":")
            far = socket.create_connection((host, int(port)))
            fault = self._faults[self.connections] if self.connections < len(self._faults) else None
            self.connections += 1
            self._sockets += [near, far]
            self._threads.append(threading.Thread(target=self._join, args=(near, far, fault)))
            self._threads[-1].start()

    def _join(self, near: socket.socket, far: socket.socket, fault: Fault | None) -> None:
        up, down = (fault, None) if fault is not None and fault.upload else (None, fault)
        upload = threading.Thread(target=self._carry, args=(near, far, up, True))
        upload.start()
        self._carry(far, near, down, False)
        upload.join(LIMIT_S)
        # Closed and not only shut down: as when a process dies.
        near.close()
        far.close()

    def _carry(
        self, source: socket.socket, sink: socket.socket, fault: Fault | None, upload: bool
    ) -> None:
        position = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if fault is not None and position + len(data) > fault.after:
                    if fault.kind == "flip":
                        data[fault.after - position] ^= 4
                        fault = None
                    else:
                        sink.sendall(data[: fault.after - position])
                        if fault.kind == "cut":
                            break
                        source.recv(1, socket.MSG_PEEK)  # Stall: nothing goes on from here.
                        while source.recv(65536):
                            pass
                        break
                sink.sendall(data)
                position += len(data)
                if not upload or len(data) > 4096:
                    self.carried += len(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def play(script: Callable[[socket.socket], None]) -> tuple[str, Callable[[], None]]:
    """A server that does what the script says on every connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError, HoldfastError):
                peer.settimeout(LIMIT_S)
                script(peer)

    thread = threading.Thread(target=serve)
    thread.start()

    def stop() -> None:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)
        listener.close()

    return f"127.0.0.1:{listener.getsockname()[1]}", stop


def contents(size: int = 3 * MB) -> dict[str, bytes]:
    return {"weights": os.urandom(size), "empty": b"", "small": b"\x00\x01"}


def image(reader: SlotReader) -> bytes:
    return bytes(reader.slot.data[: reader.offer.total])


def fetch(client: PeerClient, target: Callable[[int], Slot], timeout_s: float = LIMIT_S) -> Slot:
    offer = client.look(GET, timeout_s)
    slot = target(offer.holding.length)
    client.fetch(GET, offer, slot, timeout_s)
    return slot


@contextlib.contextmanager
def started_in(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts nodes, and ends them."""
    nodes: list[Node] = []

    def start(tls: ssl.SSLContext | None = None, idle_s: float = 10.0) -> Node:
        folder = tmp_path / f"node-{len(nodes)}"
        folder.mkdir()
        shelf = Shelf(folder)
        nodes.append(Node(shelf, PeerServer("127.0.0.1", TOKEN, tls, shelf, idle_s)))
        return nodes[-1]

    yield start
    for node in nodes:
        node.server.close()
        node.shelf.close()


@contextlib.contextmanager
def targets_in(tmp_path: Path) -> Iterator[Callable[[int], Slot]]:
    """Slots to fetch into."""
    slots: list[Slot] = []

    def make(size: int) -> Slot:
        slots.append(Slot.create(tmp_path / f"target-{len(slots)}", size))
        return slots[-1]

    yield make
    for slot in slots:
        slot.close()
