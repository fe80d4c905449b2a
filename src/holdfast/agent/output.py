# SPDX-License-Identifier: Apache-2.0
"""What workers print: every byte to a file per rank, and, prefixed by rank, to the console."""

import asyncio
import fcntl
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeAlias

from holdfast.agent import window
from holdfast.agent.bars import MOVES, ROWS_MAX, Bars
from holdfast.agent.repeats import ERROR_STARTS, Repeats


class Write(Protocol):
    """Where lines are shown. It never blocks; when it is full, the workers' pipes wait."""

    def __call__(self, data: bytes) -> None: ...

    @property
    def is_full(self) -> bool: ...

    def when_room(self, callback: Callable[[], None]) -> None: ...

    @property
    def is_live(self) -> bool:
        """Whether unfinished lines are shown in place, as on a terminal."""
        ...

    @property
    def size(self) -> os.terminal_size:
        """Its columns and lines; only where it is live."""
        ...

    def show_rows(self, slot: "Slot", rows: list[bytes]) -> None:
        """Replace what is shown of the unfinished lines of one stream; only where it is live."""
        ...


Slot: TypeAlias = tuple[int, bool]
"""A stream of a worker: its rank, and whether it is standard error. Rows stand in this order."""

PIPE_BYTES = 1024 * 1024
"""Room for a burst, so that a worker does not wait for the agent. A terminal has room for a few KB
only, and cannot be given more: a worker that writes more waits for the agent."""

WINDOW_BYTES = 256 * 1024
"""How much the agent reads from one terminal, a few KB per read, before it turns to other
streams."""

FIT_S = 0.1
"""How long after a worker's write its terminal may still have the old size of our terminal."""

LINE_BYTES_MAX = 8192
"""A longer line is shown in pieces."""

SETTLE_S = 0.05
"""Unfinished lines are shown again at most this often. Bars are written each tenth of a second:
half of that is as far from the next write as can be. Otherwise the agent would catch a bar again
and again on its way down and up."""

ERROR_S = 2.0
"""How long an error may be held back. By then the worker has ended, or goes on after the error."""

ERROR_BYTES_MAX = 65536
"""A longer error is not held back."""

BAR_S = 5.0
"""How often a progress bar becomes a line where nothing can be shown in place: a pipe, a file."""


