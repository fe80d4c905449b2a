# SPDX-License-Identifier: Apache-2.0
"""The log file of one process: what it said, with date and level, in files that are rotated.

The file may be on a server that does not answer, and beats must go on meanwhile. So a thread writes
it, as with the terminal of `holdfast run`. Lines that the disk is too slow for are dropped, and the
file says how many.
"""

import logging
import os
import queue
import stat
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Final

from holdfast.model.errors import StateError
from holdfast.runtime.observe import Details, Level
from holdfast.runtime.private import require_own

FILE_BYTES_MAX = 512 * 1024 * 1024
FILES_KEPT = 3
"""Full files that are kept beside the present one: NAME.1, the newest, to NAME.3."""

BACKLOG_MAX = 10_000
"""Lines that wait for the disk."""

CLOSE_S = 2.0
"""How long the end of a process waits for a disk that does not answer."""


class LogFile:
    """Takes lines, and never waits for the disk before it is closed."""

    def __init__(
        self,
        path: Path,
        *,
        late: bool = False,
        bytes_max: int = FILE_BYTES_MAX,
        kept: int = FILES_KEPT,
    ) -> None:
        """OSError if there can be no such file, StateError if another user has made it.

        With `late` neither error is raised, and nothing waits for the disk: the writer thread opens
        the file. It reports once why it cannot, and tries again at each line.
        """
        self._files = _Rotating(path, bytes_max, kept, late=late)
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(BACKLOG_MAX)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, name="log file", daemon=True)
        self._writer.start()

    def __call__(self, text: str | Details, level: Level = Level.INFO, /) -> None:
        if self._dropped and not self._records.full():
            missing, self._dropped = self._dropped, 0
            self._put(_missing(missing, "the disk was too slow"), Level.WARNING)
        self._put(str(text), level)

    def close(self) -> None:
        """Write what is left, if the disk takes it."""
        try:
            self._records.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._writer.join(CLOSE_S)

    def _put(self, text: str, level: Level) -> None:
        try:
            self._records.put_nowait(_record(text, level))
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            self._files.write(record)
        if self._dropped:  # No caller adds to it any more.
            self._files.write(_record(_missing(self._dropped, "the disk was too slow")))
        with suppress(OSError):  # It was reported when it began to fail.
            self._files.close()


def _record(text: str, level: Level = Level.WARNING) -> logging.LogRecord:
    return logging.LogRecord("holdfast", level, "", 0, text, None, None)


def _missing(lines: int, why: str) -> str:
    return f"{lines} lines are missing here: {why}"


class _Lines(logging.Formatter):
    """Text that comes from elsewhere can neither forge a line nor tell a terminal what to do."""

    def format(self, record: logging.LogRecord) -> str:
        # Of a traceback each further line is indented: only a record begins in the first column.
        return "\n    ".join(map(_printable, super().format(record).splitlines()))


def _printable(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode()
        for char in line
    )


_FORM: Final = _Lines("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


class _Rotating:
    """Files that belong to this user alone. What goes wrong with them is said once on standard
    error.

    A file that has failed is given up, and the next line opens it again. This is not one of the
    handlers of `logging`: at the end of a process `logging` closes these once more, and would wait
    without limit for a disk that does not answer.
    """

    def __init__(self, path: Path, bytes_max: int, kept: int, *, late: bool) -> None:
        self._path = path.absolute()
        self._bytes_max = self._step = bytes_max
        self._kept = kept
        self._has_failed = False
        self._lost, self._why = 0, ""
        self._file = -1 if late else self._open()

    def write(self, record: logging.LogRecord) -> None:
        if lost := self._lost:
            self._lost = 0
            self._put(_record(_missing(lost, self._why)))
            if self._lost:  # It still fails; the line that told of the loss does not count.
                self._lost = lost
        self._put(record)

    def close(self) -> None:
        """Close the file; it is never used again, even if that fails."""
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)

    def _open(self) -> int:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(self._path.parent)
        require_own(self._path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

    def _put(self, record: logging.LogRecord) -> None:
        # A name of a file may have bytes that are no text.
        line = memoryview(f"{_FORM.format(record)}\n".encode(errors="backslashreplace"))
        try:
            if self._file < 0:
                self._file = self._open()
            found = os.fstat(self._file)
            if stat.S_ISREG(found.st_mode) and found.st_size + len(line) > self._bytes_max:
                self._turn_over()
                self._file = self._open()
            while line:
                line = line[os.write(self._file, line) :]
        except (OSError, StateError) as exc:
            self._lost, self._why = self._lost + 1, str(exc)
            with suppress(OSError):
                self.close()
            self._complain(f"the log {self._path} is not written: {self._why}")

    def _turn_over(self) -> None:
        """Move each file to the next name; the oldest one is replaced."""
        try:
            self.close()
        except OSError as exc:
            self._complain(f"the end of {self._path} may be missing: {exc}")
        names = [str(self._path), *(f"{self._path}.{number + 1}" for number in range(self._kept))]
        try:
            for newer, older in reversed(list(pairwise(names))):
                with suppress(FileNotFoundError):
                    os.replace(newer, older)
            self._bytes_max = self._step
        except OSError as exc:
            # Better a large file than none. To try at each line could move the old ones out.
            self._bytes_max += self._step
            self._complain(f"the log {self._path} grows, it cannot be rotated: {exc}")

    def _complain(self, sentence: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            # Standard error may be broken too; the file may come back.
            with suppress(OSError, ValueError):
                print(f"holdfast: {sentence}", file=sys.stderr)
