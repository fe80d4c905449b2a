# SPDX-License-Identifier: Apache-2.0
"""Moves parts between memory slots and storage: raw bytes one way, verified bytes the other."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from holdfast.checkpoint.digests import RunDigest, chunks_of, combine
from holdfast.checkpoint.manifest import Committed, is_safe_name
from holdfast.checkpoint.places import begin, place_of
from holdfast.checkpoint.slots import Slot, SlotFile, SlotMeta, align, lay_out
from holdfast.checkpoint.storage_port import (
    CrcOf,
    Moved,
    Patience,
    Storage,
    crc_of,
    persistently,
    readable_size,
)
from holdfast.model.checkpoint import FileEntry, Series
from holdfast.model.errors import RejectedError, StateError

WRITERS = 6
"""Threads that write one file: some compute digests while the disk has four chunks to write."""

READERS = 4
"""Threads that read one file. Training waits for a restore, so it takes what it can get."""


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part that is on storage."""

    files: tuple[FileEntry, ...]
    digest: int
    """The digest of the slot's data, computed from the very bytes that were written."""


def write_part(
    storage: Storage,
    series: Series,
    attempt: str,
    slot: Slot,
    *,
    patience: Patience | None = None,
    stop: threading.Event | None = None,
    moved: Moved = lambda size: None,
) -> WrittenPart:
    """Write every file of a sealed slot to the attempt's place, durably.

    The slot is read once only: beside a training, reading from memory is what costs most.

    The caller has pinned the slot. `moved` is told of progress, in any thread. RetryableError if
    the storage failed for longer than `patience`, RejectedError if it refuses, StateError if the
    slot was written to meanwhile.
    """
    meta = slot.read()
    if meta is None:
        raise StateError(f"the memory slot {slot.path} is not sealed, so it cannot be stored")
    patience, stop = patience or Patience(), stop or threading.Event()
    place = place_of(storage, series, attempt, meta.version.step)
    what = f"the place for step {meta.version.step} in {storage.url} could not be noted"
    persistently(what, lambda: begin(storage, place, attempt), patience, stop)
    digest = RunDigest()
    entries = tuple(
        _write_file(storage, place, slot, meta.part, file, digest, moved, patience, stop)
        for file in meta.files
    )
    what = f"{storage.full(place)} could not be synced"
    persistently(what, lambda: storage.sync(place), patience, stop)
    if slot.version != meta.version:
        raise StateError(
            f"the memory slot {slot.path} was written to while step {meta.version.step} "
            f"of it was being stored"
        )
    return WrittenPart(entries, digest.result())


def _write_file(
    storage: Storage,
    place: str,
    slot: Slot,
    part: str,
    file: SlotFile,
    slot_digest: RunDigest,
    moved: Moved,
    patience: Patience,
    stop: threading.Event,
) -> FileEntry:
    if not is_safe_name(file.name):
        raise RejectedError(f"a file of a checkpoint cannot be called {file.name!r}")
    path = f"{place}/{file.name}"
    what = f"{storage.full(path)} ({readable_size(file.length)}) could not be written"
    free = storage.free_bytes()
    if free is not None:
        what += f" ({readable_size(free)} were free there)"

    crc_of = partial(_crc_at, slot_digest, file.offset)
    end = file.offset + file.length
    with slot.data[file.offset : end] as data, slot.data[end : align(end)] as padding:
        digest = persistently(
            what, lambda: storage.write(path, data, WRITERS, moved, crc_of), patience, stop
        )
        slot_digest.read(end, padding)
    return FileEntry(file.name, file.length, digest, part)


def part_length(committed: Committed, part: str) -> int:
    """Bytes of slot data that a part needs; StateError if the checkpoint has no such part."""
    files = committed.manifest.files_of(part)
    if not files:
        raise StateError(f"the checkpoint {committed.name} has no part {part}")
    return lay_out((file.name, file.size) for file in files)[1]


