# SPDX-License-Identifier: Apache-2.0
"""How long a job waits for a world: the last call for those who are missing, and when it gives up.

The job gives up when it has had no world for `join_timeout_s`. That clock stands still while the
job is suspended, and while its platform has no place for a node: how long that may be is asked
elsewhere (pending.py).
"""


class JoinClock:
    """Two deadlines of a job that has no world, or could have a larger one."""

    def __init__(self) -> None:
        self.last_call_at: float | None = None
        self._give_up_at: float | None = None
        #: Whether there is no world, and since when one is waited for.
        self._is_waiting = False
        self._runs = True

    def wait(self, now: float, timeout_s: float) -> None:
        """There is no world: from now on one is waited for."""
        self._is_waiting = True
        self.last_call_at = None
        self._give_up_at = now + timeout_s if self._runs else None

    def formed(self) -> None:
        """There is a world."""
        self._is_waiting = False
        self.last_call_at = self._give_up_at = None

    def set(self, now: float, timeout_s: float, *, runs: bool) -> None:
        """Stand still, or count from the beginning again."""
        self._runs = runs
        self._give_up_at = now + timeout_s if runs and self._is_waiting else None

    def call(self, now: float, patience_s: float) -> bool:
        """Whether the last call is over; it begins with the first time that this is asked."""
        if self.last_call_at is None:
            self.last_call_at = now + patience_s
        return now >= self.last_call_at

    def is_up(self, now: float) -> bool:
        """Whether the job gives up; it does so once."""
        if self._give_up_at is None or self._give_up_at > now:
            return False
        self._give_up_at = None
        return True

    def deadline(self) -> float | None:
        times = (self.last_call_at, self._give_up_at)
        return min((at for at in times if at is not None), default=None)
