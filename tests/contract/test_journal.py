# SPDX-License-Identifier: Apache-2.0
"""What every journal must promise, and what the one on disk says when it cannot.

The first half runs against each journal that ships; a new one (Postgres, etcd) joins `LOCATIONS`.
The second half breaks real files: full and read-only disks, damage, foreign and newer journals.
"""

import errno
import os
import platform
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.model.errors import AwayError, DiskFullError, StateError
from holdfast.ports import Entry, Journal
from holdfast.runtime.journal import MemoryJournal, SqliteJournal
from tests.disks import filled, small_disk

DAMAGED = "restore the folder from a copy, or start the job anew"


class Location(Protocol):
    """A place that keeps one journal between its owners."""

    def open(self) -> Journal: ...


class OnDisk:
    def __init__(self, folder: Path) -> None:
        self._directory = folder / "state"

    def open(self) -> Journal:
        return SqliteJournal.open(self._directory, job="cats")


class InMemory:
    def __init__(self, folder: Path) -> None:
        self._newest: MemoryJournal | None = None

    def open(self) -> Journal:
        self._newest = MemoryJournal() if self._newest is None else self._newest.reopen()
        return self._newest


LOCATIONS: tuple[Callable[[Path], Location], ...] = (OnDisk, InMemory)


@pytest.fixture(params=LOCATIONS)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    made: Location = request.param(tmp_path)
    return made


def entry(number: int, size: int = 20) -> Entry:
    """Its times fall as the number rises: no clock may decide the order."""
    return Entry(-number / 8, 1.7e9 - number, number.to_bytes(4, "big") + os.urandom(size))


def batch(start: int, count: int) -> list[Entry]:
    return [entry(number) for number in range(start, start + count)]


class FailsHalfWay(list[Entry]):
    """Entries of which the third cannot be read, as when its encoding fails."""

    def __iter__(self) -> Iterator[Entry]:
        yield from self[:2]
        raise ValueError("this one cannot be read")


def test_a_new_journal_is_empty_and_stays_so(location: Location) -> None:
    with closing(location.open()) as journal:
        assert journal.load() == []
        journal.append([])
        assert journal.load() == []
    with closing(location.open()) as journal:
        assert journal.load() == []


def test_entries_come_back_equal_and_in_order(location: Location) -> None:
    first, second = batch(0, 3), batch(3, 5)
    with closing(location.open()) as journal:
        journal.append(first)
        journal.append(second)
        assert journal.load() == first + second
    with closing(location.open()) as journal:
        assert journal.load() == first + second


def test_any_bytes_and_sizes_are_kept(location: Location) -> None:
    payloads = [b"", b"\0", b"\xff" * 7, "grüße".encode(), os.urandom(9_000_000)]
    entries = [Entry(0.0, 0.0, payload) for payload in payloads]
    with closing(location.open()) as journal:
        journal.append(entries)
    with closing(location.open()) as journal:
        assert journal.load() == entries


@pytest.mark.parametrize("write", ["append", "compact"])
def test_a_write_that_fails_half_way_leaves_nothing(location: Location, write: str) -> None:
    kept, after = batch(0, 2), batch(2, 2)
    with closing(location.open()) as journal:
        journal.append(kept)
        with pytest.raises(ValueError, match="cannot be read"):
            getattr(journal, write)(FailsHalfWay(batch(10, 4)))
        assert journal.load() == kept
        journal.append(after)
        assert journal.load() == kept + after


def test_what_load_returned_is_the_callers_own(location: Location) -> None:
    with closing(location.open()) as journal:
        journal.append(batch(0, 2))
        journal.load().clear()
        assert len(journal.load()) == 2


def test_compaction_replaces_all_that_came_before(location: Location) -> None:
    snapshot, after = batch(100, 2), batch(200, 3)
    with closing(location.open()) as journal:
        journal.append(batch(0, 50))
        journal.compact(snapshot)
        assert journal.load() == snapshot
        journal.append(after)
    with closing(location.open()) as journal:
        assert journal.load() == snapshot + after
        journal.compact(after)
        journal.compact(snapshot)
    with closing(location.open()) as journal:
        assert journal.load() == snapshot


def test_an_empty_snapshot_empties_the_journal(location: Location) -> None:
    after = batch(3, 1)
    with closing(location.open()) as journal:
        journal.append(batch(0, 3))
        journal.compact([])
    with closing(location.open()) as journal:
        assert journal.load() == []
        journal.append(after)
    with closing(location.open()) as journal:
        assert journal.load() == after


def test_a_second_owner_is_refused_while_the_first_lives(location: Location) -> None:
    with closing(location.open()), pytest.raises(StateError, match="in use by another master"):
        location.open()
    location.open().close()


