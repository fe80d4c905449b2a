# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: steps, incidents, and every second of the job attributed to one use.

The job is always in one stage. A stage ends when the next one begins, at a time that is known
exactly even if it is heard of later: beats and reports say how long ago a step finished.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, commit
from holdfast.model.ids import Round
from holdfast.model.use import Use

INCIDENTS_KEPT = 200


@dataclass(slots=True)
class _Heard:
    """What the beats of the present round said; they say it again to a restarted master."""

    steps: int = 0
    step: int = -1
    first_step_at: float = -1.0
    last_step_at: float = -1.0
    saved: int = -1


class Progress:
    """The job's stopwatch and its diary."""

    def __init__(self) -> None:
        # Durable.
        self._spent: dict[Use, float] = dict.fromkeys(Use, 0.0)
        self._until: float | None = None
        self._use = Use.IDLE
        self._round = Round(0)
        #: Where the script stood and the steps done in all when the present round began.
        self._step = -1
        self._steps_before = 0
        self._step_price_s = 0.0
        self._incidents: dict[int, rec.IncidentNoted] = {}
        # Volatile.
        self._heard = _Heard()
        self._is_suspended = False
        self._ended = False

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Outcome:
        if self._ended:
            return NOTHING
        match event:
            case ev.BeatReceived():
                return self._beat(event, now)
            case ev.WorldBroken():
                return self._broken(event, now)
            case ev.WorldFormed():
                return self._formed(event, now)
            case ev.StartReported():
                return self._exact_detect(event.report.last_step_ago_s, now)
            case ev.WorldStarted() if self._use is Use.RESTART:
                return self._enter(Use.RESTORE, now)
            case ev.JobOpened() if self._until is None:
                outcome = Outcome()
                commit(self, outcome, rec.TimeSpent(Use.IDLE, 0.0, now))
                return outcome
            case ev.JobSuspended() if not self._is_suspended:
                self._is_suspended = True
                if self._use is Use.RENDEZVOUS:
                    return self._enter(Use.IDLE, now)
            case ev.JobResumed():
                self._is_suspended = False
                if self._round > 0:
                    return self._enter(Use.RENDEZVOUS, now)
            case ev.JobFinished():
                outcome = self._enter(Use.IDLE, now)
                self._ended = True
                return outcome
        return NOTHING

    def deadline(self) -> float | None:
        return None

    def _beat(self, event: ev.BeatReceived, now: float) -> Outcome:
        beat = event.beat
        if beat.round != self._round or beat.steps <= 0:
            return NOTHING
        heard = self._heard
        heard.steps = max(heard.steps, beat.steps)
        heard.saved = max(heard.saved, beat.saved_step)
        heard.last_step_at = max(heard.last_step_at, now - beat.last_step_ago_s)
        if heard.first_step_at < 0 and beat.first_step_ago_s >= 0:
            heard.first_step_at = max(0.0, now - beat.first_step_ago_s)
        outcome = Outcome()
        if self._use in (Use.RESTORE, Use.RESTART) and heard.first_step_at >= 0:
            at = max(heard.first_step_at, self._until or 0.0)
            outcome.add(self._enter(Use.PRODUCTIVE, at))
            outcome.facts.append(ev.FirstStepMade(self._round, at))
        if beat.step >= 0:
            if heard.step < 0:
                self._count_loss(outcome, first_step=beat.step - beat.steps + 1)
            heard.step = max(heard.step, beat.step)
        return outcome

    def _count_loss(self, outcome: Outcome, first_step: int) -> None:
        """Steps that the new world does again were not productive the first time."""
        if first_step == self._step + 1:
            return
        again = self._step + 1 - first_step
        if self._step >= 0 and again > 0:
            lost_s = min(again * self._step_price_s, self._spent[Use.PRODUCTIVE])
            assert self._until is not None
            commit(self, outcome, rec.TimeSpent(Use.PRODUCTIVE, -lost_s, self._until))
            commit(self, outcome, rec.TimeSpent(Use.LOST, lost_s, self._until))
        # Also says that this loss is counted, whichever master hears the next beat.
        at = rec.StepsSeen(first_step - 1, self._steps_before, self._step_price_s)
        commit(self, outcome, at)

    def _broken(self, event: ev.WorldBroken, now: float) -> Outcome:
        outcome = Outcome()
        detect_s = self._stop_productive(outcome, now, event.last_step_ago_s)
        if self._is_suspended:
            # People asked for it: that is no incident.
            commit(self, outcome, rec.StageEntered(Use.IDLE, self._round))
            return outcome
        note = rec.IncidentNoted(
            self._next_incident(),
            event.round,
            now,
            event.reason,
            event.node_rank,
            detect_s,
            estimated=event.last_step_ago_s < 0,
        )
        commit(self, outcome, note)
        commit(self, outcome, rec.StageEntered(Use.RENDEZVOUS, self._round))
        return outcome

    def _next_incident(self) -> int:
        return max(self._incidents, default=0) + 1

    def _exact_detect(self, last_step_ago_s: float, now: float) -> Outcome:
        """A lost node cannot say when it stepped last, but those who stepped with it can."""
        note = self._incidents.get(max(self._incidents, default=0))
        if note is None or not note.estimated or last_step_ago_s < 0:
            return NOTHING
        detect_s = min(max(note.at_s - (now - last_step_ago_s), 0.0), note.detect_s)
        outcome = Outcome()
        assert self._until is not None
        excess_s = note.detect_s - detect_s
        commit(self, outcome, rec.TimeSpent(Use.DETECT, -excess_s, self._until))
        commit(self, outcome, rec.TimeSpent(Use.PRODUCTIVE, excess_s, self._until))
        commit(self, outcome, replace(note, detect_s=detect_s, estimated=False))
        return outcome

    def _stop_productive(self, outcome: Outcome, now: float, last_step_ago_s: float) -> float:
        """Split the time until now into productive and detect; the latter is returned."""
        if self._use is not Use.PRODUCTIVE:
            self._settle(outcome, now, self._counted_as())
            return 0.0
        assert self._until is not None
        last_step_at = now - last_step_ago_s if last_step_ago_s >= 0 else self._heard.last_step_at
        last_step_at = min(max(last_step_at, self._until), now)
        self._settle(outcome, last_step_at, Use.PRODUCTIVE)
        self._settle(outcome, now, Use.DETECT)
        return now - last_step_at

    def _formed(self, event: ev.WorldFormed, now: float) -> Outcome:
        outcome = Outcome()
        if event.planned:
            # Its workers were well until now: nothing had to be detected.
            self._settle(outcome, now, self._counted_as())
            number = self._next_incident()
            note = rec.IncidentNoted(number, self._round, now, event.reason, -1, 0.0)
            commit(self, outcome, note)
            commit(self, outcome, rec.StageEntered(Use.RENDEZVOUS, self._round))
        heard, price_s = self._heard, self._step_price_s
        if heard.steps > 1 and heard.first_step_at >= 0:
            price_s = (heard.last_step_at - heard.first_step_at) / (heard.steps - 1)
        reached, total = self._reached(), self._steps_before + heard.steps
        commit(self, outcome, rec.StepsSeen(reached, total, price_s))
        self._round, self._heard = event.world.round, _Heard()
        outcome.add(self._enter(Use.RESTART, now))
        return outcome

    def _reached(self) -> int:
        return self._heard.step if self._heard.step >= 0 else self._step

    def _enter(self, use: Use, at: float) -> Outcome:
        """The next stage begins; the incident that is open learns how long the last one took."""
        outcome = Outcome()
        took_s = self._settle(outcome, at, self._counted_as())
        note = self._incidents.get(max(self._incidents, default=0))
        if note is not None and note.restore_s < 0:
            changed = _with_stage(note, self._use, took_s)
            if use is Use.PRODUCTIVE and changed.restore_s < 0:
                # The first step was heard of before the last worker's start.
                changed = replace(changed, restore_s=0.0)
            if changed is not note:
                commit(self, outcome, changed)
            if use is Use.PRODUCTIVE:
                outcome.facts.append(_closed(changed))
        commit(self, outcome, rec.StageEntered(use, self._round))
        return outcome

    def _counted_as(self) -> Use:
        if self._use is Use.RESTORE and self._heard.steps == 0 and self._steps_before == 0:
            # A script that never reports a step: all we know is that its workers ran.
            return Use.PRODUCTIVE
        return self._use

    def _settle(self, outcome: Outcome, at: float, use: Use) -> float:
        """Attribute the time since the last settlement."""
        if self._until is None:
            commit(self, outcome, rec.TimeSpent(use, 0.0, at))
        assert self._until is not None
        seconds = max(0.0, at - self._until)
        if seconds > 0:
            commit(self, outcome, rec.TimeSpent(use, seconds, self._until + seconds))
        return seconds

    # ---- durable state --------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        match record:
            case rec.TimeSpent():
                self._spent[Use(record.use)] += record.seconds
                self._until = max(self._until or 0.0, record.until_s)
            case rec.StepsSeen():
                self._step, self._steps_before = record.step, record.steps_total
                self._step_price_s = record.step_price_s
            case rec.StageEntered():
                self._use, self._round = Use(record.use), Round(record.round)
            case rec.IncidentNoted():
                self._incidents[record.number] = record
                while len(self._incidents) > INCIDENTS_KEPT:
                    del self._incidents[next(iter(self._incidents))]
            case _:
                raise TypeError(f"{record!r} is not a record of progress")

    def snapshot(self) -> Iterable[Record]:
        for use, seconds in self._spent.items():
            if self._until is not None and (seconds or use is Use.IDLE):
                yield rec.TimeSpent(use, seconds, self._until)
        yield rec.StepsSeen(self._step, self._steps_before, self._step_price_s)
        yield rec.StageEntered(self._use, self._round)
        yield from self._incidents.values()

    def view(self, now: float) -> dict[str, object]:
        """Steps, goodput and the story of every incident."""
        spent = dict(self._spent)
        if self._until is not None and not self._ended:
            spent[self._counted_as()] += max(0.0, now - self._until)
        total = sum(spent.values())
        return {
            # What was saved is shown only: it may count something else than optimizer steps.
            "step": self._reached() if self._reached() >= 0 else self._heard.saved,
            "steps_total": self._steps_before + self._heard.steps,
            "stage": str(self._use),
            "seconds": {str(use): round(seconds, 3) for use, seconds in spent.items()},
            "goodput": round(spent[Use.PRODUCTIVE] / total, 4) if total > 0 else 0.0,
            "incidents": [_view(note) for note in self._incidents.values()],
        }


