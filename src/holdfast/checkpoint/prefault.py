# SPDX-License-Identifier: Apache-2.0
"""Sets memory aside and faults it in, in threads of low priority, before it is needed.

Both take long: to get the pages from the kernel, and to make them present (first touch runs at a
fraction of the speed of memory). A slot can be written as soon as its pages are set aside; before
that a write could find the file system full, which kills the writer with SIGBUS.
"""

import mmap
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.checkpoint.memory import PIECE, address_of, fault_in, low_priority
from holdfast.model.errors import StateError

_AT_ONCE_MAX = 4 * 1024 * 1024


class Prefault:
    """Two threads: one sets aside, one faults in what the other has set aside."""

    def __init__(self) -> None:
        self._is_closed = threading.Event()
        self._allocating = ThreadPoolExecutor(1, "memory-allocate", low_priority)
        self._faulting = ThreadPoolExecutor(1, "memory-fault", low_priority)

    def create(self, path: Path, size: int) -> tuple["Future[None]", "Future[None]"]:
        """A new file of this size; the futures are done when it is set aside and faulted in."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, size)
        except OSError:
            os.close(fd)
            os.unlink(path)
            raise
        if size <= _AT_ONCE_MAX:
            allocated: Future[None] = Future()
            try:
                os.posix_fallocate(fd, 0, size)
                allocated.set_result(None)
            except OSError as exc:
                allocated.set_exception(exc)
        else:
            allocated = self._allocating.submit(self._allocate, fd, size)
        return allocated, self._faulting.submit(self._fault_in, fd, size, allocated)

    def close(self) -> None:
        """Stop after the piece in hand."""
        self._is_closed.set()
        # What was not begun is still run, to its first look at the event: it closes its file.
        self._allocating.shutdown()
        self._faulting.shutdown()

    def _allocate(self, fd: int, size: int) -> None:
        for offset in range(0, size, PIECE):
            if self._is_closed.is_set():
                raise StateError("the memory was closed before all of it was set aside")
            os.posix_fallocate(fd, offset, min(PIECE, size - offset))

    def _fault_in(self, fd: int, size: int, allocated: "Future[None]") -> None:
        try:
            allocated.result()
            with mmap.mmap(fd, size) as mapping, memoryview(mapping) as view:
                fault_in(address_of(view), size, self._is_closed.is_set)
        finally:
            os.close(fd)
