# SPDX-License-Identifier: Apache-2.0
"""What other agents may take from this node's memory, and where their copies go.

The byte service calls this from its threads. Everything about slots is decided in the event loop,
so each method here hops into it and waits, for a limited time.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory, digest_of_slot
from holdfast.checkpoint.arena import PartKey, Pin
from holdfast.checkpoint.parity import BlockBuilder, Room, stripe_range
from holdfast.checkpoint.peer_server import SlotReader
from holdfast.checkpoint.receivers import AlreadyKept, ImageReceiver, Receiver
from holdfast.checkpoint.slots import Slot
from holdfast.model.checkpoint import Version
from holdfast.model.errors import HoldfastError, RejectedError
from holdfast.model.parity import Block
from holdfast.protocol.checkpoints import PartGet, PartPut

HOP_S = 30.0
"""How long a thread waits for the event loop."""

ROOM_S = 8.0
"""How long a copy of another node waits for a slot that is being read; below wire.IDLE_S, so that
its sender hears why there is none."""

KEPT_SLOTS = 2
"""The newest safe version, and the one that comes or came after it."""

KEPT_FOR_OTHERS = 0
"""The node in the keys of slots that are kept for others. Names of parts differ between nodes, so
the key need not say for which node."""

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Incoming:
    """A part or a block that is not complete yet; kept when a connection breaks."""

    put: PartPut
    taker: ImageReceiver | BlockBuilder
    paths: list[Path]
    """Every slot that was granted for it."""

    @property
    def version(self) -> Version:
        return self.put.holding.version


class Shelf:
    """The slots of this node, for the threads of the byte service."""

    def __init__(self, means: Means, memory: Memory) -> None:
        self._maps = means.maps
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        #: By directory and name: one version of each at a time.
        self._incoming: dict[tuple[str, str], _Incoming] = {}

    # ---- giving ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self, get: PartGet) -> Iterator[SlotReader]:
        """A part, held still meanwhile; RejectedError if it is not here."""
        pin = self._hop(self._pin(get))
        try:
            with self._maps.reading(pin.path) as slot:
                meta = slot.read()
                if meta is None or meta.version != get.version:
                    raise RejectedError(f"{get.part} of step {get.version.step} is not here")
                yield SlotReader(slot, meta, digest_of_slot(pin.path, slot, meta).data)
        finally:
            self._loop.call_soon_threadsafe(self._memory.unpin, pin)

    async def _pin(self, get: PartGet) -> Pin:
        path = self._memory.find(get.directory, get.version, get.part)
        if path is None:
            raise RejectedError(f"{get.part} of step {get.version.step} is not here")
        return self._memory.pin(path, "another node reads it")

    # ---- taking ---------------------------------------------------------------------------------

    @contextmanager
    def receiving(self, put: PartPut) -> Iterator[Receiver]:
        """A place for a part, or for its stripe of a block; RejectedError for want of room."""
        name = put.block or put.holding.part
        if self._hop(self._is_here(put, name)):
            yield AlreadyKept(_size_of(put))
            return
        with self._lock:
            incoming = self._taker(put, name)
        taker = incoming.taker
        try:
            yield taker.receiver(put) if isinstance(taker, BlockBuilder) else taker
        finally:
            with self._lock:
                self._after(put, name, incoming)

    async def _is_here(self, put: PartPut, name: str) -> bool:
        return self._memory.find(put.directory, put.holding.version, name) is not None

    def _taker(self, put: PartPut, name: str) -> _Incoming:
        """What takes the bytes: one that was begun before a connection broke, or a new one."""
        key, version = (put.directory, name), put.holding.version
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.version == version and _goes_on(incoming, put):
            return incoming
        if incoming is not None:
            if version < incoming.version:
                raise RejectedError(f"step {incoming.version.step} of {name} is coming already")
            self._forget(key, incoming)
        paths: list[Path] = []

        def room(size: int) -> Slot:
            paths.append(self._hop(self._room(put, name, size)))
            return Slot.open(paths[-1], writable=True)

        try:
            found = self._incoming[key] = _Incoming(put, _new_taker(put, room), paths)
        except HoldfastError:
            for path in paths:
                self._hop(self._give_back(path))
            raise
        return found

    async def _room(self, put: PartPut, name: str, size: int) -> Path:
        """A slot to write to: never that of the safe version, from which nodes are restored."""
        safe = self._memory.find(put.directory, put.safe, name)
        pin = None if safe is None else self._memory.pin(safe, "it is the newest safe version")
        try:
            key = PartKey(put.directory, name, KEPT_FOR_OTHERS)
            return await self._memory.grant(key, size, KEPT_SLOTS, wait_s=ROOM_S)
        finally:
            if pin is not None:
                self._memory.unpin(pin)

    def _after(self, put: PartPut, name: str, incoming: _Incoming) -> None:
        """A connection has ended or broken: keep what is whole, drop what is spoilt."""
        key, taker = (put.directory, name), incoming.taker
        if self._incoming.get(key) is not incoming:
            return
        if taker.is_sealed:
            del self._incoming[key]
            assert taker.slot is not None
            path = taker.slot.path
            taker.slot.close()
            digest = -1 if put.block else put.holding.digest
            for other in incoming.paths:
                if other != path:
                    self._hop(self._give_back(other))
            self._hop(self._sealed(path, incoming.version, digest))
        elif isinstance(taker, BlockBuilder) and taker.problem:
            self._forget(key, incoming)

    def _forget(self, key: tuple[str, str], incoming: _Incoming) -> None:
        del self._incoming[key]
        if incoming.taker.slot is not None:
            incoming.taker.slot.close()
        for path in incoming.paths:
            self._hop(self._give_back(path))

    async def _give_back(self, path: Path) -> None:
        self._memory.give_back(path)

    async def _sealed(self, path: Path, version: Version, digest: int) -> None:
        self._memory.sealed(path, version, digest, is_verified=True)

    def _hop(self, errand: Coroutine[Any, Any, Result]) -> Result:
        """Have the event loop do it, and wait."""
        try:
            return asyncio.run_coroutine_threadsafe(errand, self._loop).result(HOP_S)
        except TimeoutError:
            raise RejectedError(f"this node did not find the time in {HOP_S:g} s") from None


def _new_taker(put: PartPut, room: Room) -> ImageReceiver | BlockBuilder:
    if not put.block:
        return ImageReceiver(room(put.holding.length), put)
    block = Block.parse(put.block)
    if block is None:
        raise RejectedError(f"{put.block!r} is not the name of a parity block")
    return BlockBuilder(block, put, room)


def _goes_on(incoming: _Incoming, put: PartPut) -> bool:
    """Whether what was begun is this very part, with the same content."""
    taker = incoming.taker
    if isinstance(taker, BlockBuilder):
        return not taker.problem
    return incoming.put == put


def _size_of(put: PartPut) -> int:
    """How many bytes would come."""
    block = Block.parse(put.block)
    if block is None:
        return put.total
    stripe = block.stripe_of(put.holding.part)
    begin, end = stripe_range(put.total, len(block.ranks), stripe)
    return end - begin
