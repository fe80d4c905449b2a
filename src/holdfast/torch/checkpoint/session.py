# SPDX-License-Identifier: Apache-2.0
"""A Checkpointer's communication with the vault, from its first save or load on."""

import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from holdfast.checkpoint.copier import Copier
from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.client.vault import VaultClient, connect_vault
from holdfast.model.checkpoint import NONE, SHARED, Series, Shape, rank_part
from holdfast.model.errors import (
    RejectedError,
    RetryableError,
    StateError,
    TimedOutError,
    UsageError,
)
from holdfast.protocol.checkpoints import RestorePlan
from holdfast.torch.checkpoint import plain
from holdfast.torch.checkpoint.after import AfterCommit
from holdfast.torch.checkpoint.following import Followers
from holdfast.torch.checkpoint.images import Image
from holdfast.torch.checkpoint.mappings import MappedSlots
from holdfast.torch.checkpoint.overlap import BackgroundSave, Gate, gentle_pace
from holdfast.torch.checkpoint.policies import Every, Keep, Schedule
from holdfast.torch.checkpoint.randomness import rng_state
from holdfast.torch.checkpoint.restore import Loading, Parts, agree
from holdfast.torch.checkpoint.sharding import is_sharded
from holdfast.torch.checkpoint.sizes import optimizer_bytes_to_come
from holdfast.torch.checkpoint.staging import CudaAccelerator, DeviceStager
from holdfast.torch.checkpoint.writing import BegunStep, PartWriter

if TYPE_CHECKING:
    from holdfast.torch.checkpoint.sharded import Sharded

log = logging.getLogger(__name__)

NOT_SAVED = (RejectedError, RetryableError, StateError, TimedOutError, OSError)
"""Errors of a save that are no reason to end the training."""


class Tier(enum.Enum):
    """Where a checkpoint goes."""

    MEMORY = "memory"
    STORAGE = "storage"


MEMORY = Tier.MEMORY
STORAGE = Tier.STORAGE


class Failures:
    """Saves that failed: the agent hears of each, and some are logged."""

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self.on_storage = ""
        """Why the last step for storage was not saved; empty if it was."""
        self._tell = tell
        self._count = 0

    def add(self, step: int, why: str, *, persist: bool) -> None:
        """A step was not saved. Any thread may call this."""
        if persist:
            self.on_storage = f"step {step} is not on storage: {why}"
        self._count += 1
        if is_said(self._count):
            times = f" ({self._count} steps were not saved so far)" if self._count > 1 else ""
            log.warning("step %d was not saved; the training goes on: %s%s", step, why, times)
        try:
            self._tell(step, why)
        except NOT_SAVED as exc:
            log.debug("the agent was not told that step %d was not saved: %s", step, exc)


def is_said(count: int) -> bool:
    """Whether to log the `count`-th repetition: the 1st, 2nd, 4th, 8th ... are logged."""
    return count & (count - 1) == 0


