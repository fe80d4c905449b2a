# SPDX-License-Identifier: Apache-2.0
"""What a process lets people see: log lines, in one form everywhere, and the clocks."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

Say = Callable[[str], None]
"""Tell the user one thing, in one line."""


def wall_clock() -> float:
    """Seconds since the epoch: for people and for restarts, never for durations."""
    return time.time()


def monotonic_name() -> str:
    """Which clock `time.monotonic` shows: one start of one machine has one, and each time namespace
    in it. Empty where /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    with suppress(FileNotFoundError):  # A kernel before 5.6 has no such namespaces.
        return f"{boot}/{Path('/proc/self/ns/time').stat().st_ino}"
    return boot


def sayer(who: str, write: Callable[[bytes], None] | None = None) -> Say:
    """Lines of the form `12:34:56 who: text`, on standard error unless told otherwise."""

    def say(text: str) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(wall_clock()))
        line = f"{stamp} {who}: {text}\n"
        if write is not None:
            write(line.encode())
            return
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except (BrokenPipeError, ValueError, OSError):
            return  # Nobody reads any more; that must not stop the work.

    return say
