# SPDX-License-Identifier: Apache-2.0
"""Processes without end, which a worker leaves behind when it is killed."""

import os
import signal


def multiply() -> int:
    """Start as many as this process may: how many. Each has its own session and ignores SIGTERM."""
    made = 0
    while True:
        try:
            child = os.fork()
        except BlockingIOError:
            return made
        if child == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        made += 1
