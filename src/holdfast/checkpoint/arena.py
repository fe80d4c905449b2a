# SPDX-License-Identifier: Apache-2.0
"""The shared memory of one agent: its slots, their writers and their readers.

    <root>/<12 hex of the directory>/<part>.<n>          a part of this node
    <root>/<12 hex of the directory>/<part>@<node>.<n>   kept for another node

The rule that everything rests on: the newest sealed slot of a part is not given away for writing,
nor is a pinned one. An arena is used by one thread, the agent's event loop; setting memory aside
takes long and is done by a thread of low priority behind it.

Other programs may remove the files at any moment: systemd when a user has logged out (RemoveIPC), a
batch system at the end of another job, a cleaner. The arena forgets a slot without its file, and
the next save gets a new one.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from holdfast.checkpoint import room
from holdfast.checkpoint.allocating import Allocator
from holdfast.checkpoint.digests import sidecar_path
from holdfast.checkpoint.roots import NAME, Root
from holdfast.checkpoint.slots import Slot, SlotMeta, file_size
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.errors import RejectedError, StateError

DEAD_AFTER_S = 900.0
"""What dead agents of other jobs left is removed when it was not touched for this long."""

_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")
_FILE_NAME = re.compile(r"(?P<part>[A-Za-z0-9_+-]+)(@(?P<node>\d+))?\.(?P<number>\d+)")


class PartKey(Struct, frozen=True):
    """Whose slots: a part of a series, of this node or kept for another."""

    directory: str
    part: str
    node: int = -1
    """The node it is kept for; -1: it is this node's own."""


class Held(Struct, frozen=True):
    """A sealed slot."""

    key: PartKey
    path: Path
    meta: SlotMeta


class Busy(Struct, frozen=True):
    """No slot can be had now. Ask again when a pin or a grant is gone, or `retry` is done."""

    why: str
    retry: "Future[None] | None" = None


@dataclass(eq=False)
class _SlotState:
    """What the arena knows of one slot file."""

    key: PartKey
    path: Path
    size: int
    allocated: "Future[None]"
    meta: SlotMeta | None = None
    is_granted: bool = False
    pins: list["Pin"] = field(default_factory=list)

    @property
    def version(self) -> Version:
        return NONE if self.meta is None else self.meta.version

    @property
    def is_free(self) -> bool:
        return not self.is_granted and not self.pins

    def cost_of_writing(self, size: int) -> tuple[Version, bool, bool]:
        """The slot with the lowest cost is written first: the oldest version; of the empty ones, a
        slot that is large enough and ready."""
        return self.version, self.size < size, not self.allocated.done()


