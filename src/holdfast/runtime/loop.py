# SPDX-License-Identifier: Apache-2.0
"""The driver around a core: the only place that calls `handle`, so the core needs no lock.

Order is the promise: the commands of a step are executed only when its records, and those of every
step before it, are durable. While one batch is on its way to the disk, the next collects: under
load many steps share one commit, and an idle master commits at once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.core.kernel import Command, Core, Event, Outcome, Record, Tick
from holdfast.model.errors import StateError
from holdfast.ports.journal import Entry, Journal

LATE_S = 0.1
"""A tick that comes this late waits as long again."""

COMPACT_AFTER = 50_000
COMPACT_AFTER_BYTES = 512 * 1024 * 1024
"""Entries, or bytes of them, after which the journal is replaced by a snapshot."""


class JobClock:
    """Job time: seconds that never go back and go on across master restarts."""

    def __init__(
        self,
        entries: Sequence[Entry],
        wall_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base_s = 0.0
        self._monotonic = monotonic
        if entries:
            last = entries[-1]
            self._base_s = last.at_s + max(0.0, wall_s - last.wall_s)
        self._started_at = monotonic()

    def now(self) -> float:
        return self._base_s + self._monotonic() - self._started_at


class Driver:
    """Owns one core and its journal."""

    def __init__(
        self,
        core: Core,
        journal: Journal,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        encode: Callable[[Record], bytes],
        execute: Callable[[Command], None],
        observe: Callable[[Event, float], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._core = core
        self._journal = journal
        self._clock = clock
        self._wall = wall
        self._encode = encode
        self._execute = execute
        self._observe = observe
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._entries: list[Entry] = []
        self._commands: deque[Command] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        #: As an earlier master left it: one that is killed often must compact its journal, too.
        self._since_snapshot, self._bytes_since_snapshot = journal.since_snapshot()
        self._is_stopped = False
        #: How far the journal was when the last commands were executed.
        self.position = journal.end()

    def feed(self, event: Event) -> None:
        """Let the core handle an event; its commands follow when its records are durable."""
        if self._is_stopped:
            return
        now = self._clock()
        self._observe(event, now)
        try:
            outcome = self._core.handle(event, now)
            entries = self._entries_of(outcome, now)
        except Exception as exc:
            # A broken invariant: the state in memory cannot be trusted, the journal can. Stop here;
            # whoever restarts the master gets the last good state back.
            self.stop()
            self._failed(exc)
            raise
        for fact in outcome.facts:
            self._observe(fact, now)
        self._accept(entries, outcome.commands)
        self._arm(now)

    async def drain(self) -> None:
        """Wait until everything fed so far is durable and executed."""
        while self._writer is not None:
            await asyncio.shield(self._writer)

    def stop(self) -> None:
        """Take nothing more."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _entries_of(self, outcome: Outcome, now: float) -> list[Entry]:
        if not outcome.records:
            return []
        wall_s = self._wall()
        return [Entry(now, wall_s, self._encode(record)) for record in outcome.records]

    def _accept(self, entries: list[Entry], commands: list[Command]) -> None:
        self._entries += entries
        if not self._entries and self._writer is None:
            for command in commands:
                self._execute(command)
            return
        self._commands += commands
        if self._writer is None:
            self._writer = self._loop.create_task(self._write())

    async def _write(self) -> None:
        """Commit batches until none is left."""
        try:
            while self._entries or self._commands:
                entries, self._entries = self._entries, []
                commands, self._commands = self._commands, deque()
                if entries:
                    await self._loop.run_in_executor(None, self._journal.append, entries)
                    self._since_snapshot += len(entries)
                    self._bytes_since_snapshot += sum(len(entry.payload) for entry in entries)
                    self.position = self._journal.end()
                for command in commands:
                    self._execute(command)
                if (
                    self._since_snapshot >= COMPACT_AFTER
                    or self._bytes_since_snapshot >= COMPACT_AFTER_BYTES
                ):
                    await self._compact()
        except StateError as exc:
            # Nothing that was not durable has left; what happens next is for others to decide.
            self.stop()
            self._failed(exc)
        except Exception as exc:
            # Commands were lost that somebody may wait for: as above, the journal has the truth.
            self.stop()
            self._failed(exc)
            raise
        finally:
            self._writer = None

    async def _compact(self) -> None:
        now, wall_s = self._clock(), self._wall()
        snapshot = [Entry(now, wall_s, self._encode(r)) for r in self._core.snapshot()]
        # It holds what these would change: under load there are always some.
        covered = len(self._entries)
        await self._loop.run_in_executor(None, self._journal.compact, snapshot)
        del self._entries[:covered]
        self.position = self._journal.end()
        self._since_snapshot = self._bytes_since_snapshot = 0

    def _arm(self, now: float) -> None:
        at = self._core.deadline()
        if at == self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = None
        if at is not None:
            self._timer = self._loop.call_later(max(0.0, at - now), self._tick)

    def _tick(self) -> None:
        # This process stood still: what others said meanwhile has arrived and is not heard yet, and
        # nobody may be taken for silent before it is.
        if self._timer_at is not None and self._clock() - self._timer_at > LATE_S:
            self._timer = self._loop.call_later(LATE_S, self._tick_now)
        else:
            self._tick_now()

    def _tick_now(self) -> None:
        self._timer = self._timer_at = None
        self.feed(Tick())
