# SPDX-License-Identifier: Apache-2.0
"""What the journal says it has written is there after a loss of power. A kill shows nothing of
that: the kernel keeps what a killed process wrote."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.ports import Entry
from holdfast.runtime.journal import SqliteJournal
from tests.power import disk

FULL = 2
"""SQLite's number for `synchronous = FULL`: an fsync before a commit returns."""


def entries(first: int, count: int) -> list[Entry]:
    return [Entry(float(n), 1.7e9 + n, b"entry %d" % n) for n in range(first, first + count)]


def test_sqlite_syncs_before_an_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no disk can be mounted this is all that can be seen."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remember(*args: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", remember)
    with closing(SqliteJournal.open(tmp_path / "state", job="cats")) as journal:
        journal.append(entries(0, 3))
        journal.compact(entries(0, 1))
        (connection,) = opened
        assert connection.execute("PRAGMA synchronous").fetchone() == (FULL,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_appended_survives_a_loss_of_power(tmp_path: Path, compacted: bool) -> None:
    with disk(tmp_path) as mounted:
        written = entries(0, 3)
        with closing(SqliteJournal.open(mounted.path / "state", job="cats")) as journal:
            journal.append(written)
            if compacted:
                written = entries(7, 1)
                journal.compact(written)
            more = entries(10, 2)
            journal.append(more)
            with (
                mounted.after_a_loss_of_power() as after,
                closing(SqliteJournal.open(after / "state", job="cats")) as found,
            ):
                assert found.load() == written + more
