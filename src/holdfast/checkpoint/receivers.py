# SPDX-License-Identifier: Apache-2.0
"""Receives parts from other nodes into slots, and seals a slot only once its part is proved whole.

A slot's *image* is its data and the meta behind it. It comes with two digests, one of each: a part
without them is not accepted, because it could not be told from zeros.
"""

from typing import Protocol

import msgspec

from holdfast.checkpoint.digests import Digest
from holdfast.checkpoint.slots import META_MAX, Slot, SlotMeta
from holdfast.model.checkpoint import Holding
from holdfast.model.errors import RejectedError, StateError
from holdfast.protocol.checkpoints import PartBytes, PartPut

PIECE = 4 * 1024 * 1024
"""What a broken connection has to send again, at most."""


class Receiver(Protocol):
    """Takes the bytes of one PartPut, in order. Used by one connection at a time."""

    @property
    def size(self) -> int:
        """How many bytes there are in all."""

    @property
    def received(self) -> int:
        """How many are here already, also from connections that broke."""

    def buffer(self) -> memoryview:
        """Where the next bytes go; the caller fills and releases it."""

    def filled(self, count: int) -> None:
        """The buffer holds the next `count` bytes."""

    def finish(self) -> None:
        """All bytes are here: keep them. StateError if they are not what was announced."""


class AlreadyKept:
    """For a part that is here: nothing has to be sent."""

    def __init__(self, size: int) -> None:
        self.size = self.received = size

    def buffer(self) -> memoryview:
        return memoryview(b"")

    def filled(self, count: int) -> None:
        raise AssertionError(f"{count} bytes came, but none were asked for")

    def finish(self) -> None:
        pass


class ImageReceiver:
    """Fills a slot with the whole image of a part."""

    def __init__(self, slot: Slot, put: PartPut) -> None:
        check_announced(put.holding, put.total, put.meta_digest)
        check_room(slot, put.holding)
        self.slot = slot
        self.is_sealed = False
        self._put = put
        self._start()

    @property
    def size(self) -> int:
        return self._put.total

    @property
    def received(self) -> int:
        return self._received

    def buffer(self) -> memoryview:
        # Never across the end of the data, where the other digest begins.
        length = self._put.holding.length
        end = length if self._received < length else self.size
        return self.slot.data[self._received : min(self._received + PIECE, end)]

    def filled(self, count: int) -> None:
        is_data = self._received < self._put.holding.length
        with self.slot.data[self._received : self._received + count] as piece:
            (self._data_digest if is_data else self._meta_digest).update(piece)
        self._received += count

    def finish(self) -> None:
        try:
            seal_verified(
                self.slot,
                PartBytes(self._put.holding, 0, self.size, self._put.meta_digest),
                data_digest=self._data_digest.result(),
                meta_digest=self._meta_digest.result(),
            )
        except StateError:
            self._start()
            raise
        self.is_sealed = True

    def _start(self) -> None:
        self._received = 0
        self._data_digest, self._meta_digest = Digest(), Digest()
        self.slot.begin(self._put.holding.version)


def check_announced(holding: Holding, total: int, meta_digest: int) -> None:
    """Refuse what could not be verified, or cannot be the image of a slot."""
    if holding.digest < 0 or meta_digest < 0:
        raise RejectedError(f"{holding.part} comes without a digest, so nobody could verify it")
    if not (0 <= holding.length < total <= holding.length + META_MAX):
        raise RejectedError(
            f"{holding.part} of {holding.length} bytes cannot have an image of {total} bytes"
        )


def check_room(slot: Slot, holding: Holding) -> None:
    """Refuse a part that is larger than its slot."""
    if holding.length > slot.capacity:
        raise RejectedError(
            f"{holding.part} has {holding.length} bytes, but its memory slot {slot.path} "
            f"has room for {slot.capacity}"
        )


def seal_verified(slot: Slot, offer: PartBytes, *, data_digest: int, meta_digest: int) -> SlotMeta:
    """Seal a slot that holds a whole image, if its digests are those that were announced.

    StateError, and nothing is sealed, if the image is anything else than what was announced.
    """
    holding = offer.holding
    if (data_digest, meta_digest) != (holding.digest, offer.meta_digest):
        raise StateError(
            f"{holding.part} of step {holding.version.step} came damaged: its digest is "
            f"{data_digest:08x}, it should be {holding.digest:08x}"
        )
    with slot.data[holding.length : offer.total] as packed:
        meta = read_meta(packed)
    if (meta.part, meta.version, meta.shape) != (holding.part, holding.version, holding.shape):
        raise StateError(
            f"{meta.part} of step {meta.version.step} came instead of {holding.part} "
            f"of step {holding.version.step}"
        )
    return slot.seal_image(holding.length, offer.total)


def read_meta(packed: bytes | bytearray | memoryview) -> SlotMeta:
    """The meta at the end of an image; StateError if it is none."""
    try:
        return msgspec.msgpack.decode(packed, type=SlotMeta)
    except msgspec.MsgspecError as exc:
        raise StateError(f"what came does not end with the meta of a slot: {exc}") from exc
