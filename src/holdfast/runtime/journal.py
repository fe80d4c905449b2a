# SPDX-License-Identifier: Apache-2.0
"""The journal on disk (SQLite) and in memory: what a restarted master finds again.

One folder holds `journal.db`, in WAL mode with an fsync per append, and `lock`, which the living
master holds. An error here means that nothing more can be promised: the driver stops on it, and
what earlier appends wrote stays readable. Only a full disk is no end: the driver tries again.
"""

import errno
import fcntl
import os
import shutil
import sqlite3
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from holdfast.model.errors import AwayError, DiskFullError, InUseError, StateError
from holdfast.ports.journal import Entry
from holdfast.runtime.private import open_private, require_own, require_own_folder
from holdfast.runtime.process_names import parent_of

FORMAT = 1
"""The layout of the tables. A master reads every format up to its own."""

BUSY_TIMEOUT_S = 1.0

_CREATE_META = "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
_CREATE_ENTRIES = """CREATE TABLE entries (
    seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, wall_s REAL NOT NULL,
    payload BLOB NOT NULL, crc INTEGER NOT NULL)"""
ROWS_MAX = 64
_INSERT = "INSERT INTO entries (seq, at_s, wall_s, payload, crc) VALUES "
#: By how many rows they insert. Each run of a statement releases the interpreter's lock, and in a
#: busy master it takes a while to get it back: so most appends are one run, which is a transaction
#: too.
_INSERTS = [_INSERT + ", ".join(["(?, ?, ?, ?, ?)"] * count) for count in range(ROWS_MAX + 1)]
_Row = tuple[int, float, float, bytes, int]
_COUNT = "SELECT count(*), coalesce(sum(length(payload)), 0) FROM entries WHERE seq > ?"
_SELECT = "SELECT seq, at_s, wall_s, payload, crc FROM entries ORDER BY seq"

#: The last two are not ours: SQLite makes them in other modes than WAL, and believes them in all.
_DATABASE = ("journal.db", "journal.db-wal", "journal.db-journal", "journal.db-shm")
_READ_BACK = ("lock", *_DATABASE, "token", "end.json", "nodes")
"""What a master finds in its state directory and believes: no other user may have put it there."""
_WAY_OUT = "restore the folder from a copy, or start the job anew in an empty state directory"
_NO_ACCESS = "this user may not write there; change its owner or choose another state directory"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSALS = (
    *(sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY),
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PERM),
)
_NO_LOCKS = (
    "its file system has no locks, without which two masters could not be told from one; mount it "
    "with locks, or choose a state directory on another one"
)
_REASONS = {
    errno.ENOENT: "a folder above it does not exist; create that first",
    errno.ENOTDIR: "it is not a folder; choose another state directory",
    errno.EACCES: _NO_ACCESS,
    errno.EPERM: _NO_ACCESS,
    errno.ENOLCK: _NO_LOCKS,
    errno.ENOSYS: _NO_LOCKS,
    errno.EOPNOTSUPP: _NO_LOCKS,
    errno.EROFS: "its file system is read-only; remount it or choose another state directory",
}


