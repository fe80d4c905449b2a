# SPDX-License-Identifier: Apache-2.0
"""How fast steps follow each other, from what beats say of them."""

from typing import NamedTuple

HALF_WINDOW_S = 15.0
"""The pace is that of the last 15 to 30 seconds, and of two steps at least."""

SILENT_S = 30.0
"""A job that makes no step for this long, and for five of its usual steps, has no pace now."""


class _Point(NamedTuple):
    at: float
    steps: int


class Pace:
    """Steps per second of one round. Three points, however many beats there were."""

    def __init__(self) -> None:
        self._old: _Point | None = None
        self._middle = self._newest = _Point(0.0, 0)

    def heard(self, steps: int, at: float) -> None:
        """This many steps were finished, the last of them at this time."""
        point = _Point(at, steps)
        if self._old is None:
            self._old = self._middle = self._newest = point
        elif steps > self._newest.steps and at > self._newest.at:
            if self._newest.at - self._middle.at >= HALF_WINDOW_S:
                self._old, self._middle = self._middle, self._newest
            self._newest = point

    def per_s(self, now: float) -> float | None:
        """None before the second step, and while no steps are made."""
        if self._old is None or self._newest == self._old:
            return None
        steps, seconds = self._newest.steps - self._old.steps, self._newest.at - self._old.at
        if now - self._newest.at > max(SILENT_S, 5 * seconds / steps):
            return None
        return steps / seconds
