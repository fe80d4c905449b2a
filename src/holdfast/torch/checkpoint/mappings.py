# SPDX-License-Identifier: Apache-2.0
"""The slots that this process has mapped, to write to them and to load from them.

Mapping and unmapping memory takes a third of the time of copying its content. So a slot is mapped
once, for loading and saving alike, and stays mapped for as long as it has its name.
"""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from holdfast.checkpoint.memory import fault_in, low_priority
from holdfast.checkpoint.slots import Slot
from holdfast.model.errors import StateError
from holdfast.torch.checkpoint.staging import Stager
from holdfast.worker import ahead


class MappedSlots:
    """Slots by their paths."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._slots: dict[str, tuple[tuple[int, int], Slot]] = {}
        self._faulting: list[_Faulting] = []
        self._may_touch = threading.Event()
        self._may_touch.set()
        for path, (inode, mapping) in ahead.take().items():
            slot = Slot(Path(path), mapping, writable=True)
            self._keep(path, (inode, len(mapping)), slot)

    def get(self, path: str) -> Slot:
        """The slot at this path; mapped again when another file has taken its place.

        StateError: there is no slot.
        """
        self.forget_removed()
        try:
            found = os.stat(path)
        except FileNotFoundError:
            raise StateError(f"the memory slot {path} is gone") from None
        identity = (found.st_ino, found.st_size)
        if path in self._slots:
            known, slot = self._slots[path]
            if known == identity:
                return slot
            self._unmap(path)
        # If the file is replaced after this look at it, the next call finds that out.
        slot = Slot.open(Path(path), writable=True)
        self._keep(path, identity, slot)
        return slot

    def _keep(self, path: str, identity: tuple[int, int], slot: Slot) -> None:
        self._slots[path] = (identity, slot)
        self._stager.mapped(slot.address, len(slot.data))

    def touch(self, paths: Sequence[str]) -> None:
        """Touch these slots for the first time, in the background and in this order."""
        slots = [self.get(path) for path in paths]
        self._faulting.append(_Faulting(slots, self._may_touch))

    def untouched(self) -> tuple[str, ...]:
        """The slots that `touch` has not finished: a copy to one takes ten times as long."""
        return tuple(str(path) for faulting in self._faulting for path in faulting.left)

    def pause(self) -> None:
        """Touch nothing more until `go_on`: a save has the memory to itself."""
        self._may_touch.clear()

    def go_on(self) -> None:
        """Go on touching; allowed also when it is not paused."""
        self._may_touch.set()

    def forget_removed(self) -> None:
        """Unmap slots without a name: their memory is freed only then."""
        for path in [path for path in self._slots if not os.path.exists(path)]:
            self._unmap(path)

    def close(self) -> None:
        """Unmap everything."""
        for path in list(self._slots):
            self._unmap(path)

    def _unmap(self, path: str) -> None:
        for faulting in self._faulting:
            faulting.stop()
        self._faulting = []
        _, slot = self._slots.pop(path)
        self._stager.unmapping(slot.address)
        slot.close()


class _Faulting:
    """Touches slots for the first time, in a thread of low priority.

    It touches one slot after another, in the order in which they will be written: the first save
    finds the first slot ready, however long the others take. No other thread touches them: two
    threads that fault in the same memory hold each other up.
    """

    def __init__(self, slots: Sequence[Slot], may_run: threading.Event) -> None:
        """It waits after each piece of memory until `may_run` is set."""
        self._slots = slots
        self._done = 0
        self._is_stopped = False
        self._may_run = may_run
        # A daemon: nothing is lost with it when the program ends.
        self._thread = threading.Thread(target=self._run, name="holdfast-memory", daemon=True)
        self._thread.start()

    @property
    def left(self) -> list[Path]:
        """The slots that are not completely touched yet."""
        return [slot.path for slot in self._slots[self._done :]]

    def stop(self) -> None:
        """Return when the thread has stopped touching memory."""
        self._is_stopped = True
        self._may_run.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        low_priority()
        for slot in self._slots:
            if not fault_in(slot.address, slot.capacity, self._wait):
                return
            self._done += 1

    def _wait(self) -> bool:
        """Wait until no save is under way, at most as long as one takes; whether to stop."""
        self._may_run.wait(60.0)
        return self._is_stopped
