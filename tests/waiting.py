# SPDX-License-Identifier: Apache-2.0
"""Waiting for the outside world, for tests that have no event, pipe or exit to block on."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

_PAUSE_S = 0.01
_PAUSE = threading.Event()


def until(predicate: Callable[[], Found], timeout_s: float, what: str = "") -> Found:
    """Return the first true value of `predicate`; fail the test when none comes in `timeout_s`.

    An exception from `predicate` goes through: a condition that cannot be evaluated is a failure.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        # Read the clock first, so that a slow predicate is still asked after the deadline.
        expired = time.monotonic() >= deadline
        if found := predicate():
            return found
        if expired:
            name = what or getattr(predicate, "__name__", repr(predicate))
            raise AssertionError(f"waited {timeout_s:g} s in vain for: {name}")
        _PAUSE.wait(_PAUSE_S)
