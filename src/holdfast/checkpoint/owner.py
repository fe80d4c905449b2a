# SPDX-License-Identifier: Apache-2.0
"""Which job owns a directory: two jobs that save to one replace and remove each other's
checkpoints.

The job that writes there leaves a note and renews it. A job looks at the note when it restores: if
another job writes the note after that, the checkpoints are no longer those that this one went on
from, and it must not add to them. A note that is not renewed belongs to a job that is over. Locks
would be simpler, but a store of objects has none, and a network file system may have none that
work.
"""

import os
import socket
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from holdfast.checkpoint.storage_port import HIDDEN, Storage
from holdfast.model.errors import RejectedError, RetryableError

RENEW_S = 10.0
GONE_S = 30.0
"""A job that has not renewed its note for this long does not use the directory any more."""

_NAME = "owner.json"


class Owner(Struct, frozen=True):
    """The note: which job, and the process that keeps it."""

    job: str
    host: Annotated[str, Meta(pattern=r"^[\w.-]{1,255}$")]
    system: str
    """The boot and the process namespace in which `pid` means something."""
    pid: Annotated[int, Meta(gt=0, lt=2**31)]
    started: int
    beat: int = 0
    """How often this process has written it."""


class Claim:
    """The claim of one job to one directory; threads may use it."""

    def __init__(self, job: str) -> None:
        host, pid = socket.gethostname(), os.getpid()
        self._own = Owner(job, host, _system(), pid, _started(pid))
        #: The note of another job that was there at the last look.
        self._seen: Owner | None = None
        self._has_looked = False

    def is_held(self, storage: Storage) -> bool:
        """Whether this job has written there before, and no other has since."""
        owner = _read(storage)
        return owner is not None and owner.job == self._own.job

    def look(self, storage: Storage) -> Owner | None:
        """To be called before a restore; returns another job that seems to write there."""
        self._seen, self._has_looked = self._other(storage), True
        is_there = self._seen is not None and not _is_gone(storage, self._seen)
        return self._seen if is_there else None

    def take(self, storage: Storage) -> None:
        """Write the note, or renew it.

        RejectedError if another job has written it since the last look, RetryableError while it is
        not known whether the job that was there then is over.
        """
        if not self._has_looked:
            self.look(storage)  # This node has restored nothing; it stores what other nodes saved.
        other = self._other(storage)
        if other is not None and (other != self._seen or not _is_gone(storage, other)):
            kind = RetryableError if other == self._seen else RejectedError
            raise kind(
                f"another job writes to {storage.url} (process {other.pid} on {other.host}): "
                "give every job a checkpoint directory of its own"
            )
        self._own = replace(self._own, beat=self._own.beat + 1)
        storage.write(f"{HIDDEN}/{_NAME}", memoryview(msgspec.json.encode(self._own)), 1)

    def _other(self, storage: Storage) -> Owner | None:
        owner = _read(storage)
        return None if owner is None or owner.job == self._own.job else owner


def _read(storage: Storage) -> Owner | None:
    raw = storage.get(f"{HIDDEN}/{_NAME}")
    try:
        return None if raw is None else msgspec.json.decode(raw, type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None  # Whatever it is, no job renews it.


def _is_gone(storage: Storage, owner: Owner) -> bool:
    return _is_over(owner) or storage.entries(HIDDEN).get(_NAME, GONE_S) >= GONE_S


def _is_over(owner: Owner) -> bool:
    """Whether the process ran on this machine and is dead; False if that cannot be known here."""
    if not owner.system or owner.system != _system():
        return False
    started = _started(owner.pid)
    if started >= 0:
        return started != owner.started
    try:
        os.kill(owner.pid, 0)
    except PermissionError:
        return False  # Processes of other users may be hidden.
    except ProcessLookupError:
        pass
    return True


def _system() -> str:
    """The boot and the process namespace of this process; empty where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> int:
    """When a process was started, in ticks of its machine; -1 if it is dead or cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return -1
    state, *fields = stat.rpartition(")")[2].split()
    return -1 if state in "ZX" else int(fields[18])
