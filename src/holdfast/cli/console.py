# SPDX-License-Identifier: Apache-2.0
"""The terminal of `holdfast run`: everybody's lines above, one line of status below them."""

import sys
from typing import Final

from holdfast.agent.output import write_all

_CLEAR: Final = b"\r\x1b[K"


class Console:
    """Owns standard output and standard error of the command.

    On a terminal the last line shows the status; it is taken away before anything else is written
    and put back after it. Elsewhere there is no status, only lines.
    """

    def __init__(self) -> None:
        self._out = sys.stdout.fileno()
        self._err = sys.stderr.fileno()
        self.is_live = sys.stderr.isatty()
        self._status = b""

    def out(self, data: bytes) -> None:
        """Whole lines for standard output."""
        self._write(self._out, data)

    def err(self, data: bytes) -> None:
        """Whole lines for standard error."""
        self._write(self._err, data)

    def status(self, text: str) -> None:
        """Replace the status line; empty takes it away."""
        if self.is_live:
            write_all(self._err, _CLEAR + text.encode())
            self._status = text.encode()

    def _write(self, descriptor: int, data: bytes) -> None:
        if self._status:
            write_all(self._err, _CLEAR)
        write_all(descriptor, data)
        if self._status:
            write_all(self._err, self._status)