def _with_stage(note: rec.IncidentNoted, use: Use, took_s: float) -> rec.IncidentNoted:
    stages = {
        Use.RENDEZVOUS: note.rendezvous_s,
        Use.RESTART: note.restart_s,
        Use.RESTORE: note.restore_s,
    }
    if use not in stages or stages[use] >= 0:
        return note
    stages[use] = took_s
    return replace(
        note,
        rendezvous_s=stages[Use.RENDEZVOUS],
        restart_s=stages[Use.RESTART],
        restore_s=stages[Use.RESTORE],
    )


def _closed(note: rec.IncidentNoted) -> ev.IncidentClosed:
    return ev.IncidentClosed(
        Round(note.round),
        note.reason,
        detect_s=max(note.detect_s, 0.0),
        rendezvous_s=max(note.rendezvous_s, 0.0),
        restart_s=max(note.restart_s, 0.0),
        restore_s=max(note.restore_s, 0.0),
    )


def _view(note: rec.IncidentNoted) -> dict[str, object]:
    stages = {
        "detect": note.detect_s,
        "rendezvous": note.rendezvous_s,
        "restart": note.restart_s,
        "restore": note.restore_s,
    }
    known = {name: round(seconds, 3) for name, seconds in stages.items() if seconds >= 0}
    return {
        "number": note.number,
        "round": note.round,
        "at_s": round(note.at_s, 3),
        "reason": note.reason,
        "node_rank": note.node_rank,
        "stages": known,
        "recovery_s": round(sum(known.values()), 3),
        "closed": note.restore_s >= 0,
    }
