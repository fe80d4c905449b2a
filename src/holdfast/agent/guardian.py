# SPDX-License-Identifier: Apache-2.0
"""Ends what an agent leaves behind, and holds its workers still when their lease is over.

A separate process that reads from a pipe which only the agent can write to. When the pipe closes,
the agent is gone, and the guardian kills every process group that the agent was still responsible
for. When the lease of the workers ends and the agent has not told of a longer one (the master does
not answer, or the agent itself stands still), the guardian holds the workers still until it does. A
second process kills the groups if agent and guardian are killed at once. The guardian is run by its
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
_GONE_S = 5.0
"""How long the second process waits for the agent's death after the guardian's. Both also wait this
long for the end of what they have killed."""


class Guardian:
    """The agent's end of the pipe: tells the guardian what must die with the agent, and what may
    run until when."""

    def __init__(self, pipe: int, on_deaf: Callable[[], None]) -> None:
        """`on_deaf` is called when the guardian has not read for so long that the pipe is full."""
        self._pipe = pipe
        self._on_deaf = on_deaf
        os.set_blocking(pipe, False)

    def hold(self, group: int) -> None:
        """This group must die with the agent."""
        self._tell(f"+{group}\n")

    def release(self, group: int) -> None:
        """This group is gone."""
        self._tell(f"-{group}\n")

    def lease(self, group: int) -> None:
        """This group may run only while the lease lasts."""
        self._tell(f"={group}\n")

    def keep_lease(self, until: float) -> None:
        """`until` is in monotonic time."""
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


def command(executable: str, mark: str, cgroup: str) -> list[str]:
    """How to start a guardian of this process; it reads from its standard input. `cgroup` is the
    folder of the cgroup with everything that the agent starts; empty if there is none."""
    path, agent = os.path.abspath(__file__), str(os.getpid())
    return [executable, "-I", "-S", path, mark, cgroup, agent]


def carries_mark(pid: int, mark: str) -> bool:
    """Whether a process was started by the agent with this mark, or by a descendant of it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:
            return f"{MARK}={mark}".encode() in environ.read().split(b"\0")
    except OSError:
        return False


class _Wards:
    """What the agent has told the guardian, and which groups the guardian holds still."""

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
        """Hold groups still, or let them run, as the lease says now. Returns for how many seconds
        nothing changes; None means for ever."""
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


def _watch(pipe: int, second: "_Second | None") -> set[int]:
    """Listen until the pipe closes; returns the groups that the agent held then. Passes everything
    on to the second process, if there is one."""
    wards, rest = _Wards(), b""
    os.set_blocking(pipe, False)
    while True:
        # First read everything that the agent has sent: the lease may be longer by now.
        with contextlib.suppress(BlockingIOError):
            while data := os.read(pipe, _READ_BYTES):
                if second is not None:
                    second.tell(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    wards.hear(line.decode())
            return wards.groups
        # The second process leaves the lease to the first one, which the agent replaces if it
        # fails.
        pause_s = wards.keep_still() if second is not None else None
        select.select([pipe], [], [], pause_s)


class _Second:
    """The guardian's own end of the pipe to a second process, which acts if both the agent and the
    guardian are killed."""

    def __init__(self, mark: str, cgroup: str, agent: int) -> None:
        theirs, self._pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._pipe)
                os.dup2(theirs, sys.stdin.fileno())
                _stand_by(mark, cgroup, agent)
            finally:
                os._exit(0)
        os.close(theirs)
        os.set_blocking(self._pipe, False)

    def tell(self, data: bytes) -> None:
        # A second process that stands still, or is gone, is useless and must not make the first one
        # wait.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, data)

    def end(self) -> None:
        """The guardian has ended everything: the second process has nothing left to do."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _stand_by(mark: str, cgroup: str, agent: int) -> None:
    try:
        agents_end = os.pidfd_open(agent)
    except ProcessLookupError:
        agents_end = -1
    groups = _watch(sys.stdin.fileno(), None)
    # An agent that lives has started another guardian by now.
    if agents_end < 0 or select.select([agents_end], [], [], _GONE_S)[0]:
        _end_all(groups, mark, cgroup)


def _end_all(groups: set[int], mark: str, cgroup: str) -> None:
    for group in groups:
        _signal_group(group, signal.SIGKILL)
    if cgroup:
        with contextlib.suppress(OSError):
            _end_cgroup(cgroup)
    # Two passes must find nothing: what is being forked during one pass is seen by the next.
    for _ in range(_SWEEPS_MAX):
        if not _sweep(mark) and not _sweep(mark):
            return


def _end_cgroup(folder: str) -> None:
    with open(f"{folder}/cgroup.kill", "w") as kill:
        kill.write("1")
    events = os.open(f"{folder}/cgroup.events", os.O_RDONLY)
    changed = select.poll()
    changed.register(events, select.POLLPRI)
    by = time.monotonic() + _GONE_S
    while b"populated 0" not in os.pread(events, 1024, 0) and time.monotonic() < by:
        changed.poll(1000 * (by - time.monotonic()))
    os.rmdir(folder)


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


def main(mark: str, cgroup: str, agent: int) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    second = _Second(mark, cgroup, agent)
    _end_all(_watch(sys.stdin.fileno(), second), mark, cgroup)
    second.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
