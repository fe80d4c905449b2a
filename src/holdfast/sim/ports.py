# SPDX-License-Identifier: Apache-2.0
"""The ports of the real drivers, with models behind them: journal, platform, desk, ports."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from holdfast.agent.network import ReservedPort
from holdfast.core.job.events import NodeSeen
from holdfast.model.errors import StateError
from holdfast.model.ids import NodeId
from holdfast.model.order import Order, Plan
from holdfast.ports.journal import Entry
from holdfast.ports.platform import Sighting
from holdfast.runtime.journal import MemoryJournal
from holdfast.sim.desk import Desk
from holdfast.sim.platform import Platform


class Disk(MemoryJournal):
    """The master's journal. The loop's `run_in_executor` decides how long a write takes."""

    def __init__(
        self,
        *,
        is_full: Callable[[], bool],
        written: Callable[[Sequence[Entry]], None],
        entries: Sequence[Entry] = (),
        end: int = 0,
    ) -> None:
        """`written` is called with the durable entries; `end` is the number of the last entry."""
        super().__init__(entries, end)
        self._is_full = is_full
        self._written = written

    def append(self, entries: Sequence[Entry]) -> None:
        if self._is_full():
            raise StateError("the disk is full")
        super().append(entries)
        self._written(entries)

    def taken_over(self) -> "Disk":
        """The disk that the next master finds after the death of this one."""
        entries, end = self.load(), self.end()
        self.close()
        return Disk(is_full=self._is_full, written=self._written, entries=entries, end=end)


class UnheldPort(ReservedPort):
    """A port of the simulated network, where no other process takes it."""

    def __init__(self) -> None:
        self.number = 4000

    def close(self) -> None:
        """Nothing to release."""


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

    def look_again(self) -> None:
        """Nothing to do: the modelled platform's sightings do not get lost."""

    def _saw(self, seen: NodeSeen) -> None:
        self._sightings.put_nowait(
            Sighting(
                node_id=seen.node_id, phase=seen.phase, reason=seen.reason, message=seen.message
            )
        )

    async def close(self) -> None:
        """Nothing to release."""


class DeskPort:
    """The modelled people as one master meets them."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._asked: asyncio.Queue[Plan] = asyncio.Queue()

    async def plans(self) -> AsyncIterator[Plan]:
        self._desk.watch(self._asked.put_nowait)
        while True:
            yield await self._asked.get()

    async def answer(self, plan_id: str, *, ok: bool, text: str) -> None:
        self._desk.answer(plan_id)

    async def show(self, view: Mapping[str, object]) -> None:
        """Check that the view can be encoded."""
        msgspec.json.encode(view)

    async def tell(self, kind: str, text: str) -> None:
        """Ignored: the modelled people read no messages."""

    async def close(self) -> None:
        """Nothing to release."""
