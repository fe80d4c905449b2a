# SPDX-License-Identifier: Apache-2.0
"""How long to wait before something that failed is tried again."""

import random

from holdfast.platforms.kubernetes.answers import Unavailable

FIRST_S = 0.2
LONGEST_S = 10.0
RETRY_AFTER_MAX_S = 60.0
"""A server may ask to be left alone for longer; it is asked after this long all the same."""


class Pauses:
    """Of one thing that is tried again and again: each twice as long as the last, up to a limit.

    Each is shortened at random, so that not all who wait for a server come back at one moment.
    """

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s
        self.failures = 0
        """Since it went well for the last time."""

    def after(self, error: Exception | None = None) -> float:
        """One more try failed; the seconds until the next, at least what the server asked for."""
        asked_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._longest_s)
        self.failures += 1
        return max(pause_s, min(asked_s, RETRY_AFTER_MAX_S))

    def renew(self) -> None:
        """It went well: the next pause is a short one again."""
        self._next_s, self.failures = self._first_s, 0
