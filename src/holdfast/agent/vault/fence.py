# SPDX-License-Identifier: Apache-2.0
"""Whether this node may still change what all nodes share on storage."""

import math
import time
from collections.abc import Callable

from holdfast.model.errors import FencedError


class Fence:
    """Closes when the lease is over, and when the master declares this node lost.

    Threads ask it right before a change: when the whole process has stood still, a thread may run
    before the event loop has noticed anything.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        #: Without a master there is no lease.
        self._leased_until = math.inf
        self._times_given_up = 0

    def leased(self, until: float) -> None:
        """The master vouches for this node until then, by the clock of the event loop."""
        is_first = self._leased_until == math.inf
        self._leased_until = until if is_first else max(until, self._leased_until)

    def given_up(self) -> None:
        """The master declared this node lost: nothing that it ordered before may change storage."""
        self._times_given_up += 1

    def begin(self) -> Callable[[], None]:
        """Begin a piece of work; returns the check to be made before each of its steps."""
        times = self._times_given_up

        def check() -> None:
            if self._times_given_up != times:
                raise FencedError("the master has given this node up")
            if self._monotonic() >= self._leased_until:
                raise FencedError("the master has not answered for the whole lease")

        return check
