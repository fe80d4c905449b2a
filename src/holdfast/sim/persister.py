# SPDX-License-Identifier: Apache-2.0
"""How a node's checkpoints get to storage, like agent/vault/persist.py."""

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import NONE, FileEntry, Shape, Version
from holdfast.model.errors import RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.sim.scenario import DIRECTORY

if TYPE_CHECKING:
    from holdfast.sim.node import Agent

Work = Coroutine[Any, None, None]


class Persister:
    """The work of one node that brings versions to storage."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self._stage = agent.stage
        self._clock = agent.stage.clock
        self._memory = agent.memory
        self._committed = NONE
        self._under_way: set[str] = set()
        self._writing: list[c.Writing] = []
        self._idle = self._clock.promise()

    def begin(self, name: str, work: Work, version: Version) -> None:
        """Do this work once, and keep the slots of the version meanwhile."""
        if name in self._under_way:
            work.close()
            return
        self._under_way.add(name)
        self._memory.pins[version] += 1
        self._agent.spawn(self._do(name, work, version))

    async def _do(self, name: str, work: Work, version: Version) -> None:
        try:
            await work
        except RejectedError as exc:
            self._agent.note(f"{name}: {exc}")
        self._under_way.discard(name)
        self._memory.pins[version] -= 1
        if not self._under_way:
            self._idle.keep(None)
            self._idle = self._clock.promise()

    @property
    def writing(self) -> tuple[c.Writing, ...]:
        """The writes under way, each from its start until its report is answered."""
        return tuple(self._writing)

    async def settled(self) -> None:
        """Wait until this node brings nothing to storage any more."""
        while self._under_way:
            await self._idle

    async def persist(self, step: SavedStep, round_number: int) -> None:
        ask = c.PersistAsk(DIRECTORY, round_number, step.version, step.shape, step.parts)
        plan = await self._agent.stream.ask(ask, c.PersistPlan)
        await self._write(step.version, step.shape, plan.attempt, plan.parts)

    async def _write(
        self, version: Version, shape: Shape, attempt: str, parts: tuple[str, ...]
    ) -> None:
        writing = c.Writing(attempt, parts)
        self._writing.append(writing)
        try:
            await self._write_and_report(version, shape, writing)
        finally:
            self._writing.remove(writing)

    async def _write_and_report(self, version: Version, shape: Shape, writing: c.Writing) -> None:
        attempt, parts = writing.attempt, writing.parts
        storage, problem = self._stage.storage, ""
        # The id of the order: meanwhile the agent may be lost and admitted as a new node.
        node_id = self._agent.node_id
        for part in parts:
            with storage.writing(attempt, part, node_id):
                await self._clock.pause(self._agent.rng.uniform(0.05, 1.0))
                copy = self._memory.copies.get((version, part))
                if copy is None or copy.is_rotten:
                    problem = f"{part} is not in memory any more"
                elif storage.is_broken:
                    problem = storage.refuse(version)
                else:
                    storage.write(attempt, part)
        files = () if problem else tuple(FileEntry(part, 1, 1, part) for part in parts)
        report = c.PartsPersisted(DIRECTORY, version, shape, attempt, parts, files, problem)
        state = await self._agent.stream.ask(report, c.PersistState)
        self._committed = max(self._committed, state.committed)

    async def obey(self, order: c.PersistOrder) -> None:
        await self._write(order.version, order.shape, order.attempt, order.parts)

    async def commit(self, order: c.CommitOrder) -> None:
        await self._clock.pause(self._agent.rng.uniform(0.01, 0.5))
        storage = self._stage.storage
        problem = storage.refuse(order.version) if storage.is_broken else ""
        if not problem:
            storage.commit(order.attempt, order.version, order.shape, order.positions)
        done = c.CommitDone(DIRECTORY, order.version, order.attempt, problem)
        await self._agent.stream.ask(done, m.Done)
        if not problem:
            self._committed = max(self._committed, order.version)

    # ---- before this node goes ------------------------------------------------------------------

    @property
    def has_unsaved(self) -> bool:
        newest = max(self._memory.versions(), default=NONE)
        return bool(self._under_way) or newest > self._committed

    async def flush(self) -> None:
        """Bring the newest complete version to storage."""
        await self.settled()
        holdings = self._memory.holdings()
        if not holdings or max(self._memory.versions()) <= self._committed:
            return
        ask = c.FlushAsk(DIRECTORY, holdings, self._committed)
        try:
            state = await self._agent.stream.ask(ask, c.PersistState)
        except RejectedError as exc:
            self._agent.note(f"flush: {exc}")
            return
        self._committed = max(self._committed, state.committed)
