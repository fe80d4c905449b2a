# SPDX-License-Identifier: Apache-2.0
"""The driver around a core: the only place that calls `handle`, so the core needs no lock.

Order is the promise: the commands of a step are executed, and people are told of it, only when its
records, and those of every step before it, are durable. While one batch is on its way to the disk,
the next collects: under load many steps share one commit, and an idle master commits at once.

The driver waits for room on a full disk: no decision leaves it until there is room again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from holdfast.core.kernel import Command, Core, Event, Outcome, Record, Tick
from holdfast.model.errors import DiskFullError, StateError
from holdfast.ports.journal import Entry, Journal
from holdfast.runtime.observe import Level, Say

FULL_PAUSE_S, FULL_PAUSE_S_MAX = 0.1, 5.0
"""Between two tries to write to a full disk: the first pause, and the longest."""

FULL_AT_THE_END_S = 10.0
"""How long a master that was told to stop waits for room: what it cannot write never happened."""

LATE_S = 0.1
"""A tick that comes this late waits as long again."""

COMPACT_AFTER = 50_000
COMPACT_AFTER_BYTES = 512 * 1024 * 1024
"""Entries, or bytes of them, after which the journal is replaced by a snapshot."""


class JobClock:
    """Job time: seconds that never go back and go on across master restarts.

    They are those of the machine's monotonic clock. Where the last master ran on the same one, job
    time just goes on. The wall clock, which people and time servers set, is asked only after the
    machine was started again, or on another machine: nothing else knows how long no master ran.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        wall_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        *,
        name: str = "",
        kept: tuple[str, float] = ("", 0.0),
    ) -> None:
        """`name` is the name of the monotonic clock. `kept` has the name of the last master's
        clock, and what that showed at job time 0. A clock without a name is not known again."""
        self._monotonic = monotonic
        self.name = name
        self.zero_s = started_at = monotonic()
        if not entries:
            return
        last, (kept_name, kept_zero_s) = entries[-1], kept
        if name and name == kept_name and started_at - kept_zero_s >= last.at_s:
            self.zero_s = kept_zero_s
        else:
            self.zero_s -= last.at_s + max(0.0, wall_s - last.wall_s)

    def now(self) -> float:
        return self._monotonic() - self.zero_s


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
        say: Say,
    ) -> None:
        self._core = core
        self._journal = journal
        self._clock = clock
        self._wall = wall
        self._encode = encode
        self._execute = execute
        self._observe = observe
        self._failed = failed
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._entries: list[Entry] = []
        #: What waits for those entries: facts to tell, with their time, and commands.
        self._waiting: deque[tuple[Event, float] | Command] = deque()
        #: Until when the driver waits for room on a full disk; None: as long as it takes.
        self._full_until: float | None = None
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
        try:
            outcome = self._core.handle(event, now)
            entries = self._entries_of(outcome, now)
        except Exception as exc:
            # A broken invariant: the state in memory cannot be trusted, the journal can. Stop here;
            # a restarted master gets the last good state back.
            self.stop()
            self._failed(exc)
            raise
        self._entries += entries
        if not self._entries and self._writer is None:
            self._observe(event, now)
            for fact in outcome.facts:
                self._observe(fact, now)
            for command in outcome.commands:
                self._execute(command)
        else:
            self._waiting.append((event, now))
            self._waiting.extend((fact, now) for fact in outcome.facts)
            self._waiting += outcome.commands
            if self._writer is None:
                self._writer = self._loop.create_task(self._write())
        self._arm(now)

    def follow(self, command: Command) -> None:
        """Execute a command that decides nothing after everything that was decided before it."""
        if self._writer is None:
            self._execute(command)
        else:
            self._waiting.append(command)

    def limit_patience(self) -> None:
        """The end is near: from now on the driver waits only for a moment for room on a full
        disk."""
        if self._full_until is None:
            self._full_until = self._loop.time() + FULL_AT_THE_END_S

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

    async def _write(self) -> None:
        """Commit batches until none is left."""
        try:
            while self._entries or self._waiting:
                entries, self._entries = self._entries, []
                waiting, self._waiting = self._waiting, deque()
                if entries:
                    await self._append(entries)
                    self._since_snapshot += len(entries)
                    self._bytes_since_snapshot += sum(len(entry.payload) for entry in entries)
                    self.position = self._journal.end()
                for item in waiting:
                    if isinstance(item, tuple):
                        self._observe(*item)
                    else:
                        self._execute(item)
                if (
                    self._since_snapshot >= COMPACT_AFTER
                    or self._bytes_since_snapshot >= COMPACT_AFTER_BYTES
                ):
                    await self._compact()
        except StateError as exc:
            # Nothing that was not durable has left; the owner of the driver decides what happens
            # next.
            self.stop()
            self._failed(exc)
        except Exception as exc:
            # Commands were lost that an agent may wait for: as above, the journal has the truth.
            self.stop()
            self._failed(exc)
            raise
        finally:
            self._writer = None

    async def _append(self, entries: list[Entry]) -> None:
        """Make these durable. As long as there is no room for them, the driver holds them back, and
        everything that follows."""
        pause_s, full_since = FULL_PAUSE_S, self._loop.time()
        while True:
            try:
                await self._loop.run_in_executor(None, self._journal.append, entries)
                break
            except DiskFullError as exc:
                if self._full_until is not None and self._loop.time() >= self._full_until:
                    raise
                if pause_s == FULL_PAUSE_S:
                    self._say(
                        f"{exc}: until then the master decides nothing, and tries again by itself; "
                        "the training goes on for as long as its lease",
                        Level.WARNING,
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, FULL_PAUSE_S_MAX)
        if pause_s > FULL_PAUSE_S:
            took_s = self._loop.time() - full_since
            self._say(
                f"there is room in the journal again after {took_s:.1f} s: the master goes on"
            )

    async def _compact(self) -> None:
        now, wall_s = self._clock(), self._wall()
        snapshot = [Entry(now, wall_s, self._encode(r)) for r in self._core.snapshot()]
        # The snapshot holds what these entries would change: under load there are always some.
        covered = len(self._entries)
        self._since_snapshot = self._bytes_since_snapshot = 0
        try:
            await self._loop.run_in_executor(None, self._journal.compact, snapshot)
        except DiskFullError:
            return  # All entries stay; an append that finds no room says so.
        del self._entries[:covered]
        self.position = self._journal.end()

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
        # This process stood still: messages that arrived meanwhile are not handled yet, and no node
        # may be taken for silent before they are.
        if self._timer_at is not None and self._clock() - self._timer_at > LATE_S:
            self._timer = self._loop.call_later(LATE_S, self._tick_now)
        else:
            self._tick_now()

    def _tick_now(self) -> None:
        self._timer = self._timer_at = None
        self.feed(Tick())
