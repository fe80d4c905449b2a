# SPDX-License-Identifier: Apache-2.0
"""Where this node has its slots: in memory and, for what finds no room there, on disk.

Only what is due on storage goes through the disk: it is slow, but a checkpoint that is late is
better than none. Slots on disk are like those in memory in everything else, and are removed once
storage has what is in them.
"""

from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.arena import Arena, Busy, Held, PartKey
from holdfast.model.errors import RejectedError, StateError
from holdfast.runtime.observe import Level, Say


class _Lazy:
    """An arena that is made when it is first needed. One that cannot be made counts as empty."""

    def __init__(self, make: Callable[[], Arena], where: str, say: Say) -> None:
        self.made: Arena | None = None
        self._make = make
        self._where = where
        self._say = say
        self._problem = ""
        self._is_loss_said = False

    def get(self) -> Arena | None:
        """The arena; None if it cannot be made. The problem is reported once; each call tries
        again."""
        if self.made is not None:
            self._tell_of_loss(self.made)
            return self.made
        try:
            self.made = self._make()
        except (OSError, StateError) as exc:
            if not self._problem:
                self._say(f"no checkpoint can be kept {self._where}: {exc}", Level.WARNING)
            self._problem = str(exc)
            return None
        self._inherit(self.made)
        return self.made

    def required(self) -> Arena:
        """The arena; RejectedError if it cannot be made."""
        arena = self.get()
        if arena is None:
            raise RejectedError(f"no checkpoint can be kept {self._where}: {self._problem}")
        return arena

    def _tell_of_loss(self, arena: Arena) -> None:
        if arena.lost and not self._is_loss_said:
            self._is_loss_said = True
            self._say(
                f"checkpoints {self._where} were removed by another program from {arena.root}; "
                "the next saves make new ones. See docs/checkpoints.md, Removed from memory",
                Level.WARNING,
            )

    def _inherit(self, arena: Arena) -> None:
        try:
            arena.sweep()
            adopted = arena.adopt()
        except OSError as exc:
            self._say(
                f"what dead agents left {self._where} could not be taken over: {exc}", Level.WARNING
            )
            return
        if adopted:
            newest = max(held.meta.version.step for held in adopted)
            self._say(f"took over what a dead agent left {self._where}, up to step {newest}")


class Arenas:
    """The slots of one agent, wherever they are."""

    def __init__(
        self,
        make_memory: Callable[[], Arena],
        make_disk: Callable[[], Arena] | None,
        is_disk_used: Callable[[], bool],
        say: Say,
    ) -> None:
        """Nothing is made before the first use, because most programs under an agent need no slots.

        `is_disk_used`: whether an agent before this one may have left slots on disk. Without
        `make_disk` there are slots in memory only.
        """
        self._memory = _Lazy(make_memory, "in memory", say)
        self._disk = None if make_disk is None else _Lazy(make_disk, "on disk", say)
        self._is_disk_used: Callable[[], bool] | None = is_disk_used
        self._say = say
        self._is_short = False

    def holdings(self, directory: str) -> list[Held]:
        """All sealed slots of one series, the newest first."""
        held = [one for arena in self._all() for one in arena.holdings(directory)]
        return sorted(held, key=lambda one: one.meta.version, reverse=True)

    def reserve(self, key: PartKey, size: int, slots: int) -> tuple[Path, ...]:
        """Set memory aside; RejectedError says why there is not enough."""
        return self._memory.required().reserve(key, size, slots)

    def grant(
        self,
        key: PartKey,
        size: int,
        slots: int,
        avoid: frozenset[str],
        *,
        on_disk: bool,
        more: int = 0,
    ) -> Path | Busy:
        """A slot to write to. `on_disk` allows one on disk if memory has no room. When all slots
        are in use, `more` further ones are allowed.

        RejectedError: there is no room.
        """
        try:
            return self._memory.required().grant(key, size, slots, avoid, more)
        except RejectedError as exc:
            if not on_disk or self._disk is None:
                raise
            no_memory = exc
        try:
            granted = self._disk.required().grant(key, size, slots, avoid, more)
        except RejectedError as exc:
            raise RejectedError(f"{no_memory}; nor is there any on disk: {exc}") from exc
        if not self._is_short:
            self._is_short = True
            place = self._disk.required().root
            self._say(
                f"checkpoints go to storage through {place}, which is slower: {no_memory}",
                Level.WARNING,
            )
        return granted

    def of(self, path: str | Path) -> Arena:
        """The arena that this slot is in; StateError if it is in none."""
        for arena in self._all():
            if Path(path).is_relative_to(arena.root):
                return arena
        raise StateError(f"there is no memory slot {path}")

    def is_on_disk(self, path: Path) -> bool:
        """Whether a slot is on disk and not in memory."""
        disk = None if self._disk is None else self._disk.made
        return disk is not None and path.is_relative_to(disk.root)

    def close(self) -> None:
        """End, and give all room back."""
        for arena in (self._memory, self._disk):
            if arena is not None and arena.made is not None:
                arena.made.close()

    def _all(self) -> list[Arena]:
        memory = self._memory.get()
        if self._is_disk_used is not None:
            # Asked once: from then on only this agent puts something there.
            is_used, self._is_disk_used = self._is_disk_used, None
            if self._disk is not None and is_used():
                self._disk.get()
        disk = None if self._disk is None else self._disk.made
        return [arena for arena in (memory, disk) if arena is not None]
