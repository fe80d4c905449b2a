# SPDX-License-Identifier: Apache-2.0
"""Unfinished lines of a worker: progress bars, and whatever else it writes without a newline yet.

A progress bar writes its line again and again: a carriage return, the new text, no newline. Several
bars go down with newlines and up again with escape codes. A terminal shows all of that in place. So
does this: a few rows and a cursor, which is as much of a terminal as bars need.
"""

import re
from typing import Final

ROWS_MAX = 16
"""More rows than this are no bars: the upper ones are lines."""

ROW_BYTES_MAX = 8192
"""A longer row is shown in pieces."""

_PIECES: Final = re.compile(rb"\r|\n|\x1b\[\d*[A-KSTfsu]|\x1b\[[\d;?]*[hlr]")
"""What moves the cursor or erases. Colours are not among them: they are part of the text."""

_BEGUN: Final = re.compile(rb"\x1b(\[[\d;?]{0,16})?\Z")
"""An escape code whose end is still to come."""


class Bars:
    """What stands on the unfinished rows of one stream. Bytes in; lines and rows out."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._cursor = 0
        #: The next text replaces its row: a carriage return came before it.
        self._is_at_start = False
        self._begun = b""
        #: Whether any row was written again: it is a bar, not only the beginning of a line.
        self.has_bar = False

    @property
    def is_open(self) -> bool:
        """Whether a row is unfinished."""
        return bool(self._rows)

    @property
    def rows(self) -> list[bytes]:
        """The unfinished rows, from the top."""
        return [row for row in self._rows if row.strip()]

    def write(self, data: bytes) -> list[bytes]:
        """What a worker wrote; returns lines that can no longer change."""
        data, at = self._begun + data, 0
        begun = _BEGUN.search(data)
        data, self._begun = (data[: begun.start()], begun.group()) if begun else (data, b"")
        for piece in _PIECES.finditer(data):
            self._put(data[at : piece.start()])
            self._move(piece.group())
            at = piece.end()
        self._put(data[at:])
        return self._overflow()

    def settle(self) -> list[bytes]:
        """The rows above the cursor, as lines. To be called a moment after the last `write`: who
        has more than one bar goes down with a newline, and up again at once."""
        lines, self._rows = self._rows[: self._cursor], self._rows[self._cursor :]
        self._cursor = 0
        if not any(self._rows):
            self._rows, self._is_at_start, self.has_bar = [], False, False
        return lines

    def end(self) -> list[bytes]:
        """Everything that is left, as lines."""
        lines, self._rows, self._cursor = self.rows, [], 0
        return lines

    def _put(self, text: bytes) -> None:
        if not text:
            return
        while len(self._rows) <= self._cursor:
            self._rows.append(b"")
        if self._is_at_start:
            self._rows[self._cursor] = text
            self._is_at_start = False
        else:
            self._rows[self._cursor] += text

    def _move(self, code: bytes) -> None:
        match code[-1:]:
            case b"\r":
                self._is_at_start = self.has_bar = True
            case b"\n" | b"B":
                while len(self._rows) <= self._cursor:
                    self._rows.append(b"")
                self._cursor += 1
                self._is_at_start = True
            case b"A":
                self._cursor = max(0, self._cursor - int(code[2:-1] or 1))
                self.has_bar = True
            case b"K" if code == b"\x1b[2K" or self._is_at_start:
                self._rows[self._cursor : self._cursor + 1] = [b""]

    def _overflow(self) -> list[bytes]:
        excess = max(0, len(self._rows) - ROWS_MAX)
        lines, self._rows = self._rows[:excess], self._rows[excess:]
        self._cursor = max(0, self._cursor - excess)
        for index, row in enumerate(self._rows):
            if len(row) > ROW_BYTES_MAX:
                lines.append(row)
                self._rows[index] = b""
        return lines
