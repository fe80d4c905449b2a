# SPDX-License-Identifier: Apache-2.0
"""The disk of the master: its journal as bytes, of which a crash keeps what was synced.

Each batch of entries is one record with its length and checksum, as a write-ahead log has it: a
batch that was torn by a crash is not there at all. A batch that was whole on the disk when the
master died is there, although nobody was ever told.

A disk that lies has said that it synced what it only had in a cache. When the machine loses power,
an earlier state is there, whole: the checksums rule everything else out.
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
"""How many of the last syncs a disk that lies may have in its cache only."""


class Disk:
    """What is written, what of it is safe, and how fast it is."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._synced = b""
        self._written = b""
        #: The number of the last entry that is safe, and of the last that is written.
        self.end = 0
        self._written_end = 0
        #: What was safe before each of the last syncs.
        self._earlier: deque[bytes] = deque(maxlen=CACHED_SYNCS)
        self.slow_until = self.full_until = 0.0
        #: What a crash kept of a batch that was not synced begins here.
        self._untold_from = 0
        self.untold: list[Entry] = []
        """Entries that are there although the master that wrote them never knew."""

    def load(self) -> list[Entry]:
        """What a new master finds: whole batches, in order."""
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
        """Begin to write a batch; how long the sync takes, None if the disk is full."""
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
        """What was written is safe, unless the disk lies."""
        self._earlier.append(self._synced)
        self._synced, self.end = self._written, self._written_end
        self._untold_from = len(self._synced)

    def crash(self) -> None:
        """Of what was not synced any beginning may be there; often all of it, or nothing."""
        unsafe = len(self._written) - len(self._synced)
        self._untold_from = len(self._synced)
        kept = self._rng.choice((0, unsafe, self._rng.randint(0, unsafe)))
        self._synced = self._written[: len(self._synced) + kept]

    def lose_power(self) -> None:
        """The last syncs were lies: what was there before one of them is there again.

        Never nothing at all: a master without any journal begins another job.
        """
        earlier = [state for state in self._earlier if state]
        if earlier:
            self._synced = self._written = self._rng.choice(earlier)
            self._untold_from = len(self._synced)


def _batch(end: int, entries: Sequence[Entry]) -> bytes:
    rows = [(entry.at_s, entry.wall_s, entry.payload) for entry in entries]
    payload = msgspec.msgpack.encode((end, rows))
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload
