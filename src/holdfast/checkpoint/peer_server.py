# SPDX-License-Identifier: Apache-2.0
"""The byte service of an agent: other agents fetch parts here, and leave copies of theirs.

After the handshake a connection carries one request after another:

    PartGet -> PartBytes, then that many raw bytes
    PartPut -> PartWanted(offset), then the raw bytes from there on come, -> Done

Either may be refused instead. A thread serves each connection, as bytes are moved by blocking
calls. How many requests are answered at once is limited; the others wait. Connections that have not
proved the token are limited too, and cut for newer ones: they keep no peer waiting.
"""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from holdfast.checkpoint.digests import digest_of
from holdfast.checkpoint.receivers import Receiver
from holdfast.checkpoint.slots import Slot, SlotMeta
from holdfast.checkpoint.wire import IDLE_S, Wire
from holdfast.model.checkpoint import Holding, Version
from holdfast.model.errors import HoldfastError, ProtocolError, RejectedError, StateError
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import PartBytes, PartGet, PartPut, PartWanted
from holdfast.runtime.blocking import tune
from holdfast.runtime.doors import ACCEPT_PAUSE_S, Strangers, interrupt
from holdfast.runtime.transport import join_address

ANSWERS_MAX = 16
"""Requests that are answered at once."""
STRANGERS_MAX = 128
CLOSING_S = 5.0
"""How long the threads may take to end."""


class SlotReader:
    """A sealed slot of this node, to be read or sent; `digest` is that of its data."""

    def __init__(self, slot: Slot, meta: SlotMeta, digest: int) -> None:
        self.slot = slot
        is_parity = bool(meta.contributions)
        with slot.image() as image:
            total = len(image)
        with slot.data[meta.data_length : total] as packed:
            meta_digest = digest_of(packed)
        holding = Holding(
            meta.version, meta.shape, meta.part, meta.data_length, digest, parity=is_parity
        )
        self.offer = PartBytes(holding, 0, total, meta_digest)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view with the image's bytes from `offset` on."""
        if offset + len(view) > self.offer.total:
            raise StateError(f"{self.slot.path} ends at byte {self.offer.total}")
        view[:] = self.slot.data[offset : offset + len(view)]


class Shelf(Protocol):
    """The slots that the service gives from and receives into. Called from many threads."""

    def reading(self, get: PartGet) -> AbstractContextManager[SlotReader]:
        """The part, held still until the end, with its digest; RejectedError if it is not here."""

    def receiving(self, put: PartPut) -> AbstractContextManager[Receiver]:
        """A place for the part, the same one again after a broken connection, or AlreadyKept.

        RejectedError if there is no room. At the end without an error the part is sealed;
        otherwise what has come is kept for a while. Never called twice at once for one part.
        """


@dataclass(eq=False, slots=True)
class _Upload:
    """A part that is being received."""

    wire: Wire
    is_over: threading.Event = field(default_factory=threading.Event)


