# SPDX-License-Identifier: Apache-2.0
"""A terminal of its own for a worker's stream that is shown on a terminal.

Programs ask whether they write to a terminal before they draw live or use colours. Nothing is typed
here, and nothing that is written is changed on its way: it is a pipe that says it is a terminal.
"""

import errno
import os
import termios
import tty
from contextlib import suppress


def open_window() -> tuple[int, int] | None:
    """The end to read from and that of the worker; None if this machine gives no terminal."""
    try:
        # Neither end becomes the controlling terminal of a process, and no child inherits them.
        read_end, worker_end = os.openpty()
    except OSError:
        return None
    try:
        # Without this a newline would become two bytes, also in the log files.
        tty.setraw(worker_end)
    except (OSError, termios.error):  # A termios.error is no OSError.
        os.close(read_end)
        os.close(worker_end)
        return None
    return read_end, worker_end


def fit(window: int, size: os.terminal_size) -> None:
    """Give the terminal this size, if it has another one."""
    with suppress(OSError, termios.error):  # The worker is gone.
        if termios.tcgetwinsize(window) != (size.lines, size.columns):
            termios.tcsetwinsize(window, (size.lines, size.columns))


def read(window: int, most: int) -> bytes:
    """As `os.read` of a pipe: all that is there, up to about `most` bytes; nothing at the end, when
    no worker has the terminal open any more."""
    parts: list[bytes] = []
    while most > 0:
        try:
            data = os.read(window, most)
        except BlockingIOError:
            if not parts:
                raise
            break
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            break
        if not data:
            break
        parts.append(data)
        most -= len(data)
    return b"".join(parts)