class SqliteJournal:
    """A journal in a folder of its own, owned by one process until it closes or dies."""

    def __init__(
        self, path: Path, db: sqlite3.Connection, next_seq: int, resources: ExitStack
    ) -> None:
        self._path = path
        self._db = db
        self._next = next_seq
        self._resources = resources

    @classmethod
    def open(cls, directory: Path, *, job: str) -> "SqliteJournal":
        """Take the journal of `job` in `directory`, made if missing; StateError says why not."""
        path = directory / "journal.db"
        with ExitStack() as resources:
            with _clear_errors(directory):
                _make_directory(directory)
                lock = _take_lock(directory)
                resources.callback(os.close, lock)
            with _clear_errors(path):
                _make_file(path)
                # Autocommit: the transactions are written out below, one per append.
                db = sqlite3.connect(
                    path,
                    timeout=BUSY_TIMEOUT_S,
                    isolation_level=None,
                    check_same_thread=False,
                    cached_statements=2 * ROWS_MAX,
                )
                resources.enter_context(closing(db))
                # With one owner the WAL index can live in its memory, and a disk that is shared
                # between hosts, where the file `-shm` would not work, can serve.
                db.execute("PRAGMA locking_mode = EXCLUSIVE")
                db.execute("PRAGMA synchronous = FULL")
                if db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                    _create(db, job)
                _check_meta(path, db, job)
                # Only now: a journal that is refused above is left as it was.
                db.execute("PRAGMA journal_mode = WAL")
                (newest,) = db.execute("SELECT max(seq) FROM entries").fetchone()
                next_seq = _first(db) if newest is None else newest + 1
                return cls(path, db, next_seq, resources.pop_all())

    def load(self) -> list[Entry]:
        """Every entry, checked against its checksum and for gaps."""
        entries = []
        with _clear_errors(self._path):
            for expected, row in enumerate(self._db.execute(_SELECT), start=_first(self._db)):
                entry = _checked(expected, row)
                if entry is None:
                    raise StateError(
                        f"entry {expected} of the journal {self._path} is missing or damaged "
                        f"(wrong checksum); {_WAY_OUT}"
                    )
                entries.append(entry)
        return entries

    def end(self) -> int:
        """The number of the last row."""
        return self._next - 1

    def since_snapshot(self) -> tuple[int, int]:
        """Counted by SQLite; a journal that has never been compacted has no snapshot."""
        with _clear_errors(self._path):
            last = int(_meta(self._db).get("snapshot", 0))
            count, size = self._db.execute(_COUNT, (last,)).fetchone()
        return count, size

    def append(self, entries: Sequence[Entry]) -> None:
        """One transaction, one fsync."""
        rows = self._rows(entries)
        if not rows:
            return
        with _clear_errors(self._path), self._db:
            if len(rows) > ROWS_MAX:
                self._db.execute("BEGIN IMMEDIATE")
            self._insert(rows)
        self._next += len(rows)

    def compact(self, snapshot: Sequence[Entry]) -> None:
        """Replace all entries in one transaction, then give the disk space back."""
        rows = self._rows(snapshot)
        with _clear_errors(self._path):
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.execute("DELETE FROM entries")
                self._insert(rows)
                meta = {"first": self._next, "snapshot": self._next + len(rows) - 1}
                self._db.executemany("REPLACE INTO meta (key, value) VALUES (?, ?)", meta.items())
            self._next += len(rows)
            # The snapshot is durable already; if its move out of the log fails for lack of space,
            # nothing is lost, and SQLite tries again at a later append.
            with suppress(sqlite3.OperationalError):
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file, then let the next owner in."""
        self._resources.close()

    def _insert(self, rows: list[_Row]) -> None:
        for first in range(0, len(rows), ROWS_MAX):
            some = rows[first : first + ROWS_MAX]
            self._db.execute(_INSERTS[len(some)], [value for row in some for value in row])

    def _rows(self, entries: Sequence[Entry]) -> list[_Row]:
        return [
            (seq, entry.at_s, entry.wall_s, entry.payload, _checksum(seq, entry))
            for seq, entry in enumerate(entries, start=self._next)
        ]


def read_left(directory: Path) -> tuple[str, list[Entry]]:
    """The job and the entries of a journal that no master uses now. Nothing there is changed."""
    path = directory / "journal.db"
    with tempfile.TemporaryDirectory(prefix="holdfast-journal-") as folder:
        copy = Path(folder) / path.name
        with _clear_errors(path):
            _copy(path, copy)
            with suppress(FileNotFoundError):  # It is there after a kill, with the last entries.
                _copy(Path(f"{path}-wal"), Path(f"{copy}-wal"))
            with closing(sqlite3.connect(copy)) as db:
                job = _meta(db).get("job", "")
        journal = SqliteJournal.open(Path(folder), job=job)
        try:
            return job, journal.load()
        finally:
            journal.close()


def _copy(path: Path, copy: Path) -> None:
    with open_private(path) as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target)


class MemoryJournal:
    """The same guarantees for as long as the process lives: for simulation, and without state."""

    def __init__(self, entries: Sequence[Entry] = (), end: int = 0, snapshot: int = 0) -> None:
        """`end` is the number of the last of these entries, the first `snapshot` are a snapshot."""
        self._entries = list(entries)
        self._end = end
        self._snapshot = snapshot
        self._is_open = True

    def reopen(self) -> "MemoryJournal":
        """What the next master finds after this owner has closed, or has died (close it then)."""
        if self._is_open:
            raise StateError("the journal in memory is in use by another master; close that first")
        return MemoryJournal(self._entries, self._end, self._snapshot)

    def load(self) -> list[Entry]:
        """Every entry, in order."""
        self._check_open()
        return list(self._entries)

    def end(self) -> int:
        """The number of the last entry."""
        return self._end

    def since_snapshot(self) -> tuple[int, int]:
        """The entries after those of the snapshot."""
        self._check_open()
        after = self._entries[self._snapshot :]
        return len(after), sum(len(entry.payload) for entry in after)

    def append(self, entries: Sequence[Entry]) -> None:
        """All or, when reading them fails, none."""
        self._check_open()
        new = list(entries)
        self._entries += new
        self._end += len(new)

    def compact(self, snapshot: Sequence[Entry]) -> None:
        """Replace all entries."""
        self._check_open()
        self._entries = list(snapshot)
        self._snapshot = len(self._entries)
        self._end += len(self._entries)

    def close(self) -> None:
        """Let the next owner in."""
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise StateError("the journal in memory is closed; reopen it")


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        for name in _READ_BACK:
            require_own(directory / name)
        require_own_folder(directory)
        return
    # The files in it are synced by SQLite; its own name is in the folder above.
    parent = os.open(directory.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def _take_lock(directory: Path) -> int:
    """A descriptor whose lock ends with this process, however that ends, and is not inherited."""
    with ExitStack() as undo:
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _in_use(directory, lock) from error
        # The owner's pid in it is not worth an error: on a full disk there may be no room for it.
        with suppress(OSError):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {os.getppid()}\n".encode(), 0)
        undo.pop_all()
        return lock


def _in_use(directory: Path, lock: int) -> InUseError:
    # Empty in the instant between the owner's lock and the writing of its pid.
    words = [word for word in os.read(lock, 40).split() if word.isdigit()]
    pid, parent = (int(words[0]), int(words[-1])) if words else (0, 0)
    # A process whose parent has died has another parent.
    is_ending = len(words) == 2 and parent_of(pid) != parent
    return InUseError(
        f"the state directory {directory} is in use by another master "
        f"(pid {pid or 'not known yet'}); stop that one or choose another state directory",
        pid=pid,
        is_ending=is_ending,
    )


def _make_file(path: Path) -> None:
    """Make the file private before SQLite opens it: SQLite copies its mode to the log beside it."""
    path.touch(mode=0o600)
    path.chmod(0o600)
    log = path.with_name("journal.db-wal")
    # SQLite would throw the log away: it belongs to a file that was emptied or deleted, because
    # a new one holds its tables before it gets a log.
    if path.stat().st_size == 0 and log.exists() and log.stat().st_size > 0:
        raise StateError(f"the journal {path} is empty, but not its log {log.name}; {_WAY_OUT}")


def _create(db: sqlite3.Connection, job: str) -> None:
    # Has effect only before the first table; gives pages that compaction freed back to the disk.
    db.execute("PRAGMA auto_vacuum = FULL")
    with db:
        db.execute("BEGIN IMMEDIATE")
        db.execute(_CREATE_ENTRIES)
        db.execute(_CREATE_META)
        meta = {"format": str(FORMAT), "job": job, "first": "1"}
        db.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", meta.items())


def _check_meta(path: Path, db: sqlite3.Connection, job: str) -> None:
    tables = {str(name) for (name,) in db.execute("SELECT name FROM sqlite_master")}
    if "meta" not in tables:
        raise StateError(f"{path} is not a journal of Holdfast; choose another state directory")
    meta = _meta(db)
    written = meta.get("format", "")
    if written.isdecimal() and int(written) > FORMAT:
        raise StateError(
            f"the journal {path} was written by a newer Holdfast (format {written}); this one "
            f"reads up to {FORMAT}: upgrade Holdfast or choose another state directory"
        )
    numbers = (meta.get("first", ""), meta.get("snapshot", "0"))
    is_whole = "entries" in tables and "job" in meta and all(map(str.isdecimal, numbers))
    if written != str(FORMAT) or not is_whole:
        raise StateError(f"the journal {path} is damaged (its header is incomplete); {_WAY_OUT}")
    if meta["job"] != job:
        raise StateError(
            f"the journal {path} belongs to the job {meta['job']!r}, not {job!r}; use that name or "
            "choose another state directory"
        )


def _meta(db: sqlite3.Connection) -> dict[str, str]:
    return {str(key): str(value) for key, value in db.execute("SELECT key, value FROM meta")}


def _first(db: sqlite3.Connection) -> int:
    return int(_meta(db)["first"])


def _checked(expected: int, row: tuple[object, ...]) -> Entry | None:
    """The entry, or None if this row is not what was written: damage can change types, too."""
    match row:
        case (int(seq), float(at_s), float(wall_s), bytes(payload), int(crc)):
            entry = Entry(at_s, wall_s, payload)
            return entry if (seq, crc) == (expected, _checksum(seq, entry)) else None
    return None


def _checksum(seq: int, entry: Entry) -> int:
    """Over the whole row, so that neither a changed time nor a moved payload goes unnoticed."""
    return zlib.crc32(entry.payload, zlib.crc32(struct.pack("<qdd", seq, entry.at_s, entry.wall_s)))


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite and the system say about `path` into one sentence with a way out."""
    try:
        yield
    except sqlite3.Error as error:
        if _is_for_want_of_room(path, error):
            raise DiskFullError(_disk_full(path)) from error
        kind = AwayError if _may_pass(error) else StateError
        raise kind(_sqlite_sentence(path, error)) from error
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(_disk_full(path)) from error
        reason = _REASONS.get(error.errno or 0, f"{error.strerror}; choose another state directory")
        raise AwayError(f"{path} cannot be used: {reason}") from error


def _may_pass(error: sqlite3.Error) -> bool:
    """Whether the error is the file system's, and nothing speaks against the file itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSALS


def _sqlite_sentence(path: Path, error: sqlite3.Error) -> str:
    # The low byte is the kind, the rest its detail. Errors of the module itself have no code.
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return f"the journal {path} is damaged ({error}); {_WAY_OUT}"
        case sqlite3.SQLITE_BUSY:
            return f"the journal {path} is open in another program; close that first"
    return f"the journal {path} failed ({error}); check its disk, then start the master again"


def _is_for_want_of_room(path: Path, error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0)
    if code in (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC):
        # SQLite recognises a full disk only by ENOSPC from a write. It does not recognise a used-up
        # quota, nor what servers say late, when they are asked to sync. The next try writes all
        # pages again.
        return _has_no_room(path.parent)
    return bool(code & 0xFF == sqlite3.SQLITE_FULL)


def _has_no_room(directory: Path) -> bool:
    """Whether a page cannot be written there for lack of space or quota."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in _FULL
    return False


def _disk_full(path: Path) -> str:
    return f"the disk with {path} is full; free some space"
