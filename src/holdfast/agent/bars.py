# SPDX-License-Identifier: Apache-2.0
"""Unfinished lines of a worker: progress bars, and whatever else it writes without a newline yet.

A progress bar writes its line again and again: a carriage return, the new text, no newline. Several
bars go down with newlines and up again with escape codes. A terminal shows all of that in place. So
does this module, with a few rows and a cursor: bars need no more of a terminal.

A program that hides the cursor (rich does) keeps a block of rows that it redraws as a whole, until
it shows the cursor again. Rows above the last redraw are final. Other programs leave nothing above
the cursor that they mean to change, except for a moment.
"""

import re
from typing import Final

ROWS_MAX = 16
"""Output with more rows than this is not bars: the upper rows become lines."""

ROW_BYTES_MAX = 8192
"""A longer row is shown in pieces."""

_PIECES: Final = re.compile(rb"\r|\n|\x1b\[\d*[A-KSTfsu]|\x1b\[[\d;?]*[hlr]")
"""Codes that move the cursor or erase. Colours are not among them: they are part of the text."""

MOVES: Final = re.compile(rb"\r|\x1b\[\d*[A-KSTfsu]|\x1b\[[\d;?]*[hl]")
"""Codes that move the cursor; a plain line of text has none."""

_HIDE: Final = b"\x1b[?25l"
_SHOW: Final = b"\x1b[?25h"

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
        self._is_region = False
        #: Where the live region begins: what is above it can no longer change.
        self._top = 0
        #: The next text is written over what was there.
        self._overwrites = False
        #: Whether any row was written over since the last `settle`.
        self._has_overwritten = False
        #: Whether any row was written again: it is a bar, not only the beginning of a line.
        self.has_bar = False

    @property
    def is_open(self) -> bool:
        """Whether a row is unfinished, or its end may be an escape code's beginning."""
        return bool(self._rows or self._begun or self._is_region)

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
        """The rows above the cursor, or above the live region, as lines. Call it a moment after the
        last `write`: a program with several bars goes down with a newline, and up again at once."""
        done = min(self._top, self._cursor) if self._is_region else self._cursor
        lines = self._take_rows(done)
        self._has_overwritten = False
        if not any(self._rows):
            self._rows, self._is_at_start, self.has_bar = [], False, False
        return lines

    def end(self) -> list[bytes]:
        """Everything that is left, as lines."""
        lines, self._rows, self._cursor = self.rows, [], 0
        return lines

    def _take_rows(self, count: int) -> list[bytes]:
        """Remove the upper rows, and return them."""
        lines, self._rows = self._rows[:count], self._rows[count:]
        self._cursor = max(0, self._cursor - count)
        self._top = max(0, self._top - count)
        return lines

    def _put(self, text: bytes) -> None:
        if not text:
            return
        if self._overwrites:
            self._top, self._overwrites = self._cursor, False
            self._has_overwritten = True
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
                self._is_at_start = self.has_bar = self._overwrites = True
            case b"\n" | b"B":
                while len(self._rows) <= self._cursor:
                    self._rows.append(b"")
                self._cursor += 1
                self._is_at_start, self._overwrites = True, False
            case b"A":
                self._cursor = max(0, self._cursor - int(code[2:-1] or 1))
                self.has_bar = self._overwrites = True
            case b"K" if code == b"\x1b[2K" or self._is_at_start:
                self._rows[self._cursor : self._cursor + 1] = [b""]
                self._overwrites = True
            case b"l" if code == _HIDE and not self._is_region:
                self._is_region, self._top = True, self._cursor
            case b"h" if code == _SHOW:
                self._is_region = False

    def _overflow(self) -> list[bytes]:
        excess = max(0, len(self._rows) - ROWS_MAX)
        lines = self._take_rows(excess)
        if excess and not self._has_overwritten:
            # No row is written over any more: the program hides the cursor for good, or has died.
            self._is_region = False
        for index, row in enumerate(self._rows):
            if len(row) > ROW_BYTES_MAX:
                lines.append(row)
                self._rows[index] = b""
        return lines
