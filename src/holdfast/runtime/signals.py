# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a program to end."""

import asyncio
import signal
from collections.abc import Callable, Iterable


def on_end_signals(
    handle: Callable[[signal.Signals], None], more: Iterable[signal.Signals] = ()
) -> None:
    """Call this in the running event loop for each signal that means the end, and for `more`.

    Not for SIGHUP where whoever started the program has it ignored, as nohup does.
    """
    loop = asyncio.get_running_loop()
    for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)