def test_a_closed_journal_refuses_everything_but_close(location: Location) -> None:
    journal = location.open()
    journal.close()
    journal.close()
    with pytest.raises(StateError, match="closed"):
        journal.load()
    with pytest.raises(StateError, match="closed"):
        journal.append(batch(0, 1))
    with pytest.raises(StateError, match="closed"):
        journal.compact([])


def test_appending_from_another_thread(location: Location) -> None:
    batches = [batch(start, 3) for start in range(0, 60, 3)]
    with closing(location.open()) as journal:
        with ThreadPoolExecutor(max_workers=1) as thread:
            for entries in batches:
                thread.submit(journal.append, entries).result(timeout=120)
        assert journal.load() == [entry for entries in batches for entry in entries]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "compact", "reopen"]),
        st.lists(st.binary(max_size=6000), max_size=4),
    ),
    max_size=12,
)


@pytest.mark.parametrize("make_location", LOCATIONS)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_any_interleaving_equals_a_list(
    make_location: Callable[[Path], Location], steps: list[tuple[str, list[bytes]]]
) -> None:
    expected: list[Entry] = []
    with tempfile.TemporaryDirectory(prefix="journal-") as folder:
        location = make_location(Path(folder))
        journal = location.open()
        for at, (step, payloads) in enumerate(steps):
            entries = [Entry(float(at), float(-at), payload) for payload in payloads]
            match step:
                case "append":
                    journal.append(entries)
                    expected += entries
                case "compact":
                    journal.compact(entries)
                    expected = entries
                case "reopen":
                    journal.close()
                    journal = location.open()
            assert journal.load() == expected
        journal.close()


def open_in(directory: Path, job: str = "cats") -> SqliteJournal:
    return SqliteJournal.open(directory, job=job)


def refusal(directory: Path, job: str = "cats") -> str:
    """What opening and loading says: one sentence, and the same again, so the lock was freed."""
    said = set()
    for _ in range(2):
        with pytest.raises(StateError) as caught, closing(open_in(directory, job)) as journal:
            journal.load()
        said.add(str(caught.value))
    (sentence,) = said
    assert "\n" not in sentence
    assert str(directory) in sentence
    return sentence


def test_what_may_pass_is_told_from_what_does_not(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(AwayError):
        open_in(tmp_path / "file" / "state")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "journal.db").write_bytes(b"nonsense" * 1000)
    open_in(tmp_path / "other").close()
    for directory, job in ((tmp_path / "damaged", "cats"), (tmp_path / "other", "dogs")):
        with pytest.raises(StateError) as caught:
            open_in(directory, job)
        assert not isinstance(caught.value, AwayError)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may write everywhere, so step down for a moment."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A state directory whose journal holds five entries."""
    path = tmp_path / "state"
    with closing(open_in(path)) as journal:
        journal.append([Entry(float(n), 0.0, f"payload-{n};".encode() * 9) for n in range(5)])
    return path


def change(directory: Path, statement: str) -> None:
    """Change the tables behind the journal's back."""
    with closing(sqlite3.connect(directory / "journal.db")) as db, db:
        db.execute(statement)


def test_only_the_owner_of_the_job_can_read_it(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        with closing(open_in(tmp_path / "state")) as journal:
            journal.append(batch(0, 1))
            assert mode(tmp_path / "state") == 0o700
            files = {path.name: mode(path) for path in (tmp_path / "state").iterdir()}
    finally:
        os.umask(old_mask)
    assert files == {"journal.db": 0o600, "journal.db-wal": 0o600, "lock": 0o600}


def test_a_journal_that_others_could_read_is_made_private(directory: Path) -> None:
    (directory / "journal.db").chmod(0o644)
    open_in(directory).close()
    assert mode(directory / "journal.db") == 0o600


def test_the_file_says_what_it_is(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "journal.db")) as db:
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        meta = dict(db.execute("SELECT key, value FROM meta"))
    assert meta == {"format": "1", "job": "cats", "first": "1"}


def test_compaction_gives_the_disk_space_back(tmp_path: Path) -> None:
    def used() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    with closing(open_in(tmp_path / "state")) as journal:
        for start in range(0, 2000, 100):
            journal.append([entry(number, size=2000) for number in range(start, start + 100)])
        assert used() > 4_000_000
        journal.compact(batch(0, 10))
        assert used() < 50_000


def test_a_child_process_does_not_keep_the_lock(directory: Path) -> None:
    journal = open_in(directory)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        journal.close()
        open_in(directory).close()
        assert child.poll() is None
    finally:
        child.communicate(timeout=120)


