# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of driver mode: real slots and real files, in a folder in memory.

The vault's own code moves the bytes. This module adds what a simulation needs: memory that outlives
a killed agent and can rot, a storage that is out of order at times, and the expected content of
every file, so that a wrong byte is noticed.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.digests import read_sidecar
from holdfast.checkpoint.manifest import list_committed, read_manifest
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.room import Room
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.checkpoint.storage_port import HIDDEN, CrcOf, Moved, crc_of
from holdfast.model.checkpoint import NONE, Series, Shape, Version
from holdfast.model.errors import StateError
from holdfast.sim.checkers import Checkers
from holdfast.sim.loop import Process
from holdfast.sim.scenario import DIRECTORY

SERIES = Series(DIRECTORY)

PLENTY_BYTES = 1_000_000_000
"""What is free in memory and on storage, whatever else uses the machine that plays this: how much
that leaves decides whether a save finds room, and is in the sentence of a write that fails."""


def content(version: Version, part: str) -> bytes:
    """The bytes of a part of a version."""
    return f"{version.lineage} {version.step} {part}\n".encode() * 20


def size_of(part: str) -> int:
    """The space that a part needs in a slot, for any version."""
    return lay_out(_files(part, 4096))[1]


def _files(part: str, length: int) -> list[tuple[str, int]]:
    return [(f"{part}.bin", length)]


def fill(slot: Slot, version: Version, shape: Shape, part: str) -> None:
    """Copy a part into a slot whose writing has begun, and seal it."""
    data = content(version, part)
    files, _ = lay_out(_files(part, len(data)))
    slot.data[: len(data)] = data
    slot.seal(SlotMeta(DIRECTORY, part, version, shape, files))


def taken(path: str) -> bytes:
    """The data of a slot as a worker reads them."""
    with Slot.open(path, writable=False) as slot:
        meta = slot.read()
        if meta is None:
            raise StateError(f"the memory slot {path} is not sealed")
        return bytes(slot.data[: meta.data_length])


def is_whole(data: bytes, version: Version, part: str) -> bool:
    """Whether this is exactly this part, byte for byte."""
    return data.rstrip(b"\0") == content(version, part)


def _plenty(_memory_dir: Path) -> Room:
    return Room("the memory of a modelled machine", PLENTY_BYTES, PLENTY_BYTES)


class MachineArena(Arena):
    """The arena of one agent process: if that is killed, its slots stay for the next one."""

    def __init__(self, folder: Path, number: int, process: Process) -> None:
        super().__init__(folder, "job", f"agent-{number:04d}", room_in=_plenty)
        self._process = process
        self._is_locked = True

    def close(self) -> None:
        # A dead process clears nothing away.
        if self._process.is_alive:
            self._is_locked = False
            super().close()

    def killed(self) -> None:
        """The kernel drops the lock of a dead process."""
        if self._is_locked:
            self._is_locked = False
            self._root.release()

    def rot(self) -> Version | None:
        """Flip a byte of the newest slot; None if no slot has its digest yet."""
        for held in self.holdings():
            sidecar = read_sidecar(held.path)
            if sidecar is not None and sidecar.version == held.meta.version:
                with Slot.open(held.path, writable=True) as slot:
                    slot.data[0] ^= 1
                return held.meta.version
        return None


class SharedStorage(PosixStorage):
    """The storage that all nodes share."""

    def __init__(self, folder: Path, checkers: Checkers, is_broken: Callable[[], bool]) -> None:
        """While `is_broken` returns true, writes fail and reads work."""
        super().__init__(str(folder))
        self.url = DIRECTORY
        self._checkers = checkers
        self._is_broken = is_broken
        #: The version that each attempt writes.
        self._versions: dict[str, Version] = {}
        self.refused: set[Version] = set()
        """Versions that could not be written completely."""

    def full(self, path: str) -> str:
        return f"{DIRECTORY}/{path}"

    def free_bytes(self) -> int | None:
        return PLENTY_BYTES

    def newest(self) -> Version:
        """The newest committed version."""
        return max((committed.version for committed in list_committed(self, SERIES)), default=NONE)

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        if not path.endswith(".json"):  # Not a part, but the note of whose the directory is.
            lineage, step, _ = bytes(data).decode(errors="replace").splitlines()[-1].split()
            self._versions[_attempt(path)] = Version(int(lineage), int(step))
        self._require_order(path)
        return super().write(path, data, writers, moved, crc_of)

    def put(self, path: str, content: bytes) -> None:
        self._require_order(path)
        super().put(path, content)

    def rename(self, source: str, target: str) -> None:
        self._require_order(source)
        super().rename(source, target)
        self._named(target)

    def exchange(self, one: str, other: str) -> bool:
        self._require_order(one)
        is_done = super().exchange(one, other)
        self._named(other)
        return is_done

    def _require_order(self, path: str) -> None:
        if self._is_broken():
            # Before its first part, an attempt writes the note of the directory's owner.
            version = self._versions.get(_attempt(path), self._checkers.newest_saved())
            self.refused.add(version)
            # An error that is not retried: a retry in a thread would wait in real time.
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.full(path))

    def _named(self, name: str) -> None:
        """A directory got this name: if it is a checkpoint, all of it must be there."""
        if name.startswith(HIDDEN):
            return
        with suppress(StateError):
            manifest = read_manifest(self, name)
            if manifest is None:
                return
            version = manifest.version
            for entry in manifest.entries:
                if self.get(f"{name}/{entry.name}") != content(version, entry.part):
                    self._checkers.fail(f"{version} is committed with wrong bytes in {entry.name}")
            parts = frozenset(entry.part for entry in manifest.entries)
            positions = tuple(entry.position() for entry in manifest.data)
            self._checkers.committed(version, manifest.shape, parts, positions)


def _attempt(path: str) -> str:
    """The attempt that a hidden file belongs to; empty for other files."""
    pieces = path.split("/")
    return pieces[1].partition("@")[0] if pieces[0] == HIDDEN else ""
