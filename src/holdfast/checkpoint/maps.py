# SPDX-License-Identifier: Apache-2.0
"""The slots that an agent reads, kept mapped.

To build the page tables of a new mapping takes longer than to read what it shows. An agent reads
the same few slots at every step, so it maps each of them once.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint.slots import Slot


class SlotMaps:
    """Slots mapped for reading, lent to one reader at a time. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Path, Slot] = {}
        self._is_closed = False

    @contextmanager
    def reading(self, path: Path) -> Iterator[Slot]:
        """The slot at this path; StateError if it is gone. Views of it end with the reading."""
        self._forget_removed()
        with self._lock:
            slot = self._idle.pop(path, None)
        if slot is None:
            slot = Slot.open(path, writable=False)
        try:
            yield slot
        finally:
            slot.release_views()
            with self._lock:
                is_kept = not self._is_closed and path not in self._idle
                if is_kept:
                    self._idle[path] = slot
            if not is_kept:
                slot.close()

    def _forget_removed(self) -> None:
        """Unmap slots that were removed: their memory is not free before that."""
        with self._lock:
            gone = [self._idle.pop(path) for path in list(self._idle) if not path.exists()]
        for slot in gone:
            slot.close()

    def close(self) -> None:
        """Unmap everything; a slot that is being read is unmapped when that is over."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
        for slot in idle.values():
            slot.close()
