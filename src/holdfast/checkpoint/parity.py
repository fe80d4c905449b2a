# SPDX-License-Identifier: Apache-2.0
"""Parity as bytes: adding stripes up to a block, and rebuilding a lost part from what is left.

model/parity.py says which member keeps which block. Every image is cut on its own: the stripes of a
larger part are longer, and what a shorter one lacks counts as zeros. So a node can send without
knowing the sizes of the others' parts.

A block stands in a slot like a part. Its meta lists, for every part that was added in, the length
and digest of its data and of its meta, so that what is rebuilt can be verified.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Protocol

from holdfast.checkpoint.digests import CHUNK, Digest, digest_of
from holdfast.checkpoint.receivers import (
    PIECE,
    check_announced,
    read_meta,
    seal_verified,
)
from holdfast.checkpoint.slots import Slot, SlotFile, SlotMeta, align
from holdfast.model.checkpoint import FileEntry, Holding
from holdfast.model.errors import RejectedError, StateError
from holdfast.model.parity import Block
from holdfast.protocol.checkpoints import PartBytes, PartPut

BLOCK_FILE = "block"
"""The one file of a block's slot."""

META_SUFFIX = "/meta"
"""Marks, in a block's list of contributions, the meta of a part."""

Room = Callable[[int], Slot]
"""Gives a writable slot with room for this many bytes of data."""


