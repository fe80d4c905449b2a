# SPDX-License-Identifier: Apache-2.0
"""Which agent owns which shared memory: a directory per agent, locked for as long as it lives.

    <memory dir>/holdfast-<uid>/<job>/<agent>/lock, and the agent's slots beside it

Slots on disk are kept likewise, below another name than `holdfast`.

The kernel drops the lock when the agent dies, whatever it died of. A directory whose lock is free
is an orphan: an agent of the same job adopts what is in it, one of another job only removes it,
and only after nothing has touched it for a while.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from holdfast.model.errors import StateError
from holdfast.runtime.private import make_private

NAME = "holdfast"
"""What a user's directory is called, before the user's number."""

_LOCK = "lock"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TRIES_MAX = 100


class Root:
    """A locked directory. Only the holder of the lock may touch what is in it."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def take(cls, memory_dir: Path, job: str, agent_key: str, name: str = NAME) -> "Root":
        """Make the agent's directory, or take over that of a dead agent of the same key."""
        path = user_dir(memory_dir, name) / safe_name(job) / safe_name(agent_key)
        try:
            return cls._take(path)
        except OSError:
            # No room for all of them: what was made is of no use.
            for directory in (path, path.parent, path.parent.parent):
                _remove_if_empty(directory)
            raise

    @classmethod
    def _take(cls, path: Path) -> "Root":
        for _ in range(_TRIES_MAX):
            with contextlib.suppress(FileNotFoundError):
                # A program that clears away may remove any of these before the lock is ours.
                for directory in (path.parent.parent, path.parent, path):
                    make_private(directory)
                root = cls._lock(path)
                if root is not None:
                    return root
                if path.exists():
                    raise StateError(
                        f"the memory in {path} belongs to another agent that is still running"
                    )
        raise StateError(f"the memory directory {path} is removed again and again by others")

    @classmethod
    def _lock(cls, path: Path) -> "Root | None":
        """None when another process has the lock, or removed the directory in the meantime."""
        fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_lock(path, fd):
                raise FileNotFoundError(path)
        except (BlockingIOError, FileNotFoundError):
            os.close(fd)
            return None
        return cls(path, fd)

    def keep(self) -> None:
        """Make the directory again if other programs have removed it, or its lock.

        OSError, StateError: it cannot be made now.
        """
        if not _is_lock(self.path, self._lock_fd):
            again = self._take(self.path)
            self.release()
            self._lock_fd = again._lock_fd

    def orphans(self) -> Iterator["Root"]:
        """Directories that dead agents of this job left, each locked for the caller."""
        yield from self._free_in(self.path.parent)

    def dead(self, idle_s: float) -> Iterator["Root"]:
        """Directories of other jobs of this user whose agents died at least `idle_s` ago."""
        os.utime(self._lock_fd)
        now = os.fstat(self._lock_fd).st_mtime
        for job_dir in _directories(self.path.parent.parent):
            if job_dir == self.path.parent:
                continue
            for root in self._free_in(job_dir):
                if now - _last_touched(root.path) >= idle_s:
                    yield root
                else:
                    root.release()
            _remove_if_empty(job_dir)

    def _free_in(self, job_dir: Path) -> Iterator["Root"]:
        for path in _directories(job_dir):
            with contextlib.suppress(FileNotFoundError):
                root = self._lock(path) if path != self.path else None
                if root is not None:
                    yield root

    def release(self) -> None:
        """Give the directory up and leave it for another agent to adopt."""
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Delete the directory and all that is in it; a process that has mapped a slot keeps its
        memory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()
        _remove_if_empty(self.path.parent)
        _remove_if_empty(self.path.parent.parent)


def _is_lock(path: Path, fd: int) -> bool:
    """Whether this is the file that others would lock."""
    try:
        return os.stat(path / _LOCK).st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def user_dir(memory_dir: Path, name: str = NAME) -> Path:
    """Where all jobs of this user have their slots."""
    return memory_dir / f"{name}-{os.getuid()}"


def safe_name(text: str) -> str:
    """A file name for this text, and for no other."""
    if _PLAIN_NAME.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:40] + "+"


def _directories(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if _is_own(path))
    except FileNotFoundError:
        return []


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _last_touched(path: Path) -> float:
    times = [path.stat().st_mtime]
    for inner in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            times.append(inner.lstat().st_mtime)
    return max(times)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
