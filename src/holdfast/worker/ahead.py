# SPDX-License-Identifier: Apache-2.0
"""Maps what a worker will probably load, while its program still imports and builds its model.

To build the page tables of a new mapping takes as long as half of the copy of what is in it. The
agent knows where the newest state of a rank is, so this can happen before the program asks for it.
"""

import mmap
import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.worker import linux

_PIECE = 4 * 1024 * 1024
"""Between two pieces other threads can map memory, and this thread can be stopped."""
_NICE = 10
_STOP_S = 5.0


class Mapped(NamedTuple):
    """A file, mapped whole for reading and writing."""

    inode: int
    mapping: mmap.mmap


class Ahead:
    """Files mapped in the background, until they are taken."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._mapped: dict[str, Mapped] = {}
        self._is_stopped = False
        # A daemon: nothing is lost with it when the program ends.
        self._thread = threading.Thread(target=self._run, name="holdfast-ahead", daemon=True)
        self._thread.start()

    def take(self) -> dict[str, Mapped]:
        """What is mapped so far, by path. It is the caller's from now on."""
        self._is_stopped = True
        self._thread.join(_STOP_S)
        taken, self._mapped = self._mapped, {}
        return taken

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for path in self._paths:
            if self._is_stopped:
                return
            try:
                mapped = _map(path)
            except (OSError, ValueError):
                continue  # It is gone or empty: the load itself finds out what there is.
            self._mapped[path] = mapped
            for start in range(0, len(mapped.mapping), _PIECE):
                if self._is_stopped or not linux.make_present(mapped.mapping, start, _PIECE):
                    break


_ahead: Ahead | None = None


def begin(paths: Sequence[str]) -> None:
    """Map these files in the background."""
    global _ahead
    if paths:
        _ahead = Ahead(paths)


def take() -> dict[str, Mapped]:
    """What was mapped ahead in this process; nothing the second time."""
    global _ahead
    ahead, _ahead = _ahead, None
    return {} if ahead is None else ahead.take()


def _map(path: str) -> Mapped:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        return Mapped(found.st_ino, mmap.mmap(fd, found.st_size))
    finally:
        os.close(fd)