class PeerServer:
    """Listens until it is closed."""

    def __init__(
        self,
        host: str,
        token: bytes,
        tls: ssl.SSLContext | None,
        shelf: Shelf,
        idle_s: float = IDLE_S,
    ) -> None:
        """Bind to a port that the kernel chooses; StateError if that fails."""
        self._token = token
        self._tls = tls
        self._shelf = shelf
        self._idle_s = idle_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        except OSError as exc:
            raise StateError(f"cannot listen on {host}: {exc.strerror}") from exc
        tune(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self.address = join_address(host, self.port)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._places = threading.Semaphore(ANSWERS_MAX)
        self._strangers = Strangers(STRANGERS_MAX)
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._uploads: dict[tuple[str, Version, str, str], _Upload] = {}
        self._accepting = threading.Thread(target=self._accept, name="peers", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop listening, break off what is under way, and wait for the threads."""
        with self._lock:
            self._closing.set()
            serving = dict(self._serving)
        for peer in (self._listener, *serving):
            interrupt(peer)
        if serving:
            self._places.release(len(serving))  # They are on their way out and need no place.
        for thread in (self._accepting, *serving.values()):
            thread.join(CLOSING_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
                if self._tls is not None:
                    # Its handshake is up to the thread of the connection: it may take long.
                    peer = self._tls.wrap_socket(
                        peer, server_side=True, do_handshake_on_connect=False
                    )
            except OSError:
                # Either the server is closing, or one connection could not be accepted: it broke
                # already, or there are no descriptors, which may last.
                with self._lock:
                    self._strangers.cut_oldest()
                if self._closing.wait(ACCEPT_PAUSE_S):
                    return
                continue
            thread = threading.Thread(target=self._serve, args=(peer,), name="peer", daemon=True)
            with self._lock:
                if self._closing.is_set():
                    peer.close()
                    return
                self._strangers.enter(peer, partial(interrupt, peer))
                self._serving[peer] = thread
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        try:
            # A peer that breaks off, or is not one of ours, is no concern of this node: it will
            # come again, or its own side says what is wrong.
            with contextlib.suppress(OSError, HoldfastError):
                wire = Wire.accept(peer, self._token, self._idle_s)
                with self._lock:
                    self._strangers.leave(peer)
                while True:
                    self._answer_next(wire)
        finally:
            with self._lock:
                self._strangers.leave(peer)
                self._serving.pop(peer, None)
            peer.close()

    def _answer_next(self, wire: Wire) -> None:
        """Hold a place only from the end of the request on: a peer may be slow to ask."""
        wire.deadline = time.monotonic() + self._idle_s
        frame = wire.receive()
        wire.deadline = float("inf")
        if not self._places.acquire(timeout=self._idle_s):
            raise TimeoutError("too much is asked for at once")
        try:
            self._answer(wire, frame)
        finally:
            self._places.release()

    def _answer(self, wire: Wire, frame: m.Frame) -> None:
        match frame.body:
            case PartGet() as get:
                self._give(wire, frame.call, get)
            case PartPut() as put:
                self._take(wire, frame.call, put)
            case other:
                raise ProtocolError(f"{type(other).__name__} is no request to a peer")

    def _give(self, wire: Wire, call: int, get: PartGet) -> None:
        with contextlib.ExitStack() as stack:
            try:
                reader = stack.enter_context(self._shelf.reading(get))
                size = _size_of(get, reader.offer)
            except (RejectedError, StateError) as exc:
                wire.send(m.Refused("rejected", str(exc)), call)
                return
            offer = reader.offer
            wire.send(PartBytes(offer.holding, size, offer.total, offer.meta_digest), call)
            with reader.slot.data[get.offset : get.offset + size] as view:
                wire.send_view(view)

    def _take(self, wire: Wire, call: int, put: PartPut) -> None:
        answer: m.Done | m.Refused = m.Done()
        try:
            with self._alone(wire, put), self._shelf.receiving(put) as receiver:
                wire.send(PartWanted(receiver.received), call)
                _fill(receiver, wire)
                receiver.finish()
        except (RejectedError, StateError) as exc:
            answer = m.Refused("rejected", str(exc))
        wire.send(answer, call)

    @contextlib.contextmanager
    def _alone(self, wire: Wire, put: PartPut) -> Iterator[None]:
        """Break off an older connection with the same part: its sender has given it up."""
        key = (put.directory, put.holding.version, put.holding.part, put.block)
        upload = _Upload(wire)
        with self._lock:
            older = self._uploads.get(key)
            self._uploads[key] = upload
        try:
            if older is not None:
                older.wire.interrupt()
                if not older.is_over.wait(self._idle_s):
                    raise RejectedError(f"{put.holding.part} is being received already")
            yield
        finally:
            upload.is_over.set()
            with self._lock:
                if self._uploads.get(key) is upload:
                    del self._uploads[key]


def _fill(receiver: Receiver, wire: Wire) -> None:
    while receiver.received < receiver.size:
        with receiver.buffer() as buffer:
            wire.receive_into(buffer)
            count = len(buffer)
        try:
            receiver.filled(count)
        except HoldfastError as exc:
            # The sender is in the midst of its bytes and hears nothing: break off.
            raise ConnectionAbortedError(str(exc)) from exc


def _size_of(get: PartGet, offer: PartBytes) -> int:
    """How many bytes are asked for; RejectedError if the part has fewer."""
    if offer.holding.digest < 0:
        raise RejectedError(f"{get.part} has no digest yet, so nobody could verify it")
    size = offer.total - get.offset if get.size < 0 else get.size
    if get.offset < 0 or size < 0 or get.offset + size > offer.total:
        raise RejectedError(
            f"{get.part} has {offer.total} bytes, not {size} from byte {get.offset} on"
        )
    return size
