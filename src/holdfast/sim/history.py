# SPDX-License-Identifier: Apache-2.0
"""What happened, line by line: one hash over all lines, and the lines for people to read."""

import hashlib

from holdfast.sim.clock import Clock

LINES_MAX = 100_000


class History:
    """The events of one run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hash = hashlib.sha256()
        self.lines: list[str] = []

    @property
    def now(self) -> float:
        return self._clock.now

    def note(self, text: str) -> None:
        line = f"{self._clock.now:10.4f} {text}"
        self._hash.update(line.encode())
        if len(self.lines) < LINES_MAX:
            self.lines.append(line)

    def digest(self) -> str:
        """The digest; the same for every run of a scenario."""
        return self._hash.hexdigest()
