# SPDX-License-Identifier: Apache-2.0
"""Brings parts here that are not in this node's memory: from storage, from peers, from parity."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory, digest_of_slot
from holdfast.agent.vault.storage import Depot
from holdfast.checkpoint.arena import PartKey
from holdfast.checkpoint.parity import ImageReader, rebuild
from holdfast.checkpoint.peer_server import SlotReader
from holdfast.checkpoint.slots import Slot
from holdfast.model.checkpoint import Version
from holdfast.model.errors import HoldfastError, RejectedError, StateError
from holdfast.model.parity import Block
from holdfast.protocol import checkpoints as c

FETCH_S = 600.0


class NoRoomError(RejectedError):
    """Neither memory nor disk has room for a part, or another program removed its slot: its copies
    may still be good."""


class Fetcher:
    """Fills slots of this node with parts that are elsewhere."""

    def __init__(self, means: Means, memory: Memory, depot: Depot) -> None:
        self._means = means
        self._memory = memory
        self._depot = depot
        self._loop = asyncio.get_running_loop()

    async def fetch(self, version: Version, sources: Sequence[c.Source]) -> Path:
        """The slot in which the part is now, sealed and verified."""
        source = sources[0]
        match source.kind:
            case "storage":
                return await self._from_storage(version, source.part)
            case "peer":
                return await self._from_peer(version, source)
            case "parity":
                return await self._from_parity(version, source.asked, sources)
            case _:
                raise StateError("it is not in the memory of this node any more")

    async def _room(self, part: str, size: int) -> Path:
        series = self._depot.series
        key = PartKey(series.directory, part)
        try:
            return await self._memory.grant(key, size, series.slots, on_disk=True)
        except RejectedError as exc:
            raise NoRoomError(str(exc)) from exc

    @contextmanager
    def _given_back_unless_filled(self, paths: list[Path]) -> Iterator[None]:
        is_filled = False
        try:
            yield
            is_filled = True
        except (HoldfastError, OSError) as exc:
            for path in paths:
                if not path.exists():
                    raise NoRoomError(f"another program removed its memory slot {path}") from exc
            raise
        finally:
            for path in paths if not is_filled else ():
                self._memory.give_back(path)

    async def _from_storage(self, version: Version, part: str) -> Path:
        committed = await self._depot.find(version)
        path = await self._room(part, self._depot.length(committed, part))
        with self._given_back_unless_filled([path]):
            digest = await self._depot.load(committed, part, path)
            self._memory.sealed(path, version, digest, is_verified=True)
        return path

    async def _from_peer(self, version: Version, source: c.Source) -> Path:
        client = self._means.peer(source.address)
        get = c.PartGet(self._depot.series.directory, version, source.part)
        offer = await self._means.urgently(client.look, get, FETCH_S)
        path = await self._room(source.part, offer.holding.length)

        def fetch() -> None:
            with Slot.open(path, writable=True) as slot:
                client.fetch(get, offer, slot, FETCH_S)

        with self._given_back_unless_filled([path]):
            await self._means.urgently(fetch)
            self._memory.sealed(path, version, offer.holding.digest, is_verified=True)
        return path

    async def _from_parity(
        self, version: Version, part: str, ingredients: Sequence[c.Source]
    ) -> Path:
        """Rebuild a part from what the other nodes of the parity group have."""
        directory = self._depot.series.directory
        here = {
            source.part: path
            for source in ingredients
            if (path := self._memory.find(directory, version, source.part)) is not None
        }
        pins = [self._memory.pin(path, f"{part} is rebuilt from it") for path in here.values()]
        paths: list[Path] = []

        def add_up() -> int:
            with ExitStack() as stack:

                def room(size: int) -> Slot:
                    granted = asyncio.run_coroutine_threadsafe(self._room(part, size), self._loop)
                    paths.append(granted.result(FETCH_S))
                    return stack.enter_context(Slot.open(paths[0], writable=True))

                readers = {
                    source.part: self._reader(stack, version, source, here.get(source.part))
                    for source in ingredients
                }
                return rebuild(part, readers, room)[1]

        try:
            with self._given_back_unless_filled(paths):
                digest = await self._means.urgently(add_up)
                self._memory.sealed(paths[0], version, digest, is_verified=True)
        finally:
            for pin in pins:
                self._memory.unpin(pin)
        return paths[0]

    def _reader(
        self, stack: ExitStack, version: Version, source: c.Source, here: Path | None
    ) -> ImageReader:
        """Reads an ingredient, in this node's memory or on another node."""
        if here is not None:
            slot = stack.enter_context(self._means.maps.reading(here))
            meta = slot.read()
            if meta is None or meta.version != version:
                raise RejectedError(f"{source.part} is not in memory any more")
            return SlotReader(slot, meta, digest_of_slot(here, slot, meta).data)
        is_block = Block.parse(source.part) is not None
        get = c.PartGet(self._depot.series.directory, version, source.part, parity=is_block)
        return stack.enter_context(self._means.peer(source.address).reader(get, FETCH_S))
