# SPDX-License-Identifier: Apache-2.0
"""How far a worker has come: 72 bytes that the worker writes and its agent reads.

Shared memory, because a training step must not pay for a system call. Every field is one aligned
8-byte word (little-endian, as every machine we run on is), written whole, so that a reader never
sees half a value and a death at any moment leaves a readable cell.
"""

import contextlib
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

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, CELL_BYTES)
        whole = memoryview(self._map)
        self._ints = whole.cast("q")
        self._times = whole.cast("d")

    @classmethod
    def create(cls, path: str) -> "ProgressCell":
        """A new file, readable by this user only. A worker that still maps the old one keeps it:
        shrinking a file under a mapping would kill that worker with SIGBUS."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, CELL_BYTES)
            cell = cls(fd)
        finally:
            os.close(fd)
        cell._ints[_REPORTED] = cell._ints[_SAVED] = -1
        return cell

    @classmethod
    def open(cls, path: str) -> "ProgressCell":
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(fd)
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
