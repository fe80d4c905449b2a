# SPDX-License-Identifier: Apache-2.0
"""How the time of a simulated job was spent, and how much of its work counts in the end.

Work is measured in seconds of the full job: an hour with nine tenths of the nodes is 0.9 hours of
work. Work that is repeated after a failure was lost from the start, so its time is marked as lost
where it was spent, not where it is repeated.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from holdfast.model.use import Use
from holdfast.sim.policies import Policy

SLOW, FEWER = "slow", "fewer nodes"
"""Beside the uses of time: time in which the work went on, but not at full speed."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the work goes on, and what slows it down."""

    nodes: float
    """Nodes of the world, as a share of the requested number."""
    slow: float
    """How much longer a step takes."""
    saving: float
    """The share of time in which saves hold up the training."""

    @property
    def rate(self) -> float:
        return self.nodes / self.slow * (1 - self.saving)


@dataclass(slots=True)
class SpanState:
    """A stretch of time with one use."""

    start_s: float
    end_s: float
    use: Use
    pace: Pace | None = None
    cause: str = ""

    @property
    def work_s(self) -> float:
        if self.use is not Use.PRODUCTIVE or self.pace is None:
            return 0.0
        return (self.end_s - self.start_s) * self.pace.rate


class Timeline:
    """All spans of a job, one after the other."""

    def __init__(self) -> None:
        self.spans: list[SpanState] = []
        self._open = SpanState(0.0, 0.0, Use.IDLE)

    @property
    def use(self) -> Use:
        return self._open.use

    def enter(self, use: Use, now: float, *, pace: Pace | None = None, cause: str = "") -> None:
        """The present span ends, and the next begins."""
        self._open.end_s = now
        if now > self._open.start_s:
            self.spans.append(self._open)
        self._open = SpanState(now, now, use, pace, cause)

    def lose(self, work_s: float, cause: str) -> None:
        """Mark the last `work_s` seconds of work as lost. No productive span may be open."""
        position = len(self.spans) - 1
        while work_s > 1e-9 and position >= 0:
            span = self.spans[position]
            done_s = span.work_s
            if done_s > work_s and span.pace is not None:
                split_s = span.end_s - work_s / span.pace.rate
                lost = SpanState(split_s, span.end_s, Use.LOST, span.pace, cause)
                span.end_s = split_s
                self.spans.insert(position + 1, lost)
            elif done_s > 0:
                span.use, span.cause = Use.LOST, cause
            work_s -= done_s
            position -= 1

    def seconds(self) -> dict[str, float]:
        """How the time was spent. Productive time counts only as far as it was at full speed."""
        spent = dict.fromkeys([*map(str, Use), SLOW, FEWER], 0.0)
        for span in self.spans:
            took_s = span.end_s - span.start_s
            if span.use is Use.PRODUCTIVE and span.pace is not None:
                pace = span.pace
                spent[FEWER] += took_s * (1 - pace.nodes)
                spent[SLOW] += took_s * pace.nodes * (1 - 1 / pace.slow)
                spent[Use.CHECKPOINT] += took_s * pace.nodes / pace.slow * pace.saving
                took_s = span.work_s
            spent[span.use] += took_s
        return spent

    def causes(self) -> dict[str, float]:
        """Time without work, by the cause of the failure behind it."""
        spent: dict[str, float] = {}
        for span in self.spans:
            if span.cause:
                spent[span.cause] = spent.get(span.cause, 0.0) + span.end_s - span.start_s
        return dict(sorted(spent.items()))

    def sliding(self, window_s: float, every_s: float) -> list[tuple[float, float]]:
        """Pairs of (end of the window, share of it that was work), one every `every_s`."""
        if not self.spans:
            return []
        times = [span.start_s for span in self.spans]
        done = list(accumulate((span.work_s for span in self.spans), initial=0.0))

        def work_until(at_s: float) -> float:
            i = bisect_right(times, at_s) - 1
            span = self.spans[i]
            share = min(at_s - span.start_s, span.end_s - span.start_s)
            return done[i] + span.work_s * share / (span.end_s - span.start_s)

        end_s, points = self.spans[-1].end_s, []
        window_s = min(window_s, end_s)
        at_s = window_s
        while at_s <= end_s:
            points.append((at_s, (work_until(at_s) - work_until(at_s - window_s)) / window_s))
            at_s += every_s
        return points


class _TierState:
    """Saves to one place, at equal distances while the training goes on."""

    def __init__(self, every_s: float, holds_up_s: float, takes_s: float) -> None:
        self._period_s = every_s + holds_up_s
        self._takes_s = takes_s
        self._since_s = 0.0
        self.share = holds_up_s / self._period_s
        self.count = 0
        #: How much work is in the newest save, and in the newest complete one.
        self.begun_s = 0.0
        self.done_s = 0.0

    def advance(self, took_s: float, work_s: float, rate: float) -> None:
        """Training went on for `took_s` at this rate, and is now at `work_s`."""
        before_s = self.begun_s
        count, self._since_s = divmod(self._since_s + took_s, self._period_s)
        if count:
            self.count += int(count)
            self.begun_s = work_s - self._since_s * rate
        if self._since_s >= self._takes_s:
            self.done_s = self.begun_s
        elif count == 1:
            self.done_s = before_s
        elif count > 1:
            self.done_s = self.begun_s - self._period_s * rate

    def restart(self, work_s: float) -> None:
        """This work was restored, and the next save is a whole period away."""
        self.begun_s = self.done_s = work_s
        self._since_s = 0.0

    def go_back(self, work_s: float) -> None:
        """Do not count saves of work that was rolled back."""
        self.begun_s = min(self.begun_s, work_s)
        self.done_s = min(self.done_s, work_s)


class SavesState:
    """How much work is safe in which place, and the time that the saves take."""

    def __init__(self, policy: Policy, checkpoint_every_s: float, persist_every_s: float) -> None:
        self._memory = _TierState(checkpoint_every_s, policy.save_s, policy.copy_s)
        self._storage = _TierState(persist_every_s, policy.persist_block_s, policy.persist_s)
        self._has_memory = policy.memory
        self.work_s = 0.0

    @property
    def share(self) -> float:
        """The share of time in which saves hold up the training."""
        return min((self._memory.share if self._has_memory else 0.0) + self._storage.share, 1.0)

    @property
    def in_memory_s(self) -> float:
        """Work that is in the memory of every node."""
        return self._memory.begun_s

    @property
    def with_peers_s(self) -> float:
        """Work that every node has copied to another node."""
        return self._memory.done_s

    @property
    def stored_s(self) -> float:
        """Work that is on storage."""
        return self._storage.done_s

    @property
    def saves(self) -> int:
        return self._memory.count if self._has_memory else 0

    @property
    def persists(self) -> int:
        return self._storage.count

    def advance(self, took_s: float, rate: float) -> None:
        """Training went on for `took_s` at this rate."""
        self.work_s += took_s * rate
        self._memory.advance(took_s, self.work_s, rate)
        self._storage.advance(took_s, self.work_s, rate)

    def go_back(self, work_s: float) -> None:
        """The training resumes with this much work done; every memory holds that now."""
        self.work_s = work_s
        self._memory.restart(work_s)
        self._storage.go_back(work_s)
