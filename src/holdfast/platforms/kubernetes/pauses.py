# SPDX-License-Identifier: Apache-2.0
"""How long to wait before a failed request is tried again."""

import random

from holdfast.platforms.kubernetes.answers import Unavailable

FIRST_S = 0.2
LONGEST_S = 10.0
RETRY_AFTER_MAX_S = 60.0
"""A server may ask for a longer wait; it is asked again after this long all the same."""


class Pauses:
    """The pauses of one repeated request: each twice as long as the last, up to a limit.

    Each is shortened at random, so that the clients of a server do not all come back at one moment.
    """

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._next_s = first_s
        self.failures = 0
        """Failures since the last success."""

    def after(self, error: Exception | None = None) -> float:
        """One more try failed; the seconds until the next, at least what the server asked for."""
        asked_s = error.retry_after_s if isinstance(error, Unavailable) else 0.0
        pause_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._longest_s)
        self.failures += 1
        return max(pause_s, min(asked_s, RETRY_AFTER_MAX_S))

    def renew(self) -> None:
        """A try succeeded: the next pause is a short one again."""
        self._next_s, self.failures = self._first_s, 0
