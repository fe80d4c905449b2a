# SPDX-License-Identifier: Apache-2.0
"""Makes parts readable here, from wherever they are: own memory, a peer, parity, storage.

Each part is fetched once, however many ranks of the node want it, and is held still until all of
them have read it. A copy that turns out to be bad, here or when a worker takes its bytes, is
remembered and told to the master, which then plans without it.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.agent.vault.fetch import Fetcher, NoRoomError
from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import CHANGED, Memory
from holdfast.checkpoint.arena import Pin
from holdfast.model.checkpoint import Series, Version
from holdfast.model.errors import HoldfastError, RejectedError
from holdfast.protocol import checkpoints as c

READERS_S = 10.0
"""For at most this time, writing to storage leaves memory and disk to workers that restore."""


@dataclass(eq=False, slots=True)
class _Ready:
    """A part that is here or on its way; `pin` holds it still once it is here."""

    arrival: asyncio.Task[Path]
    kind: str
    pin: Pin | None = None
    readers: set[int] = field(default_factory=set)


class Opener:
    """The opened parts of one series."""

    def __init__(self, means: Means, memory: Memory, fetcher: Fetcher) -> None:
        self._means = means
        self._memory = memory
        self._fetcher = fetcher
        self._ready: dict[tuple[Version, str], _Ready] = {}
        self._all_read = asyncio.Event()
        self.bad: list[c.BadCopy] = []
        """Every copy that turned out bad since the agreement began."""
        self._no_room = ""

    async def open(
        self, series: Series, ask: c.PartsOpen, sources: Iterable[c.Source]
    ) -> c.PartsOpened:
        """All parts of the ask, verified, in slots of this node; RejectedError names what fails."""
        known: dict[str, list[c.Source]] = {}
        for source in sources:
            known.setdefault(source.asked, []).append(source)
        unknown = tuple(part for part in ask.parts if part not in known)
        if unknown:
            located = await self._means.ask(
                c.PartsLocate(series.directory, ask.version, unknown), c.PartsLocated
            )
            for source in located.sources:
                known.setdefault(source.asked, []).append(source)
        missing = [part for part in ask.parts if part not in known]
        if missing:
            raise RejectedError(
                f"there is no copy of part {missing[0]} of step {ask.version.step} anywhere"
            )
        opened = [
            self._open_one(series, ask.version, ask.local_rank, known[part]) for part in ask.parts
        ]
        return c.PartsOpened(tuple(await asyncio.gather(*opened)))

    async def _open_one(
        self, series: Series, version: Version, local_rank: int, sources: Sequence[c.Source]
    ) -> c.OpenedPart:
        source, part = sources[0], _what_comes(sources)
        key = (version, part)
        ready = self._ready.get(key)
        if ready is None:
            arrival = asyncio.create_task(self._make_ready(series, version, sources))
            arrival.add_done_callback(_note_failure)
            ready = self._ready[key] = _Ready(arrival, source.kind)
        ready.readers.add(local_rank)
        try:
            # Shielded: a rank that dies while it waits must not spoil it for the others.
            path = await asyncio.shield(ready.arrival)
        except HoldfastError:
            self._ready.pop(key, None)
            self._all_read.set()
            raise
        digest = self._memory.digest(path, version)
        known = digest if digest >= 0 else source.digest
        return c.OpenedPart(source.asked, part, str(path), ready.kind, known)

    async def _make_ready(
        self, series: Series, version: Version, sources: Sequence[c.Source]
    ) -> Path:
        """Bring one part here and hold it still."""
        source, part = sources[0], _what_comes(sources)
        here = self._memory.find(series.directory, version, part)
        pin: Pin | None = None
        try:
            if here is not None:
                pin = self._memory.pin(here, "a worker restores from it")
                problem = await self._memory.verify(here, version, source.digest)
                if problem:
                    raise RejectedError(problem)
                path = here
            else:
                path = await self._fetcher.fetch(version, sources)
                pin = self._memory.pin(path, "a worker restores from it")
        except (HoldfastError, OSError) as exc:
            if pin is not None:
                self._memory.unpin(pin)
            if here is not None:
                self._memory.drop_if_free(here)
            if isinstance(exc, NoRoomError):
                self._no_room = f"step {version.step} cannot be restored here: {exc}"
            elif here is not None:
                self.bad.append(c.BadCopy(version, part, self._means.node_id, str(exc)))
            else:
                # With parity the source is one of the blocks: without it the master plans no other
                # rebuild.
                self.bad.append(c.BadCopy(version, source.part, source.node_id, str(exc)))
            raise RejectedError(
                f"part {part} of step {version.step} cannot be had from {_where(source)}: {exc}"
            ) from exc
        self._means.tally.restored(source.kind)
        ready = self._ready.get((version, part))
        if ready is None:
            self._memory.unpin(pin)  # All ranks that wanted it are gone.
        else:
            ready.pin = pin
        return path

    async def wait_for_readers(self) -> None:
        """Wait until no rank reads, but not for long: a worker may hang while it reads."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READERS_S):
                while self._ready:
                    self._all_read.clear()
                    await self._all_read.wait()

    def close(self, local_rank: int, own_parts: Iterable[str], bad: Collection[str] = ()) -> None:
        """A rank has read what it opened, or never will; some of the parts were `bad`."""
        for key, ready in list(self._ready.items()):
            if local_rank not in ready.readers:
                continue
            ready.readers.discard(local_rank)
            if key[1] in bad:
                self._distrust(key, ready)
            elif not ready.readers:
                self._let_go(key, ready, keep=key[1] in set(own_parts))

    def _distrust(self, key: tuple[Version, str], ready: _Ready) -> None:
        """The bytes of a slot have changed since they were verified: it is worth nothing.

        Other ranks that read it now find out by themselves.
        """
        version, part = key
        self.bad.append(c.BadCopy(version, part, self._means.node_id, CHANGED))
        self._let_go(key, ready, keep=True)
        if ready.pin is not None:
            self._memory.distrust(ready.pin.path)

    def close_all(self) -> None:
        """No rank reads any more, and a new agreement begins."""
        for key, ready in list(self._ready.items()):
            self._let_go(key, ready, keep=True)
        self.bad.clear()
        self._no_room = ""

    def take_no_room(self) -> str:
        """Why the last turn found no room for a part, whatever its copies; told once, then
        forgotten."""
        why, self._no_room = self._no_room, ""
        return why

    def _let_go(self, key: tuple[Version, str], ready: _Ready, *, keep: bool) -> None:
        del self._ready[key]
        self._all_read.set()
        if ready.pin is None:
            return
        path = ready.pin.path
        self._memory.unpin(ready.pin)
        if ready.kind != "memory" and (not keep or self._memory.is_on_disk(path)):
            # Fetched only to be read once: by ranks that now own other parts, or from the disk.
            self._memory.drop_if_free(path)


def _note_failure(arrival: asyncio.Task[Path]) -> None:
    """Take the error: if the ranks that waited are gone, nothing else does, and asyncio
    complains."""
    if not arrival.cancelled():
        arrival.exception()


def _what_comes(sources: Sequence[c.Source]) -> str:
    """Which part these sources give: for parity there is one source for each ingredient."""
    source = sources[0]
    return source.asked if source.kind == "parity" else source.part


def _where(source: c.Source) -> str:
    match source.kind:
        case "memory":
            return "the memory of this node"
        case "peer":
            return f"the memory of node {source.node_id} ({source.address})"
        case "parity":
            return "the parity of its group"
        case _:
            return "storage"
