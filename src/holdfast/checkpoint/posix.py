# SPDX-License-Identifier: Apache-2.0
"""A directory on a file system, written past the page cache.

The bytes of a checkpoint are read once, months later or never: through the page cache they would
cost a second copy in memory and push out what the training reads. So they go straight from the
slot's pages to the disk (O_DIRECT), by several threads, 16 MiB at a time, each of which is checked
by the thread that writes it. Where that is refused (tmpfs, some network file systems) the same
calls go through the cache.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.checkpoint.digests import chunks_of, combine
from holdfast.checkpoint.memory import low_priority
from holdfast.checkpoint.storage_port import (
    HIDDEN,
    SMALL_MAX,
    CrcOf,
    Moved,
    crc_of,
    readable_size,
    refuse_large,
)
from holdfast.model.errors import RejectedError, RetryableError, StateError

_PAGE = 4096
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_POSSIBLE_HERE = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


class PosixStorage:
    """A directory of this machine's file system; it is made when something is first written."""

    can_rename = True

    def __init__(self, directory: str) -> None:
        self.url = directory
        self._root = Path(directory)

    def full(self, path: str) -> str:
        return str(self._root / path)

    def write(
        self,
        path: str,
        data: memoryview,
        writers: int,
        moved: Moved = lambda size: None,
        crc_of: CrcOf = crc_of,
    ) -> int:
        place = self._place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        with _draft_of(place) as draft, _opened_for_writing(draft, len(data)) as fd:
            body = len(data) // _PAGE * _PAGE
            crcs = _write_chunks(fd, data, body, writers, moved, crc_of)
            if body < len(data):
                _leave_direct(fd)  # It takes whole pages only.
                _write_all(fd, data[body:], body)
            os.fsync(fd)
        return combine(crcs)

    def put(self, path: str, content: bytes) -> None:
        place = self._place(path)
        with _draft_of(place) as draft:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _write_all(fd, memoryview(content), 0)
                os.fsync(fd)
            finally:
                os.close(fd)
        _sync_directory(place.parent)

    def get(self, path: str) -> bytes | None:
        place = self._place(path)
        try:
            if stat.S_ISDIR(place.lstat().st_mode):
                return None
            fd = _opened_for_reading(place)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with os.fdopen(fd, "rb") as file:
            content = file.read(SMALL_MAX + 1)
        refuse_large(str(place), len(content))
        return content

    def open(self, path: str) -> "PosixReader":
        return PosixReader(self._place(path))

    def files(self, path: str) -> dict[str, int]:
        top = self._folder(path)
        return {
            str((Path(folder) / name).relative_to(top)): (Path(folder) / name).lstat().st_size
            for folder, _, names in os.walk(top, onerror=_unless_missing)
            for name in names
        }

    def folders(self, path: str) -> list[str]:
        try:
            with os.scandir(self._folder(path)) as found:
                return sorted(entry.name for entry in found if _is_folder(entry))
        except FileNotFoundError:
            return []

    def entries(self, path: str) -> dict[str, float]:
        top = self._folder(path)
        if not top.is_dir():
            return {}
        # The file system's own clock, which may be another machine's.
        clock = top / f".clock-{secrets.token_hex(8)}"
        clock.touch()
        now = clock.stat().st_mtime
        clock.unlink(missing_ok=True)
        ages = {}
        for name in sorted(os.listdir(top)):
            with suppress(FileNotFoundError):
                ages[name] = now - (top / name).lstat().st_mtime
        return ages

    def sync(self, path: str) -> None:
        top = self._folder(path)
        for folder, _, _ in os.walk(top, onerror=_unless_missing):
            _sync_directory(Path(folder))
        # Up to the directory itself and its own name: it may be new too.
        for parent in top.parents:
            if parent == self._root.parent:
                with suppress(PermissionError):  # Then this user did not make the directory.
                    _sync_directory(parent)
                break
            _sync_directory(parent)

    def rename(self, source: str, target: str) -> None:
        origin, place = self._place(source), self._place(target)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(origin, place)
        _sync_directory(place.parent)
        _sync_directory(origin.parent)

    def exchange(self, one: str, other: str) -> bool:
        paths = [os.fsencode(self._place(path)) for path in (one, other)]
        if _LIBC.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) != 0:
            code = ctypes.get_errno()
            if code in _NOT_POSSIBLE_HERE:
                return False
            raise OSError(code, os.strerror(code), self.full(other))
        for path in (one, other):
            _sync_directory(self._place(path).parent)
        return True

    def remove(self, path: str) -> None:
        place = self._place(path)
        try:
            is_folder = stat.S_ISDIR(place.lstat().st_mode)
        except FileNotFoundError:
            return
        if is_folder:
            # Two nodes may clear up the same remains. A caller that removes a directory that others
            # may work on takes it by a rename first: rmtree goes on in a directory that was moved
            # meanwhile.
            shutil.rmtree(place, onerror=_unless_gone)
        else:
            place.unlink(missing_ok=True)

    def free_bytes(self) -> int | None:
        for place in (self._root, *self._root.parents):
            with suppress(OSError):
                usage = os.statvfs(place)
                return usage.f_bavail * usage.f_frsize
        return None

    def _place(self, path: str) -> Path:
        """Where this is; RejectedError if that would be outside of the directory.

        Another program that may write here could have put a link where a folder of ours is
        expected.
        """
        *folders, name = map(_checked, path.split("/"))
        return self._folder("/".join(folders)) / name

    def _folder(self, path: str) -> Path:
        """The same for a folder, or the directory itself if there is no path."""
        folder = self._root
        for piece in path.split("/") if path else ():
            folder = folder / _checked(piece)
            if folder.is_symlink():
                raise RejectedError(f"{folder} is a link, and what it leads to is not used")
        return folder


