# SPDX-License-Identifier: Apache-2.0
"""Fetches parts from other agents, and leaves copies of own parts with them.

A connection that breaks is opened again and goes on where it stopped, a few times. What arrives is
checked against its digests on the way, and a slot is sealed only when all of it is right.

RetryableError: the peer cannot be reached, or not in time. RejectedError: it said no.
StateError: what it sent is not what it should be.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from crc32c import crc32c

from holdfast.checkpoint.digests import CHUNK, chunks_of, combine, digest_of
from holdfast.checkpoint.parity import stripe_range
from holdfast.checkpoint.peer_server import SlotReader
from holdfast.checkpoint.receivers import PIECE, check_announced, check_room, seal_verified
from holdfast.checkpoint.slots import Slot, SlotMeta
from holdfast.checkpoint.wire import IDLE_S, Wire
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.errors import ProtocolError, RetryableError, StateError
from holdfast.model.parity import Block
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import PartBytes, PartGet, PartPut, PartWanted
from holdfast.runtime.blocking import refusal

ATTEMPTS = 4
"""How often one connection is opened, at most, without any progress between; half as often when
it was a time-out that ended it."""

CONNECTIONS = 2
"""How many connections carry one large part: one alone does not fill a fast network."""

RUN_CHUNKS = 4
"""How many chunks are asked for at once."""

_PAUSE_S = 0.1
Result = TypeVar("Result")


class PeerClient:
    """Another agent's byte service. Any thread may use it; all calls block."""

    def __init__(
        self, address: str, token: bytes, certificate: str | None, idle_s: float = IDLE_S
    ) -> None:
        """`certificate` is the fingerprint of the agent's certificate; None: without TLS."""
        self.address = address
        self._token = token
        self._certificate = certificate
        self._idle_s = idle_s

    def look(self, get: PartGet, timeout_s: float) -> PartBytes:
        """What the peer has of this part, and how large it is; nothing is fetched."""
        question = msgspec.structs.replace(get, offset=0, size=0)
        until = time.monotonic() + timeout_s
        return self._retried(until, lambda wire, _: _ask(wire, question))

    def fetch(self, get: PartGet, offer: PartBytes, slot: Slot, timeout_s: float) -> SlotMeta:
        """Fill the slot with the part that `look` offered, and seal it once it is verified."""
        check_announced(offer.holding, offer.total, offer.meta_digest)
        check_room(slot, offer.holding)
        slot.begin(offer.holding.version)
        download = _Download(get, offer, slot)
        until = time.monotonic() + timeout_s
        connections = min(CONNECTIONS, download.runs_left)
        with ThreadPoolExecutor(connections, "fetch") as pool:
            work = [pool.submit(self._retried, until, download.work) for _ in range(connections)]
            try:
                for one in work:
                    one.result()
            finally:
                download.stop()  # The others need not go on when one has failed.
        return download.seal()

    @contextmanager
    def reader(self, get: PartGet, timeout_s: float) -> Iterator["PeerReader"]:
        """Reads ranges of a part there, over one connection at a time. Nothing is verified."""
        reader = PeerReader(self, get, time.monotonic() + timeout_s)
        try:
            yield reader
        finally:
            reader.close()

    def put(
        self,
        directory: str,
        round: int,
        part: SlotReader,
        timeout_s: float,
        *,
        safe: Version = NONE,
    ) -> None:
        """Leave a copy of a part there; returns once it is sealed there.

        The peer does not give up what it keeps of the version `safe` for it.
        """
        put = _announce(directory, round, part, safe)
        with part.slot.data[: put.total] as image:
            self._put(put, image, timeout_s)

    def put_stripe(
        self,
        directory: str,
        round: int,
        part: SlotReader,
        block: Block,
        timeout_s: float,
        *,
        safe: Version = NONE,
    ) -> None:
        """Add this part's stripe to the parity block that is kept there."""
        put = _announce(directory, round, part, safe)
        stripe = block.stripe_of(put.holding.part)
        begin, end = stripe_range(put.total, len(block.ranks), stripe)
        with part.slot.data[begin:end] as bytes_of_stripe:
            put = msgspec.structs.replace(
                put, block=block.name, stripe_digest=digest_of(bytes_of_stripe)
            )
            self._put(put, bytes_of_stripe, timeout_s)

    def _put(self, put: PartPut, image: memoryview, timeout_s: float) -> None:
        arrived = 0

        def send(wire: Wire, went_on: Callable[[], None]) -> None:
            nonlocal arrived
            wanted = _accepted(wire.ask(put))
            if not isinstance(wanted, PartWanted) or not 0 <= wanted.offset <= len(image):
                raise ProtocolError(f"{self.address} answered {wanted!r} to a part")
            if wanted.offset > arrived:
                # Only this is progress: what was sent may never have arrived.
                arrived = wanted.offset
                went_on()
            for start in range(wanted.offset, len(image), PIECE):
                with image[start : start + PIECE] as piece:
                    wire.send_view(piece)
            _accepted(wire.answer())

        self._retried(time.monotonic() + timeout_s, send)

    def connect(self, until: float) -> Wire:
        """A new connection; OSError if it cannot be made."""
        return Wire.connect(self.address, self._token, self._certificate, until, self._idle_s)

    def _retried(self, until: float, use: Callable[[Wire, Callable[[], None]], Result]) -> Result:
        """Do something over a connection, and again when it breaks; progress renews the number
        of tries."""
        tries = _Tries(self.address, until)
        while True:
            try:
                with self.connect(until) as wire:
                    return use(wire, tries.went_on)
            except OSError as exc:
                tries.broke(exc)


