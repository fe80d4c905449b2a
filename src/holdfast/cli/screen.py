# SPDX-License-Identifier: Apache-2.0
"""The bottom of a terminal: unfinished lines of workers, one row each, and one line of status.

The console removes it before it writes lines above it, and draws it again below them.
"""

import re
from typing import Final

from holdfast.agent.output import Slot

ROWS_MAX = 8
"""Progress bars shown at a time: with more the lines above would have no room."""

_CODES: Final = re.compile(
    rb"(\x1b\[[0-9;:]*m)"  # A colour.
    rb"|\x1b\[[0-?]*[ -/]*[@-~]?"
    rb"|\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"  # Links, titles: text until its end.
    rb"|\x1b[ -/]*[0-~]?"
    rb"|[\x00-\x08\x0b-\x1a\x1c-\x1f]"
)
_CONTROLS: Final = bytes({*range(0x20)} - {*b"\t\n"})
_RESET: Final = b"\x1b[0m"
_NO_WRAP: Final = b"\x1b[?7l"
_WRAP: Final = b"\x1b[?7h"
"""The terminal cuts a row that is too long itself: it knows how wide its characters are."""


class Screen:
    """The rows at the bottom. Text in, bytes for the terminal out."""

    def __init__(self) -> None:
        self._status = b""
        self._rows: dict[Slot, list[bytes]] = {}
        #: How many rows are on the terminal now.
        self._drawn = 0

    def set_status(self, text: bytes) -> bool:
        """Returns whether anything changed."""
        before, self._status = self._status, text
        return text != before

    def set_rows(self, slot: Slot, rows: list[bytes]) -> bool:
        """Returns whether anything changed."""
        before = self._rows.pop(slot, [])
        if rows:
            self._rows[slot] = rows
        return rows != before

    def clear(self) -> bytes:
        """Remove all rows. The cursor is then where the next line begins."""
        drawn, self._drawn = self._drawn, 0
        if not drawn:
            return b""
        up = b"\x1b[%dA" % (drawn - 1) if drawn > 1 else b""
        return b"\r" + up + b"\x1b[J"

    def draw(self, height: int) -> bytes:
        """Show all rows, on a terminal of `height` rows; after `clear`, or after whole lines."""
        bars = [_row(row) for slot in sorted(self._rows) for row in self._rows[slot]]
        room = max(1, min(ROWS_MAX, height - 3))
        if len(bars) > room:
            hidden = len(bars) - (room - 1)
            bars = [*bars[: room - 1], b"... and %d more" % hidden]
        rows = [*bars, self._status] if self._status else bars
        self._drawn = len(rows)
        if not rows:
            return b""
        return _NO_WRAP + b"\r\n".join(rows) + _WRAP


def plain(text: bytes) -> bytes:
    """The text without anything that changes more of a terminal than its colours."""
    # Most text has no such byte, and to look for one takes a twentieth of the time.
    if len(text.translate(None, _CONTROLS)) == len(text):
        return text
    return _CODES.sub(rb"\1", text)


def _row(row: bytes) -> bytes:
    """One row, whose colours end with it."""
    text = plain(row)
    return text + _RESET if b"\x1b" in text else text
