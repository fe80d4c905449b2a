# SPDX-License-Identifier: Apache-2.0
"""The ports of the real drivers, with models behind them: journal, platform, network ports."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from holdfast.agent.network import ReservedPort
from holdfast.core.job.events import NodeSeen
from holdfast.model.errors import StateError
from holdfast.model.ids import NodeId
from holdfast.model.order import Order
from holdfast.ports.journal import Entry
from holdfast.ports.platform import Sighting
from holdfast.runtime.journal import MemoryJournal
from holdfast.sim.platform import Platform


class Disk(MemoryJournal):
    """The master's journal. How long a write takes is for the loop: see `run_in_executor` there."""

    def __init__(
        self,
        *,
        is_full: Callable[[], bool],
        written: Callable[[Sequence[Entry]], None],
        entries: Sequence[Entry] = (),
    ) -> None:
        """`written` is told what is durable now."""
        super().__init__(entries)
        self._is_full = is_full
        self._written = written

    def append(self, entries: Sequence[Entry]) -> None:
        if self._is_full():
            raise StateError("the disk is full")
        super().append(entries)
        self._written(entries)

    def taken_over(self) -> "Disk":
        """What the next master finds after the death of this one."""
        entries = self.load()
        self.close()
        return Disk(is_full=self._is_full, written=self._written, entries=entries)


class UnheldPort(ReservedPort):
    """A port of a network in which nobody takes it."""

    def __init__(self) -> None:
        self.number = 4000

    def close(self) -> None:
        """Nothing is held."""


class PlatformPort:
    """The modelled platform as one master sees it."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._sightings: asyncio.Queue[Sighting] = asyncio.Queue()

    async def launch(self, order: Order) -> None:
        self._platform.launch(order)

    async def remove(self, node_id: NodeId) -> None:
        self._platform.remove(node_id)

    async def watch(self) -> AsyncIterator[Sighting]:
        self._platform.watch(self._saw)
        while True:
            yield await self._sightings.get()

    def _saw(self, seen: NodeSeen) -> None:
        self._sightings.put_nowait(
            Sighting(
                node_id=seen.node_id, phase=seen.phase, reason=seen.reason, message=seen.message
            )
        )

    async def close(self) -> None:
        """Nothing is held."""
