# SPDX-License-Identifier: Apache-2.0
"""What follows from a failure: another round, or the end of the job.

Each class of failure has a budget of its own: a node that is preempted a hundred times a week must
not use up the patience meant for a bug, and a bug must not be retried a hundred times.

What the job trains brings budgets back, the whole of each in `BUDGET_BACK_S`: thousands of nodes
lose one every half hour, for months. A job that comes to no step gets nothing back, and what
`--max-restarts` counts never comes back.

The first retry is immediate. Workers that fail at once again and again, before any step, are
started again after pauses that grow: what they stumble over has time to go away. A lost node and a
worker that was killed say nothing about the script: nothing waits because of them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import FinishJob, Reply
from holdfast.core.kernel import NOTHING, Outcome, Record, commit
from holdfast.model.ids import Round
from holdfast.model.job import BUDGET_BACK_S, JobSpec
from holdfast.model.node import OF_THE_PROGRAM, ExitReason, asks_person
from holdfast.protocol import messages as m

PAUSE_S_MAX = 30.0
"""The longest pause before a round. Workers that ran for longer than this did not fail at once."""


@dataclass(slots=True)
class _Budget:
    """The budget of one class of failure."""

    count: int = 0
    back: float = 0.0
    """Units that training brought back, of those counted."""
    trained_s: float = 0.0
    """How long the job had trained when the last unit was counted."""


Handled = (
    ev.WorldHurt
    | ev.FirstStepMade
    | ev.WorldFormed
    | ev.WorldFound
    | ev.WorldStarted
    | ev.WorkSettled
    | ev.WorldImpossible
    | ev.JournalBehind
    | ev.StopRequested
    | ev.JobOpened
    | ev.RulesChanged
    | ev.JobSuspended
    | ev.MasterStarted
)


class Verdicts:
    """Budgets of worker failures, and how the job ended."""

    OWNS = (rec.RestartCounted, rec.TrainingBegan, rec.JobClosed, rec.JobContinued)

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._rules: m.JobRules | None = None
        # Durable.
        self._budgets: dict[ExitReason, _Budget] = {}
        self._closed: rec.JobClosed | None = None
        #: How long worlds that broke had trained, and since when the present one does (-1: not).
        self._trained_s = 0.0
        self._trains_since = -1.0
        self._has_stepped = False
        #: How often in a row workers have failed at once.
        self._failed_starts = 0
        # Volatile.
        #: How many workers the present world has.
        self._workers = 0
        #: When the present round began, or this master, if that was later.
        self._began_at = 0.0
        #: When the workers of the present world ran: counts for scripts that report no steps.
        self._runs_since = -1.0
        #: When the last node was lost whose loss was counted.
        self._lost_at = -math.inf
        #: The newest round that was judged. Of nodes lost in one step the first breaks the round,
        #: and the others only follow.
        self._judged = Round(0)

    def handle(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.WorldHurt():
                return self._judge(event, now)
            case ev.FirstStepMade():
                if not self._has_stepped or self._trains_since < 0:
                    outcome = Outcome()
                    commit(self, outcome, rec.TrainingBegan(event.at_s))
                    return outcome
            case ev.WorldFormed():
                self._began_at, self._workers = now, event.world.size
            case ev.WorldFound():
                self._workers = event.world.size
            case ev.WorldStarted():
                if self._runs_since < 0:
                    self._runs_since = now
            case ev.WorkSettled():
                return self._end(ok=True, reason="every worker finished")
            case ev.WorldImpossible() | ev.JournalBehind():
                return self._end(ok=False, reason=event.reason)
            case ev.StopRequested():
                outcome = self._end(ok=False, reason=event.reason, stopped=event.stopped)
                outcome.commands.append(Reply(event.link, event.call, m.Done()))
                return outcome
            case ev.JobOpened() | ev.RulesChanged():
                self._rules = event.rules
            case ev.JobSuspended():
                return self._pause()
            case ev.MasterStarted():
                self._began_at = now
                return self._end_again()
            case _:
                assert_never(event)
        return NOTHING

    def _end_again(self) -> Outcome:
        """A job that was stopped goes on with this master; one that has ended has ended."""
        if self._closed is None:
            return NOTHING
        if not self._closed.stopped:
            return Outcome(facts=[_fact(self._closed)], commands=[_command(self._closed)])
        outcome = Outcome(facts=[ev.JobResumed(self._closed.reason)])
        commit(self, outcome, rec.JobContinued())
        return outcome

    def deadline(self) -> None:
        """Nothing here waits."""

    def _pause(self) -> Outcome:
        """A job that waits trains nothing, and gets nothing back for it."""
        self._runs_since = -1.0
        outcome = Outcome()
        if self._trains_since >= 0:
            commit(self, outcome, rec.TrainingBegan())
        return outcome

    def _why_not_again(self, event: ev.WorldHurt) -> str | None:
        """What to add to the reason if another try must end the same way; None if it need not."""
        if self._spec.retry_mistakes:
            return None
        if event.cause is not None and asks_person(event.cause.message):
            return ""
        if not event.is_everywhere or self._has_stepped:
            return None
        where = f"the same on {self._workers} ranks, " if self._workers > 1 else ""
        return f"; {where}before the first step: it is not tried again without --retry-mistakes"

    def _judge(self, event: ev.WorldHurt, now: float) -> Outcome:
        if self._closed is not None or event.round <= self._judged:
            return NOTHING
        self._judged = event.round
        if (not_again := self._why_not_again(event)) is not None:
            return self._end(
                ok=False,
                reason=f"{event.message}{not_again}",
                cause=event.cause,
                node_rank=event.node_rank,
            )
        limit, budget = self._limit(event.reason), self._budgets.get(event.reason, _Budget())
        trained_s = self._trained_until(now - max(0.0, event.last_step_ago_s))
        used, back = budget.count - budget.back, 0.0
        if event.reason not in OF_THE_PROGRAM:
            back = min(used, (trained_s - budget.trained_s) * limit / BUDGET_BACK_S)
        follows = self._follows_a_loss(event, now)
        if used - back > limit - 1 and not follows:
            allowed = _allowed(event.reason, limit, budget.count + 1)
            return self._end(
                ok=False,
                reason=f"{event.message}; {allowed}" if limit else event.message,
                cause=event.cause,
                node_rank=event.node_rank,
            )
        outcome = Outcome()
        starts = self._count_starts(event, now)
        pause_s = _pause_after(starts) if starts > self._failed_starts else 0.0
        counted = rec.RestartCounted(
            event.reason, 0 if follows else 1, back, trained_s, failed_starts=starts
        )
        commit(self, outcome, counted)
        self._runs_since = -1.0
        broken = (event.round, event.message, event.node_rank, event.last_step_ago_s)
        why = starts if pause_s else 0
        outcome.facts.append(ev.WorldBroken(*broken, pause_s=pause_s, failed_starts=why))
        return outcome

    def _follows_a_loss(self, event: ev.WorldHurt, now: float) -> bool:
        """Whether a node was lost to the same cause as another before it. If a switch fails, the
        nodes behind it fall silent within `silence_s`; a large job must not end because of that."""
        is_node = event.cause is None and event.reason is ExitReason.LOST
        if is_node and now - self._lost_at < self._spec.silence_s:
            return True
        if is_node:
            self._lost_at = now
        return False

    def _count_starts(self, event: ev.WorldHurt, now: float) -> int:
        """How often in a row workers have failed at once, after this failure."""
        has_stepped = self._trains_since >= 0 or event.last_step_ago_s >= 0
        if has_stepped or now - self._began_at > PAUSE_S_MAX:
            return 0
        is_its_own = event.cause is not None and event.reason is not ExitReason.KILLED
        return self._failed_starts + is_its_own

    def _trained_until(self, at: float) -> float:
        """How long the job has trained in all, if the present world did so until then."""
        since = self._trains_since if self._has_stepped else self._runs_since
        return self._trained_s + (max(0.0, at - since) if since >= 0 else 0.0)

    def _limit(self, reason: ExitReason) -> int:
        assert self._rules is not None
        asked = self._rules.max_restarts
        if reason in OF_THE_PROGRAM:
            return asked
        if asked == 0 and reason is not ExitReason.LOST:
            return 0  # As with torchrun, zero means that no worker is ever restarted.
        return max(asked, self._spec.worker_restarts[reason])

    def _end(
        self,
        *,
        ok: bool,
        reason: str,
        cause: m.FailureInfo | None = None,
        node_rank: int = -1,
        stopped: int = 0,
    ) -> Outcome:
        if self._closed is not None:
            return Outcome()
        outcome = self._pause() if stopped else Outcome()
        closed = rec.JobClosed(ok, reason, cause, node_rank, stopped)
        commit(self, outcome, closed)
        outcome.facts.append(_fact(closed))
        outcome.commands.append(_command(closed))
        return outcome

    def validate(self) -> None:
        for reason, budget in self._budgets.items():
            assert 0 <= budget.back <= budget.count, (reason, budget)
        assert self._failed_starts >= 0, self._failed_starts

    def apply(self, record: Record) -> None:
        match record:
            case rec.RestartCounted():
                budget = self._budgets.setdefault(ExitReason(record.reason), _Budget())
                budget.count += record.count
                budget.back += record.back
                budget.trained_s = record.trained_s
                self._trained_s = max(self._trained_s, record.trained_s)
                self._trains_since = -1.0
                self._failed_starts = record.failed_starts
            case rec.TrainingBegan():
                self._trains_since, self._has_stepped = record.at_s, True
                if record.at_s >= 0:
                    self._failed_starts = 0
            case rec.JobClosed():
                self._closed = record
            case rec.JobContinued():
                # People started the job again: they may have changed the script.
                self._closed, self._failed_starts = None, 0
            case _:
                raise TypeError(f"{record!r} is not a record of the verdicts")

    def snapshot(self) -> Iterable[Record]:
        for reason, budget in self._budgets.items():
            yield rec.RestartCounted(
                reason, budget.count, budget.back, budget.trained_s, self._failed_starts
            )
        if self._has_stepped:
            yield rec.TrainingBegan(self._trains_since)
        if self._closed is not None:
            yield self._closed

    def view(self) -> dict[str, object]:
        """How the job stands and what its budgets have left."""
        closed, state = self._closed, "running"
        if closed is not None:
            state = "succeeded" if closed.ok else ("stopped" if closed.stopped else "failed")
        return {
            "state": state,
            "reason": "" if closed is None else closed.reason,
            "restarts": {
                str(reason): self._budgets[reason].count for reason in sorted(self._budgets)
            },
        }


def _pause_after(failed_starts: int) -> float:
    """How long the next round waits: 0, 1, 2, 4 ... s."""
    if failed_starts < 2:
        return 0.0
    return min(2.0 ** min(failed_starts - 2, 10), PAUSE_S_MAX)


def _allowed(reason: ExitReason, limit: int, count: int) -> str:
    if reason in OF_THE_PROGRAM:
        return f"it failed {count} times; --max-restarts is {limit}"
    return (
        f"{limit} restarts in {BUDGET_BACK_S / 3600:g} h of training are the limit for {reason!s}"
    )


def _fact(closed: rec.JobClosed) -> ev.JobFinished:
    fields = (closed.ok, closed.reason, closed.cause, closed.cause_node_rank)
    return ev.JobFinished(*fields, stopped=closed.stopped)


def _command(closed: rec.JobClosed) -> FinishJob:
    fields = (closed.ok, closed.reason, closed.cause, closed.cause_node_rank)
    return FinishJob(m.JobEnded(*fields, stopped=closed.stopped))
