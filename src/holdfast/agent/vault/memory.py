# SPDX-License-Identifier: Apache-2.0
"""What this node holds in memory: finding it, holding it still, room for more, digests.

A slot that is read is pinned, so that no worker is given it to write into. Digests that did not
come with the slot are computed after the worker has gone on, without a pin: the next save must not
wait for them. Whether a worker overwrote a slot meanwhile shows in its header.
"""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from holdfast.agent.vault.means import Means
from holdfast.checkpoint.arena import Arena, Busy, Held, PartKey, Pin
from holdfast.checkpoint.digests import (
    Sidecar,
    digest_beside,
    digest_of,
    read_sidecar,
    write_sidecar,
)
from holdfast.checkpoint.maps import SlotMaps
from holdfast.checkpoint.slots import Slot, SlotMeta
from holdfast.model.checkpoint import Holding, Version
from holdfast.model.errors import RejectedError, StateError

ROOM_S = 60.0
"""How long a save waits for a slot that is being read."""

MORE_S = 1.0
"""After this wait a save may have one slot more for each version that waits for a slow storage."""

NOT_SEALED = "its memory slot is not sealed any more"
CHANGED = "the bytes in its memory slot have changed since they were saved"


class Memory:
    """The slots of this node, as the rest of the vault sees them."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._loop = asyncio.get_running_loop()
        self._freed = asyncio.Event()
        self._undigested: dict[Path, Version] = {}
        self._is_digesting = False
        self._sidecars: dict[Path, Sidecar] = {}
        #: Slots whose bytes were compared with their digest after the last worker could write.
        self._verified: dict[Path, Version] = {}

    # ---- what there is --------------------------------------------------------------------------

    def held(self, directory: str) -> list[Held]:
        """Every sealed slot of a series, own parts and those kept for others."""
        return self._means.arenas.holdings(directory)

    def find(self, directory: str, version: Version, part: str) -> Path | None:
        """The slot with this part of this version; None if it is not here."""
        for held in self.held(directory):
            if held.meta.version == version and held.meta.part == part:
                return held.path
        return None

    def holdings(self, directory: str) -> tuple[Holding, ...]:
        """What the master is told of the memory of this node."""
        return tuple(self._holding(held) for held in self.held(directory))

    def _holding(self, held: Held) -> Holding:
        meta = held.meta
        return Holding(
            version=meta.version,
            shape=meta.shape,
            part=meta.part,
            length=meta.data_length,
            digest=self.digest(held.path, meta.version),
            parity=bool(meta.contributions),
        )

    def digest(self, path: Path, version: Version) -> int:
        """The digest of a slot; -1 if it is not known."""
        sidecar = self._sidecars.get(path)
        if sidecar is not None and sidecar.version == version:
            return sidecar.data
        digest = digest_beside(path, version)
        if digest >= 0:
            self._sidecars[path] = Sidecar(version, digest)
        return digest

    # ---- room -----------------------------------------------------------------------------------

    def pin(self, path: Path, why: str) -> Pin:
        """Hold a slot still until `unpin`."""
        return self._means.arenas.of(path).pin(path, why)

    def unpin(self, pin: Pin) -> None:
        pin.release()
        self.room_may_be_free()

    def room_may_be_free(self) -> None:
        """Let all tasks that wait for a slot try again."""
        self._freed.set()
        self._freed = asyncio.Event()

    def reserve(self, key: PartKey, size: int, slots: int) -> tuple[Path, ...]:
        """Set memory aside; RejectedError says why there is not enough."""
        return self._means.arenas.reserve(key, size, slots)

    async def grant(
        self,
        key: PartKey,
        size: int,
        slots: int,
        wait_s: float = ROOM_S,
        avoid: frozenset[str] = frozenset(),
        give_up: Callable[[], bool] = lambda: False,
        give_up_s: float = ROOM_S,
        on_disk: bool = False,
        more: Callable[[], int] = lambda: 0,
    ) -> Path:
        """A slot for writing; waits while all are read. RejectedError: there is not enough memory.

        A slot of those to `avoid` is given only if there is no other. After `MORE_S` there may be
        `more` further slots, if memory has room. After `give_up_s` and after `wait_s`, `give_up` is
        asked to let go of something that the node can do without. `on_disk`: a slot on disk will do
        if memory has no room.
        """
        begin = self._loop.time()
        until, ask_at, more_at = begin + wait_s, begin + min(give_up_s, wait_s), begin + MORE_S
        while True:
            is_late = self._loop.time() >= more_at
            granted = self._means.arenas.grant(
                key, size, slots, avoid, on_disk=on_disk, more=more() if is_late else 0
            )
            if not isinstance(granted, Busy):
                self._sidecars.pop(granted, None)
                self._verified.pop(granted, None)
                return granted
            freed = self._freed
            if granted.retry is not None:
                granted.retry.add_done_callback(
                    lambda _: self._loop.call_soon_threadsafe(self.room_may_be_free)
                )
            try:
                async with asyncio.timeout_at(ask_at if is_late else min(ask_at, more_at)):
                    await freed.wait()
            except TimeoutError:
                if self._loop.time() < ask_at or give_up():
                    continue
                is_last, ask_at = ask_at == until, until
                if is_last:
                    raise RejectedError(
                        f"no memory slot of part {key.part} became free within {wait_s:g} s: "
                        f"{granted.why}"
                    ) from None

    # ---- on disk --------------------------------------------------------------------------------

    def is_on_disk(self, path: Path) -> bool:
        """Whether a slot is on disk, because there was no room in memory."""
        return self._means.arenas.is_on_disk(path)

    def stored(self, directory: str, version: Version) -> None:
        """A version is on storage: its slots on disk, and those of older ones, are not needed."""
        for held in self.held(directory):
            if held.meta.version <= version and self.is_on_disk(held.path):
                self.drop_if_free(held.path)

    # ---- digests --------------------------------------------------------------------------------

    def sealed(
        self, path: Path, version: Version, digest: int = -1, *, is_verified: bool = False
    ) -> None:
        """A slot was sealed: it is the newest of its part now. A digest of -1 is computed later.

        `is_verified`: the digest is of bytes that were read from the slot.
        """
        self._means.arenas.of(path).sealed(path)
        if digest >= 0:
            self._sidecars[path] = Sidecar(version, digest)
            with contextlib.suppress(OSError):  # No room for the file: the digest is known here.
                write_sidecar(path, self._sidecars[path])
            if is_verified:
                self._verified[path] = version
            return
        self._undigested[path] = version
        if not self._is_digesting:
            self._is_digesting = True
            self._means.spawn(self._digest_all(), "computing digests")

    async def _digest_all(self) -> None:
        try:
            while self._undigested:
                # Newest first: an older slot may be overwritten before its turn comes.
                path = max(self._undigested, key=lambda path: self._undigested[path])
                version = self._undigested.pop(path)
                sidecar = await self._means.quietly(_digest_slot, self._means.maps, path, version)
                if sidecar is not None:
                    self._sidecars[path] = sidecar
                    self._verified[path] = version
        finally:
            self._is_digesting = False

    def writers_are_gone(self) -> None:
        """No worker lives: compare what they left in memory with its digests before it is used."""
        self._verified.clear()

    async def verify(self, path: Path, version: Version, expected: int = -1) -> str:
        """Compare a slot with the digests that are known; returns what is wrong, or nothing.

        Afterwards the digest of the slot is known, so that a copy of it can be compared in turn.
        The digest of a save that was made a moment ago may still be missing: it is computed now.
        """
        if self._verified.get(path) != version:
            problem = await self._means.urgently(compare_slot, self._means.maps, path, version)
            if problem:
                return problem
            if self.digest(path, version) < 0:
                found = await self._means.urgently(_digest_slot, self._means.maps, path, version)
                if found is None:
                    return NOT_SEALED
                self._sidecars[path] = found
            self._verified[path] = version
        known = self.digest(path, version)
        if expected >= 0 and known >= 0 and known != expected:
            return f"its digest is {known:08x}, but {expected:08x} was expected"
        return ""

    def distrust(self, path: Path) -> None:
        """The bytes of a slot have changed: remove it, or else compare it again before it is
        used."""
        self._verified.pop(path, None)
        self.drop_if_free(path)

    def give_back(self, path: Path) -> None:
        """The slot's writer has stopped writing to it."""
        with contextlib.suppress(StateError):  # The slot is gone altogether.
            self._means.arenas.of(path).give_back(path)
        self.room_may_be_free()

    def drop_if_free(self, path: Path) -> None:
        """Remove a slot that is of no more use, unless it is being read or written."""
        self._let_go(path, Arena.drop)

    def empty_if_free(self, path: Path) -> None:
        """The same, but keep its memory: a save will need it, and other programs may take what is
        free."""
        self._let_go(path, Arena.empty)

    def _let_go(self, path: Path, how: Callable[[Arena, Path], None]) -> None:
        try:
            how(self._means.arenas.of(path), path)
        except StateError:
            return
        self._sidecars.pop(path, None)
        self._verified.pop(path, None)
        self.room_may_be_free()


