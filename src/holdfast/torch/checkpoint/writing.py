# SPDX-License-Identifier: Apache-2.0
"""Writes the parts of a step into slots: asks for memory, copies, seals, reports.

These are separate steps so that the copy can run in the background: `begin` returns what to copy,
`seal` ends it. A part that is not sealed does not exist for any other process, whatever was copied.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.copier import COPY_WITH_CRC, Copier, Copy, CopyWithCrc, Pace, Task
from holdfast.checkpoint.filling import Filling
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.client.vault import VaultClient
from holdfast.core.node.marks import Marks
from holdfast.model.checkpoint import Shape, Version, rank_part
from holdfast.torch.checkpoint.images import Image
from holdfast.torch.checkpoint.mappings import MappedSlots
from holdfast.torch.checkpoint.staging import Placed, Staged, Stager

GRAIN = 256 * 1024
"""Slots are requested in multiples of this, so that a number with one more digit fits."""


@dataclass(frozen=True, slots=True)
class BegunPart:
    """A part whose slot is being written."""

    slot: Slot
    meta: SlotMeta
    placed: tuple[Placed, ...]
    filling: Filling | None
    """None if the copy gives no digest."""


@dataclass(frozen=True, slots=True)
class BegunStep:
    """The parts of one step that this process writes."""

    step: int
    parts: tuple[BegunPart, ...]
    persist: bool
    marks: Marks | None
    """The data position of this rank; None if no data follow."""

    def placed(self, *, early: bool | None = None) -> list[Placed]:
        """The tensors: all, or those that must, or need not, be copied before the next forward."""
        return [
            p for part in self.parts for p in part.placed if early is None or p.hole.early == early
        ]


class PartWriter:
    """The slots of this process, and the tools to write them."""

    def __init__(
        self,
        client: VaultClient,
        directory: str,
        slots: MappedSlots,
        stager: Stager,
        copier: Copier,
        timeout_s: float,
        copy_with_crc: CopyWithCrc | None = COPY_WITH_CRC,
    ) -> None:
        """Without `copy_with_crc` the agent computes the digests."""
        self._client = client
        self._directory = directory
        self._slots = slots
        self._stager = stager
        self._copier = copier
        self._timeout_s = timeout_s
        self._copy_with_crc = copy_with_crc

    def reserve(self, part: str, images: Iterable[Image], more: int = 0) -> None:
        """Prepare memory for these files, and `more` bytes, in the background."""
        self._slots.touch(self._client.reserve(part, _rounded(_length(images) + more)))

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
        self._slots.forget_removed()
        self._slots.pause()
        untouched = self._slots.untouched()
        granted = []
        for part, images in parts.items():
            size = _rounded(_length(images))
            grant = self._client.slot(part, step, size, untouched, persist=persist)
            granted.append((part, images, grant))
        begun = []
        for part, images, grant in granted:
            files, _ = lay_out((image.name, image.length) for image in images)
            version = Version(grant.lineage, step)
            meta = SlotMeta(self._directory, part, version, shape, files)
            slot = self._slots.get(grant.path)
            slot.begin(version)
            slot.pad(files)
            placed: list[Placed] = []
            for image, file in zip(images, files, strict=True):
                view = slot.data[file.offset : file.offset + file.length]
                for offset, data in image.pieces:
                    view[offset : offset + len(data)] = data
                address = slot.address + file.offset
                placed += [Placed(hole, view, address) for hole in image.holes]
            begun.append(BegunPart(slot, meta, tuple(placed), self._filling(slot, meta)))
        return BegunStep(step, tuple(begun), persist, marks)

    def copy_early(self, step: BegunStep) -> None:
        """Copy the tensors that the next forward pass may change."""
        staged = self._stager.stage(step.placed(early=True))
        self._copier.run(staged.tasks, self._timeout_s)
        staged.finish()

    def copy_all(self, step: BegunStep) -> None:
        """Copy every tensor, with all threads."""
        staged, tasks = self.stage(step, step.placed(), Pace())
        self._copier.run(tasks, self._timeout_s)
        staged.finish()

    def stage(
        self, step: BegunStep, last: Sequence[Placed], pace: Pace
    ) -> tuple[Staged, Sequence[Task]]:
        """Begin to copy the tensors that are not in place yet; the caller runs the tasks."""
        staged = self._stager.stage(last)
        return staged, _with_digests(step, last, staged, pace)

    def seal(self, step: BegunStep, waited_s: float) -> None:
        """Everything is copied: make it a checkpoint. The training waited `waited_s` for it."""
        self._slots.go_on()
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
                digest=-1 if part.filling is None else part.filling.digest,
            )

    def _filling(self, slot: Slot, meta: SlotMeta) -> Filling | None:
        if self._copy_with_crc is None:
            return None
        return Filling(self._copy_with_crc, slot.data, slot.address, meta.data_length)


def _with_digests(
    step: BegunStep, placed: Sequence[Placed], staged: Staged, pace: Pace
) -> Sequence[Task]:
    """The staged tasks, so that they give the digests of the parts if that is possible.

    It is not possible if torch or an accelerator copies some tensors: their bytes may come last.
    """
    copies = [task for task in staged.tasks if isinstance(task, Copy)]
    if sum(copy.length for copy in copies) != sum(item.hole.tensor.nbytes for item in placed):
        return staged.tasks
    fillings = [part.filling for part in step.parts if part.filling is not None]
    if len(fillings) < len(step.parts):
        return staged.tasks
    return [task for filling in fillings for task in filling.tasks(copies, pace)]


def _length(images: Iterable[Image]) -> int:
    return lay_out((image.name, image.length) for image in images)[1]


def _rounded(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
