# SPDX-License-Identifier: Apache-2.0
"""Brings one series to storage: takes its turn, writes, commits, and keeps the outcome.

The master decides which version goes when, and which node writes which part. This node holds the
slots still (pins them) from their sealing on and for as long as an attempt may need them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory
from holdfast.agent.vault.storage import Depot
from holdfast.checkpoint.arena import Pin
from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import NONE, FileEntry, Shape, Version
from holdfast.model.errors import FencedError, HoldfastError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.runtime.observe import Level

_WRITE = "write"
"""How the names of the orders to write parts begin."""


class Persister:
    """The versions of one series that are on their way to storage through this node."""

    def __init__(
        self,
        means: Means,
        memory: Memory,
        depot: Depot,
        readers_gone: Callable[[], Awaitable[None]],
    ) -> None:
        """`readers_gone` returns when the workers of this node have restored."""
        self._means = means
        self._memory = memory
        self._depot = depot
        self._readers_gone = readers_gone
        self._directory = depot.series.directory
        #: Pins by version, held from sealing on: whether they will be needed is not known yet.
        self._waiting: dict[Version, list[Pin]] = {}
        #: What is being written or committed here, by attempt: orders may come twice.
        self._attempts: dict[str, asyncio.Task[None]] = {}
        self._under_way = 0
        self._writing: list[c.Writing] = []
        self._changed = asyncio.Event()
        self.committed = NONE
        self.problem = ""

    @property
    def is_idle(self) -> bool:
        return self._under_way == 0 and not self._attempts

    @property
    def held(self) -> int:
        """How many versions are on their way to storage, or may be needed for it."""
        ordered = sum(name.startswith(_WRITE) for name in self._attempts)
        return len(self._waiting) + self._under_way + ordered

    @property
    def state(self) -> c.PersistState:
        return c.PersistState(self.committed, self.problem)

    @property
    def writing(self) -> tuple[c.Writing, ...]:
        """What this node is writing: a new master has to ask, because it cannot know."""
        return tuple(self._writing)

    async def settled(self) -> c.PersistState:
        """Wait until nothing is on its way to storage here."""
        while not self.is_idle:
            await self._changed.wait()
        return self.state

    async def all_settled(self) -> c.PersistState:
        """The same, also for versions that some workers of this node have sealed and others have
        not."""
        while self._waiting or not self.is_idle:
            await self._changed.wait()
        return self.state

    # ---- steps that workers want on storage -----------------------------------------------------

    def part_sealed(self, version: Version, part: str) -> None:
        """A part is to go to storage once the other parts are there too: hold it still until
        then."""
        path = self._memory.find(self._directory, version, part)
        if path is not None:
            pin = self._memory.pin(path, f"step {version.step} goes to storage")
            self._waiting.setdefault(version, []).append(pin)

    def overtaken(self, versions: Iterable[Version]) -> None:
        """These versions will never be whole."""
        for version in versions:
            pins = self._waiting.pop(version, [])
            if pins:
                self._means.say(
                    f"step {version.step} does not go to storage: not every rank saved it",
                    Level.WARNING,
                )
            self._release(pins)
            self._tell()

    def saved(self, step: SavedStep, round: int) -> None:
        """All of this node's parts are sealed: bring the step to storage."""
        pins = self._waiting.pop(step.version, [])
        self._under_way += 1
        self._means.spawn(
            self._persist(step, round, pins), f"step {step.version.step} does not go to storage"
        )

    async def _persist(self, step: SavedStep, round: int, pins: list[Pin]) -> None:
        ask = c.PersistAsk(self._directory, round, step.version, step.shape, step.parts)
        try:
            plan = await self._means.ask(ask, c.PersistPlan)
            await self._write(step.version, step.shape, plan.attempt, plan.parts)
        except FencedError:
            return  # The round is over; the next round decides about this step.
        except HoldfastError as exc:
            self.problem = f"step {step.version.step} is not on storage: {exc}"
            raise
        finally:
            self._under_way -= 1
            self._release(pins)
            self._tell()

    async def _write(
        self, version: Version, shape: Shape, attempt: str, parts: tuple[str, ...]
    ) -> None:
        """Write the parts and wait for the outcome of the attempt; RejectedError if it was given
        up."""
        writing = c.Writing(attempt, parts)
        self._writing.append(writing)
        try:
            await self._write_and_report(version, shape, writing)
        finally:
            self._writing.remove(writing)

    async def _write_and_report(self, version: Version, shape: Shape, writing: c.Writing) -> None:
        attempt, parts = writing.attempt, writing.parts
        files: tuple[FileEntry, ...] = ()
        problem = ""
        try:
            files = await self._depot.write_parts(attempt, version, self._paths(version, parts))
        except (HoldfastError, OSError) as exc:
            problem = str(exc) or type(exc).__name__
        report = c.PartsPersisted(
            self._directory, version, shape, attempt, parts, files, problem=problem
        )
        try:
            state = await self._means.ask(report, c.PersistState)
        except RejectedError:
            await self._depot.give_up(attempt)
            raise
        self.committed = max(self.committed, state.committed)
        if self.committed >= version:
            self.problem = ""

    def _paths(self, version: Version, parts: tuple[str, ...]) -> dict[str, Path]:
        paths = {}
        for part in parts:
            path = self._memory.find(self._directory, version, part)
            if path is None:
                raise RejectedError(f"part {part} of step {version.step} is not in memory any more")
            paths[part] = path
        return paths

    # ---- what the master orders -----------------------------------------------------------------

    def ordered(self, order: c.PersistOrder) -> None:
        """Write parts that this node holds, because the version must not be lost."""
        pins = [
            self._memory.pin(path, f"step {order.version.step} goes to storage")
            for part in order.parts
            if (path := self._memory.find(self._directory, order.version, part)) is not None
        ]
        work = self._obey(order, pins)
        # A node may get two orders in an attempt: the second one for the parts of a lost node.
        name = f"{_WRITE} {order.attempt} {' '.join(order.parts)}"
        self._once(name, work, f"{order.reason}: not on storage", pins)

    async def _obey(self, order: c.PersistOrder, pins: list[Pin]) -> None:
        try:
            # Orders come with the agreement on what to restore: training waits for that first.
            await self._readers_gone()
            await self._write(order.version, order.shape, order.attempt, order.parts)
        except HoldfastError as exc:
            self.problem = f"step {order.version.step} is not on storage: {exc}"
            raise
        finally:
            self._release(pins)

    def commit(self, order: c.CommitOrder) -> None:
        """All parts are there: make them a checkpoint."""
        what = f"the checkpoint of step {order.version.step} was not committed"
        fence = self._depot.fence()
        self._once(f"commit {order.attempt}", self._commit(order, fence), what, [])

    async def _commit(self, order: c.CommitOrder, fence: Callable[[], None]) -> None:
        problem = ""
        try:
            await self._depot.commit(order, fence)
        except (HoldfastError, OSError) as exc:
            problem = str(exc) or type(exc).__name__
        done = c.CommitDone(self._directory, order.version, order.attempt, problem)
        await self._means.ask(done, m.Done)
        if problem:
            raise RejectedError(problem)
        self.committed = max(self.committed, order.version)
        with suppress(FencedError):  # It is committed; another node removes the old ones.
            await self._depot.apply_retention(fence)

    def _once(
        self, name: str, work: Coroutine[None, None, None], what: str, pins: list[Pin]
    ) -> None:
        """Do it, unless it is being done: orders are sent again when a stream broke."""
        if name in self._attempts:
            work.close()
            self._release(pins)
            return
        task = self._attempts[name] = self._means.spawn(work, what)

        def ended(_: asyncio.Task[None]) -> None:
            del self._attempts[name]
            self._tell()

        task.add_done_callback(ended)

    # ---- before this node goes ------------------------------------------------------------------

    async def flush(self) -> c.PersistState:
        """Bring the newest complete version to storage, with what is on its way there already."""
        await self.settled()
        holdings = self._memory.holdings(self._directory)
        if not holdings:
            return self.state
        ask = c.FlushAsk(self._directory, holdings, self.committed)
        state = await self._means.ask(ask, c.PersistState)
        self.committed = max(self.committed, state.committed)
        return state

    def _release(self, pins: Iterable[Pin]) -> None:
        for pin in pins:
            self._memory.unpin(pin)
        self._memory.stored(self._directory, self.committed)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
