# SPDX-License-Identifier: Apache-2.0
"""The workers of one node as processes: started warm or cold, watched, stopped, never left behind.

All of it happens in the agent's event loop: ends arrive through pidfds, stops through SIGCHLD,
imports through sockets. Nothing polls.
"""

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.agent.children import Brood, Child, Status
from holdfast.agent.spares import Spares
from holdfast.runtime.observe import Level, Say
from holdfast.worker.bootstrap import PROGRAM, Assignment, RunMode

__all__ = ["Processes", "RunMode", "Service", "Worker", "WorkerExit", "WorkerOrder"]

_KILL_TIMEOUT_S = 5.0
_READ_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """Everything needed to start one worker."""

    local_rank: int
    argv: tuple[str, ...]
    """The script, module or command, and its arguments."""
    mode: RunMode
    env: Mapping[str, str]
    """The whole environment of the worker."""
    stdout: int
    """A descriptor that belongs to the caller, which may close it once `start` has returned."""
    stderr: int
    progress: str
    """Path of the worker's progress cell; "" for none."""
    memory: tuple[str, ...] = ()
    """Files with what the worker will probably load: it maps them while it starts."""
    stdin: int | None = None
    """None: the input is empty."""

    @property
    def streams(self) -> tuple[int, ...]:
        """What a spare is given: output, errors and, if there is one, input."""
        return (self.stdout, self.stderr, *(() if self.stdin is None else (self.stdin,)))


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended."""

    pid: int
    local_rank: int
    code: int | None
    """None when it was killed by a signal."""
    signal: int | None


class Worker:
    """A worker that has been started."""

    def __init__(self, local_rank: int, child: Child, how: str, started_at: float) -> None:
        self.pid = child.pid
        self.local_rank = local_rank
        self.how = how
        """ "cold", "zygote" or "one-shot"."""
        self.started_at = started_at
        self.child = child
        self.paused_by_us = False


class ImportLine:
    """The agent's end of a worker's line: gives the word to run, receives module names."""

    def __init__(self, on_names: Callable[[list[str]], None]) -> None:
        self._on_names = on_names
        self._loop = asyncio.get_running_loop()
        self._socket, self.worker_end = socket.socketpair()
        self._socket.setblocking(False)
        self._rest = b""

    def give_the_word(self) -> None:
        self._socket.send(b"!")
        self.worker_end.close()
        self._loop.add_reader(self._socket, self._receive)

    def close(self) -> None:
        """Take what the worker wrote last, then hang up."""
        if self._socket.fileno() >= 0:
            self._receive()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        self.worker_end.close()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._hang_up()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._on_names([line.decode(errors="replace") for line in lines])


class Service:
    """A process of the agent's own. It is no worker: `stop` and `kill_now` leave it alone."""

    def __init__(self, child: Child, line: ImportLine) -> None:
        self.on_exit: Callable[[], None] = lambda: None
        self._child = child
        self._line = line
        child.on_exit = self._ended

    @property
    def is_running(self) -> bool:
        return self._child.is_running

    def end(self) -> None:
        self._child.signal_group(signal.SIGKILL)

    def _ended(self, _status: Status) -> None:
        self._line.close()
        self.on_exit()


