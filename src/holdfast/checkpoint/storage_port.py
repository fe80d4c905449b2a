# SPDX-License-Identifier: Apache-2.0
"""What persisting needs of a storage, and how its errors are told apart.

A storage is one directory: a path on a file system (posix.py) or a prefix of a store of objects
(objects.py). All names are relative to it, with "/" between their pieces. The difference that
matters: a file system can rename, so a checkpoint appears in one move; a store of objects cannot,
so there the manifest, written last, makes the checkpoint.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from crc32c import crc32c

from holdfast.model.errors import RejectedError, RetryableError, StateError

HIDDEN = ".holdfast"
"""Where everything that is not (or no longer) a checkpoint lives, inside the directory."""

SMALL_MAX = 256 << 20
"""No manifest and no tracker is larger: a larger file is not read into memory."""

Result = TypeVar("Result")

Moved = Callable[[int], None]
"""Told how many more bytes have gone to a storage."""

CrcOf = Callable[[int, memoryview], int]
"""Computes the CRC-32C of a run of bytes that begins at this offset of a file."""


def crc_of(offset: int, run: memoryview) -> int:
    """The CRC-32C of `run`; the offset is ignored."""
    return int(crc32c(run))


TRANSIENT = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EDQUOT,
        errno.EHOSTUNREACH,
        errno.EIO,
        errno.ENETUNREACH,
        errno.ENOSPC,
        errno.EPIPE,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
"""Errors that may be over in a minute: the user frees space, a server comes back. All others are
reported at once: waiting does not make a read-only directory writable."""


class Reader(Protocol):
    """An open file; several threads may read from it at once."""

    size: int

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on; RetryableError when there are fewer."""

    def close(self) -> None: ...


class Storage(Protocol):
    """One directory. What a call has written is durable when it returns, except for the names of
    new files: they are durable after `sync` of their directory."""

    url: str
    can_rename: bool

    def full(self, path: str) -> str:
        """The whole name, for messages."""

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        """A new file with this content, replacing one of that name; returns its digest.

        Every run of bytes is given to `crc_of` before it is written, and its size to `moved` after
        that, in any thread.
        """

    def put(self, path: str, content: bytes) -> None:
        """Replace a small file in one move: a reader sees the old content or the new.

        It never makes a directory: on a file system the file's directory must be there, and
        FileNotFoundError says that it is not (any more).
        """

    def get(self, path: str) -> bytes | None:
        """A small file's content; None if there is no such file."""

    def open(self, path: str) -> Reader: ...

    def files(self, path: str) -> dict[str, int]:
        """Every file below a directory, however deep: its name relative to it, and its size."""

    def folders(self, path: str) -> list[str]:
        """The names of the directories right below this one."""

    def entries(self, path: str) -> dict[str, float]:
        """What is right below this directory: names, and how many seconds ago each changed."""

    def sync(self, path: str) -> None:
        """Make the names of everything below a directory durable, and the directory's own."""

    def rename(self, source: str, target: str) -> None:
        """Give a directory another name, durably. `target` does not exist or is empty."""

    def exchange(self, one: str, other: str) -> bool:
        """Let two directories swap names in one move; False when this cannot be done here."""

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it; no error if there is none."""

    def free_bytes(self) -> int | None:
        """The space left; None when there is no such limit."""


class FencedStorage:
    """A storage that asks, before every call that changes something, whether it still may.

    A node that was replaced, or whose lease is over, may be in the middle of a commit: from then on
    the directory belongs to other nodes.
    """

    def __init__(self, storage: Storage, fence: Callable[[], None]) -> None:
        """`fence` raises FencedError once this node must not write any more."""
        self._storage = storage
        self._fence = fence
        self.url = storage.url
        self.can_rename = storage.can_rename
        self.full = storage.full
        self.get = storage.get
        self.open = storage.open
        self.files = storage.files
        self.folders = storage.folders
        self.entries = storage.entries
        self.sync = storage.sync
        self.free_bytes = storage.free_bytes

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        self._fence()
        return self._storage.write(path, data, writers, moved, crc_of)

    def put(self, path: str, content: bytes) -> None:
        self._fence()
        self._storage.put(path, content)

    def rename(self, source: str, target: str) -> None:
        self._fence()
        self._storage.rename(source, target)

    def exchange(self, one: str, other: str) -> bool:
        self._fence()
        return self._storage.exchange(one, other)

    def remove(self, path: str) -> None:
        self._fence()
        self._storage.remove(path)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call that fails with transient errors of a storage is tried again."""

    limit_s: float = 60.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    failed: Callable[[str], object] = lambda why: None
    """Told of every transient error, in any thread."""


def _is_transient(error: OSError) -> bool:
    """Errors of stores of objects have the right class, but no number."""
    if isinstance(error, FileNotFoundError | PermissionError | NotADirectoryError):
        return False
    return error.errno is None or error.errno in TRANSIENT


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn the errors of a storage into ours; `what` begins the sentence.

    RetryableError for those that may pass, RejectedError for the others.
    """
    try:
        yield
    except OSError as exc:
        sentence = f"{what}: {exc.strerror or exc}"
        if _is_transient(exc):
            raise RetryableError(sentence) from exc
        raise RejectedError(sentence) from exc


def persistently(
    what: str,
    action: Callable[[], Result],
    patience: Patience,
    stop: threading.Event,
) -> Result:
    """Call `action`, again after every transient error while patience lasts; errors as with
    `telling`."""
    deadline = time.monotonic() + patience.limit_s
    pause_s = patience.first_pause_s
    while True:
        try:
            with telling(what):
                return action()
        except RetryableError as exc:
            patience.failed(str(exc))
            if time.monotonic() + pause_s > deadline or stop.wait(pause_s):
                raise
        pause_s = min(2 * pause_s, patience.longest_pause_s)


def refuse_large(path: str, size: int) -> None:
    """StateError if a file of this size is larger than any small file of ours."""
    if size > SMALL_MAX:
        raise StateError(f"{path} has more than {readable_size(SMALL_MAX)}")


def readable_size(size: float) -> str:
    """A size for people: "1.5 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:,.4g} TB"
