# SPDX-License-Identifier: Apache-2.0
"""How far a worker has come: 72 bytes that the worker writes and its agent reads.

Shared memory, because a training step must not pay for a system call. Every field is one aligned
8-byte word (little-endian, as every machine we run on is), written whole, so that a reader never
sees half a value and a death at any moment leaves a readable cell.
"""

import contextlib
import errno
import mmap
import os
from typing import NamedTuple

CELL_BYTES = 72

_STEPS, _REPORTED, _REPORTS, _SAVED, _SAVES, _TOTAL = 0, 3, 5, 6, 7, 8
_FIRST_AT, _LAST_AT, _MAIN_AT = 1, 2, 4


class Progress(NamedTuple):
    """One reading. Times are `time.monotonic()`, the same clock in every process of a host."""

    steps: int
    """Optimizer steps finished since the worker started."""
    first_step_at: float
    """0.0 before the first step."""
    last_step_at: float
    reported_step: int
    """The step number the program itself reported; -1 when it reported none."""
    main_at: float
    """When the user's code began; 0.0 before."""
    reports: int
    """How many step numbers the program has reported."""
    saved_step: int
    """The step that the program saved last; -1 when it saved none."""
    saves: int
    """How many saves followed each other as steps do."""
    total_steps: int
    """How many steps the program wants to make in all; 0 when it does not say."""


class ProgressCell:
    """One worker's cell, mapped into this process."""

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        """Where other processes of this user open it, while this one has it open."""
        self._kept = -1
        self._map = mmap.mmap(fd, CELL_BYTES)
        whole = memoryview(self._map)
        self._ints = whole.cast("q")
        self._times = whole.cast("d")

    @classmethod
    def create(cls, path: str) -> "ProgressCell":
        """A new cell, readable by this user only: the file `path`, or plain memory where no file
        can be made. A worker that still maps the old one keeps it: shrinking a file under a mapping
        would kill that worker with SIGBUS."""
        try:
            cell = cls._in_file(path)
        except OSError:
            cell = cls._in_memory()
        cell._ints[_REPORTED] = cell._ints[_SAVED] = -1
        return cell

    @classmethod
    def _in_file(cls, path: str) -> "ProgressCell":
        """The usual place: a worker in a container of its own sees it if the folder is mounted."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _take_room(fd)
            return cls(fd, path)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    @classmethod
    def _in_memory(cls) -> "ProgressCell":
        """Needs no folder. The path leads to our descriptor, which is open as long as the cell."""
        fd = os.memfd_create("holdfast-progress", os.MFD_CLOEXEC)
        try:
            _take_room(fd)
            cell = cls(fd, f"/proc/{os.getpid()}/fd/{fd}")
        except OSError:
            os.close(fd)
            raise
        cell._kept = fd
        return cell

    @classmethod
    def open(cls, path: str) -> "ProgressCell":
        """An existing cell; OSError if there is none."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The number of a descriptor may be that of something else by now.
            if os.fstat(fd).st_size != CELL_BYTES:
                raise OSError(errno.EINVAL, "not the progress of a worker", path)
            return cls(fd, path)
        finally:
            os.close(fd)

    def begin(self, now: float) -> None:
        """The user's code begins."""
        self._times[_MAIN_AT] = now

    def advance(self, now: float) -> None:
        """One more optimizer step is finished."""
        steps = self._ints[_STEPS]
        if steps == 0:
            self._times[_FIRST_AT] = now
        self._times[_LAST_AT] = now
        self._ints[_STEPS] = steps + 1

    def report(self, step: int, now: float, total: int | None = None) -> None:
        """The program says which step it has finished, and of how many, in its own counting."""
        if total is not None:
            self._ints[_TOTAL] = max(0, total)
        if self._times[_FIRST_AT] == 0.0:
            self._times[_FIRST_AT] = now
        self._times[_LAST_AT] = now
        if step != self._ints[_REPORTED]:
            self._ints[_REPORTED] = step
            self._ints[_REPORTS] += 1

    def saved(self, step: int, now: float, before: float | None) -> None:
        """The program saves a step. With the time of the save `before` it, both count as steps."""
        self._ints[_SAVED] = step
        if before is not None:
            if self._times[_FIRST_AT] == 0.0:
                self._times[_FIRST_AT] = before
            self._times[_LAST_AT] = now
            self._ints[_SAVES] = max(1, self._ints[_SAVES]) + 1

    def read(self) -> Progress:
        return Progress(
            steps=self._ints[_STEPS],
            first_step_at=self._times[_FIRST_AT],
            last_step_at=self._times[_LAST_AT],
            reported_step=self._ints[_REPORTED],
            main_at=self._times[_MAIN_AT],
            reports=self._ints[_REPORTS],
            saved_step=self._ints[_SAVED],
            saves=self._ints[_SAVES],
            total_steps=self._ints[_TOTAL],
        )

    def close(self) -> None:
        self._ints.release()
        self._times.release()
        self._map.close()
        if self._kept >= 0:
            os.close(self._kept)
            self._kept = -1


def _take_room(fd: int) -> None:
    """Set the cell's room aside; OSError if there is none. A file that is only made longer takes
    its room when its mapping is written to: if there is none then, the writer is killed with
    SIGBUS."""
    os.posix_fallocate(fd, 0, CELL_BYTES)
