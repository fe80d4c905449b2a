# SPDX-License-Identifier: Apache-2.0
"""The terminal of `holdfast run`: the lines of all processes above, one line of status below.

A terminal can stop reading for as long as it likes (Ctrl-S, a pager). So a separate thread writes
to it, and the agent's event loop never waits: beats go on while the terminal does not read. The
amount of waiting output is bounded; beyond it the console leaves the workers' pipes unread, like
any slow reader of a pipe.
"""

import asyncio
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from holdfast.agent.output import Slot, write_all
from holdfast.cli.screen import Screen, plain
from holdfast.runtime.settings import environment

BACKLOG_BYTES_MAX = 4 * 1024 * 1024
CLOSE_S = 2.0
"""How long the end of a command waits for a terminal that does not read."""

UNKNOWN_SIZE = os.terminal_size((80, 24))
"""The size for a terminal that reports none. tqdm shows nothing on one without columns."""

_SHOW_CURSOR: Final = b"\x1b[?25h"

_Work: TypeAlias = tuple[int, bytes] | Callable[[Screen], bool]


class Outlet:
    """One of the console's two streams, as an output of workers."""

    def __init__(self, console: "Console", descriptor: int) -> None:
        self._console = console
        self._descriptor = descriptor
        self.is_live = console.is_live and os.isatty(descriptor)

    def __call__(self, data: bytes) -> None:
        """Show whole lines, soon. On a terminal only text and colours pass: a worker that hides the
        cursor may be killed before it shows the cursor again."""
        self._console.put(self._descriptor, plain(data) if self.is_live else data)

    @property
    def is_full(self) -> bool:
        return self._console.is_full

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back, in the event loop, once there is room again."""
        self._console.when_room(callback)

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal."""
        return self._console.size

    def show_rows(self, slot: Slot, rows: list[bytes]) -> None:
        """Replace the unfinished lines of one stream, at the bottom of the terminal."""
        self._console.change(lambda screen: screen.set_rows(slot, rows))


class Console:
    """Owns standard output and standard error of the command.

    On a terminal the last line shows the status; it is removed before anything else is written and
    put back after that. Elsewhere there is no status, only lines.
    """

    def __init__(self, *, is_lent: bool = False) -> None:
        """`is_lent`: a worker writes to the terminal itself, wherever its cursor is."""
        is_terminal = sys.stderr.isatty() and environment().get("TERM") != "dumb"
        self._begin_line = b"\r\x1b[K" if is_terminal and is_lent else b""
        self.is_live = is_terminal and not is_lent
        self.out = Outlet(self, sys.stdout.fileno())
        self.err = Outlet(self, sys.stderr.fileno())
        self._screen = Screen()
        self._lock = threading.Lock()
        self._backlog = 0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="console", daemon=True)
        self._writer.start()

    def status(self, text: str) -> None:
        """Replace the status line; an empty text removes it."""
        if self.is_live:
            self.change(lambda screen: screen.set_status(text.encode()))

    def change(self, change: Callable[[Screen], bool]) -> None:
        """Change the rows at the bottom of the terminal."""
        self._work.put(change)

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal."""
        try:
            columns, lines = os.get_terminal_size(sys.stderr.fileno())
        except OSError:
            return UNKNOWN_SIZE
        return os.terminal_size((columns or UNKNOWN_SIZE.columns, lines or UNKNOWN_SIZE.lines))

    @property
    def is_full(self) -> bool:
        return self._backlog > BACKLOG_BYTES_MAX

    def put(self, descriptor: int, data: bytes) -> None:
        """Queue whole lines for a descriptor."""
        with self._lock:
            self._backlog += len(data)
        self._work.put((descriptor, data))

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back, in the running loop, once less than half of the backlog is left."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._backlog > BACKLOG_BYTES_MAX // 2:
                self._waiting.append((loop, callback))
                return
        loop.call_soon(callback)

    def close(self) -> None:
        """Write what is left, if the other end reads it."""
        self.status("")
        self._work.put(None)
        self._writer.join(CLOSE_S)

    def _write(self) -> None:
        error = sys.stderr.fileno()
        while (work := self._work.get()) is not None:
            if callable(work):
                if work(self._screen):
                    write_all(error, self._screen.clear() + self._drawn())
                continue
            descriptor, data = work
            write_all(error, self._screen.clear() + self._begin_line)
            write_all(descriptor, data)
            write_all(error, self._drawn())
            self._written(len(data))
        if self._begin_line:
            # A program that drew here may have been killed before it showed the cursor again.
            write_all(error, _SHOW_CURSOR)

    def _drawn(self) -> bytes:
        if not self.is_live:
            return b""
        return self._screen.draw(self.size.lines)

    def _written(self, count: int) -> None:
        with self._lock:
            self._backlog -= count
            if self._backlog > BACKLOG_BYTES_MAX // 2:
                return
            waiting, self._waiting = self._waiting, []
        for loop, callback in waiting:
            loop.call_soon_threadsafe(callback)
