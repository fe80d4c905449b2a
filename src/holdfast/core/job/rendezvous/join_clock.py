# SPDX-License-Identifier: Apache-2.0
"""How long a job waits for a world: the last call for missing nodes, and when the job gives up.

The job gives up when it has had no world for `join_timeout_s`. That clock stands still while the
job is suspended, and while its platform has no place for a node: pending.py decides how long that
may be.
"""


class JoinClock:
    """Deadlines of a job that has no world, or could have a larger one."""

    def __init__(self) -> None:
        self.last_call_at: float | None = None
        self._give_up_at: float | None = None
        #: Until when no world may form. Not durable: a restarted master does not go on waiting.
        self._held_until: float | None = None
        #: Whether there is no world, and since when one is waited for.
        self._is_waiting = False
        self._runs = True

    def wait(self, now: float, timeout_s: float, pause_s: float = 0.0) -> None:
        """There is no world: from now on one is waited for, and none forms during the pause."""
        self._is_waiting = True
        self.last_call_at = None
        self._held_until = now + pause_s if pause_s > 0 else None
        self._give_up_at = now + pause_s + timeout_s if self._runs else None

    def is_held(self, now: float) -> bool:
        """Whether there is a pause, in which no world forms."""
        if self._held_until is not None and self._held_until <= now:
            self._held_until = None
        return self._held_until is not None

    def pause_left(self, now: float) -> float:
        return 0.0 if self._held_until is None else max(0.0, self._held_until - now)

    def formed(self) -> None:
        """There is a world."""
        self._is_waiting = False
        self.last_call_at = self._give_up_at = self._held_until = None

    def set(self, now: float, timeout_s: float, *, runs: bool) -> None:
        """Stand still, or count from the beginning again."""
        self._runs = runs
        begins_at = now + self.pause_left(now)
        self._give_up_at = begins_at + timeout_s if runs and self._is_waiting else None

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
        times = (self.last_call_at, self._give_up_at, self._held_until)
        return min((at for at in times if at is not None), default=None)
