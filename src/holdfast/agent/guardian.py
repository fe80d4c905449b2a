# SPDX-License-Identifier: Apache-2.0
"""Ends what an agent leaves behind, and holds its workers still when their lease is over.

A separate process that reads from a pipe which only the agent can write to. When the pipe closes,
the agent is gone, and every process group it was still responsible for is killed. When the lease of
its workers ends and the agent has not told of a longer one, be it that the master does not answer
or that the agent itself stands still, the workers are held still until it does. It is run by its
path in an isolated interpreter, so this file imports nothing but the standard library.
"""

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable

MARK = "HOLDFAST_KEPT_BY"
"""Environment variable of everything an agent starts: finds what has left its process group."""

_SWEEPS_MAX = 10
_READ_BYTES = 64 * 1024


class Guardian:
    """The agent's end: what must die with the agent, and what may run until when."""

    def __init__(self, pipe: int, on_deaf: Callable[[], None]) -> None:
        """`on_deaf` is called when the guardian has not read for long: it is of no use so."""
        self._pipe = pipe
        self._on_deaf = on_deaf
        os.set_blocking(pipe, False)

    def hold(self, group: int) -> None:
        """It must die with the agent."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """It is gone."""
        self._tell(f"-{group}\n")

    def lease(self, group: int) -> None:
        """It may run only as long as the lease does."""
        self._tell(f"={group}\n")

    def keep_lease(self, until: float) -> None:
        """In monotonic time."""
        self._tell(f"<{until!r}\n")

    def close(self) -> None:
        os.close(self._pipe)

    def _tell(self, line: str) -> None:
        # A guardian that has just died is replaced, and the new one is told everything again.
        try:
            os.write(self._pipe, line.encode())
        except BrokenPipeError:
            pass
        except BlockingIOError:
            self._on_deaf()


def command(executable: str, mark: str) -> list[str]:
    """How to start a guardian; it reads from its standard input."""
    return [executable, "-I", "-S", os.path.abspath(__file__), mark]


def carries_mark(pid: int, mark: str) -> bool:
    """Whether a process was started by the agent with this mark, or by a descendant of it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return f"{MARK}={mark}".encode() in environ.read().split(b"\0")
    except OSError:
        return False


class _Wards:
    """What the agent has told, and which groups were held still for it."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self._leased: set[int] = set()
        self._until = math.inf
        self._still: set[int] = set()

    def hear(self, line: str) -> None:
        about, value = line[0], line[1:]
        if about == "<":
            self._until = float(value)
        elif about == "+":
            self.groups.add(int(value))
        elif about == "=":
            self._leased.add(int(value))
        else:
            for groups in (self.groups, self._leased, self._still):
                groups.discard(int(value))

    def keep_still(self) -> float | None:
        """Do what the lease asks for now; returns how long nothing changes, None for ever."""
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            for group in self._leased - self._still:
                _signal_group(group, signal.SIGSTOP)
            self._still |= self._leased
            return None
        for group in self._still:
            _signal_group(group, signal.SIGCONT)
        self._still.clear()
        return left_s if self._leased and left_s < math.inf else None


def _watch(pipe: int) -> set[int]:
    """The groups that are held when the pipe closes."""
    wards, rest = _Wards(), b""
    os.set_blocking(pipe, False)
    while True:
        # All that was told is heard first: the lease may be longer by now.
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, _READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    wards.hear(line.decode())
            return wards.groups
        select.select([pipe], [], [], wards.keep_still())


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _sweep(mark: str) -> bool:
    """Kill every process that carries the mark; whether there was one."""
    found = False
    for entry in os.listdir("/proc"):
        if entry.isdigit() and carries_mark(int(entry), mark):
            found = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry), signal.SIGKILL)
    return found


def main(mark: str) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    for group in _watch(sys.stdin.fileno()):
        _signal_group(group, signal.SIGKILL)
    # Twice without a find: what is being forked during one pass is seen by the next.
    for _ in range(_SWEEPS_MAX):
        if not _sweep(mark) and not _sweep(mark):
            return


if __name__ == "__main__":
    main(sys.argv[1])
