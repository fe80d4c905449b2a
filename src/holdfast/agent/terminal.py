# SPDX-License-Identifier: Apache-2.0
"""The terminal of the command, lent to one worker: pdb, `breakpoint()` and `input()` work there."""

import os
import signal
import termios

STREAMS = (0, 1, 2)


def is_ours() -> bool:
    """Whether all three streams are a terminal, and what is typed there is meant for us.

    A command in the background must not read: it would take the keys from the shell.
    """
    try:
        return all(os.isatty(fd) for fd in STREAMS) and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


class Terminal:
    """Remembers the terminal's modes: a worker that is killed at a prompt cannot restore them."""

    def __init__(self) -> None:
        self._modes = termios.tcgetattr(0)

    def restore(self) -> None:
        """Undo what the worker did to the terminal."""
        # In the background the kernel would stop us for this.
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        try:
            termios.tcsetattr(0, termios.TCSADRAIN, self._modes)
        except termios.error:
            pass  # It is gone.
        finally:
            signal.signal(signal.SIGTTOU, before)
