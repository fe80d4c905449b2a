# SPDX-License-Identifier: Apache-2.0
"""Writes the parts of a step into slots: asks for memory, copies, seals, says so.

The steps are apart so that the copy can run in the background: `begin` gives what is to be copied,
`seal` ends it. A part that is not sealed does not exist for anybody, whatever was copied.
"""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.copier import Copier
from holdfast.checkpoint.memory import fault_in, low_priority
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.client.vault import VaultClient
from holdfast.core.node.marks import Marks
from holdfast.model.checkpoint import Shape, Version, rank_part
from holdfast.torch.images import Image
from holdfast.torch.staging import Placed, Staged, Stager

GRAIN = 256 * 1024
"""Slots are asked for in multiples of this, so that a number with one more digit fits."""


@dataclass(frozen=True, slots=True)
class BegunPart:
    """A part whose slot is being written."""

    slot: Slot
    meta: SlotMeta
    placed: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class BegunStep:
    """The parts of one step that this process writes."""

    parts: tuple[BegunPart, ...]
    persist: bool
    marks: Marks | None
    """How far the data of this rank are; None if none follow."""

    def placed(self, *, early: bool) -> list[Placed]:
        """The tensors that must, or need not, be copied before the next forward pass."""
        return [p for part in self.parts for p in part.placed if p.hole.early == early]


class PartWriter:
    """The slots of this process, and what it takes to write them."""

    def __init__(
        self, client: VaultClient, directory: str, stager: Stager, copier: Copier, timeout_s: float
    ) -> None:
        self._client = client
        self._directory = directory
        self._stager = stager
        self._copier = copier
        self._timeout_s = timeout_s
        self._slots: dict[str, tuple[tuple[int, int], Slot]] = {}
        self._faulting: list[_Faulting] = []

    def reserve(self, part: str, images: Iterable[Image], more: int = 0) -> None:
        """Have memory for these files, and `more` bytes, made ready in the background."""
        paths = self._client.reserve(part, _rounded(_length(images) + more))
        slots = [self._mapped(path) for path in paths]
        self._faulting.append(_Faulting(slots))

    def begin(
        self,
        step: int,
        parts: Mapping[str, Sequence[Image]],
        shape: Shape,
        *,
        persist: bool,
        marks: Marks | None = None,
    ) -> BegunStep:
        """Ask for slots and write everything but the tensors."""
        self._forget_removed()
        for faulting in self._faulting:
            faulting.pause()
        granted = [
            (part, images, self._client.slot(part, step, _rounded(_length(images))))
            for part, images in parts.items()
        ]
        begun = []
        for part, images, grant in granted:
            files, _ = lay_out((image.name, image.length) for image in images)
            version = Version(grant.lineage, step)
            meta = SlotMeta(self._directory, part, version, shape, files)
            slot = self._mapped(grant.path)
            slot.begin(version)
            placed: list[Placed] = []
            for image, file in zip(images, files, strict=True):
                view = slot.data[file.offset : file.offset + file.length]
                for offset, data in image.pieces:
                    view[offset : offset + len(data)] = data
                address = slot.address + file.offset
                placed += [Placed(hole, view, address) for hole in image.holes]
            begun.append(BegunPart(slot, meta, tuple(placed)))
        return BegunStep(tuple(begun), persist, marks)

    def stage(self, placed: Sequence[Placed]) -> Staged:
        """Begin to copy these tensors; the host copies are left to the caller."""
        return self._stager.stage(placed)

    def copy_now(self, placed: Sequence[Placed]) -> None:
        """Copy these tensors with all threads there are."""
        staged = self._stager.stage(placed)
        self._copier.run(staged.tasks, self._timeout_s)
        staged.finish()

    def seal(self, step: BegunStep, waited_s: float) -> None:
        """Everything is copied: make it a checkpoint. The training waited so long for it."""
        for faulting in self._faulting:
            faulting.go_on()
        own = rank_part(self._client.place.rank)
        for part in step.parts:
            part.slot.seal(part.meta)
        for part in step.parts:
            meta = part.meta
            self._client.sealed(
                meta.part,
                meta.version,
                meta.shape,
                str(part.slot.path),
                persist=step.persist,
                waited_s=waited_s,
                marks=step.marks if meta.part == own else None,
            )

    def close(self) -> None:
        """Unmap everything."""
        for _, slot in self._slots.values():
            self._unmap(slot)
        self._slots.clear()

    def _mapped(self, path: str) -> Slot:
        """The slot at this path: mapped once, and again when another file has taken its place."""
        found = os.stat(path)
        identity = (found.st_ino, found.st_size)
        known = self._slots.get(path)
        if known is not None:
            if known[0] == identity:
                return known[1]
            self._unmap(known[1])
            del self._slots[path]
        self._forget_removed()
        slot = Slot.open(Path(path), writable=True)
        self._slots[path] = (identity, slot)
        self._stager.mapped(slot.address, len(slot.data))
        return slot

    def _forget_removed(self) -> None:
        """Unmap what has no name any more: its memory is not free before that."""
        for path in [path for path in self._slots if not os.path.exists(path)]:
            self._unmap(self._slots.pop(path)[1])

    def _unmap(self, slot: Slot) -> None:
        for faulting in self._faulting:
            faulting.stop()
        self._faulting = []
        self._stager.unmapping(slot.address)
        slot.close()


class _Faulting:
    """Touches slots for the first time, in a thread that steps back for all others.

    One slot after the other, in the order in which they will be written: the first save finds the
    first slot ready however long the others take. Nobody else touches them: two who fault in the
    same memory hold each other up. While a save is under way, it has the memory to itself.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._is_stopped = False
        self._may_run = threading.Event()
        self._may_run.set()
        # A daemon: nothing is lost with it when the program ends.
        self._thread = threading.Thread(target=self._run, name="holdfast-memory", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stop after the piece in hand until `go_on`."""
        self._may_run.clear()

    def go_on(self) -> None:
        """May be called whether it is paused or not."""
        self._may_run.set()

    def stop(self) -> None:
        """Return when the memory is not touched any more."""
        self._is_stopped = True
        self._may_run.set()
        self._thread.join(60.0)

    def _run(self) -> None:
        low_priority()
        for slot in self._slots:
            if not fault_in(slot.address, slot.capacity, self._wait):
                return

    def _wait(self) -> bool:
        """Until no save is under way, or for long enough for one; whether to stop."""
        self._may_run.wait(60.0)
        return self._is_stopped


def _length(images: Iterable[Image]) -> int:
    return lay_out((image.name, image.length) for image in images)[1]


def _rounded(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
