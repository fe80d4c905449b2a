# SPDX-License-Identifier: Apache-2.0
"""A master killed at any point: every batch whose append returned is there, whole, at once."""

import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.model.errors import StateError
from holdfast.runtime.journal import SqliteJournal

KILLS = 10
BATCH = 20

# Appends numbered batches, and at every fifth number replaces all of them by one snapshot of a
# batch's size; prints each number once it is durable. Goes on from the number it is given.
WRITER = f"""
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from holdfast.ports import Entry
from holdfast.runtime.journal import SqliteJournal

journal = SqliteJournal.open(Path(sys.argv[2]), job="cats")
journal.load()
print("ready", flush=True)
number = int(sys.argv[3])
while True:
    write = journal.compact if number % 5 == 0 else journal.append
    payload = b"%d " % number
    write([Entry(float(part), 0.0, payload.ljust(150)) for part in range({BATCH})])
    print(number, flush=True)
    number += 1
"""


@contextmanager
def writer(directory: Path, start: int) -> Iterator[subprocess.Popen[str]]:
    """A process that owns the journal and has said so."""
    source = str(Path(holdfast.__file__).parents[1])
    command = [sys.executable, "-c", WRITER, source, str(directory), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def numbers_in(directory: Path) -> list[int]:
    """The numbers of the batches in the journal, each of which must be whole."""
    with closing(SqliteJournal.open(directory, job="cats")) as journal:
        entries = journal.load()
    assert [entry.at_s for entry in entries] == list(range(BATCH)) * (len(entries) // BATCH)
    numbers = [int(entry.payload) for entry in entries]
    assert numbers[::BATCH] == numbers[BATCH - 1 :: BATCH]
    return numbers[::BATCH]


def test_no_acknowledged_batch_is_lost_and_none_is_half_there(tmp_path: Path) -> None:
    chance = random.Random(20)
    directory = tmp_path / "state"
    newest = 0
    for _ in range(KILLS):
        with writer(directory, newest + 1) as process:
            assert process.stdout is not None
            printed = [int(process.stdout.readline()) for _ in range(chance.randrange(12))]
            # Somewhere between this number and the next: before, in or after the commit.
            select.select([process.stdout], [], [], chance.uniform(0.0, 0.004))
            process.kill()
            printed += [int(line) for line in process.stdout.read().split()]
        acknowledged = max([newest, *printed])
        found = numbers_in(directory)
        # At most the batch that was under way when the signal came is there without its print.
        newest = found[-1] if found else 0
        assert newest in (acknowledged, acknowledged + 1)
        snapshot = max(1, newest - newest % 5)
        assert found == list(range(snapshot, newest + 1))
    assert newest > KILLS


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    with writer(directory, 1) as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StateError, match=rf"in use by another master \(pid {process.pid}\)"):
            SqliteJournal.open(directory, job="cats")
        process.kill()
        process.wait(timeout=120)
        SqliteJournal.open(directory, job="cats").close()
