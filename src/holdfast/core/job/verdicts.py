# SPDX-License-Identifier: Apache-2.0
"""What follows from a failure: another round, or the end of the job.

Each class of failure has a budget of its own: a node that is preempted a hundred times a week must
not use up the patience meant for a bug, and a bug must not be retried a hundred times.
"""

from collections.abc import Iterable

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import FinishJob, Reply
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, commit
from holdfast.model.ids import Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.protocol import messages as m

_OF_THE_PROGRAM = frozenset({ExitReason.ERROR, ExitReason.OOM, ExitReason.UNKNOWN})
"""Failures that `--max-restarts` counts: the program itself is the likely cause."""


class Verdicts:
    """Budgets of worker failures, and how the job ended."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._rules: m.JobRules | None = None
        self._used: dict[ExitReason, int] = {}
        self._closed: rec.JobClosed | None = None
        #: Of nodes lost in one step the first breaks the round, and the others only follow.
        self._judged = Round(0)

    def handle(self, event: Event, now: float) -> Outcome:
        match event:
            case ev.WorldHurt():
                return self._judge(event)
            case ev.WorkSettled():
                return self._end(ok=True, reason="every worker finished")
            case ev.WorldImpossible():
                return self._end(ok=False, reason=event.reason)
            case ev.StopRequested():
                outcome = self._end(ok=False, reason=event.reason)
                outcome.commands.append(Reply(event.link, event.call, m.Done()))
                return outcome
            case ev.JobOpened():
                self._rules = event.rules
            case ev.MasterStarted() if self._closed is not None:
                return Outcome(facts=[_fact(self._closed)], commands=[_command(self._closed)])
        return NOTHING

    def deadline(self) -> float | None:
        return None

    def _judge(self, event: ev.WorldHurt) -> Outcome:
        if self._closed is not None or event.round <= self._judged:
            return NOTHING
        self._judged = event.round
        used, limit = self._used.get(event.reason, 0), self._limit(event.reason)
        if used >= limit:
            times = "time" if limit == 1 else "times"
            allowed = f"it may be restarted {limit} {times} for the reason {event.reason!s}"
            return self._end(
                ok=False,
                reason=f"{event.message}; {allowed}" if limit else event.message,
                cause=event.cause,
                node_rank=event.node_rank,
            )
        outcome = Outcome()
        commit(self, outcome, rec.RestartCounted(event.reason))
        outcome.facts.append(
            ev.WorldBroken(event.round, event.message, event.node_rank, event.last_step_ago_s)
        )
        return outcome

    def _limit(self, reason: ExitReason) -> int:
        assert self._rules is not None
        asked = self._rules.max_restarts
        if reason in _OF_THE_PROGRAM:
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
    ) -> Outcome:
        if self._closed is not None:
            return Outcome()
        outcome = Outcome()
        closed = rec.JobClosed(ok, reason, cause, node_rank)
        commit(self, outcome, closed)
        outcome.facts.append(_fact(closed))
        outcome.commands.append(_command(closed))
        return outcome

    def apply(self, record: Record) -> None:
        match record:
            case rec.RestartCounted():
                reason = ExitReason(record.reason)
                self._used[reason] = self._used.get(reason, 0) + record.count
            case rec.JobClosed():
                self._closed = record
            case _:
                raise TypeError(f"{record!r} is not a record of the verdicts")

    def snapshot(self) -> Iterable[Record]:
        for reason, count in self._used.items():
            yield rec.RestartCounted(reason, count)
        if self._closed is not None:
            yield self._closed

    def view(self) -> dict[str, object]:
        """How the job stands and what its budgets have left."""
        closed = self._closed
        return {
            "state": "running" if closed is None else ("succeeded" if closed.ok else "failed"),
            "reason": "" if closed is None else closed.reason,
            "restarts": {str(reason): count for reason, count in sorted(self._used.items())},
        }


def _fact(closed: rec.JobClosed) -> ev.JobFinished:
    return ev.JobFinished(closed.ok, closed.reason, closed.cause, closed.cause_node_rank)


def _command(closed: rec.JobClosed) -> FinishJob:
    end = m.JobEnded(closed.ok, closed.reason, closed.cause, closed.cause_node_rank)
    return FinishJob(end)
