# SPDX-License-Identifier: Apache-2.0
"""Copies into a slot, and out of it, that give its digest on the way.

A digest that is computed later reads all bytes from memory once more, beside a training that waits
for memory. So the copies are cut where the digest's chunks end, and the thread that copies a chunk
has its CRC-32C at the end. For a copy out of a slot it is the digest of the bytes that arrived,
which are the bytes that will be used.
"""

import ctypes
from collections.abc import Sequence
from functools import partial

from crc32c import crc32c

from holdfast.checkpoint.copier import COPY_WITH_CRC, Copier, Copy, CopyWithCrc, Pace, Task
from holdfast.checkpoint.digests import CHUNK, chunks_of, combine

_Piece = tuple[int, int, int]
"""Offset in the data, address of the other end of the copy, and length."""

_CACHED = 256 * 1024
"""A copy this short is still in a cache when it is read again."""


def copy_then_crc(target: int, source: int, length: int, crc: int = 0, pace: float = 0.0, /) -> int:
    """The copy of machines without the C extension: the CRC-32C is that of the target's bytes."""
    for offset in range(0, length, _CACHED):
        size = min(_CACHED, length - offset)
        ctypes.memmove(target + offset, source + offset, size)
        crc = int(crc32c((ctypes.c_char * size).from_address(target + offset), crc))
    return crc


class _Chunks:
    """The data of one slot, chunk by chunk, and the copies that have one end in each chunk."""

    def __init__(self, copy: CopyWithCrc, data: memoryview, address: int, length: int) -> None:
        """`data` begins at `address`; the digest will be that of its first `length` bytes."""
        self._copy = copy
        self._data = data
        self._address = address
        self._end = address + length
        self._chunks = list(chunks_of(length))
        self._crcs = [-1] * len(self._chunks)

    @property
    def digest(self) -> int:
        """Of the data; -1 before the tasks are done."""
        return -1 if -1 in self._crcs else combine(self._crcs)

    def _tasks(self, runs: Sequence[_Piece], pace: Pace) -> list[Task]:
        """A task for each chunk; the runs are in the order of their bytes and do not overlap."""
        pieces: list[list[_Piece]] = [[] for _ in self._chunks]
        for offset, other, length in runs:
            end = offset + length
            while offset < end:
                number, inside = divmod(offset, CHUNK)
                size = min(end - offset, CHUNK - inside)
                pieces[number].append((offset, other, size))
                offset, other = offset + size, other + size
        return [partial(self._pass, pace, *cut) for cut in enumerate(pieces)]

    def _pass(self, pace: Pace, number: int, pieces: list[_Piece]) -> None:
        at, size = self._chunks[number]
        end, crc = at + size, 0
        for offset, other, length in pieces:
            crc = self._read(at, offset, crc)
            crc = self._move(self._address + offset, other, length, crc, pace.bytes_per_s)
            at = offset + length
        self._crcs[number] = self._read(at, end, crc)

    def _move(self, here: int, other: int, length: int, crc: int, pace: float) -> int:
        raise NotImplementedError

    def _read(self, begin: int, end: int, crc: int) -> int:
        """Continue the CRC-32C with bytes that are in the slot already."""
        if begin == end:
            return crc
        with self._data[begin:end] as view:
            return int(crc32c(view, crc))


class Filling(_Chunks):
    """The data of one slot on its way in."""

    def tasks(self, copies: Sequence[Copy], pace: Pace) -> list[Task]:
        """The copies that go into this slot, as a task for each chunk.

        They must come last: all other bytes are read from the slot as they are by then.
        """
        here = [copy for copy in copies if self._address <= copy.target_address < self._end]
        here.sort(key=lambda copy: copy.target_address)
        runs = [(c.target_address - self._address, c.source_address, c.length) for c in here]
        return self._tasks(runs, pace)

    def _move(self, here: int, other: int, length: int, crc: int, pace: float) -> int:
        return self._copy(here, other, length, crc, pace)


class Taking(_Chunks):
    """The data of one slot on its way out."""

    def tasks(self, copies: Sequence[Copy]) -> tuple[list[Task], list[Copy]]:
        """The copies that come out of this slot, as a task for each chunk; and all others.

        A copy of bytes that another copy takes too is among the others. Bytes that no copy takes
        are read from the slot.
        """
        others: list[Copy] = []
        runs: list[_Piece] = []
        at = self._address
        for copy in sorted(copies, key=lambda copy: copy.source_address):
            begin, end = copy.source_address, copy.source_address + copy.length
            if at <= begin and end <= self._end:
                runs.append((begin - self._address, copy.target_address, copy.length))
                at = end
            else:
                others.append(copy)
        return self._tasks(runs, Pace()), others

    def _move(self, here: int, other: int, length: int, crc: int, pace: float) -> int:
        return self._copy(other, here, length, crc, pace)


def take(
    copier: Copier,
    slots: Sequence[tuple[memoryview, int, int]],
    tasks: Sequence[Task],
    timeout_s: float,
    copy: CopyWithCrc = COPY_WITH_CRC or copy_then_crc,
) -> list[int]:
    """Copy out of slots, and return the digest of the data of each (data, address, length).

    Tasks that copy themselves (to an accelerator, to a strided tensor) run first. Their bytes are
    read once more right after that: what was wrong then is wrong still.
    """
    takings = [Taking(copy, *slot) for slot in slots]
    copies = [task for task in tasks if isinstance(task, Copy)]
    chunks: list[Task] = []
    for taking in takings:
        own, copies = taking.tasks(copies)
        chunks += own
    copier.run([*(task for task in tasks if not isinstance(task, Copy)), *copies], timeout_s)
    copier.run(chunks, timeout_s)
    return [taking.digest for taking in takings]