class Stream:
    """One output stream of one worker, which holds the other end of a pipe. If the output is shown
    on a terminal, the worker writes to a terminal too: otherwise it would draw no bars and use no
    colours."""

    def __init__(
        self,
        path: Path | None,
        console: Write | None,
        prefix: str,
        slot: Slot = (-1, False),
        repeats: Repeats | None = None,
        no_file: Callable[[OSError], None] | None = None,
        *,
        is_worker: bool = True,
    ) -> None:
        """With `repeats`, an error that ends the worker is not shown if it ended another worker
        before.

        With `no_file`, the stream does without the file if that cannot be opened or written, and
        calls `no_file` with the reason.

        A stream of Holdfast's own processes (not `is_worker`) is always a pipe: processes that
        share a terminal would each draw on it as if it were theirs alone."""
        self._loop = asyncio.get_running_loop()
        self._prefix = prefix.encode()
        self._console = console
        self._slot = slot
        self._rest = b""
        self._bars = Bars()
        self._timer: asyncio.TimerHandle | None = None
        self._fit_timer: asyncio.TimerHandle | None = None
        #: The rows of bars that a console without a terminal was shown last, and when.
        self._shown: list[bytes] = []
        self._shown_at = -math.inf
        self._has_rows = False
        self._repeats = repeats
        #: Lines of what may be the error that ends the worker, and until when they are held back.
        self._error: list[bytes] = []
        self._error_timer: asyncio.TimerHandle | None = None
        self._file, self._path, self._no_file = -1, path, no_file
        if path is not None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._file = os.open(path, flags, 0o600)
            except OSError as exc:
                if no_file is None:
                    raise
                no_file(exc)
        is_seen = is_worker and console is not None and console.is_live
        opened = window.open_window() if is_seen else None
        self._is_window = opened is not None
        self._read_end, self.worker_end = opened or os.pipe2(os.O_CLOEXEC)
        if not self._is_window:
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        elif console is not None:
            self._fit(console)
        os.set_blocking(self._read_end, False)
        self._resume()

    def handed_over(self) -> None:
        """The worker has its end of the pipe: close ours, so that its death is seen as
        end-of-file."""
        if self.worker_end >= 0:
            os.close(self.worker_end)
            self.worker_end = -1

    def close(self) -> None:
        """Take what is still in the pipe and let go."""
        self.handed_over()
        while self._read_end >= 0 and self._receive():
            pass
        self._end()

    def _fit(self, console: Write) -> None:
        """Make the worker's terminal as large as its part of ours. The prefix takes some columns,
        and a program that draws more rows than are kept could not write them again."""
        self._fit_timer = None
        columns, lines = console.size
        columns = max(1, columns - len(self._prefix))
        window.fit(self._read_end, os.terminal_size((columns, min(lines, ROWS_MAX))))

    def _receive(self) -> bool:
        """Take what the worker wrote; returns whether there may be more."""
        try:
            if self._is_window:
                data = window.read(self._read_end, WINDOW_BYTES)
            else:
                data = os.read(self._read_end, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        if self._file >= 0:
            problem = write_all(self._file, data)
            if problem is not None and self._no_file is not None:
                problem.filename = str(self._path)
                self._no_file(problem)
        if self._console is not None:
            if self._is_window and self._fit_timer is None:
                self._fit_timer = self._loop.call_later(FIT_S, self._fit, self._console)
            self._take(self._console, data)
            if self._console.is_full:
                self._loop.remove_reader(self._read_end)
                self._console.when_room(self._resume)
        return True

    def _take(self, console: Write, data: bytes) -> None:
        data, self._rest = self._rest + data, b""
        # On a terminal, output other than bars may move the cursor too, and must not move ours.
        moves = b"\r" in data or (console.is_live and b"\x1b" in data and MOVES.search(data))
        if self._bars.is_open or moves:
            self._show(self._bars.write(data))
        else:
            # The usual case, and the one that must be quick: whole lines.
            *lines, self._rest = data.split(b"\n")
            if self._error or any(start in data for start in ERROR_STARTS):
                self._show(lines)
            else:
                self._write(lines)
            if len(self._rest) > LINE_BYTES_MAX:
                self._show([self._rest])
                self._rest = b""
        is_unfinished = self._bars.is_open or (console.is_live and (self._rest or self._has_rows))
        if is_unfinished:
            self._settle_in(SETTLE_S, console)

    def _settle_in(self, seconds: float, console: Write) -> None:
        at = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._settle, console)

    def _settle(self, console: Write) -> None:
        """A moment after the last write: show the lines that are finished, and those that are
        not."""
        self._timer = None
        self._show(line for line in self._bars.settle() if line not in self._shown)
        rows = [*self._bars.rows, *([self._rest] if self._rest else ())]
        if console.is_live:
            self._has_rows = bool(rows)
            console.show_rows(self._slot, [self._prefix + row for row in rows])
        elif not self._bars.has_bar:
            self._shown = []
        elif rows != self._shown:
            wait_s = self._shown_at + BAR_S - self._loop.time()
            if wait_s > 0:
                self._settle_in(wait_s, console)
                return
            self._show(row for row in rows if row not in self._shown)
            self._shown, self._shown_at = rows, self._loop.time()

    def _resume(self) -> None:
        if self._read_end >= 0:
            self._loop.add_reader(self._read_end, self._receive)

    def _show(self, lines: Iterable[bytes]) -> None:
        self._write(lines if self._repeats is None else self._hold_error(list(lines)))

    def _hold_error(self, lines: list[bytes]) -> list[bytes]:
        """Hold back what may be the worker's last error; returns what can be shown now."""
        if not self._error:
            begins = (at for at, line in enumerate(lines) if line.startswith(ERROR_STARTS))
            at = next(begins, len(lines))
            lines, self._error = lines[:at], lines[at:]
            if self._error:
                self._error_timer = self._loop.call_later(ERROR_S, self._show_error)
            return lines
        self._error += lines
        if sum(map(len, self._error)) > ERROR_BYTES_MAX:
            self._show_error()
        return []

    def _show_error(self) -> None:
        lines, self._error = self._error, []
        if self._error_timer is not None:
            self._error_timer.cancel()
        self._write(lines)

    def _write(self, lines: Iterable[bytes]) -> None:
        text = b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)
        if text and self._console is not None:
            self._console(text)

    def _end(self) -> None:
        if self._read_end < 0:
            return
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1
        for timer in (self._timer, self._fit_timer):
            if timer is not None:
                timer.cancel()
        self._show(line for line in self._bars.end() if line not in self._shown)
        self._show([self._rest] if self._rest else [])
        if self._repeats is not None and self._error:
            if not self._repeats.is_new(b"\n".join(self._error), self._slot[0]):
                self._error = []
            self._show_error()
        if self._console is not None and self._has_rows:
            self._console.show_rows(self._slot, [])
        if self._file >= 0:
            os.close(self._file)


def write_all(descriptor: int, data: bytes) -> OSError | None:
    """Write everything; what cannot be written (disk full, console gone) is not worth a failure.

    Returns why, if something is missing.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            os.set_blocking(descriptor, True)
        except OSError as exc:
            return exc
    return None
