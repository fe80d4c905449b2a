# SPDX-License-Identifier: Apache-2.0
"""How much memory may still be set aside, and what limits it.

Three things can run out: the file system in memory, the machine, and the control group that this
process is in. Running out of the last two gets a process killed, so some of them is left free. On a
disk only the file system counts: the kernel writes out what it has no memory for.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MARGIN_SHARE = 0.05
_MARGIN_MIN = 256 * 1024 * 1024
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_UNLIMITED = 1 << 60  # Version 1 of control groups writes "no limit" as a huge number.


@dataclass(frozen=True, slots=True)
class Room:
    """What one limit leaves."""

    limit: str
    """What it is, for the user."""
    total: int
    available: int
    """Without the margin."""


def tightest(memory_dir: Path) -> Room:
    """The limit that leaves the least, in a directory in memory or on a disk."""
    if not is_in_memory(memory_dir):
        return _file_system(memory_dir, _MARGIN_MIN)
    rooms = [_file_system(memory_dir), _machine(), *_control_groups()]
    return min(rooms, key=lambda room: room.available)


def is_in_memory(folder: Path) -> bool:
    """Whether what is written there takes memory until it is removed."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split()[2] == number:
            return kind.split()[0] in _IN_MEMORY
    return False  # Some file systems on disk hide their number; those in memory do not.


def _file_system(memory_dir: Path, margin_max: int = sys.maxsize) -> Room:
    status = os.statvfs(memory_dir)
    total = status.f_blocks * status.f_frsize
    free = status.f_bavail * status.f_frsize
    # A full file system harms only the programs that use it, so a share of it is margin enough.
    margin = min(int(total * _MARGIN_SHARE), margin_max)
    return Room(f"the size of {memory_dir}", total, max(0, free - margin))


def _machine() -> Room:
    numbers = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        numbers[name] = int(rest.split()[0]) * 1024
    total = numbers["MemTotal"]
    return _with_margin("the memory of this machine", total, numbers["MemAvailable"])


def _control_groups(proc: Path = Path("/proc/self/cgroup")) -> Iterator[Room]:
    """The limits of every memory control group that this process is in."""
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from limits_of_group(Path("/sys/fs/cgroup"), path)
            # Where both versions are mounted, version 2 is in a folder of its own.
            yield from limits_of_group(Path("/sys/fs/cgroup/unified"), path)
        elif "memory" in controllers.split(","):
            yield from limits_of_group(Path("/sys/fs/cgroup/memory"), path)


def limits_of_group(mount: Path, path: str) -> Iterator[Room]:
    """The limits of a group and of all groups around it; in a container the mount is its own
    group."""
    group = mount / path.lstrip("/")
    while group.is_relative_to(mount):
        limit = _number(group / "memory.max", group / "memory.limit_in_bytes")
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < _UNLIMITED:
            free = limit - used + _reclaimable(group / "memory.stat")
            yield _with_margin(f"the memory limit of the control group {path}", limit, free)
        group = group.parent


def _number(*paths: Path) -> int | None:
    """The number in the first of these files that exists; None for "max", or if none exists."""
    for path in paths:
        with contextlib.suppress(OSError):
            text = path.read_text().strip()
            return int(text) if text.isdigit() else None
    return None


def _reclaimable(path: Path) -> int:
    """What the group uses as a cache of files: it goes when room is needed."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    numbers = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(numbers.get("total_inactive_file") or numbers.get("inactive_file") or 0)


def _with_margin(limit: str, total: int, available: int) -> Room:
    margin = max(int(total * _MARGIN_SHARE), _MARGIN_MIN)
    return Room(limit, total, max(0, available - margin))


def in_words(size: int) -> str:
    """A number of bytes for people."""
    amount = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
