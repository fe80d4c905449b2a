# SPDX-License-Identifier: Apache-2.0
"""Names for processes that stay unambiguous after the process has ended.

A process id alone may belong to another process by now, or to one of another machine or container:
the name has the start of the machine, the namespace of process ids and the start of the process.
"""

import asyncio
import os
from contextlib import suppress
from enum import Enum
from pathlib import Path

# Fields of /proc/PID/stat, counted from the one after the name.
_STATE, _PARENT, _STARTED = 0, 1, 19


class Whereabouts(Enum):
    """What this process can say about another one."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It belongs to another machine, another start of this one, or another container; or it is
    hidden from this user."""


def own_name() -> str:
    """The name of this process; empty where /proc does not tell."""
    pid = os.getpid()
    realm, started = _realm(), _started(pid)
    return f"{realm}/{pid}/{started}" if realm and started else ""


def pid_of(name: str) -> int:
    """The process id in a name."""
    return int(name.split("/")[2])


def look_for(name: str) -> Whereabouts:
    """Whether the process of that name still lives, if it can be known from here."""
    realm, _, process = name.rpartition("/")[0].rpartition("/")
    started = name.rpartition("/")[2]
    if not process.isdecimal() or not started or not realm or realm != _realm():
        return Whereabouts.UNKNOWN
    found = _started(int(process))
    if not found and _is_hidden(int(process)):
        return Whereabouts.UNKNOWN
    return Whereabouts.ALIVE if found == started else Whereabouts.GONE


async def wait_for_end(pid: int, timeout_s: float) -> None:
    """Wait until the process has ended, or the time is up."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), timeout_s)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def parent_of(pid: int) -> int:
    """The present parent of a process; 0 if the process has ended."""
    fields = _fields(pid)
    return int(fields[_PARENT]) if fields else 0


def _realm() -> str:
    """Where process ids mean the same as here; empty if /proc is of another namespace."""
    try:
        if Path("/proc/self").readlink() != Path(str(os.getpid())):
            return ""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if it has ended, reaped or not."""
    fields = _fields(pid)
    return fields[_STARTED].decode() if fields else ""


def _is_hidden(pid: int) -> bool:
    """Whether there is a process of another user: /proc may not show it (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _fields(pid: int) -> list[bytes]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    fields = stat.rpartition(b")")[2].split()
    return [] if fields[_STATE] in (b"Z", b"X") else fields
