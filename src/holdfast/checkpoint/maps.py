# SPDX-License-Identifier: Apache-2.0
"""The slots that a worker has mapped.

Even when the agent has faulted a slot in, each process has to build its own page tables, and for
large states that takes longer than the copy. So a slot is mapped once and stays mapped, and its
pages are mapped in the background, before the first save, when the paths are known early enough.
"""

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from pathlib import Path

from holdfast.checkpoint.memory import fault_in
from holdfast.checkpoint.slots import Slot
from holdfast.model.errors import StateError


class SlotMaps:
    """Mapped slots by path; paths are never used twice. For one thread, save for the warming."""

    def __init__(self) -> None:
        self._slots: dict[Path, Slot] = {}
        self._warming: dict[Path, tuple[Future[bool], threading.Event]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def get(self, path: str | Path) -> Slot:
        """The slot, mapped for writing. It stays mapped until its file is gone, or `close`."""
        self._forget_removed()
        place = Path(path)
        if place not in self._slots:
            self._slots[place] = Slot.open(place, writable=True)
        return self._slots[place]

    def warm(self, paths: Iterable[str | Path]) -> None:
        """Map these slots and build their page tables in the background."""
        for path in map(Path, paths):
            # The agent may have replaced it since it told us of it.
            with contextlib.suppress(StateError):
                slot = self.get(path)
                if path not in self._warming:
                    self._warming[path] = self._warm_later(slot)

    def wait_warm(self, timeout_s: float) -> bool:
        """Whether everything that was to be warmed is."""
        futures = [future for future, _ in self._warming.values()]
        return not wait_for_futures(futures, timeout_s).not_done

    def close(self) -> None:
        """Unmap everything. StateError when views of a slot are still in use."""
        for path in list(self._slots):
            self._forget(path)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _warm_later(self, slot: Slot) -> tuple["Future[bool]", threading.Event]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "memory-map")
        stop = threading.Event()
        length = len(slot.data)
        return self._pool.submit(fault_in, slot.address, length, stop.is_set), stop

    def _forget_removed(self) -> None:
        for path in list(self._slots):
            if not path.exists():
                self._forget(path)

    def _forget(self, path: Path) -> None:
        if path in self._warming:
            future, stop = self._warming.pop(path)
            stop.set()
            # Unmapping under it would make it fault in whatever comes to stand there.
            wait_for_futures([future])
        self._slots.pop(path).close()