def _digest_slot(maps: SlotMaps, path: Path, version: Version) -> Sidecar | None:
    """Compute and keep the digests of a slot; None if it holds something else by now."""
    try:
        with maps.reading(path) as slot:
            meta = slot.read()
            if meta is None or meta.version != version:
                return None
            sidecar = digest_of_slot(path, slot, meta)
            return sidecar if slot.version == version else None
    except StateError:
        return None  # It was replaced by a larger one.


def digest_of_slot(path: Path, slot: Slot, meta: SlotMeta) -> Sidecar:
    """The digest beside the slot; if there is none, it is computed and put there.

    Without a pin the slot may be overwritten meanwhile: then the digest belongs to a version that
    no longer exists, and is never looked up.
    """
    sidecar = read_sidecar(path)
    if sidecar is None or sidecar.version != meta.version:
        sidecar = Sidecar(meta.version, _data_digest(slot, meta))
        if slot.version == meta.version:
            with contextlib.suppress(OSError):  # No room: it is computed again when it is needed.
                write_sidecar(path, sidecar)
    return sidecar


def _data_digest(slot: Slot, meta: SlotMeta) -> int:
    with slot.data[: meta.data_length] as data:
        return digest_of(data)


def compare_slot(maps: SlotMaps, path: Path, version: Version) -> str:
    """What is wrong with a slot; nothing if it matches its digest, or if it has none yet."""
    with maps.reading(path) as slot:
        meta = slot.read()
        if meta is None or meta.version != version:
            return NOT_SEALED
        known = digest_beside(path, version)
        return CHANGED if known >= 0 and known != _data_digest(slot, meta) else ""