class PosixReader:
    """A file, read past the page cache where the target's pages allow it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plain = _opened_for_reading(path)
        self.size = os.fstat(self._plain).st_size
        self._direct = -1
        with suppress(OSError):
            self._direct = os.open(path, _READING | os.O_DIRECT)

    def read_into(self, offset: int, target: memoryview) -> None:
        done = 0
        body = len(target) // _PAGE * _PAGE
        if self._direct >= 0 and body > 0:
            try:
                done = os.preadv(self._direct, [target[:body]], offset) // _PAGE * _PAGE
            except OSError as exc:
                if exc.errno not in _NOT_POSSIBLE_HERE:
                    raise
        while done < len(target):
            count = os.preadv(self._plain, [target[done:]], offset + done)
            if count == 0:
                end = offset + done
                raise RetryableError(
                    f"{self._path} ends after {readable_size(end)}, sooner than said"
                )
            done += count

    def close(self) -> None:
        os.close(self._plain)
        if self._direct >= 0:
            os.close(self._direct)


_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is not followed, and opening a pipe does not wait for its other end."""


def _checked(piece: str) -> str:
    if piece in {"", ".", ".."} or "/" in piece or "\0" in piece:
        raise RejectedError(f"nothing in a checkpoint directory is called {piece!a}")
    return piece


def _opened_for_reading(path: Path) -> int:
    """A descriptor of a plain file; StateError if it is anything else."""
    try:
        fd = os.open(path, _READING)
    except OSError as exc:
        if exc.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise StateError(f"{path} is a link or a socket, not a file") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StateError(f"{path} is not a plain file")
    return fd


@contextmanager
def _draft_of(place: Path) -> Iterator[Path]:
    """A file that takes this place once it is whole.

    Each writer has a draft of its own. A writer that was given up may only have been cut off, while
    another node writes its part now: it must not tear what the other node has written.
    """
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}.draft")
    try:
        yield draft
        os.rename(draft, place)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _opened_for_writing(place: Path, size: int) -> Iterator[int]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        fd = os.open(place, flags | os.O_DIRECT, 0o666)
    except OSError as exc:
        if exc.errno not in _NOT_POSSIBLE_HERE:
            raise
        fd = os.open(place, flags, 0o666)
    try:
        _set_aside(fd, size)
        yield fd
    finally:
        os.close(fd)


def _set_aside(fd: int, size: int) -> None:
    """Set the space aside before the first write: faster, and a full disk is found out at once."""
    # Not os.posix_fallocate: where the file system has no such call, that writes every block.
    if size > 0 and _LIBC.fallocate(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code not in _NOT_POSSIBLE_HERE:
            raise OSError(code, os.strerror(code))


def _write_chunks(
    fd: int, data: memoryview, body: int, writers: int, moved: Moved, crc_of: CrcOf
) -> list[int]:
    """Write the whole pages of the data, and check all of it; returns the chunks' CRC-32Cs."""

    def write_chunk(chunk: tuple[int, int]) -> int:
        offset, size = chunk
        with data[offset : offset + size] as view:
            crc = crc_of(offset, view)
            _write_all(fd, view[: max(0, body - offset)], offset)
        moved(size)
        return crc

    chunks = list(chunks_of(len(data)))
    if len(chunks) <= 1:
        return [write_chunk(chunk) for chunk in chunks]
    with ThreadPoolExecutor(writers, "ckpt-write", initializer=low_priority) as pool:
        return list(pool.map(write_chunk, chunks))


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    is_refused = False
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as exc:
            if exc.errno not in _NOT_POSSIBLE_HERE or is_refused:
                raise
            is_refused = True  # Perhaps only direct writing is refused.
            _leave_direct(fd)


def _leave_direct(fd: int) -> None:
    """Write through the cache from now on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as exc:
        # Some file systems have nothing to sync there and say so.
        if exc.errno not in _NOT_POSSIBLE_HERE:
            # The kernel reports a lost write once: to sync again would succeed and mean nothing.
            why = f"the names in {path} may be lost when the machine stops: {exc.strerror}"
            raise RejectedError(why) from exc
    finally:
        os.close(fd)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and entry.name != HIDDEN


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _unless_gone(function: object, path: str, info: tuple[object, BaseException, object]) -> None:
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]
