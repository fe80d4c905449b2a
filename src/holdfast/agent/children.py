# SPDX-License-Identifier: Apache-2.0
"""Child processes of the agent: started, watched and reaped without polling or losing any.

Each child leads its own session and process group. Its end wakes the event loop through a pidfd,
and its group is killed with it. The agent also reaps orphans: descendants that the kernel gave to
it because their parent ended. It never touches children that other code in this process has
started: those have this process's session, or are named to `leave_alone`. Every other child is an
orphan that a worker left.
"""

import asyncio
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from holdfast.agent import cgroups, guardian
from holdfast.runtime.observe import Level, Say
from holdfast.worker import linux

Status: TypeAlias = os.waitid_result

_DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM)
_GUARDIAN_LIFE_MIN_S = 1.0


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    inherit: Iterable[int] = (),
) -> int:
    """Start a program in its own session. It gets these descriptors and no others."""
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = []
    with contextlib.ExitStack() as copies:
        for target, source in enumerate((stdin, stdout, stderr)):
            if source is None:
                actions.append((os.POSIX_SPAWN_OPEN, target, os.devnull, os.O_RDWR, 0))
            else:
                # A copy, because the source may itself be one of the three targets.
                copy = os.dup(source)
                copies.callback(os.close, copy)
                actions.append((os.POSIX_SPAWN_DUP2, copy, target))
        for fd in inherit:
            os.set_inheritable(fd, True)
            copies.callback(os.set_inheritable, fd, False)
        return os.posix_spawn(
            argv[0],
            list(argv),
            env,
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULT_SIGNALS,
        )


class Child:
    """A child process, and the only place that takes its exit status."""

    def __init__(
        self, pid: int, on_gone: Callable[["Child"], None], on_exit: Callable[[Status], None]
    ) -> None:
        self.pid = pid
        self.is_running = True
        self.on_exit = on_exit
        self.on_change: Callable[[Status], None] | None = None
        """Told when a signal stops the process and when it continues."""
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._ended)

    def signal_group(self, number: int) -> None:
        if self.is_running:
            _signal_group(self.pid, number)

    def report_changes(self) -> None:
        """Take stops and continues, never the exit status."""
        if self.on_change is None:
            return
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while self.is_running:
            try:
                change = os.waitid(os.P_PIDFD, self._pidfd, flags)
            except ChildProcessError:
                return
            if change is None:
                return
            self.on_change(change)

    def _ended(self) -> None:
        # The group is killed before its leader is reaped: until then no other group can have its
        # number.
        _signal_group(self.pid, signal.SIGKILL)
        self.is_running = False
        self._loop.remove_reader(self._pidfd)
        status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        assert status is not None
        self._on_gone(self)
        self.on_exit(status)


