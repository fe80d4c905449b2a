# SPDX-License-Identifier: Apache-2.0
"""When a master replaces its journal by a snapshot: however short its lives, however busy it is."""

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.sync.scopes import VALUE_BYTES_MAX
from holdfast.core.job.sync.sync import Sync
from holdfast.core.kernel import Command, Core, Record
from holdfast.model.ids import NodeId
from holdfast.ports import Entry, Journal
from holdfast.protocol import messages as m
from holdfast.runtime.journal import MemoryJournal
from holdfast.runtime.loop import COMPACT_AFTER, COMPACT_AFTER_BYTES, Driver
from tests.contract.test_journal import LOCATIONS, Location
from tests.hearing import Heard


def entry(record: Record) -> Entry:
    return Entry(0.0, 0.0, rec.encode_record(record))


def empty(key: str = "marks") -> Entry:
    return entry(rec.KvChanged(0, (key,), (b"",)))


def mark(number: int) -> ev.KvRequested:
    """A request whose record would show if it were applied twice."""
    return ev.KvRequested(NodeId(1), 1, number, "session", number, m.KvAppend(0, "marks", b"x"))


class Life:
    """A master with nothing but a key-value store, from its start to its death."""

    def __init__(self, journal: Journal, execute: Callable[[Command], None]) -> None:
        self.sync = Sync()
        core = Core([self.sync])
        core.route(ev.KvRequested, self.sync)
        for found in journal.load():
            core.replay(rec.decode_record(found.payload))
        self.problems: list[Exception] = []
        self.driver = Driver(
            core,
            journal,
            clock=time.monotonic,
            wall=time.time,
            encode=rec.encode_record,
            execute=execute,
            observe=lambda event, now: None,
            failed=self.problems.append,
            say=Heard(),
        )


def live(journal: Journal, first: int, count: int) -> None:
    """Be asked for this many marks, one after the other is durable; then be killed."""

    async def run() -> None:
        life = Life(journal, lambda command: None)
        for number in range(first, first + count):
            life.driver.feed(mark(number))
            await life.driver.drain()
        assert life.problems == []

    asyncio.run(run())


def marks_in(journal: Journal) -> int:
    """What the next master finds."""
    sync = Sync()
    for found in journal.load():
        sync.apply(rec.decode_record(found.payload))
    (changed,) = [one for one in sync.snapshot() if isinstance(one, rec.KvChanged)]
    return len(changed.values[changed.keys.index("marks")])


@pytest.fixture(params=LOCATIONS)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    made: Location = request.param(tmp_path)
    return made


def test_masters_that_live_too_briefly_for_it_compact_their_journal_together(
    location: Location,
) -> None:
    with closing(location.open()) as journal:
        journal.append([empty()] * (COMPACT_AFTER - 5))
    for life in range(3):
        with closing(location.open()) as journal:
            live(journal, 1 + 2 * life, 2)
    with closing(location.open()) as journal:
        assert len(journal.load()) < 10
        assert journal.since_snapshot()[0] < 5
        assert marks_in(journal) == 6


def test_a_large_snapshot_is_not_made_again_at_every_start(location: Location) -> None:
    with closing(location.open()) as journal:
        journal.compact([empty(f"k{number}") for number in range(COMPACT_AFTER)])
    with closing(location.open()) as journal:
        live(journal, 1, 1)
        assert journal.since_snapshot()[0] == 1


def test_a_busy_master_compacts_while_more_waits_to_be_written(location: Location) -> None:
    """Nothing of what waits is lost, and nothing of it counts twice."""
    count = 20

    async def run(journal: Journal) -> list[int]:
        lengths: list[int] = []

        def execute(command: Command) -> None:
            lengths.append(journal.since_snapshot()[0])
            if len(lengths) < count:
                # It is not durable when the length of the journal is looked at next.
                life.driver.feed(mark(1 + len(lengths)))

        life = Life(journal, execute)
        life.driver.feed(mark(1))
        await life.driver.drain()
        assert life.problems == []
        assert life.driver.position == journal.end()
        return lengths

    with closing(location.open()) as journal:
        journal.append([empty()] * COMPACT_AFTER)
        lengths = asyncio.run(run(journal))
        assert len(lengths) == count
        assert lengths[0] > COMPACT_AFTER
        assert max(lengths[1:]) < count
    with closing(location.open()) as journal:
        assert marks_in(journal) == count


def test_few_entries_that_are_large_are_compacted_too() -> None:
    large = entry(rec.KvChanged(0, ("marks", "large"), (b"", bytes(VALUE_BYTES_MAX))))
    # The same bytes again and again: they are in this process once.
    journal = MemoryJournal([large] * (1 + COMPACT_AFTER_BYTES // VALUE_BYTES_MAX), end=1)
    live(journal, 1, 1)
    assert journal.since_snapshot() == (0, 0)
    assert marks_in(journal) == 1
