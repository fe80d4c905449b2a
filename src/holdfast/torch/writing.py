# SPDX-License-Identifier: Apache-2.0
"""Writes the parts of a step into slots: asks for memory, copies, seals, says so.

The steps are apart so that the copy can run in the background: `begin` gives what is to be copied,
`seal` ends it. A part that is not sealed does not exist for anybody, whatever was copied.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.copier import Copier
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.client.vault import VaultClient
from holdfast.core.node.marks import Marks
from holdfast.model.checkpoint import Shape, Version, rank_part
from holdfast.torch.images import Image
from holdfast.torch.mappings import MappedSlots
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
        self,
        client: VaultClient,
        directory: str,
        slots: MappedSlots,
        stager: Stager,
        copier: Copier,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._directory = directory
        self._slots = slots
        self._stager = stager
        self._copier = copier
        self._timeout_s = timeout_s

    def reserve(self, part: str, images: Iterable[Image], more: int = 0) -> None:
        """Have memory for these files, and `more` bytes, made ready in the background."""
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
        granted = [
            (part, images, self._client.slot(part, step, _rounded(_length(images))))
            for part, images in parts.items()
        ]
        begun = []
        for part, images, grant in granted:
            files, _ = lay_out((image.name, image.length) for image in images)
            version = Version(grant.lineage, step)
            meta = SlotMeta(self._directory, part, version, shape, files)
            slot = self._slots.get(grant.path)
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
            )


def _length(images: Iterable[Image]) -> int:
    return lay_out((image.name, image.length) for image in images)[1]


def _rounded(length: int) -> int:
    return -(-length // GRAIN) * GRAIN