def _signal_group(group: int, number: int) -> bool:
    """Whether there was anything to signal."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # What is left of the group runs as another user: it exists, and is not ours to kill.
    return True


_left_alone: set[int] = set()


def leave_alone(pid: int) -> None:
    """Never take this child for an orphan of a worker: it has a session of its own, but no agent
    supervises it."""
    _left_alone.add(pid)


class Brood:
    """Everything the agent has started: live groups, dying groups, and the guardian over them."""

    def __init__(
        self,
        *,
        base_env: Mapping[str, str],
        is_quiet: Callable[[], bool],
        say: Say,
    ) -> None:
        """`is_quiet`: whether no worker lives or is being started."""
        self._loop = asyncio.get_running_loop()
        self._base_env = {k: v for k, v in base_env.items() if k != guardian.MARK}
        self._is_quiet = is_quiet
        self._say = say
        self._live: dict[int, Child] = {}
        self._dying: set[int] = set()
        self._leased: set[int] = set()
        self._lease_until = math.inf
        self._departures: list[asyncio.Future[None]] = []
        self._mark = f"{os.getpid()}-{os.urandom(8).hex()}"
        for pid in _children_of_this_process():
            leave_alone(pid)
        self._cgroup = cgroups.make(f"holdfast-{self._mark}")
        if not self._cgroup:
            say(
                "No cgroup can be made here: if this agent is killed by SIGKILL, a process of a"
                " worker that left its session and cleared its environment survives it"
                " (docs/guarantees.md).",
                Level.DEBUG,
            )
        linux.become_subreaper()
        _keep_descriptors_private()
        self._start_guardian()
        # Not by the loop's own signal handlers: uvloop keeps SIGCHLD to itself there.
        self._before = signal.signal(signal.SIGCHLD, self._sigchld)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_exit: Callable[[Status], None],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        inherit: Iterable[int] = (),
    ) -> Child:
        """Start a child. It joins the cgroup only once it runs: what it starts before that is
        outside.

        Holdfast's own programs first wait for a word from the agent (`bootstrap`, also before a
        command; and the zygote), so no user code runs that early. Only what Python itself runs at
        its start does: a `.pth` file or a `sitecustomize`.
        """
        marked = self.marked(env)
        pid = spawn(argv, marked, stdin=stdin, stdout=stdout, stderr=stderr, inherit=inherit)
        if self._cgroup:
            cgroups.join(self._cgroup, pid)
        return self.adopt(pid, on_exit)

    def marked(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**env, guardian.MARK: self._mark}

    def adopt(self, pid: int, on_exit: Callable[[Status], None]) -> Child:
        """Supervise a child of this process from now on."""
        child = Child(pid, self._gone, on_exit)
        self._guard.hold(pid)
        self._live[pid] = child
        return child

    def lease(self, child: Child) -> None:
        """The child may run only while the lease lasts."""
        self._leased.add(child.pid)
        self._guard.lease(child.pid)

    def keep_lease(self, until: float) -> None:
        """Leased children may run until then (loop time, which is monotonic)."""
        self._lease_until = until
        self._guard.keep_lease(until)

    def kill_strays(self) -> None:
        """Kill descendants of ended workers that have left their group. This needs a quiet moment,
        without workers: it is not known which worker a stray came from, and that worker may
        live."""
        if not self._is_quiet():
            return
        for pid in _children_of_this_process():
            if pid in self._live or pid == self._guard_child.pid or not self._is_stray(pid):
                continue
            with contextlib.suppress(ProcessLookupError):
                self.adopt(pid, self._stray_ended)
                os.kill(pid, signal.SIGKILL)

    async def wait_gone(self, children: Iterable[Child], timeout_s: float) -> bool:
        """Wait until these children and all of their groups have been reaped."""
        groups = {child.pid for child in children}
        try:
            async with asyncio.timeout(timeout_s):
                while not groups.isdisjoint(self._live.keys() | self._dying):
                    departure = self._loop.create_future()
                    self._departures.append(departure)
                    await departure
        except TimeoutError:
            return False
        return True

    async def close(self, timeout_s: float) -> None:
        """Kill all that is left. The guardian goes last and sweeps."""
        for child in list(self._live.values()):
            child.signal_group(signal.SIGKILL)
        await self.wait_gone(list(self._live.values()), timeout_s)
        self.kill_strays()
        # What a stray leaves behind is killed when it has ended.
        while self._live and await self.wait_gone(list(self._live.values()), timeout_s):
            pass
        guard_gone = asyncio.Event()
        self._guard_child.on_exit = lambda _status: guard_gone.set()
        self._guard.close()
        if self._guard_child.is_running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(guard_gone.wait(), timeout_s)
        signal.signal(signal.SIGCHLD, self._before or signal.SIG_DFL)

    def _sigchld(self, _number: int, _frame: object) -> None:
        self._loop.call_soon_threadsafe(self._children_changed)

    def _children_changed(self) -> None:
        for child in list(self._live.values()):
            child.report_changes()
        self._reap_groups()

    def _gone(self, child: Child) -> None:
        del self._live[child.pid]
        self._dying.add(child.pid)
        self._reap_groups()

    def _reap_groups(self) -> None:
        """Reap the orphans of dying groups, one group at a time: so no child of other code in this
        process is reaped."""
        for group in list(self._dying):
            with contextlib.suppress(ChildProcessError):
                while os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG) is not None:
                    pass
            if not _signal_group(group, 0):
                self._dying.remove(group)
                self._leased.discard(group)
                self._guard.release(group)
        for departure in self._departures:
            if not departure.done():
                departure.set_result(None)
        self._departures.clear()

    def _is_stray(self, pid: int) -> bool:
        try:
            if os.getpgid(pid) in self._dying:
                return False  # Killed already, and reaped with its group.
            # A worker has its own session, and nothing that it starts can get into this one.
            return pid not in _left_alone and os.getsid(pid) != os.getsid(0)
        except ProcessLookupError:
            return False

    def _stray_ended(self, _status: Status) -> None:
        self.kill_strays()

    def _start_guardian(self) -> None:
        pipe, self_end = os.pipe()
        pid = spawn(
            guardian.command(sys.executable, self._mark, self._cgroup), self._base_env, stdin=pipe
        )
        os.close(pipe)
        child = Child(pid, lambda _child: None, self._guardian_ended)
        # A guardian that does not read, because something stopped it, is killed and replaced.
        self._guard = guardian.Guardian(self_end, lambda: child.signal_group(signal.SIGKILL))
        self._guard_since = self._loop.time()
        self._guard_child = child
        self._guard.keep_lease(self._lease_until)
        for group in (*self._live, *self._dying):
            self._guard.hold(group)
        for group in self._leased:
            self._guard.lease(group)

    def _guardian_ended(self, _status: Status) -> None:
        if self._loop.time() - self._guard_since < _GUARDIAN_LIFE_MIN_S:
            self._say(
                "The guardian process cannot stay alive; if this agent is killed by SIGKILL,"
                " some processes of its workers may survive it.",
                Level.WARNING,
            )
            return
        self._guard.close()
        self._start_guardian()


def _children_of_this_process() -> list[int]:
    pids: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as listing:
            pids.extend(int(pid) for pid in listing.read().split())
    return pids


def _keep_descriptors_private() -> None:
    """What our own launcher left open must not reach the workers."""
    for fd in os.listdir("/proc/self/fd"):
        if int(fd) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(fd), False)