class Processes:
    """Starts and ends workers. To be constructed inside the running event loop of the agent's
    main thread; at most one per process, because it takes SIGCHLD and adopts orphans."""

    def __init__(
        self,
        *,
        on_exit: Callable[[WorkerExit], None],
        on_stopped: Callable[[int, int], None],
        on_continued: Callable[[int], None],
        say: Say,
        spares: bool,
        base_env: Mapping[str, str],
        excluded_roots: tuple[str, ...],
        on_warm: Callable[[], None] = lambda: None,
    ) -> None:
        """`say` takes a sentence for the user; modules under `excluded_roots` are the user's own
        and never preloaded; `base_env` is what helper processes of the agent run with; `on_warm`
        is told whenever all spares are ready."""
        self._on_exit = on_exit
        self._on_stopped = on_stopped
        self._on_continued = on_continued
        self._say = say
        self._excluded_roots = excluded_roots
        self._loop = asyncio.get_running_loop()
        self._workers: dict[int, Worker] = {}
        self._lines: dict[int, ImportLine] = {}
        self._starting = 0
        self._most_workers = 0
        self._kills = 0
        self._lease_until, self._grace_until = math.inf, -math.inf
        self._brood = Brood(base_env=base_env, is_quiet=self._is_quiet, say=say)
        self._spares = Spares(
            brood=self._brood,
            enabled=spares,
            workers_wanted=lambda: self._most_workers,
            say=say,
            on_warm=on_warm,
        )

    @property
    def spare_state(self) -> str:
        """ "none", "warming", "ready", "one-shot" or "off: reason"."""
        return self._spares.state

    @property
    def learned(self) -> tuple[str, ...]:
        """The modules that workers imported, in order."""
        return self._spares.learned

    def preload(self, names: Sequence[str], env: Mapping[str, str], workers: int) -> None:
        """Prepare spares for this number of workers before the first one runs on this node."""
        self._most_workers = max(self._most_workers, workers)
        self._spares.preload(names, self._brood.marked(env))

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    async def start(self, order: WorkerOrder) -> Worker:
        """Start one worker. Several may be started at the same time."""
        kills = self._kills
        started_at = self._loop.time()
        line = ImportLine(self._spares.learn)
        self._starting += 1
        with contextlib.ExitStack() as undo:
            undo.callback(line.close)
            try:
                child, how = await self._start_child(order, line)
            finally:
                self._starting -= 1
            undo.pop_all()
        worker = Worker(order.local_rank, child, how, started_at)
        child.on_exit = lambda status: self._worker_ended(worker, status)
        child.on_change = lambda change: self._worker_changed(worker, change)
        self._workers[worker.pid] = worker
        self._lines[worker.pid] = line
        self._most_workers = max(self._most_workers, len(self._workers))
        self._brood.lease(child)
        if self._kills != kills:
            child.signal_group(signal.SIGKILL)  # All workers were to end while this one started.
        line.give_the_word()
        if order.mode is not RunMode.COMMAND:
            self._spares.worker_started(order.env)
        return worker

    async def start_service(self, order: WorkerOrder) -> Service | None:
        """A process of the agent's own, forked from the zygote; None if there is none."""
        if self.spare_state != "ready":
            return None
        line = ImportLine(lambda _names: None)
        assignment = self._assignment(order, line)
        fds = [assignment.line, *order.streams]
        env = self._brood.marked(order.env)
        taken = await self._spares.take(assignment, env, fds, _not_yet_known)
        if taken is None:
            line.close()
            return None
        service = Service(taken[0], line)
        line.give_the_word()
        return service

    def keep_lease(self, until: float) -> None:
        """The workers may run until then (loop time). After that the guardian holds them still,
        even if this process stands still."""
        self._lease_until = until
        self._tell_lease()

    def _tell_lease(self) -> None:
        # Workers that were asked to end get their whole grace, even if the lease ends earlier.
        self._brood.keep_lease(max(self._lease_until, self._grace_until))

    def signal_all(self, sig: int) -> None:
        for worker in self._workers.values():
            if sig == signal.SIGSTOP:
                worker.paused_by_us = True
            worker.child.signal_group(sig)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when all workers and their process groups
        are gone, or a few seconds after SIGKILL if something survives it."""
        self._kills += 1
        self._spares.stop_waiting()
        children = [worker.child for worker in self._workers.values()]
        if grace_s > 0:
            self._grace_until = self._loop.time() + grace_s
            self._tell_lease()
        for child in children:
            child.signal_group(signal.SIGTERM)
            child.signal_group(signal.SIGCONT)  # A stopped process could not act on SIGTERM.
        if grace_s > 0 and await self._brood.wait_gone(children, grace_s):
            return
        self.kill_now()
        if not await self._brood.wait_gone(children, _KILL_TIMEOUT_S):
            left = ", ".join(str(child.pid) for child in children if child.is_running)
            self._say(
                f"Some processes do not end even by SIGKILL (workers: {left or 'none'}).",
                Level.ERROR,
            )

    def kill_now(self) -> None:
        """SIGKILL to every worker's group at once; the exits are reported as usual."""
        self._kills += 1
        self._spares.stop_waiting()
        for worker in self._workers.values():
            worker.child.signal_group(signal.SIGKILL)

    async def close(self) -> None:
        """End everything, the spares and the guardian included."""
        self._spares.close()
        await self.stop(0.0)
        await self._brood.close(_KILL_TIMEOUT_S)

    async def _start_child(self, order: WorkerOrder, line: ImportLine) -> tuple[Child, str]:
        env = self._brood.marked(order.env)
        assignment = self._assignment(order, line)
        if order.mode is not RunMode.COMMAND:
            fds = [assignment.line, *order.streams]
            taken = await self._spares.take(assignment, env, fds, _not_yet_known)
            if taken is not None:
                return taken
        # The bootstrap only executes a command, so it needs no site-packages.
        options = ["-I", "-S"] if order.mode is RunMode.COMMAND else ["-u"]
        settings = assignment._replace(argv=()).to_json()
        child = self._brood.start(
            [sys.executable, *options, PROGRAM, "worker", settings, *order.argv],
            env,
            _not_yet_known,
            stdin=order.stdin,
            stdout=order.stdout,
            stderr=order.stderr,
            inherit=[assignment.line],
        )
        return child, "cold"

    def _assignment(self, order: WorkerOrder, line: ImportLine) -> Assignment:
        return Assignment(
            mode=order.mode,
            argv=order.argv,
            agent_pid=os.getpid(),
            line=line.worker_end.fileno(),
            learn=self._spares.enabled,
            progress=order.progress,
            excluded_roots=self._excluded_roots,
            memory=order.memory,
        )

    def _is_quiet(self) -> bool:
        return not self._workers and not self._starting and not self._spares.is_forking

    def _worker_changed(self, worker: Worker, change: Status) -> None:
        if change.si_code == os.CLD_CONTINUED:
            was_ours, worker.paused_by_us = worker.paused_by_us, False
            if not was_ours:
                self._on_continued(worker.local_rank)
        elif not worker.paused_by_us:
            self._on_stopped(worker.local_rank, change.si_status)

    def _worker_ended(self, worker: Worker, status: Status) -> None:
        del self._workers[worker.pid]
        self._lines.pop(worker.pid).close()
        self._brood.kill_strays()
        exited = status.si_code == os.CLD_EXITED
        self._on_exit(
            WorkerExit(
                pid=worker.pid,
                local_rank=worker.local_rank,
                code=status.si_status if exited else None,
                signal=None if exited else status.si_status,
            )
        )


def _not_yet_known(_status: Status) -> None:
    """A worker cannot end between its start and its registration: both happen in one turn of the
    event loop."""
