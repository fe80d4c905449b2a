# SPDX-License-Identifier: Apache-2.0
"""The terminal of `holdfast run`: everybody's lines above, one line of status below them.

A terminal can stop reading for as long as it likes (Ctrl-S, a pager). So a thread of its own writes
to it, and the agent's event loop never waits: beats go on while nobody looks. What is not shown yet
is bounded; beyond that the workers' pipes are left unread, as with any pipe whose reader is slow.
"""

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from typing import Final

from holdfast.agent.output import write_all

BACKLOG_BYTES_MAX = 4 * 1024 * 1024
CLOSE_S = 2.0
"""How long the end of a command waits for a terminal that does not read."""

_CLEAR: Final = b"\r\x1b[K"


class Outlet:
    """One of the console's two streams, as an output of workers."""

    def __init__(self, console: "Console", descriptor: int) -> None:
        self._console = console
        self._descriptor = descriptor

    def __call__(self, data: bytes) -> None:
        """Show whole lines, soon."""
        self._console.put(self._descriptor, data)

    @property
    def is_full(self) -> bool:
        return self._console.is_full

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back, in the event loop, once there is room again."""
        self._console.when_room(callback)


class Console:
    """Owns standard output and standard error of the command.

    On a terminal the last line shows the status; it is taken away before anything else is written
    and put back after it. Elsewhere there is no status, only lines.
    """

    def __init__(self) -> None:
        self.out = Outlet(self, sys.stdout.fileno())
        self.err = Outlet(self, sys.stderr.fileno())
        self.is_live = sys.stderr.isatty()
        self._status = b""
        self._lock = threading.Lock()
        self._backlog = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._lines: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="console", daemon=True)
        self._writer.start()

    def status(self, text: str) -> None:
        """Replace the status line; empty takes it away."""
        if self.is_live:
            self.put(-1, text.encode())

    @property
    def is_full(self) -> bool:
        return self._backlog > BACKLOG_BYTES_MAX

    def put(self, descriptor: int, data: bytes) -> None:
        """Queue lines for a descriptor; -1 is the status line."""
        with self._lock:
            self._backlog += len(data)
        self._lines.put((descriptor, data))

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back, in the running loop, once less than half of the backlog is left."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._backlog > BACKLOG_BYTES_MAX // 2:
                self._waiting.append((loop, callback))
                return
        loop.call_soon(callback)

    def close(self) -> None:
        """Show what is left, if anybody reads it."""
        self.status("")
        self._lines.put(None)
        self._writer.join(CLOSE_S)

    def _write(self) -> None:
        error = sys.stderr.fileno()
        while (line := self._lines.get()) is not None:
            descriptor, data = line
            if descriptor < 0:
                write_all(error, _CLEAR + data)
                self._status = data
            else:
                if self._status:
                    write_all(error, _CLEAR)
                write_all(descriptor, data)
                if self._status:
                    write_all(error, self._status)
            self._written(len(data))

    def _written(self, count: int) -> None:
        with self._lock:
            self._backlog -= count
            if self._backlog > BACKLOG_BYTES_MAX // 2:
                return
            waiting, self._waiting = self._waiting, []
        for loop, callback in waiting:
            loop.call_soon_threadsafe(callback)
