# SPDX-License-Identifier: Apache-2.0
"""The pipe between a launcher and what must not outlive it.

Only the launcher holds the end for writing: when it dies, however that happens, all others read
end-of-file. A byte in the pipe, which stays there, says that a person wants the end at once.
"""

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Callable


def watch(lifeline: int, gone: Callable[[bool], None]) -> None:
    """Call `gone` once in the running event loop; True: it must be at once. -1 is no lifeline."""
    if lifeline < 0:
        return
    loop = asyncio.get_running_loop()

    def readable() -> None:
        (waiting,) = struct.unpack("i", fcntl.ioctl(lifeline, termios.FIONREAD, bytes(4)))
        loop.remove_reader(lifeline)
        gone(waiting > 0)

    loop.add_reader(lifeline, readable)


def hurry(launchers_end: int) -> None:
    """Tell all that watch the lifeline to end at once."""
    os.write(launchers_end, b"!")