class Pin:
    """While it is held, the slot is not given away for writing."""

    def __init__(self, slot: _SlotState, why: str) -> None:
        self.path = slot.path
        self.why = why
        self._slot: _SlotState | None = slot
        slot.pins.append(self)

    def release(self) -> None:
        """May be called more than once."""
        if self._slot is not None:
            self._slot.pins.remove(self)
            self._slot = None

    def __enter__(self) -> "Pin":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Arena:
    """The slots of one agent."""

    def __init__(
        self,
        memory_dir: Path,
        job: str,
        agent_key: str,
        name: str = NAME,
        room_in: Callable[[Path], room.Room] = room.tightest,
    ) -> None:
        """`name`: what the user's directory in `memory_dir` is called; `room_in` says how much room
        is left there. OSError: no room for it."""
        self._memory_dir = memory_dir
        self._room_in = room_in
        self._root = Root.take(memory_dir, job, agent_key, name)
        self._slots: dict[Path, _SlotState] = {}
        self._allocator = Allocator()
        self._number = _highest_number(self._root.path)
        self.lost = 0
        """How many slots other programs have removed."""
        try:
            self._take_over(self._root.path)
            self._remove_strays()
        except OSError:
            self._root.release()
            raise

    @property
    def root(self) -> Path:
        return self._root.path

    def reserve(self, key: PartKey, size: int, slots: int) -> tuple[Path, ...]:
        """Set memory aside until there are `slots` slots with room for `size` bytes of data each.

        Returns the slots that there are, so that workers can map them before they need them.
        """
        self._forget_removed()
        mine = self._of(key)
        # What holds something grows when its turn to be written comes.
        useless = [s for s in mine if s.meta is None and s.is_free and s.size < file_size(size)]
        missing = slots - len(mine) + len(useless)
        self._check_room(key, size, missing, freed=sum(slot.size for slot in useless))
        for slot in useless:
            self._remove(slot)
        for _ in range(missing):
            self._allocate(key, size)
        return tuple(slot.path for slot in self._of(key))

    def grant(
        self,
        key: PartKey,
        size: int,
        slots: int,
        avoid: frozenset[str] = frozenset(),
        more: int = 0,
    ) -> Path | Busy:
        """A slot to write `size` bytes of data to; `sealed` or `give_back` ends the grant.

        A slot of those to `avoid` is taken only if there is no other. When the newest is the only
        one that is not in use, a part of this node gets one slot more: if a rank dies now, all
        ranks may have to restore the newest. Without room for one more, the newest is given. When
        all are in use, there may be `more` further slots.
        """
        self._forget_removed()
        mine = self._of(key)
        free = [slot for slot in mine if slot.is_free and self._may_be_lost(slot, slots)]
        if len(mine) < slots and all(slot.meta is not None for slot in free):
            try:
                self._check_room(key, size, 1)
                return self._hand_out(self._allocate(key, size))
            except RejectedError:
                if not free:
                    raise
                # Fewer slots than were asked for: then the oldest has to do.
        if not free and slots <= len(mine) < slots + more:
            with contextlib.suppress(RejectedError):
                self._check_room(key, size, 2)
                return self._hand_out(self._allocate(key, size))
        if not free:
            whys = {pin.why for slot in mine for pin in slot.pins}
            whys |= {"being written" for slot in mine if slot.is_granted}
            return Busy(
                f"all {len(mine)} memory slots of {key.part} are in use ({', '.join(sorted(whys))})"
            )
        ready = [slot for slot in free if slot.allocated.done()]
        if key.node < 0 and slots > 1 and ready and all(map(self._is_newest, ready)):
            if coming := [slot for slot in free if slot not in ready]:
                return self._hand_out(coming[0])
            # As much again must stay free, here and above, for the training itself.
            if len(mine) == slots:
                with contextlib.suppress(RejectedError):
                    self._check_room(key, size, 2)
                    return self._hand_out(self._allocate(key, size))
        slot, *others = sorted(
            ready or free,
            key=lambda slot: (str(slot.path) in avoid, slot.cost_of_writing(file_size(size))),
        )
        if slot.size < file_size(size):
            self._check_room(key, size, 1, freed=slot.size)
            self._remove(slot)
            slot = self._allocate(key, size)
        for surplus in others[: max(0, len(mine) - slots - more)]:
            self._remove(surplus)
        return self._hand_out(slot)

    def sealed(self, path: str | Path) -> Held:
        """The writer has sealed the slot that it was granted. StateError if it has not."""
        slot = self._known(path)
        slot.is_granted = False
        slot.meta = _meta_of(slot.path)
        if slot.meta is None:
            raise StateError(f"the memory slot {path} was reported as sealed, but it is not")
        if (slot.meta.directory, slot.meta.part) != (slot.key.directory, slot.key.part):
            found, slot.meta = slot.meta, None
            raise StateError(
                f"the memory slot {path} is for part {slot.key.part} of {slot.key.directory}, but "
                f"{found.part} of {found.directory} was written to it"
            )
        # The same version may have been written again, with other bytes.
        sidecar_path(slot.path).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.utime(slot.path)
        return Held(slot.key, slot.path, slot.meta)

    def give_back(self, path: str | Path) -> None:
        """The writer that had the grant is gone, or no longer wants it."""
        slot = self._slots.get(Path(path))
        if slot is not None and slot.is_granted:
            slot.is_granted = False
            slot.meta = _meta_of(slot.path)

    def pin(self, path: str | Path, why: str) -> Pin:
        """Do not give this slot away for writing until the pin is released."""
        return Pin(self._known(path), why)

    def drop(self, path: str | Path) -> None:
        """Remove a slot that is damaged or not needed any more. Refused while it is in use."""
        self._remove(self._unused(path))

    def empty(self, path: str | Path) -> None:
        """The content of a slot is of no more use; its memory stays, for the next save.

        Refused while it is in use.
        """
        slot = self._unused(path)
        with Slot.open(slot.path, writable=True) as opened:
            opened.begin(NONE)
        sidecar_path(slot.path).unlink(missing_ok=True)
        slot.meta = None

    def holdings(self, directory: str | None = None) -> list[Held]:
        """All sealed slots, of one series or of all, the newest first."""
        self._forget_removed()
        sealed = [
            Held(slot.key, slot.path, slot.meta)
            for slot in self._slots.values()
            if slot.meta is not None and directory in (None, slot.key.directory)
        ]
        return sorted(sealed, key=lambda held: held.meta.version, reverse=True)

    def adopt(self) -> list[Held]:
        """Take over what dead agents of the same job left on this machine."""
        before = set(self._slots)
        for orphan in self._root.orphans():
            try:
                self._take_over(orphan.path)
            except OSError:
                orphan.release()  # An agent that has room may take over the rest.
                raise
            orphan.remove()
        return [held for held in self.holdings() if held.path not in before]

    def sweep(self, idle_s: float = DEAD_AFTER_S) -> list[Path]:
        """Remove what dead agents of other jobs left; returns their folders."""
        removed = []
        for dead in self._root.dead(idle_s):
            removed.append(dead.path)
            dead.remove()
        return removed

    def close(self) -> None:
        """End, and give all memory back."""
        self._slots.clear()
        self._root.remove()
        self._allocator.close()

    def _forget_removed(self) -> None:
        """Forget slots that have no file any more: a process that has one mapped keeps its memory,
        but no other process can open it.

        Its pins and its grant end like those of any other slot.
        """
        for path in [path for path in self._slots if _is_gone(path)]:
            del self._slots[path]
            self.lost += 1

    def _of(self, key: PartKey) -> list[_SlotState]:
        return [slot for slot in self._slots.values() if slot.key == key]

    def _known(self, path: str | Path) -> _SlotState:
        slot = self._slots.get(Path(path))
        if slot is None:
            raise StateError(f"there is no memory slot {path}")
        return slot

    def _unused(self, path: str | Path) -> _SlotState:
        slot = self._known(path)
        if not slot.is_free:
            raise StateError(f"the memory slot {path} is in use and cannot be removed")
        return slot

    def _may_be_lost(self, slot: _SlotState, slots: int) -> bool:
        """Whether this slot may be overwritten: a newer one stays, or there is no better choice."""
        if slot.meta is None or slots == 1:
            return True
        if not self._is_newest(slot):
            return True
        others = [other for other in self._of(slot.key) if other is not slot]
        is_alone = not any(other.is_free and other.allocated.done() for other in others)
        has_older = any(other.meta is not None for other in others)
        return len(others) + 1 >= slots and has_older and is_alone

    def _is_newest(self, slot: _SlotState) -> bool:
        """Whether this slot holds the newest sealed version of its part."""
        sealed = (other for other in self._of(slot.key) if other.meta is not None)
        return slot.meta is not None and all(
            other.version < slot.version for other in sealed if other is not slot
        )

    def _hand_out(self, slot: _SlotState) -> Path | Busy:
        if not slot.allocated.done():
            return Busy(f"memory for {slot.key.part} is being set aside", slot.allocated)
        try:
            slot.allocated.result()
            os.utime(slot.path)
        except (OSError, StateError) as exc:
            self._remove(slot)
            raise self._no_memory(slot.key, slot.size, exc) from exc
        # Only now: what was granted without being handed out would never be given back.
        # Its digest stays: a writer that dies before its first byte leaves what was there before.
        slot.is_granted = True
        slot.meta = None
        return slot.path

    def _no_memory(self, key: PartKey, size: int, why: OSError | StateError) -> RejectedError:
        return RejectedError(
            f"{room.in_words(size)} of room for {key.part} could not be set aside "
            f"in {self._memory_dir}: {why.strerror if isinstance(why, OSError) else why}"
        )

    def _allocate(self, key: PartKey, size: int) -> _SlotState:
        if not _PART_NAME.fullmatch(key.part):
            raise RejectedError(f"a part cannot be called {key.part!r}")
        try:
            self._root.keep()
            path = self._new_path(key)
            allocated = self._allocator.create(path, file_size(size))
        except (OSError, StateError) as exc:
            raise self._no_memory(key, size, exc) from exc
        slot = _SlotState(key, path, file_size(size), allocated)
        self._slots[path] = slot
        return slot

    def _new_path(self, key: PartKey) -> Path:
        """Always a new one: a process that has mapped a removed slot never takes another for it."""
        self._number += 1
        owner = "" if key.node < 0 else f"@{key.node}"
        folder = self._root.path / hashlib.sha256(key.directory.encode()).hexdigest()[:12]
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder / f"{key.part}{owner}.{self._number}"

    def _remove(self, slot: _SlotState) -> None:
        del self._slots[slot.path]
        slot.path.unlink(missing_ok=True)
        sidecar_path(slot.path).unlink(missing_ok=True)

    def _remove_strays(self) -> None:
        """Remove what a dead agent left in our own root, except sealed slots."""
        for path in self._root.path.glob("*/*"):
            if path not in self._slots and path.with_suffix("") not in self._slots:
                path.unlink(missing_ok=True)

    def _check_room(self, key: PartKey, size: int, count: int, freed: int = 0) -> None:
        """RejectedError unless `count` more slots can be had once `freed` bytes are gone."""
        if count <= 0:
            return
        try:
            limit = self._room_in(self._memory_dir)
            pending = sum(_not_yet_taken(slot) for slot in self._slots.values())
        except OSError as exc:
            raise self._no_memory(key, size, exc) from exc
        left = limit.available + freed - pending
        if count * file_size(size) > left:
            raise RejectedError(
                f"no room for part {key.part}: {count} more slots of "
                f"{room.in_words(file_size(size))} are needed, {room.in_words(max(0, left))} can "
                f"be had ({limit.limit} is {room.in_words(limit.total)})"
            )

    def _take_over(self, root: Path) -> None:
        """Make the sealed slots of a dead agent ours, with their digests."""
        for path in sorted(root.glob("*/*")):
            meta, name = _meta_of(path), _FILE_NAME.fullmatch(path.name)
            if meta is None or name is None or name["part"] != meta.part:
                continue
            key = PartKey(meta.directory, meta.part, int(name["node"] or -1))
            place = self._new_path(key)
            path.rename(place)
            with contextlib.suppress(FileNotFoundError):
                sidecar_path(path).rename(sidecar_path(place))
            done: Future[None] = Future()
            done.set_result(None)
            self._slots[place] = _SlotState(key, place, place.stat().st_size, done, meta)


def _highest_number(root: Path) -> int:
    names = [_FILE_NAME.fullmatch(path.name) for path in root.glob("*/*")]
    return max((int(name["number"]) for name in names if name is not None), default=0)


def _is_gone(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # A disk that fails now may work again, and then the slot is removed.
    return False


def _not_yet_taken(slot: _SlotState) -> int:
    """Bytes that a slot will still take from what is free now."""
    if slot.allocated.done():
        return 0
    return max(0, slot.size - slot.path.stat().st_blocks * 512)


def _meta_of(path: Path) -> SlotMeta | None:
    """What is sealed in the file; None when nothing is, or it is no slot."""
    try:
        with Slot.open(path, writable=False) as slot:
            return slot.read()
    except StateError:
        return None
