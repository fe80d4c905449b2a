# SPDX-License-Identifier: Apache-2.0
"""Machines that fail under a job without ending it: clocks, disks, locks and lines.

The clock, EIO, missing locks and a rename that waits are switched on inside the job's processes
(`faults.c`, for LD_PRELOAD). Disks without room are real file systems of their own. Lost and late
packets are lost and late on a link of network devices, and real TCP makes up for them.
"""

import fcntl
import heapq
import mmap
import os
import random
import secrets
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("faults.c")
_CLOCK = struct.Struct("=d")
_FLAG = struct.Struct("=i")
_EIO, _NO_LOCKS, _HOLD, _HELD, _COUNTERS, _PREFIX, _SIZE = 8, 12, 16, 20, 24, 36, 256
_COUNTER = struct.Struct("=iii")
"""Where the switches are: see `struct switches`."""


class Switches:
    """What of a job's machine does not work at present."""

    def __init__(self, folder: Path) -> None:
        library, file = folder / "faults.so", folder / "faults"
        build = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(build, check=True, timeout=120)
        file.write_bytes(bytes(_SIZE))
        with file.open("r+b") as opened:
            self._mapped = mmap.mmap(opened.fileno(), _SIZE)
        self.env = {"LD_PRELOAD": str(library), "FAULTS_FILE": str(file)}

    def clock(self, seconds: float) -> None:
        """So far the wall clock is ahead."""
        _CLOCK.pack_into(self._mapped, 0, seconds)

    def eio(self, prefix: Path | None) -> None:
        """Nothing can be written to files under this path; None: everywhere again."""
        self._set(_EIO, prefix)

    def no_locks(self, prefix: Path | None) -> None:
        """No file under this path can be locked; None: all can be again."""
        self._set(_NO_LOCKS, prefix)

    def hold(self, prefix: Path | None) -> None:
        """Who renames something to a name under this path waits; None: nobody waits any more."""
        self._set(_HOLD, prefix)

    def is_held(self) -> bool:
        """Whether a process has come to such a rename."""
        return bool(_FLAG.unpack_from(self._mapped, _HELD)[0])

    def acted(self) -> dict[str, int]:
        """How often each fault has changed or refused a call: reads of the wall clock, EIO, locks.

        One that has never acted has tested nothing."""
        counts = _COUNTER.unpack_from(self._mapped, _COUNTERS)
        return dict(zip(("clock", "eio", "locks"), counts, strict=True))

    def _set(self, flag: int, prefix: Path | None) -> None:
        if prefix is not None:
            self._mapped[_PREFIX:_SIZE] = bytes(prefix).ljust(_SIZE - _PREFIX, b"\0")
        _FLAG.pack_into(self._mapped, flag, prefix is not None)


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Not a byte is left."""
        with suppress(OSError), (self.path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    def fill_inodes(self) -> None:
        """Room for bytes is left, but not for another file."""
        (self.path / "many").mkdir()
        with suppress(OSError):
            for number in range(1_000_000):
                (self.path / "many" / str(number)).touch()

    def clear(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            for path in (self.path / "many").iterdir():
                path.unlink()
            (self.path / "many").rmdir()


class Line:
    """Two network devices, and every frame between them late or lost."""

    def __init__(self, ends: tuple[int, int], late_s: float, lost: float) -> None:
        self._ends, self._late_s, self._lost = ends, late_s, lost
        self._dice = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        count = 0
        while True:
            wait_s = None
            if self._under_way:
                wait_s = max(0.0, self._under_way[0][0] - time.monotonic())
            ready, _, _ = select.select([*self._ends, self._stop], [], [], wait_s)
            if self._stop in ready:
                return
            for end in ready:
                frame = os.read(end, 1 << 16)
                other = self._ends[1 - self._ends.index(end)]
                count += 1
                if self._dice.random() >= self._lost:
                    due = time.monotonic() + self._late_s
                    heapq.heappush(self._under_way, (due, count, other, frame))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                *_, other, frame = heapq.heappop(self._under_way)
                with suppress(OSError):  # The device may be down by now.
                    os.write(other, frame)

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join()
        for end in (*self._ends, self._stop):
            os.close(end)


@contextmanager
def far_away(late_s: float, lost: float) -> Iterator[tuple[str, str]]:
    """A network namespace at the end of a bad line: its name, and our address on the line."""
    if os.getuid() != 0 or not os.path.exists("/dev/net/tun"):
        pytest.skip("needs network devices of its own: run the tests as root, with /dev/net/tun")
    name = f"hf{secrets.token_hex(4)}"
    subnet = f"10.232.{secrets.randbelow(256)}"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode().strip()
        pytest.skip(f"needs network namespaces, e.g. a container with CAP_SYS_ADMIN: {why}")
    ends = [_tap(f"{name}{end}") for end in "ab"]
    try:
        ip("addr", "add", f"{subnet}.1/30", "dev", f"{name}a")
        ip("link", "set", f"{name}a", "up")
        ip("link", "set", f"{name}b", "netns", name)
        ip("-n", name, "addr", "add", f"{subnet}.2/30", "dev", f"{name}b")
        ip("-n", name, "link", "set", f"{name}b", "up")
        ip("-n", name, "link", "set", "lo", "up")
        line = Line((ends[0], ends[1]), late_s, lost)
        try:
            yield name, f"{subnet}.1"
        finally:
            line.close()
    finally:
        ip("netns", "del", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=120)


def _tap(name: str) -> int:
    """A network device whose frames this process reads and writes."""
    set_interface, tap, no_header = 0x400454CA, 0x0002, 0x1000
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, set_interface, struct.pack("16sH22x", name.encode(), tap | no_header))
    return device