def stripe_range(total: int, members: int, stripe: int) -> tuple[int, int]:
    """Where a stripe of an image of `total` bytes begins and ends; the last may be short, or empty.

    Every byte of the image is in one stripe, and no stripe is longer than the first.
    """
    size = align(-(-total // (members - 1)))
    return min(stripe * size, total), min((stripe + 1) * size, total)


def xor_into(target: memoryview, source: bytes | bytearray | memoryview) -> None:
    """target ^= source, for equally many bytes."""
    numpy = _numpy()
    if numpy is not None:
        sink = numpy.frombuffer(target, numpy.uint8)
        numpy.bitwise_xor(sink, numpy.frombuffer(source, numpy.uint8), out=sink)
        return
    left = int.from_bytes(target, "little")
    target[:] = (left ^ int.from_bytes(source, "little")).to_bytes(len(target), "little")


@functools.cache
def _numpy() -> ModuleType | None:
    """numpy where it is installed (it comes with torch): several times as fast as integers."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


class BlockBuilder:
    """One block in the making, on the node that keeps it. Several connections may add at once."""

    def __init__(self, block: Block, first: PartPut, room: Room) -> None:
        """`first` is the first announcement; all others must be of the same version."""
        self.block = block
        self.slot: Slot | None = None
        """Where the block is now: another one after it had to grow."""
        self.is_sealed = False
        self.problem = ""
        """Why this block can never be finished; empty if it still can."""
        self._directory = first.directory
        self._version, self._shape = first.holding.version, first.holding.shape
        self._room = room
        self._length = 0
        self._lock = threading.Lock()
        self._receivers: dict[str, StripeReceiver] = {}
        self._contributions: dict[str, tuple[FileEntry, FileEntry]] = {}

    def receiver(self, put: PartPut) -> "StripeReceiver":
        """Takes the stripe of one part; the same one again after a broken connection."""
        holding = put.holding
        check_announced(holding, put.total, put.meta_digest)
        if put.stripe_digest < 0 or holding.part not in self.block.contributors():
            raise RejectedError(f"{holding.part} cannot be added to {self.block.name}")
        if (put.directory, holding.version, holding.shape) != (
            self._directory,
            self._version,
            self._shape,
        ):
            raise RejectedError(
                f"step {holding.version.step} cannot be added to the parity block of step "
                f"{self._version.step}"
            )
        with self._lock:
            self._check_usable()
            known = self._receivers.get(holding.part)
            if known is None:
                known = StripeReceiver(self, put)
                self._make_room(known.size)
                self._receivers[holding.part] = known
            elif known.put != put:
                raise RejectedError(f"another {holding.part} was added to {self.block.name} before")
            return known

    def add(self, offset: int, piece: memoryview) -> None:
        """XOR the next bytes of a stripe in."""
        with self._lock:
            self._check_usable()
            assert self.slot is not None
            with self.slot.data[offset : offset + len(piece)] as target:
                xor_into(target, piece)

    def spoil(self, problem: str) -> None:
        """Wrong bytes are in the block, and cannot be taken out again."""
        with self._lock:
            self.problem = problem

    def added(self, put: PartPut) -> None:
        """A whole stripe is in; with the last one the block is sealed."""
        holding = put.holding
        with self._lock:
            self._check_usable()
            self._contributions[holding.part] = (
                FileEntry(holding.part, holding.length, holding.digest),
                FileEntry(holding.part + META_SUFFIX, put.total - holding.length, put.meta_digest),
            )
            if set(self._contributions) == set(self.block.contributors()):
                self._seal()

    def _check_usable(self) -> None:
        if self.problem:
            raise RejectedError(f"{self.block.name} cannot be finished: {self.problem}")

    def _make_room(self, length: int) -> None:
        old, needed = self.slot, max(self._length, length)
        if old is None or needed > old.capacity:
            self.slot = self._room(needed)
            self.slot.begin(self._version)
            if old is not None:
                self.slot.data[: self._length] = old.data[: self._length]
                old.close()
        assert self.slot is not None
        # What a slot held before must not get into the sum.
        for start in range(self._length, align(needed), PIECE):
            end = min(start + PIECE, align(needed))
            self.slot.data[start:end] = bytes(end - start)
        self._length = max(self._length, align(needed))

    def _seal(self) -> None:
        assert self.slot is not None
        entries = [entry for pair in self._contributions.values() for entry in pair]
        meta = SlotMeta(
            self._directory,
            self.block.name,
            self._version,
            self._shape,
            (SlotFile(BLOCK_FILE, 0, self._length),),
            tuple(sorted(entries, key=lambda entry: entry.name)),
        )
        self.slot.seal(meta)
        self.is_sealed = True


class StripeReceiver:
    """Takes one stripe and adds it to a block as it comes."""

    def __init__(self, builder: BlockBuilder, put: PartPut) -> None:
        block = builder.block
        begin, end = stripe_range(put.total, len(block.ranks), block.stripe_of(put.holding.part))
        self.put = put
        self.size = end - begin
        self.received = 0
        self._builder = builder
        self._scratch = bytearray(min(PIECE, self.size))
        self._digest = Digest()
        self._is_added = False

    def buffer(self) -> memoryview:
        return memoryview(self._scratch)[: min(PIECE, self.size - self.received)]

    def filled(self, count: int) -> None:
        with memoryview(self._scratch)[:count] as piece:
            self._digest.update(piece)
            self._builder.add(self.received, piece)
        self.received += count

    def finish(self) -> None:
        if self._is_added:
            return
        if self._digest.result() != self.put.stripe_digest:
            problem = f"the stripe of {self.put.holding.part} came damaged"
            self._builder.spoil(problem)
            raise StateError(problem)
        self._builder.added(self.put)
        self._is_added = True
        self._scratch = bytearray()


class ImageReader(Protocol):
    """Reads a sealed image, here or on another node."""

    @property
    def offer(self) -> PartBytes:
        """What it is, and how large."""

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill the view with the image's bytes from `offset` on."""


def rebuild(part: str, readers: Mapping[str, ImageReader], room: Room) -> tuple[SlotMeta, int]:
    """Rebuild a lost part in a new slot, and seal it once it is proved to be the lost one.

    Returns what the slot then holds, and the digest of its data.

    `readers` has, by name, all that `holdfast.model.parity.rebuildable` says is needed. StateError
    if what they give does not add up to the lost part.
    """
    blocks = [block for block in map(Block.parse, readers) if block is not None]
    if not blocks:
        raise StateError(f"there is no parity block to rebuild {part} from")
    offer = _what_was_lost(part, readers[blocks[0].name])
    slot = room(offer.holding.length)
    slot.begin(offer.holding.version)
    for block in blocks:
        begin, end = stripe_range(offer.total, len(block.ranks), block.stripe_of(part))
        others = [name for name in block.contributors() if name != part]
        for start, stop in _pieces(begin, end):
            with slot.data[start:stop] as target:
                _sum_up(block, start - begin, target, readers, others)
    length, total = offer.holding.length, offer.total
    with slot.data[:length] as data, slot.data[length:total] as meta:
        digests = digest_of(data), digest_of(meta)
    meta_of_part = seal_verified(slot, offer, data_digest=digests[0], meta_digest=digests[1])
    return meta_of_part, digests[0]


def _what_was_lost(part: str, reader: ImageReader) -> PartBytes:
    """What the lost part was, from the meta of a block that it is in."""
    holding, total = reader.offer.holding, reader.offer.total
    packed = bytearray(total - holding.length)
    reader.read_into(holding.length, memoryview(packed))
    if digest_of(packed) != reader.offer.meta_digest:
        raise StateError(f"the meta of {holding.part} came damaged")
    entries = {entry.name: entry for entry in read_meta(packed).contributions}
    if part not in entries or part + META_SUFFIX not in entries:
        raise StateError(f"{part} is not in {holding.part}")
    data, meta = entries[part], entries[part + META_SUFFIX]
    lost = Holding(holding.version, holding.shape, part, data.size, data.digest)
    return PartBytes(lost, 0, data.size + meta.size, meta.digest)


def _sum_up(
    block: Block,
    offset: int,
    target: memoryview,
    readers: Mapping[str, ImageReader],
    others: Iterable[str],
) -> None:
    """The lost bytes at `offset` of a stripe: the block's, without those of the other parts."""
    readers[block.name].read_into(offset, target)
    for name in others:
        reader = readers[name]
        begin, end = stripe_range(reader.offer.total, len(block.ranks), block.stripe_of(name))
        size = min(len(target), end - begin - offset)
        if size > 0:
            scratch = bytearray(size)
            reader.read_into(begin + offset, memoryview(scratch))
            with target[:size] as covered:
                xor_into(covered, scratch)


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, CHUNK):
        yield start, min(start + CHUNK, end)
