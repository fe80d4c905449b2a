# SPDX-License-Identifier: Apache-2.0
"""Digests: whether bytes are still those that were saved.

A digest is a CRC-32C over the little-endian CRC-32Cs of the chunks of 16 MiB, in order. So chunks
can be checked by several threads, and while they are written or received. A digest does not hold
back an attacker: a program that can change a slot or a file can change its digest too.

The digest of a slot stands beside it in `<slot>.crc`, where a later agent still finds it. It comes
with the copy (filling.py), or the agent computes it afterwards.
"""

import os
import struct
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
from crc32c import crc32c
from msgspec import Struct

from holdfast.model.checkpoint import Version

CHUNK = 16 * 1024 * 1024

_POLYNOMIAL = 0x82F63B78
"""CRC-32C's, bit-reversed as its remainders are: the highest bit stands for 1, the next for x."""


def combine(chunk_crcs: Iterable[int]) -> int:
    """The digest of bytes whose chunks have these CRC-32Cs."""
    return int(crc32c(b"".join(struct.pack("<I", crc) for crc in chunk_crcs)))


def chunks_of(length: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of every chunk of bytes of this length."""
    for offset in range(0, length, CHUNK):
        yield offset, min(CHUNK, length - offset)


def digest_of(buffer: bytes | bytearray | memoryview) -> int:
    """The digest of the buffer."""
    view = memoryview(buffer).cast("B")
    chunks = [view[offset : offset + size] for offset, size in chunks_of(len(view))]
    try:
        return combine(map(crc32c, chunks))
    finally:
        for chunk in chunks:
            chunk.release()


def join(first: int, second: int, length: int) -> int:
    """The CRC-32C of two runs of bytes, from the one of each; the second run has this length."""
    return _times(first, _shift(length)) ^ second


@lru_cache(256)
def _shift(length: int) -> int:
    """What a remainder is multiplied by when this many bytes follow: x^(8 * length)."""
    power, factor = 1 << 31, 1 << 23
    while length > 0:
        if length & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        length >>= 1
    return power


def _times(one: int, other: int) -> int:
    """The product of two remainders, modulo CRC-32C's polynomial."""
    product = 0
    while one:
        if one & (1 << 31):
            product ^= other
        one = one << 1 & 0xFFFFFFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product


class RunDigest:
    """The digest of bytes that are read run by run, by several threads and in any order."""

    def __init__(self) -> None:
        #: By offset: the length and the CRC-32C of a run that lies within one chunk.
        self._runs: dict[int, tuple[int, int]] = {}

    def read(self, offset: int, run: memoryview) -> int:
        """The CRC-32C of the run at this offset. Read again, it replaces what was read before."""
        whole = 0
        while len(run) > 0:
            size = min(len(run), CHUNK - offset % CHUNK)
            crc = int(crc32c(run[:size]))
            self._runs[offset] = size, crc
            whole = join(whole, crc, size)
            offset, run = offset + size, run[size:]
        return whole

    def result(self) -> int:
        """The digest, once every byte has been read."""
        chunks: dict[int, int] = {}
        for offset, (size, crc) in sorted(self._runs.items()):
            number = offset // CHUNK
            chunks[number] = join(chunks.get(number, 0), crc, size)
        return combine(chunks.values())


class Digest:
    """A digest in the making: add the chunks' CRC-32Cs in order, or the bytes as they come."""

    def __init__(self) -> None:
        self._crcs: list[int] = []
        self._open_crc = 0
        self._open_length = 0

    def add(self, chunk_crc: int) -> None:
        """The CRC-32C of the next whole chunk, or of the shorter last one."""
        self._crcs.append(chunk_crc)

    def update(self, piece: bytes | bytearray | memoryview) -> None:
        """The next bytes, of any length."""
        view = memoryview(piece).cast("B")
        while len(view) > 0:
            taken = view[: CHUNK - self._open_length]
            self._open_crc = crc32c(taken, self._open_crc)
            self._open_length += len(taken)
            view = view[len(taken) :]
            if self._open_length == CHUNK:
                self._crcs.append(self._open_crc)
                self._open_crc = self._open_length = 0

    def result(self) -> int:
        """The digest of everything so far."""
        return combine([*self._crcs, self._open_crc] if self._open_length else self._crcs)


class Sidecar(Struct, frozen=True):
    """The digest of what a slot held when it was computed."""

    version: Version
    data: int
    """Of the slot's data as a whole."""


def sidecar_path(slot_path: str | Path) -> Path:
    """Where the digest of a slot is."""
    return Path(f"{slot_path}.crc")


def write_sidecar(path: str | Path, sidecar: Sidecar) -> None:
    """Put the digest of the slot at `path` beside it, in one move."""
    packed = msgspec.msgpack.encode(sidecar)
    place = sidecar_path(path)
    # A draft per thread: two threads may compute the same digest at once.
    draft = Path(f"{place}.{threading.get_ident()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(struct.pack("<I", crc32c(packed)) + packed)
    os.rename(draft, place)


def read_sidecar(path: str | Path) -> Sidecar | None:
    """The digest beside the slot at `path`; None if there is none, or none that can be read."""
    try:
        image = sidecar_path(path).read_bytes()
    except FileNotFoundError:
        return None
    packed = image[4:]
    if len(image) < 4 or struct.unpack("<I", image[:4]) != (crc32c(packed),):
        return None
    try:
        return msgspec.msgpack.decode(packed, type=Sidecar)
    except msgspec.MsgspecError:
        return None


def digest_beside(path: str | Path, version: Version) -> int:
    """What `read_sidecar` finds of this version; -1 if it finds nothing."""
    sidecar = read_sidecar(path)
    return sidecar.data if sidecar is not None and sidecar.version == version else -1
