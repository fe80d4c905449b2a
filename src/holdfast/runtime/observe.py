# SPDX-License-Identifier: Apache-2.0
"""What a process lets people see: log lines, in one form everywhere, and the clocks."""

import enum
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec import Struct

DETAIL_MAX = 120
"""Letters of a field that `Details` show; a longer one is left out."""


class Level(enum.IntEnum):
    """How much a line matters. DEBUG lines are only for people who look for a bug."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


@dataclass(frozen=True, slots=True)
class Details:
    """An event or a command as `Name field=value ...`, put into words only if they are shown.

    Only fields that are short: numbers, words, and of messages no more than their kind, because
    they may hold keys and whole worlds.
    """

    of: object

    def __str__(self) -> str:
        parts = [type(self.of).__name__]
        for name in getattr(self.of, "__dataclass_fields__", ()):
            value = getattr(self.of, name)
            if isinstance(value, int | float | str):
                text = f"{value:g}" if isinstance(value, float) else str(value)
                parts.append(f"{name}={text if len(text) <= DETAIL_MAX else '...'}")
            elif isinstance(value, Struct):
                parts.append(f"{name}={type(value).__name__}")
        return " ".join(parts)


class Say(Protocol):
    """Tell the user one thing, in one line."""

    def __call__(self, text: str | Details, level: Level = Level.INFO, /) -> None: ...


def wall_clock() -> float:
    """Seconds since the epoch: for people and for restarts, never for durations."""
    return time.time()


def monotonic_name() -> str:
    """The name of the clock that `time.monotonic` shows: every start of a machine has its own, and
    so has each time namespace in it. Empty where /proc does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
    with suppress(FileNotFoundError):  # A kernel before 5.6 has no such namespaces.
        return f"{boot}/{Path('/proc/self/ns/time').stat().st_ino}"
    return boot


def sayer(
    who: str,
    write: Callable[[bytes], None] | None = None,
    *,
    least: Level = Level.INFO,
    file: Say | None = None,
) -> Say:
    """Lines of the form `12:34:56 who: text`, on standard error unless told otherwise.

    Lines below `least` are left out. With a log file, everything from INFO on is in the file, and
    what is below INFO is only there: a terminal is for what people must see.
    """
    in_file = min(least, Level.INFO)
    shown = least if file is None else max(least, Level.INFO)

    def say(text: str | Details, level: Level = Level.INFO, /) -> None:
        if file is not None and level >= in_file:
            file(f"{who}: {text}", level)
        if level < shown:
            return
        stamp = time.strftime("%H:%M:%S", time.localtime(wall_clock()))
        line = f"{stamp} {who}: {text}\n"
        if write is not None:
            write(line.encode(errors="backslashreplace"))
            return
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except (BrokenPipeError, ValueError, OSError):
            return  # Standard error has no reader any more; that must not stop the work.

    return say