class Session:
    """What the ranks of a node share with the vault, and what this rank has under way."""

    def __init__(
        self,
        series: Series,
        every: Every | None,
        storage: Every | None,
        keep: Keep | None,
        shared: bool,
        timeout_s: float,
        followers: Followers,
    ) -> None:
        self.client: VaultClient = connect_vault()
        self.client.open_series(series)
        self.copier = Copier(threads=2)
        place = self.client.place
        stager = DeviceStager(CudaAccelerator)
        self.slots = MappedSlots(stager)
        self._writer = PartWriter(
            self.client, series.directory, self.slots, stager, self.copier, timeout_s
        )
        self._has_lineage, self._last_step = False, -1
        self._memory_due = Schedule(every, place.world_size)
        self._storage_due = Schedule(storage, place.world_size)
        self._after = AfterCommit(self.client, series, keep, self._storage_due, timeout_s)
        self._series = series
        self._shared = shared
        self._timeout_s = timeout_s
        self._gate = Gate()
        #: How long the last save in the background ran before the training waited for it.
        self._room_s = 0.0
        self._followers = followers
        self._failures = Failures(self.client.save_failed)

    @cached_property
    def sharded(self) -> "Sharded":
        """For states that are spread over ranks."""
        # Imported late: it pulls in torch.distributed.checkpoint, which unsharded jobs never need.
        from holdfast.torch.checkpoint.sharded import Sharded

        return Sharded(self.client.place.rank, self.client.place.world_size)

    def tier(self, step: int) -> Tier | None:
        """The tier of this step by the rules; None: it is not saved."""
        # Both are always asked, because each counts its steps.
        is_memory, is_storage = self._memory_due.is_due(step), self._storage_due.is_due(step)
        return STORAGE if is_storage else MEMORY if is_memory else None

    def collect(
        self, model: object, optimizer: object, extra: object, data: object, allow_pickle: bool
    ) -> tuple[dict[str, list[Image]], Shape]:
        """The files of each part that this process writes, and the shape of the whole."""
        place = self.client.place
        part = rank_part(place.rank)
        own = {"extra": extra, "data": data, "rng": rng_state()}
        if positions := self._followers.own_positions():
            own["positions"] = positions
        if is_sharded(model, optimizer):
            images = self.sharded.collect(model, optimizer, own, allow_pickle)
            return {part: images}, Shape(place.world_size, shared=False)
        given = {"model": model, "optimizer": optimizer}
        common = {name: item for name, item in given.items() if item is not None}
        if not self._shared:
            images = plain.collect(part, common | own, allow_pickle)
            return {part: images}, Shape(place.world_size, shared=False)
        parts = {part: plain.collect(part, own, allow_pickle)}
        if place.local_rank == 0:
            parts[SHARED] = plain.collect(SHARED, common, allow_pickle)
        return parts, Shape(place.world_size, shared=True)

    def write(
        self,
        step: int,
        parts: Mapping[str, Sequence[Image]],
        shape: Shape,
        tier: Tier,
        hooked: Iterable[torch.nn.Module | torch.optim.Optimizer] | None,
        began: float,
    ) -> str:
        """Save; with `hooked`, in the background. Returns why it failed, or an empty text.

        The training waits since `began`.
        """
        try:
            self.settle()
            if tier is STORAGE:
                self._failures.on_storage = ""
            self._make_newest(step)
            marks = self._followers.marks()
            begun = self._writer.begin(step, parts, shape, persist=tier is STORAGE, marks=marks)
            if hooked is None:
                self._writer.copy_all(begun)
                self._seal(begun, time.monotonic() - began)
            else:
                self._gate.watch(hooked)
                self._writer.copy_early(begun)
                self._gate.save = self._in_background(begun, time.monotonic() - began)
        except NOT_SAVED as exc:
            self.slots.go_on()
            why = str(exc) or type(exc).__name__
            self._failures.add(step, why, persist=tier is STORAGE)
            return why
        if tier is STORAGE:
            self._after.asked()
        return ""

    def reserve(self, model: object, optimizer: object, allow_pickle: bool) -> None:
        """Prepare the memory for the first save while the training computes its first step."""
        images, _ = self.collect(model, optimizer, None, None, allow_pickle)
        to_come = optimizer_bytes_to_come(optimizer)
        for part, files in images.items():
            holds_model = part == SHARED or SHARED not in images
            try:
                self._writer.reserve(part, files, to_come if holds_model else 0)
            except NOT_SAVED as exc:
                log.warning("memory for checkpoints could not be set aside: %s", exc)

    def newest_stored(self, timeout_s: float) -> int | None:
        """Wait for the saves to storage that are under way; returns the newest step on storage."""
        self.settle()
        found = self.client.wait(timeout_s)
        if problem := self._failures.on_storage or found.problem:
            raise RejectedError(problem)
        if found.committed != NONE:
            return found.committed.step
        # The saver has committed nothing since it began; there may be older checkpoints.
        stored = list_committed(open_storage(self._series.directory), self._series)
        return stored[0].version.step if stored else None

    def agree(self, loading: Loading, step: int) -> tuple[RestorePlan, Parts | None]:
        """Agree on one version with all other ranks. The caller closes the parts."""
        self.settle()
        plan, parts = agree(self.client, self.slots, loading, step, self.copier, self._timeout_s)
        self._agreed(plan)
        return plan, parts

    def _agreed(self, plan: RestorePlan) -> None:
        """The ranks have agreed on a state to begin with."""
        self._has_lineage, self._last_step = True, -1
        self._storage_due.failures_per_s = plan.failures_per_s
        if self.client.place.local_rank == 0:
            for note in plan.notes:
                log.warning("%s", note)

    def settle(self) -> None:
        """Wait for the save in the background, if there is one."""
        save, self._gate.save = self._gate.save, None
        if save is not None:
            save.wait()
            self._room_s = save.room_s

    def close(self) -> None:
        """End everything in this process."""
        self.settle()
        self._gate.close()
        self._after.close()
        self.slots.close()
        self.copier.close()
        self.client.close()

    def _in_background(self, begun: BegunStep, waited_s: float) -> BackgroundSave:
        late = begun.placed(early=False)
        pace = gentle_pace(sum(item.hole.tensor.nbytes for item in late), self._room_s)
        staged, tasks = self._writer.stage(begun, late, pace)
        return BackgroundSave(
            [item.hole for item in late],
            staged,
            tasks,
            pace,
            lambda: self._seal(begun, waited_s),
            lambda why: self._failures.add(begun.step, why, persist=begun.persist),
            self._timeout_s,
        )

    def _seal(self, begun: BegunStep, waited_s: float) -> None:
        self._writer.seal(begun, waited_s)
        self._followers.saved()

    def _make_newest(self, step: int) -> None:
        """Make sure that the next save is newer than all before.

        A step that is no higher than the last one, and a first save without a load, need a new
        lineage. All ranks get there together, as they all save the same steps.
        """
        if self._followers.has_any and not self._has_lineage:
            raise UsageError(
                "Data follow this Checkpointer: call load() before the first save, also in a new "
                "training. It is what brings the data to where the model is."
            )
        if not self._has_lineage or step <= self._last_step:
            self._agreed(self.client.restore(fresh=True, timeout_s=self._timeout_s))
        self._last_step = step
