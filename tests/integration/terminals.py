# SPDX-License-Identifier: Apache-2.0
"""A `holdfast` command on a terminal of its own, for tests that look at it and type."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from contextlib import suppress

from tests.integration.jobs import LIMIT_S, Jobs

_LOCAL_MODES = 3
"""Where `termios.tcgetattr` has the modes that a prompt changes."""


class TerminalCommand:
    """A command in the foreground of a terminal, as a person starts it."""

    def __init__(self, jobs: Jobs, *words: str, **env: str) -> None:
        self._screen, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 100))
        self.modes_before = termios.tcgetattr(terminal)[_LOCAL_MODES]
        self._terminal = terminal
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *words],
            env=jobs.environment(**{"TERM": "xterm", **env}),
            cwd=jobs.folder,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            # The new session's first terminal is the one that it is in the foreground of.
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
        )
        self.pid = self._process.pid
        self._text = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # It ends so when the last process has let go of the terminal.
            while data := os.read(self._screen, 65536):
                with self._changed:
                    self._text += data.decode(errors="replace")
                    self._changed.notify_all()

    @property
    def text(self) -> str:
        """Everything that was written to the terminal, escape codes and all."""
        with self._changed:
            return self._text

    @property
    def modes(self) -> int:
        """The local modes of the terminal: echo, whole lines, signals."""
        modes: int = termios.tcgetattr(self._terminal)[_LOCAL_MODES]
        return modes

    def wait_text(self, pattern: str, timeout_s: float = LIMIT_S) -> None:
        """Wait until it has been written."""
        with self._changed:
            seen = self._changed.wait_for(lambda: re.search(pattern, self._text), timeout_s)
        assert seen, f"no {pattern!r} in {timeout_s:g} s:\n{self.text}"

    def resize(self, lines: int, columns: int) -> None:
        termios.tcsetwinsize(self._terminal, (lines, columns))

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait(self) -> int:
        """The exit code, when it has ended and all its output is here."""
        code = self._process.wait(LIMIT_S)
        os.close(self._terminal)
        self._reader.join(LIMIT_S)
        os.close(self._screen)
        return code

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
