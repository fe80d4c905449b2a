# SPDX-License-Identifier: Apache-2.0
"""Ends what an agent leaves behind, even when the agent is killed by SIGKILL.

A separate process that reads from a pipe which only the agent can write to: when the pipe closes,
the agent is gone, and every process group it was still responsible for is killed. It is run by its
path in an isolated interpreter, so this file imports nothing but the standard library.
"""

import contextlib
import os
import signal
import sys

MARK = "HOLDFAST_KEPT_BY"
"""Environment variable of everything an agent starts: finds what has left its process group."""

_SWEEPS_MAX = 10


class Guardian:
    """The agent's end: what must die with the agent."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def hold(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        self._tell(f"-{group}\n")

    def close(self) -> None:
        os.close(self._pipe)

    def _tell(self, line: str) -> None:
        # A guardian that has just died is replaced, and the new one is told everything again.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line.encode())


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


def _watch(pipe: int) -> set[int]:
    """The groups that are held when the pipe closes."""
    held: set[int] = set()
    with open(pipe, encoding="ascii") as lines:
        for line in lines:
            if line.startswith("+"):
                held.add(int(line[1:]))
            else:
                held.discard(int(line[1:]))
    return held


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
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    # Twice without a find: what is being forked during one pass is seen by the next.
    for _ in range(_SWEEPS_MAX):
        if not _sweep(mark) and not _sweep(mark):
            return


if __name__ == "__main__":
    main(sys.argv[1])
