# SPDX-License-Identifier: Apache-2.0
"""Copies into a slot that give its digest on the way.

A digest that is computed later reads all bytes from memory once more, beside a training that waits
for memory. So the copies are cut where the digest's chunks end, and whoever copies a chunk has its
CRC-32C at the end. That takes the C extension.
"""

from collections.abc import Sequence
from functools import partial

from crc32c import crc32c

from holdfast.checkpoint.copier import Copy, CopyWithCrc, Pace, Task
from holdfast.checkpoint.digests import CHUNK, chunks_of, combine

_Piece = tuple[int, int, int]
"""Offset in the data, address of the source, and length."""


class Filling:
    """The data of one slot on its way in."""

    def __init__(self, copy: CopyWithCrc, data: memoryview, address: int, length: int) -> None:
        """`data` begins at `address`; the digest will be that of its first `length` bytes."""
        self._copy = copy
        self._data = data
        self._address = address
        self._chunks = list(chunks_of(length))
        self._crcs = [-1] * len(self._chunks)

    def tasks(self, copies: Sequence[Copy], pace: Pace) -> list[Task]:
        """Those of the copies that go into this slot, as a task for each chunk.

        They must be the last to come: all other bytes are read from where they stand by then.
        """
        end = self._address + sum(size for _, size in self._chunks)
        here = [copy for copy in copies if self._address <= copy.target_address < end]
        return [partial(self._fill, pace, *cut) for cut in enumerate(self._cut(here))]

    @property
    def digest(self) -> int:
        """Of the data; -1 before the tasks are done."""
        return -1 if -1 in self._crcs else combine(self._crcs)

    def _cut(self, copies: list[Copy]) -> list[list[_Piece]]:
        """What goes into each chunk, in the order of its bytes."""
        pieces: list[list[_Piece]] = [[] for _ in self._chunks]
        for copy in sorted(copies, key=lambda copy: copy.target_address):
            offset, source = copy.target_address - self._address, copy.source_address
            end = offset + copy.length
            while offset < end:
                number, inside = divmod(offset, CHUNK)
                size = min(end - offset, CHUNK - inside)
                pieces[number].append((offset, source, size))
                offset, source = offset + size, source + size
        return pieces

    def _fill(self, pace: Pace, number: int, pieces: list[_Piece]) -> None:
        at, size = self._chunks[number]
        end, crc = at + size, 0
        for offset, source, length in pieces:
            crc = self._read(at, offset, crc)
            crc = self._copy(self._address + offset, source, length, crc, pace.bytes_per_s)
            at = offset + length
        self._crcs[number] = self._read(at, end, crc)

    def _read(self, begin: int, end: int, crc: int) -> int:
        """Go on with bytes that are here already."""
        if begin == end:
            return crc
        with self._data[begin:end] as view:
            return int(crc32c(view, crc))
