# SPDX-License-Identifier: Apache-2.0
"""Watches a platform beside a test, and waits for what the test is about."""

import asyncio
from collections.abc import Callable
from types import TracebackType

from holdfast.model.ids import NodeId
from holdfast.model.node import Phase
from holdfast.ports.platform import Platform, Sighting

WAIT_S = 90.0
"""Long, because the machine may be busy; nothing waits for it where things work."""


class Sightings:
    """`async with Sightings(platform) as seen`: everything that the platform says."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self.all: list[Sighting] = []

    async def __aenter__(self) -> "Sightings":
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        async for sighting in self._platform.watch():
            async with self._news:
                self.all.append(sighting)
                self._news.notify_all()

    def of(self, node_id: int) -> list[Sighting]:
        return [sighting for sighting in self.all if sighting.node_id == node_id]

    def phases(self, node_id: int) -> list[Phase]:
        return [sighting.phase for sighting in self.of(node_id)]

    async def until(self, what: Callable[[Sighting], bool]) -> Sighting:
        """The first sighting of which `what` is true, past or still to come."""
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(lambda: any(what(sighting) for sighting in self.all))
        return next(sighting for sighting in self.all if what(sighting))

    async def of_node(self, node_id: int, *phases: Phase) -> Sighting:
        """The first sighting of a node, in one of these phases if some are given."""
        return await self.until(
            lambda seen: seen.node_id == NodeId(node_id) and (not phases or seen.phase in phases)
        )

    async def end_of(self, node_id: int) -> Sighting:
        """The first sighting of a node's end."""
        return await self.until(
            lambda seen: seen.node_id == NodeId(node_id) and seen.phase.is_final
        )