class _Tries:
    """Counts connections that broke without any progress."""

    def __init__(self, address: str, until: float) -> None:
        self._address = address
        self._until = until
        self._left = ATTEMPTS

    def went_on(self) -> None:
        self._left = ATTEMPTS

    def broke(self, error: OSError) -> None:
        """Wait a little before the next try; RetryableError if no try is left."""
        # A time-out counts double: it has cost the whole patience with silence already.
        self._left -= 2 if isinstance(error, TimeoutError) else 1
        pause_s = _PAUSE_S * (ATTEMPTS - self._left)
        if self._left <= 0 or time.monotonic() + pause_s >= self._until:
            raise RetryableError(f"the peer {self._address} broke off: {error}") from error
        time.sleep(pause_s)


class _Download:
    """One part on its way into a slot, in chunks that several connections share."""

    def __init__(self, get: PartGet, offer: PartBytes, slot: Slot) -> None:
        self._get = get
        self._offer = offer
        self._slot = slot
        length, total = offer.holding.length, offer.total
        self._data_chunks = len(range(0, length, CHUNK))
        self._chunks = [*chunks_of(length), (length, total - length)]
        self._crcs = [-1] * len(self._chunks)
        numbers = range(len(self._chunks))
        self._runs = deque(
            deque(numbers[start : start + RUN_CHUNKS]) for start in numbers[::RUN_CHUNKS]
        )
        self._is_stopped = threading.Event()

    @property
    def runs_left(self) -> int:
        return len(self._runs)

    def stop(self) -> None:
        """Begin no further chunk."""
        self._is_stopped.set()

    def work(self, wire: Wire, went_on: Callable[[], None]) -> None:
        """Fetch runs of chunks until there are none left, or the connection breaks."""
        while not self._is_stopped.is_set():
            try:
                run = self._runs.popleft()
            except IndexError:
                return
            try:
                self._fetch(wire, run, went_on)
            finally:
                if run:
                    self._runs.appendleft(run)  # Another connection fetches the rest.

    def _fetch(self, wire: Wire, run: deque[int], went_on: Callable[[], None]) -> None:
        offset = self._chunks[run[0]][0]
        size = sum(self._chunks[number][1] for number in run)
        answer = _ask(wire, msgspec.structs.replace(self._get, offset=offset, size=size))
        if msgspec.structs.replace(answer, size=0) != self._offer or answer.size != size:
            raise StateError(f"{self._get.part} changed on the peer while it was fetched")
        while run and not self._is_stopped.is_set():
            offset, size = self._chunks[run[0]]
            with self._slot.data[offset : offset + size] as view:
                wire.receive_into(view)
                self._crcs[run[0]] = crc32c(view)
            run.popleft()
            went_on()

    def seal(self) -> SlotMeta:
        """All connections have ended: seal the slot if every chunk came and all are right."""
        if -1 in self._crcs:
            raise StateError(f"{self._get.part} did not come as a whole")
        return seal_verified(
            self._slot,
            self._offer,
            data_digest=combine(self._crcs[: self._data_chunks]),
            meta_digest=combine(self._crcs[self._data_chunks :]),
        )


class PeerReader:
    """An image on another node, read range by range."""

    def __init__(self, peer: PeerClient, get: PartGet, until: float) -> None:
        self._peer = peer
        self._get = get
        self._until = until
        self._wire: Wire | None = None
        self._tries = _Tries(peer.address, until)
        self.offer = msgspec.structs.replace(
            self._exchange(0, memoryview(b"")),
            size=0,
        )

    def close(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view with the image's bytes from `offset` on."""
        answer = self._exchange(offset, view)
        if msgspec.structs.replace(answer, size=0) != self.offer:
            raise StateError(f"{self._get.part} changed on the peer while it was read")

    def _exchange(self, offset: int, view: memoryview) -> PartBytes:
        question = msgspec.structs.replace(self._get, offset=offset, size=len(view))
        while True:
            try:
                if self._wire is None:
                    self._wire = self._peer.connect(self._until)
                answer = _ask(self._wire, question)
                if answer.size != len(view):
                    raise ProtocolError(f"{answer.size} bytes came instead of {len(view)}")
                self._wire.receive_into(view)
            except OSError as exc:
                self.close()
                self._tries.broke(exc)
            else:
                self._tries.went_on()
                return answer


def _announce(directory: str, round: int, part: SlotReader, safe: Version) -> PartPut:
    offer = part.offer
    return PartPut(directory, round, offer.holding, offer.total, offer.meta_digest, safe=safe)


def _ask(wire: Wire, get: PartGet) -> PartBytes:
    answer = _accepted(wire.ask(get))
    if not isinstance(answer, PartBytes):
        raise ProtocolError(f"{type(answer).__name__} came instead of a part")
    found = answer.holding
    if (found.version, found.part, found.parity) != (get.version, get.part, get.parity):
        raise StateError(f"{get.part} was asked for, but {found.part} of {found.version} came")
    return answer


def _accepted(answer: m.AnyMessage) -> m.AnyMessage:
    if isinstance(answer, m.Refused):
        raise refusal(answer)
    return answer