def load_part(
    storage: Storage,
    series: Series,
    committed: Committed,
    part: str,
    slot: Slot,
    *,
    patience: Patience | None = None,
    stop: threading.Event | None = None,
    readers: int = READERS,
    slot_digest: RunDigest | None = None,
) -> SlotMeta:
    """Read a part into a slot, verify it, and seal the slot; returns what it then holds.

    `slot_digest` becomes the digest of the slot's data, computed from the very bytes that were
    verified. StateError when the bytes on storage are not those that were saved; RetryableError
    when storage did not answer.
    """
    patience, stop = patience or Patience(), stop or threading.Event()
    digest = slot_digest or RunDigest()
    length = part_length(committed, part)
    if length > slot.capacity:
        raise RejectedError(
            f"the part {part} has {length} bytes, but the memory slot {slot.path} "
            f"has room for {slot.capacity}"
        )
    entries = committed.manifest.files_of(part)
    files, _ = lay_out((entry.name, entry.size) for entry in entries)
    slot.begin(committed.version)
    slot.pad(files)
    for entry, file in zip(entries, files, strict=True):
        end = file.offset + file.length
        with slot.data[file.offset : end] as target, slot.data[end : align(end)] as padding:
            crc_of = partial(_crc_at, digest, file.offset)
            read_file(storage, committed, entry, target, patience, stop, readers, crc_of)
            digest.read(end, padding)
    meta = SlotMeta(series.directory, part, committed.version, committed.manifest.shape, files)
    slot.seal(meta)
    return meta


def _crc_at(slot_digest: RunDigest, begin: int, offset: int, run: memoryview) -> int:
    """The CRC-32C of a run at `offset` of a file that begins at `begin` in the slot."""
    return slot_digest.read(begin + offset, run)


def read_file(
    storage: Storage,
    committed: Committed,
    entry: FileEntry,
    target: memoryview,
    patience: Patience,
    stop: threading.Event,
    readers: int = READERS,
    crc_of: CrcOf = crc_of,
) -> None:
    """Fill `target` with a file of a checkpoint; StateError if it is missing or damaged."""
    path = f"{committed.name}/{entry.name}"

    def room(offset: int, size: int) -> memoryview:
        return target[offset:][:size]

    def read() -> int:
        return digest_file(storage, path, entry.size, room, readers, crc_of=crc_of)

    try:
        digest = persistently(f"{storage.full(path)} could not be read", read, patience, stop)
    except RejectedError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            raise StateError(f"{storage.full(path)} is missing") from exc
        raise
    if digest != entry.digest:
        raise StateError(damaged(storage.full(path), entry.digest, digest))


def wrong_size(path: str, expected: int, found: int) -> str:
    """The sentence for a file that is too short or too long."""
    return f"{path} has {found} bytes; the manifest says {expected}"


def damaged(path: str, expected: int, found: int) -> str:
    """The sentence for bytes that are not those that were saved."""
    return f"{path} is damaged: its digest is {found:08x}, the manifest says {expected:08x}"


def digest_file(
    storage: Storage,
    path: str,
    size: int,
    room_for: Callable[[int, int], memoryview],
    readers: int,
    progress: Callable[[int], None] = lambda size: None,
    crc_of: CrcOf = crc_of,
) -> int:
    """Read a file by several threads and return its digest.

    `room_for(offset, size)` gives the memory that a chunk is read into. StateError if the file has
    another size.
    """
    reader = storage.open(path)
    try:
        if reader.size != size:
            raise StateError(wrong_size(storage.full(path), size, reader.size))

        def read_chunk(chunk: tuple[int, int]) -> int:
            with room_for(*chunk) as view:
                reader.read_into(chunk[0], view)
                crc = crc_of(chunk[0], view)
            progress(chunk[1])
            return crc

        chunks = list(chunks_of(size))
        if len(chunks) <= 1:
            return combine(map(read_chunk, chunks))
        with ThreadPoolExecutor(readers, "ckpt-read") as pool:
            return combine(pool.map(read_chunk, chunks))
    finally:
        reader.close()
