# SPDX-License-Identifier: Apache-2.0
"""The storage of one series, as the event loop uses it: every call runs in a thread."""

import asyncio
import functools
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import CHANGED, NOT_SEALED
from holdfast.checkpoint.commit import commit, put_in_order
from holdfast.checkpoint.digests import RunDigest, digest_beside
from holdfast.checkpoint.manifest import Committed, find_committed, list_committed
from holdfast.checkpoint.owner import RENEW_S, Claim
from holdfast.checkpoint.persist import load_part, part_length, write_part
from holdfast.checkpoint.places import abandon, clean_leftovers
from holdfast.checkpoint.retention import apply_retention, remove_steps
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.storage_port import FencedStorage, Patience, Storage, persistently
from holdfast.model.checkpoint import FileEntry, Series, Stored, Version
from holdfast.model.errors import FencedError, HoldfastError, RetryableError, StateError
from holdfast.protocol import checkpoints as c
from holdfast.runtime.observe import Level


class Depot:
    """Where the checkpoints of one series are kept for good."""

    def __init__(self, means: Means, series: Series) -> None:
        self.series = series
        self._means = means
        self._stop = threading.Event()
        self._storage: Storage | None = None
        self._opening = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._patience = Patience(
            failed=lambda why: self._loop.call_soon_threadsafe(self._failed, why)
        )
        self._is_failing = False
        self._claim = Claim(means.job)
        self._renewing: asyncio.Task[None] | None = None
        self._is_in_order = False

    def close(self) -> None:
        """From now on, do not repeat what fails, and commit and remove nothing more."""
        self._stop.set()

    def _failed(self, why: str) -> None:
        """Say once that the storage does not work: training goes on, and more fails later."""
        if not self._is_failing:
            self._is_failing = True
            self._means.say(f"{why}: it is tried again", Level.WARNING)

    def fence(self) -> Callable[[], None]:
        """The check before each step of one piece of work that changes checkpoints."""
        begun = self._means.fence.begin()

        def check() -> None:
            if self._stop.is_set():
                raise FencedError("the agent ends")
            begun()

        return check

    async def _open(self) -> Storage:
        # In a thread: the first use of a remote storage imports its library and connects.
        async with self._opening:
            if self._storage is None:
                opening = self._means.urgently(self._means.open_storage, self.series.directory)
                self._storage = await opening
            return self._storage

    async def stored(self) -> tuple[Stored, ...]:
        """The committed checkpoints; damaged ones are reported and passed over."""
        storage = await self._open()
        await self._look_for_others(storage)
        problems: list[str] = []
        found = await self._means.urgently(list_committed, storage, self.series, problems.append)
        for problem in problems:
            self._means.say(f"a checkpoint is passed over: {problem}", Level.WARNING)
        return tuple(committed.stored for committed in found)

    async def _look_for_others(self, storage: Storage) -> None:
        """Warn if another job writes here; if this job holds the claim, keep renewing it."""
        with suppress(HoldfastError, OSError):  # This job may only be allowed to read.
            other = await self._means.urgently(self._claim.look, storage)
            if other is not None:
                self._means.say(
                    f"another job writes to {storage.url} (process {other.pid} on {other.host}): "
                    "as long as it does, this one can read there, but nothing that it saves stays",
                    Level.WARNING,
                )
            elif await self._means.urgently(self._claim.is_held, storage):
                self._keep_claim(storage)

    async def _take(self) -> Storage:
        """The storage, once it is known that no other job writes there; RejectedError if one does.

        Called by the first node before it writes, and by the node that commits.
        """
        storage = await self._open()
        if self._renewing is None or self._renewing.done():
            what = f"{storage.full('')} could not be claimed for this job"
            fenced = FencedStorage(storage, self.fence())
            take = functools.partial(self._claim.take, fenced)
            await self._means.quietly(persistently, what, take, self._patience, self._stop)
            self._keep_claim(storage)
        if not self._is_in_order:
            await self._put_in_order(storage)
        return storage

    async def _put_in_order(self, storage: Storage) -> None:
        """Finish the work of a node that died while it gave a checkpoint its name."""
        # Writing goes on in any case: a commit does the same for its step, and says what fails.
        order = functools.partial(put_in_order, storage, self.series, self.fence())
        try:
            notes = await self._means.quietly(order)
        except (HoldfastError, OSError) as exc:
            self._means.say(f"names in {storage.url} are not in order yet: {exc}", Level.DEBUG)
            return
        for note in notes or ():
            self._means.say(note)
        self._is_in_order = notes is not None

    def _keep_claim(self, storage: Storage) -> None:
        is_kept = self._renewing is not None and not self._renewing.done()
        if self._means.group_rank == 0 and not is_kept:
            self._renewing = self._means.spawn(
                self._renew(storage), "nothing more goes to storage from this job"
            )

    async def _renew(self, storage: Storage) -> None:
        """Renew the claim. Only the first node does: if it is lost, the next first node goes on
        when it has restored."""
        while self._means.group_rank == 0:
            await asyncio.sleep(RENEW_S)
            fenced = FencedStorage(storage, self.fence())
            # Another job that has taken the claim ends this; a storage that fails does not.
            with suppress(RetryableError, FencedError, OSError):
                await self._means.quietly(self._claim.take, fenced)

    async def find(self, version: Version) -> Committed:
        """The checkpoint of this version; StateError if it is not there."""
        return await self._means.urgently(find_committed, await self._open(), self.series, version)

    async def load(self, committed: Committed, part: str, path: Path) -> int:
        """Read a part into a slot that was granted for it, verify it and seal it.

        Returns the digest of the slot's data.
        """
        storage, digest = await self._open(), RunDigest()

        def load() -> None:
            with Slot.open(path, writable=True) as slot:
                load_part(
                    storage,
                    self.series,
                    committed,
                    part,
                    slot,
                    stop=self._stop,
                    slot_digest=digest,
                )

        await self._means.urgently(load)
        return digest.result()

    @staticmethod
    def length(committed: Committed, part: str) -> int:
        """How much room a part needs in a slot."""
        return part_length(committed, part)

    async def write_parts(
        self, attempt: str, version: Version, paths: dict[str, Path]
    ) -> tuple[FileEntry, ...]:
        """Write the slots of these parts to the place of the attempt, durably."""
        is_first = self._means.group_rank == 0
        storage = await self._take() if is_first else await self._open()
        series, tally = self.series, self._means.tally
        loop = asyncio.get_running_loop()

        def moved(size: int) -> None:
            loop.call_soon_threadsafe(tally.moved, size)

        def write(path: Path) -> tuple[FileEntry, ...]:
            with self._means.maps.reading(path) as slot:
                if slot.version != version:
                    raise StateError(NOT_SEALED)
                part = write_part(
                    storage,
                    series,
                    attempt,
                    slot,
                    patience=self._patience,
                    stop=self._stop,
                    moved=moved,
                )
            # The manifest will vouch for these bytes: they must be those that were saved.
            if digest_beside(path, version) not in (-1, part.digest):
                raise StateError(CHANGED)
            return part.files

        written: list[FileEntry] = []
        for path in paths.values():
            began = loop.time()
            written += await self._means.quietly(write, path)
            tally.written(loop.time() - began)
        return tuple(written)

    async def commit(self, order: c.CommitOrder, fence: Callable[[], None]) -> None:
        """Make a checkpoint of what all nodes have written for the attempt.

        `fence` raises FencedError once this node must not commit any more.
        """
        notes = await self._means.urgently(
            commit,
            await self._take(),
            self.series,
            order,
            patience=self._patience,
            stop=self._stop,
            fence=fence,
        )
        # Not sooner: if only commits fail, it would be reported again at every attempt.
        self._is_failing = False
        for note in notes:
            self._means.say(note)

    async def give_up(self, attempt: str) -> None:
        """Remove what was written for an attempt that failed."""
        storage = await self._open()
        await self._means.quietly(abandon, storage, attempt)

    async def apply_retention(self, fence: Callable[[], None]) -> None:
        """Remove what the rules of the series do not keep, and what dead attempts left.

        `fence` raises FencedError once this node must not remove anything any more.
        """
        storage = FencedStorage(await self._open(), fence)
        await self._means.quietly(apply_retention, storage, self.series)
        # What is removed here has not been touched for longer than any attempt lives.
        await self._means.quietly(clean_leftovers, storage, ())

    async def remove(self, steps: tuple[int, ...]) -> None:
        """Remove committed steps, but never the newest."""
        storage = FencedStorage(await self._take(), self.fence())
        await self._means.quietly(remove_steps, storage, self.series, steps)
