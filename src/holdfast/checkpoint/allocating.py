# SPDX-License-Identifier: Apache-2.0
"""Sets memory aside in a thread of low priority, before it is needed.

A slot can be written once its pages are set aside; before that a write could find the file system
full, which kills the writer with SIGBUS. The pages are not touched here: the first touch takes
long, and the process that will write the slot does it in its own mapping
(torch/checkpoint/writing.py).
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.checkpoint.memory import low_priority
from holdfast.model.errors import StateError

_AT_ONCE_MAX = 4 * 1024 * 1024
_PIECE = 64 * 1024 * 1024
"""This much is set aside at a time, so that the thread can stop in between."""


class Allocator:
    """One thread, one file after the other: what was removed is free before the next begins."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "memory-allocate", low_priority)

    def create(self, path: Path, size: int) -> "Future[None]":
        """A new file of this size; the future is done when its memory is set aside.

        Removing the file ends that: the future then has a StateError.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        if size > _AT_ONCE_MAX:
            return self._thread.submit(_allocate, fd, size)
        allocated: Future[None] = Future()
        try:
            _allocate(fd, size)
            allocated.set_result(None)
        except OSError as exc:
            allocated.set_exception(exc)
        return allocated

    def close(self) -> None:
        """Return when no file is open any more; memory for files that still exist is set aside
        first."""
        self._thread.shutdown()


def _allocate(fd: int, size: int) -> None:
    try:
        for offset in range(0, size, _PIECE):
            if os.fstat(fd).st_nlink == 0:
                raise StateError("the memory slot was removed before all of it was set aside")
            os.posix_fallocate(fd, offset, min(_PIECE, size - offset))
    finally:
        os.close(fd)