def test_a_missing_parent_is_not_made_up(tmp_path: Path) -> None:
    said = refusal(tmp_path / "no" / "state")
    assert "a folder above it does not exist; create that first" in said
    assert not (tmp_path / "no").exists()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("notes")
    assert "it is not a folder" in refusal(tmp_path / "state")
    assert (tmp_path / "state").read_text() == "notes"


def test_a_directory_that_cannot_be_made() -> None:
    assert "choose another state directory" in refusal(Path("/sys/holdfast-state"))


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    with ordinary_user():
        assert "this user may not write there" in refusal(tmp_path / "state")


def test_a_read_only_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        with closing(open_in(disk / "state")) as journal:
            journal.append(batch(0, 3))
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert "file system is read-only; remount it" in refusal(disk / "state")
        assert "file system is read-only; remount it" in refusal(disk / "new")


def fill(journal: Journal, acknowledged: list[Entry]) -> None:
    for start in range(0, 10_000, 10):
        entries = [entry(number, size=150) for number in range(start, start + 10)]
        journal.append(entries)
        acknowledged += entries


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged: list[Entry] = []
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        (disk / "other data").write_bytes(bytes(100_000))
        with closing(open_in(disk / "state")) as journal:
            with pytest.raises(DiskFullError) as caught:
                fill(journal, acknowledged)
            said = f"the disk with {disk}/state/journal.db is full; free some space"
            assert str(caught.value) == said
            assert len(acknowledged) >= 20
            assert journal.load() == acknowledged
        (disk / "other data").unlink()
        with closing(open_in(disk / "state")) as journal:
            assert journal.load() == acknowledged
            journal.append(batch(0, 1))


def test_the_same_owner_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        with closing(open_in(disk / "state")) as journal:
            entries = [entry(number, size=2000) for number in range(100)]
            with filled(disk):
                for _ in range(3):
                    with pytest.raises(DiskFullError):
                        journal.append(entries[:50])
            journal.append(entries[:50])
            assert journal.end() == 50
        with closing(open_in(disk / "state")) as journal:
            assert journal.load() == entries[:50]


def test_a_journal_opens_on_a_disk_that_is_full(tmp_path: Path) -> None:
    """A master that was killed meanwhile comes back, and waits for room like the one before."""
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        kept = batch(0, 3)
        journal = open_in(disk / "state")
        journal.append(kept)
        journal.close()
        with filled(disk), closing(open_in(disk / "state")) as journal:
            assert journal.load() == kept


WITHOUT_ROOM = """
import ctypes, struct, sys
from pathlib import Path
from holdfast.model.errors import DiskFullError
from holdfast.ports import Entry
from holdfast.runtime.journal import SqliteJournal

journal = SqliteJournal.open(Path(sys.argv[1]), job="cats")
journal.append([Entry(0.0, 0.0, b"kept")])
# From here on two system calls on every file but the first three say that there is no room.
LOAD, EQUAL, ABOVE, RETURN = 0x20, 0x15, 0x25, 0x06
one, other, refusal = (int(word) for word in sys.argv[2:])
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | refusal
steps = [(LOAD, 0, 0, 0), (EQUAL, 1, 0, one), (EQUAL, 0, 3, other), (LOAD, 0, 0, 16)]
steps += [(ABOVE, 0, 1, 2), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("H6xP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
    sys.exit(77)
for _ in range(2):
    try:
        journal.append([Entry(1.0, 1.0, bytes(5000))])
    except DiskFullError as error:
        print(error, flush=True)
print(journal.end(), [bytes(entry.payload) for entry in journal.load()], flush=True)
"""


