# SPDX-License-Identifier: Apache-2.0
"""The master's disk: its journal as bytes; a crash keeps what was synced.

Each batch of entries is one record with its length and checksum, as in a write-ahead log: a batch
that a crash tore does not exist after it. A batch that was whole on the disk when the master died
does exist, although the master told no node of it.

A lying disk has reported a sync of bytes that it only had in a cache. After a loss of power an
earlier state is there, and it is whole: the checksums rule out everything else.
"""

import struct
import zlib
from collections import deque
from collections.abc import Sequence
from random import Random

import msgspec

from holdfast.ports.journal import Entry

_HEAD = struct.Struct("<II")
_batches = msgspec.msgpack.Decoder(tuple[int, list[tuple[float, float, bytes]]])

CACHED_SYNCS = 20
"""How many of the last syncs a lying disk may have only in its cache."""


class Disk:
    """What is written, which part of it is safe, and how fast the disk is."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._synced = b""
        self._written = b""
        #: The number of the last safe entry, and of the last written entry.
        self.end = 0
        self._written_end = 0
        #: The safe bytes before each of the last syncs.
        self._earlier: deque[bytes] = deque(maxlen=CACHED_SYNCS)
        self.slow_until = self.full_until = 0.0
        #: Here begins what a crash kept of a batch that was not synced.
        self._untold_from = 0
        self.untold: list[Entry] = []
        """Entries that are on the disk although the master that wrote them never learned it."""

    def load(self) -> list[Entry]:
        """The entries that a new master finds: whole batches, in order."""
        entries: list[Entry] = []
        position = self.end = 0
        self.untold = []
        while position + _HEAD.size <= len(self._synced):
            length, checksum = _HEAD.unpack_from(self._synced, position)
            is_untold = position >= self._untold_from
            payload = self._synced[position + _HEAD.size : position + _HEAD.size + length]
            if len(payload) < length or zlib.crc32(payload) != checksum:
                break
            position += _HEAD.size + length
            self.end, rows = _batches.decode(payload)
            entries += [Entry(*row) for row in rows]
            self.untold += [Entry(*row) for row in rows] if is_untold else ()
        self._untold_from = position
        self._synced = self._written = self._synced[:position]
        return entries

    def write(self, entries: Sequence[Entry], now: float) -> float | None:
        """Begin to write a batch; returns how long the sync takes, or None if the disk is full."""
        if now < self.full_until:
            return None
        self._written_end = self.end + len(entries)
        self._written = self._synced + _batch(self._written_end, entries)
        return self._rng.uniform(0.5, 2.0) if now < self.slow_until else self._rng.expovariate(500)

    def compact(self, snapshot: Sequence[Entry]) -> None:
        """Replace everything, in one transaction."""
        self._earlier.append(self._synced)
        self.end = self._written_end = self.end + len(snapshot)
        self._synced = self._written = _batch(self.end, snapshot)
        self._untold_from = len(self._synced)

    def sync(self) -> None:
        """Make the written bytes safe, unless the disk lies."""
        self._earlier.append(self._synced)
        self._synced, self.end = self._written, self._written_end
        self._untold_from = len(self._synced)

    def crash(self) -> None:
        """Keep any prefix of the bytes that were not synced; often all of them, or none."""
        unsafe = len(self._written) - len(self._synced)
        self._untold_from = len(self._synced)
        kept = self._rng.choice((0, unsafe, self._rng.randint(0, unsafe)))
        self._synced = self._written[: len(self._synced) + kept]

    def lose_power(self) -> None:
        """The last syncs were lies: go back to the state before one of them.

        Never to an empty journal: a master without any journal begins another job.
        """
        earlier = [state for state in self._earlier if state]
        if earlier:
            self._synced = self._written = self._rng.choice(earlier)
            self._untold_from = len(self._synced)


def _batch(end: int, entries: Sequence[Entry]) -> bytes:
    rows = [(entry.at_s, entry.wall_s, entry.payload) for entry in entries]
    payload = msgspec.msgpack.encode((end, rows))
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
