# SPDX-License-Identifier: Apache-2.0
"""What workers print: every byte to a file per rank, and, prefixed by rank, to the console."""

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol


class Write(Protocol):
    """Where lines are shown. It never blocks; when it is full, the workers' pipes wait."""

    def __call__(self, data: bytes) -> None: ...

    @property
    def is_full(self) -> bool: ...

    def when_room(self, callback: Callable[[], None]) -> None: ...


PIPE_BYTES = 1024 * 1024
"""Room for a burst, so that a worker does not wait for the agent."""

LINE_BYTES_MAX = 8192
"""A longer line is shown in pieces."""


class Stream:
    """One output stream of one worker: a pipe whose other end the worker holds."""

    def __init__(self, path: Path | None, console: Write | None, prefix: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._prefix = prefix.encode()
        self._console = console
        self._rest = b""
        self._file = -1
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
        self._read_end, self.worker_end = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._read_end, False)
        self._resume()

    def handed_over(self) -> None:
        """The worker has its end: close ours, so that its death is seen as end-of-file."""
        if self.worker_end >= 0:
            os.close(self.worker_end)
            self.worker_end = -1

    def close(self) -> None:
        """Take what is still in the pipe and let go."""
        self.handed_over()
        while self._read_end >= 0 and self._receive():
            pass
        self._end()

    def _receive(self) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(self._read_end, PIPE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end()
            return False
        if self._file >= 0:
            write_all(self._file, data)
        if self._console is not None:
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._show(lines)
            if len(self._rest) > LINE_BYTES_MAX:
                self._show([self._rest])
                self._rest = b""
            if self._console.is_full:
                self._loop.remove_reader(self._read_end)
                self._console.when_room(self._resume)
        return True

    def _resume(self) -> None:
        if self._read_end >= 0:
            self._loop.add_reader(self._read_end, self._receive)

    def _show(self, lines: Iterable[bytes]) -> None:
        text = b"".join(b"%b%b\n" % (self._prefix, line) for line in lines)
        if text and self._console is not None:
            self._console(text)

    def _end(self) -> None:
        if self._read_end < 0:
            return
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1
        if self._rest:
            self._show([self._rest])
            self._rest = b""
        if self._file >= 0:
            os.close(self._file)


def write_all(descriptor: int, data: bytes) -> None:
    """Write everything; what cannot be written (disk full, console gone) is not worth a failure."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            os.set_blocking(descriptor, True)
        except OSError:
            return