WRITES, SYNCS = (1, 18), (74, 75)
"""The numbers of write and pwrite64, and of fsync and fdatasync."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="counts on the numbers of system calls")
@pytest.mark.parametrize(
    ("calls", "refusal"),
    [(WRITES, errno.EDQUOT), (SYNCS, errno.EDQUOT), (SYNCS, errno.ENOSPC)],
    ids=["quota", "quota at the sync", "disk at the sync"],
)
def test_want_of_room_is_a_full_disk_however_it_is_said(
    tmp_path: Path, calls: tuple[int, int], refusal: int
) -> None:
    """On NFS, and wherever room is given late, it is the sync that finds none."""
    numbers = [str(number) for number in (*calls, refusal)]
    command = [sys.executable, "-c", WITHOUT_ROOM, str(tmp_path / "state"), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("needs a kernel with seccomp filters")
    full = f"the disk with {tmp_path}/state/journal.db is full; free some space"
    assert done.stdout.splitlines() == [full, full, "1 [b'kept']"], done.stderr


def test_compaction_on_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        with closing(open_in(disk / "state")) as journal:
            kept = batch(0, 3)
            journal.append(kept)
            with pytest.raises(DiskFullError, match=r"the disk with .* is full"):
                journal.compact([entry(9, size=400_000)])
            assert journal.load() == kept
            journal.compact(kept[:1])
        with closing(open_in(disk / "state")) as journal:
            assert journal.load() == kept[:1]


def test_a_disk_that_is_full_from_the_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=256k") as disk:
        with pytest.raises(OSError, match="No space left"):
            (disk / "other data").write_bytes(bytes(300_000))
        assert "is full; free some space" in refusal(disk / "state")
        (disk / "other data").unlink()
        open_in(disk / "state").close()


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"not a database at all " * 500, id="overwritten"),
        pytest.param(lambda whole: whole[: len(whole) // 2], id="cut off"),
        pytest.param(lambda whole: whole[:4096] + bytes(len(whole) - 4096), id="zeroed"),
        pytest.param(lambda whole: whole[:100] + b"\x55" * 3996 + whole[4096:], id="no schema"),
    ],
)
def test_a_damaged_file(directory: Path, damage: Callable[[bytes], bytes]) -> None:
    path = directory / "journal.db"
    path.write_bytes(damaged := damage(path.read_bytes()))
    assert DAMAGED in refusal(directory)
    assert path.read_bytes() == damaged


def test_a_changed_byte_is_found_and_its_entry_named(directory: Path) -> None:
    path = directory / "journal.db"
    path.write_bytes(path.read_bytes().replace(b"payload-2;", b"payload-7;", 1))
    said = refusal(directory)
    assert "entry 3 of the journal" in said
    assert "wrong checksum" in said
    assert DAMAGED in said


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entries SET at_s = 99 WHERE seq = 4",
        "UPDATE entries SET wall_s = 99 WHERE seq = 4",
        "UPDATE entries SET payload = 'text' WHERE seq = 4",
        "UPDATE entries SET payload = (SELECT payload FROM entries WHERE seq = 3) WHERE seq = 4",
        "DELETE FROM entries WHERE seq = 4",
    ],
)
def test_a_changed_or_missing_entry_is_named(directory: Path, statement: str) -> None:
    change(directory, statement)
    assert "entry 4 of the journal" in refusal(directory)


def test_missing_entries_at_the_start_are_noticed(directory: Path) -> None:
    with closing(open_in(directory)) as journal:
        journal.compact(batch(0, 3))
    change(directory, "DELETE FROM entries WHERE seq = 6")
    assert "entry 6 of the journal" in refusal(directory)


@pytest.mark.parametrize("key", ["format", "job", "first"])
def test_a_header_that_lost_a_field(directory: Path, key: str) -> None:
    change(directory, f"DELETE FROM meta WHERE key = '{key}'")
    assert "its header is incomplete" in refusal(directory)


def test_a_journal_without_its_table(directory: Path) -> None:
    change(directory, "DROP TABLE entries")
    assert "its header is incomplete" in refusal(directory)


def test_a_file_that_was_emptied_while_its_log_was_not(tmp_path: Path) -> None:
    with closing(open_in(tmp_path / "live")) as journal:
        journal.append(batch(0, 3))
        log = (tmp_path / "live" / "journal.db-wal").read_bytes()
    emptied = tmp_path / "emptied"
    emptied.mkdir()
    (emptied / "journal.db-wal").write_bytes(log)
    assert "is empty, but not its log journal.db-wal" in refusal(emptied)
    assert (emptied / "journal.db-wal").read_bytes() == log


def test_a_newer_journal_is_left_alone(directory: Path) -> None:
    change(directory, "UPDATE meta SET value = '2' WHERE key = 'format'")
    change(directory, "DROP TABLE entries")
    before = (directory / "journal.db").read_bytes()
    assert (
        "was written by a newer Holdfast (format 2); this one reads up to 1: upgrade Holdfast"
    ) in refusal(directory)
    assert (directory / "journal.db").read_bytes() == before


def test_the_journal_of_another_job_is_left_alone(directory: Path) -> None:
    before = (directory / "journal.db").read_bytes()
    assert "belongs to the job 'cats', not 'dogs'" in refusal(directory, job="dogs")
    assert (directory / "journal.db").read_bytes() == before


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    change(tmp_path, "CREATE TABLE recipes (name TEXT)")
    before = (tmp_path / "journal.db").read_bytes()
    assert "is not a journal of Holdfast" in refusal(tmp_path)
    assert (tmp_path / "journal.db").read_bytes() == before


def test_a_journal_that_somebody_looks_into(directory: Path) -> None:
    with closing(sqlite3.connect(directory / "journal.db")) as db:
        assert db.execute("SELECT count(*) FROM entries").fetchone() == (5,)
        assert "is open in another program; close that first" in refusal(directory)
    open_in(directory).close()
