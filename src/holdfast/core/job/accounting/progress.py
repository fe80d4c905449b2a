# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: steps, incidents, and every second of the job attributed to one use.

The job is always in one stage. A stage ends when the next one begins, at a time that is known
exactly even if it is heard of later: beats and reports say how long ago a step finished.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.pace import Pace
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick, commit
from holdfast.model.ids import NodeId, Round
from holdfast.model.use import Use
from holdfast.protocol.checkpoints import NodeRestore

INCIDENTS_KEPT = 200

STEPLESS_S = 600.0
"""After this long without a step, the workers' script is taken for one that reports no steps."""

UNHEARD_STEPS_S = 30.0
"""Steps between the last beat and a failure are believed if they took at most this long."""

_BEFORE_A_STEP = (Use.RESTART, Use.START, Use.RESTORE)


@dataclass(slots=True)
class _Heard:
    """What the beats of the present round said; later beats repeat it to a restarted master."""

    steps: int = 0
    step: int = -1
    first_step_at: float = -1.0
    last_step_at: float = -1.0
    saved: int = -1
    total: int = 0
    """Steps that the script wants to make in all, in its own counting; 0 if it does not say."""
    pace: Pace = field(default_factory=Pace)
    own_pace: Pace = field(default_factory=Pace)
    """By the step numbers that the script reports: they may count something else."""
    asked: set[NodeId] = field(default_factory=set)
    """Nodes whose workers all asked for a checkpoint."""
    imported_at: float = -1.0
    """When all nodes had asked."""
    loaded_at: float = -1.0
    """When all had a checkpoint at hand, or knew that there is none."""
    stepless_from: float = -1.0
    """Since when this round is taken to work without a step, as in a last evaluation. Only for a
    job that has stepped."""


Handled = (
    ev.BeatReceived
    | ev.WorldBroken
    | ev.WorldFormed
    | ev.StartReported
    | ev.WorldStarted
    | ev.FirstStepLate
    | ev.CheckpointRequested
    | ev.RestoreAgreed
    | ev.JobOpened
    | ev.JobSuspended
    | ev.JobResumed
    | ev.JobFinished
    | Tick
)


class Progress:
    """The job's stopwatch and its diary."""

    OWNS = (rec.TimeSpent, rec.StepsSeen, rec.StageEntered, rec.IncidentNoted)

    def __init__(self) -> None:
        # Durable.
        self._spent: dict[Use, float] = dict.fromkeys(Use, 0.0)
        self._until: float | None = None
        self._use = Use.IDLE
        self._round = Round(0)
        #: The step of the script, and the steps done in all, when the present round began.
        self._step = -1
        self._steps_before = 0
        self._step_price_s = 0.0
        self._incidents: dict[int, rec.IncidentNoted] = {}
        # Volatile.
        self._heard = _Heard()
        #: Nodes of the present world; 0: not known to this master.
        self._nodes = 0
        self._is_suspended = False
        self._ended = False

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
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
            case ev.WorldStarted():
                if self._use is Use.RESTART:
                    return self._started(now)
            case ev.FirstStepLate():
                return self._late(event, now)
            case ev.CheckpointRequested() | ev.RestoreAgreed():
                self._restoring(event, now)
            case ev.JobOpened():
                if self._until is None:
                    outcome = Outcome()
                    commit(self, outcome, rec.TimeSpent(Use.IDLE, 0.0, now))
                    return outcome
            case ev.JobSuspended():
                if not self._is_suspended:
                    self._is_suspended = True
                    if self._use is Use.RENDEZVOUS:
                        return self._enter(Use.IDLE, now)
            case ev.JobResumed():
                self._is_suspended = False
                if self._round > 0:
                    return self._enter(Use.RENDEZVOUS, now)
            case ev.JobFinished():
                return self._finished(event, now)
            case Tick():
                if (at := self.deadline()) is not None and at <= now:
                    return self._works_without_steps(now)
            case _:
                assert_never(event)
        return NOTHING

    def _finished(self, event: ev.JobFinished, now: float) -> Outcome:
        outcome = Outcome()
        if event.ok:
            if self._use is Use.START:
                # A script that reports no step came to its end: it did work.
                self._settle(outcome, now, Use.PRODUCTIVE)
            self._close_late(outcome)
        outcome.add(self._enter(Use.IDLE, now))
        self._ended = True
        return outcome

    def deadline(self) -> float | None:
        if self._until is None or self._ended:
            return None
        since = _stepless_since(self._use, self._until, self._heard)
        return None if since is None else since + STEPLESS_S

    def _works_without_steps(self, now: float) -> Outcome:
        """Count the time as work: of such a script only that its workers run is known."""
        if self._use is Use.RESTORE:
            # The job has stepped: this round only evaluates or exports, or its steps come late.
            at = self._heard.stepless_from = max(self._until or 0.0, self._heard.loaded_at)
            return self._enter(Use.PRODUCTIVE, at)
        outcome = Outcome()
        self._settle(outcome, now, Use.PRODUCTIVE)
        self._close_late(outcome)
        outcome.add(self._enter(Use.PRODUCTIVE, now))
        return outcome

    def _has_stepped(self) -> bool:
        return self._heard.steps > 0 or self._steps_before > 0

    def _started(self, now: float) -> Outcome:
        """All workers run."""
        if self._has_stepped():
            return self._enter(Use.RESTORE, now)
        # Work without a step: this script was found to report none.
        is_stepless = self._spent[Use.PRODUCTIVE] > 0
        return self._enter(Use.PRODUCTIVE if is_stepless else Use.START, now)

    def _restoring(self, event: ev.CheckpointRequested | ev.RestoreAgreed, now: float) -> None:
        """Note how far the workers are on their way to the first step."""
        heard = self._heard
        if self._use not in _BEFORE_A_STEP:
            return
        if isinstance(event, ev.RestoreAgreed):
            heard.loaded_at = now
        elif isinstance(event.body, NodeRestore) and event.body.round == self._round:
            heard.asked.add(event.node_id)
            if len(heard.asked) == self._nodes and heard.imported_at < 0:
                heard.imported_at = now

    def _beat(self, event: ev.BeatReceived, now: float) -> Outcome:
        beat = event.beat
        if beat.round != self._round or beat.steps <= 0:
            return NOTHING
        heard, has_stepped = self._heard, self._has_stepped()
        heard.steps = max(heard.steps, beat.steps)
        heard.saved = max(heard.saved, beat.saved_step)
        heard.last_step_at = max(heard.last_step_at, now - beat.last_step_ago_s)
        if heard.first_step_at < 0 and beat.first_step_ago_s >= 0:
            heard.first_step_at = max(0.0, now - beat.first_step_ago_s)
            heard.pace.heard(1, heard.first_step_at)
        heard.total = max(heard.total, beat.total_steps)
        heard.pace.heard(heard.steps, heard.last_step_at)
        outcome = Outcome()
        if self._use in _BEFORE_A_STEP and heard.first_step_at >= 0:
            at = max(heard.first_step_at, self._until or 0.0)
            outcome.add(self._enter(Use.PRODUCTIVE, at))
            outcome.facts.append(ev.FirstStepMade(self._round, at))
        elif not has_stepped and heard.first_step_at >= 0:
            self._was_not_stepless(outcome, heard.first_step_at)
        elif heard.stepless_from >= 0 and heard.first_step_at >= 0:
            self._was_restoring(outcome, heard)
        if beat.step >= 0:
            if heard.step < 0:
                self._count_loss(outcome, first_step=beat.step - beat.steps + 1)
            heard.step = max(heard.step, beat.step)
            heard.own_pace.heard(heard.step, heard.last_step_at)
        return outcome

    def _was_not_stepless(self, outcome: Outcome, first_step_at: float) -> None:
        """The first step came late, or a new master hears of it: the time before it is no work."""
        self._settle(outcome, first_step_at, Use.PRODUCTIVE)
        assert self._until is not None
        start_s = self._spent[Use.PRODUCTIVE] - max(0.0, self._until - first_step_at)
        if start_s > 0:
            self._move(outcome, start_s, Use.PRODUCTIVE, Use.START)
        outcome.facts.append(ev.FirstStepMade(self._round, first_step_at))
        note = self._newest_incident()
        if note is not None and note.restore_s < 0:  # The incident that `_late` noted.
            # Of its round only: the job may have worked without steps in others before.
            in_round_s = first_step_at - note.at_s + max(note.late_s, 0.0)
            changed = replace(note, restore_s=max(0.0, min(start_s, in_round_s)))
            commit(self, outcome, changed)
            outcome.facts.append(_closed(changed))

    def _was_restoring(self, outcome: Outcome, heard: _Heard) -> None:
        """A round that was taken to work without steps makes one: until then it was restoring."""
        self._settle(outcome, heard.first_step_at, Use.PRODUCTIVE)
        restore_s = max(0.0, heard.first_step_at - heard.stepless_from)
        heard.stepless_from = -1.0
        self._move(outcome, restore_s, Use.PRODUCTIVE, Use.RESTORE)
        outcome.facts.append(ev.FirstStepMade(self._round, heard.first_step_at))
        note = next((n for n in reversed(self._incidents.values()) if n.round < self._round), None)
        if note is not None and note.restore_s >= 0:
            commit(self, outcome, replace(note, restore_s=note.restore_s + restore_s))

    def _late(self, event: ev.FirstStepLate, now: float) -> Outcome:
        """Show it to people as an incident, unless one is open. The workers are left alone."""
        newest = self._newest_incident()
        if newest is not None and newest.restore_s < 0:
            return NOTHING
        reason = f"no first step within {event.waited_s:.0f} s"
        has_stepped = self._has_stepped()  # Some workers have, but not all.
        restore_s = 0.0 if has_stepped else -1.0
        note = rec.IncidentNoted(self._next_incident(), event.round, now, reason, -1, 0.0)
        outcome = Outcome()
        commit(self, outcome, replace(note, restore_s=restore_s, late_s=event.waited_s))
        return outcome

    def _close_late(self, outcome: Outcome) -> None:
        """No first step is waited for any more, and nothing had to be recovered."""
        note = self._newest_incident()
        if note is not None and note.restore_s < 0 and note.late_s >= 0:
            commit(self, outcome, replace(note, restore_s=0.0))

    def _count_loss(self, outcome: Outcome, first_step: int) -> None:
        """Steps that the new world does again were not productive the first time."""
        if first_step == self._step + 1:
            return
        again = self._step + 1 - first_step
        if self._step >= 0 and again > 0:
            lost_s = min(again * self._step_price_s, self._spent[Use.PRODUCTIVE])
            self._move(outcome, lost_s, Use.PRODUCTIVE, Use.LOST)
        # The round before made steps after its last beat, or this round began elsewhere.
        unheard = -again if self._step >= 0 and again < 0 else 0
        if unheard * self._step_price_s > UNHEARD_STEPS_S or self._step_price_s == 0:
            unheard = 0
        # Also says that this loss is counted, whichever master hears the next beat.
        at = rec.StepsSeen(first_step - 1, self._steps_before + unheard, self._step_price_s)
        commit(self, outcome, at)

    def _broken(self, event: ev.WorldBroken, now: float) -> Outcome:
        outcome = Outcome()
        detect_s = self._stop_productive(outcome, now, event.last_step_ago_s)
        if self._is_suspended:
            # People asked for it: that is no incident.
            self._close_late(outcome)
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

    def _newest_incident(self) -> rec.IncidentNoted | None:
        return self._incidents.get(max(self._incidents, default=0))

    def _exact_detect(self, last_step_ago_s: float, now: float) -> Outcome:
        """A lost node cannot say when it stepped last, but the nodes that stepped with it can."""
        note = self._newest_incident()
        if note is None or not note.estimated or last_step_ago_s < 0:
            return NOTHING
        detect_s = min(max(note.at_s - (now - last_step_ago_s), 0.0), note.detect_s)
        outcome = Outcome()
        self._move(outcome, note.detect_s - detect_s, Use.DETECT, Use.PRODUCTIVE)
        commit(self, outcome, replace(note, detect_s=detect_s, estimated=False))
        return outcome

    def _stop_productive(self, outcome: Outcome, now: float, last_step_ago_s: float) -> float:
        """Split the time until now into productive and detect; returns the seconds of detect."""
        if self._use is not Use.PRODUCTIVE or not self._has_stepped():
            self._settle(outcome, now, self._use)
            return 0.0
        if self._heard.stepless_from >= 0 and last_step_ago_s < 0:
            # Whatever this round did without a step, the next one does again.
            self._settle(outcome, now, Use.LOST)
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
            self._settle(outcome, now, self._use)
            number = self._next_incident()
            note = rec.IncidentNoted(number, self._round, now, event.reason, -1, 0.0)
            commit(self, outcome, note)
            commit(self, outcome, rec.StageEntered(Use.RENDEZVOUS, self._round))
        heard, price_s = self._heard, self._step_price_s
        if heard.steps > 1 and heard.first_step_at >= 0:
            price_s = max(0.0, heard.last_step_at - heard.first_step_at) / (heard.steps - 1)
        reached, total = self._reached(), self._steps_before + heard.steps
        commit(self, outcome, rec.StepsSeen(reached, total, price_s))
        self._round, self._heard = event.world.round, _Heard()
        self._nodes = len(event.world.members)
        outcome.add(self._enter(Use.RESTART, now))
        return outcome

    def _reached(self) -> int:
        return self._heard.step if self._heard.step >= 0 else self._step

    def _enter(self, use: Use, at: float) -> Outcome:
        """The next stage begins; the incident that is open learns how long the last one took."""
        outcome = Outcome()
        began_at = self._until or 0.0
        took_s = self._settle(outcome, at, self._use)
        note = self._newest_incident()
        if note is not None and note.restore_s < 0:
            changed = _with_stage(note, self._use, took_s)
            if use is Use.PRODUCTIVE and changed.restore_s < 0:
                # The first step was heard of before the last worker's start.
                changed = replace(changed, restore_s=0.0)
            elif use is Use.PRODUCTIVE:
                changed = _with_parts(changed, self._heard, began_at)
            if changed is not note:
                commit(self, outcome, changed)
            if use is Use.PRODUCTIVE:
                outcome.facts.append(_closed(changed))
        commit(self, outcome, rec.StageEntered(use, self._round))
        return outcome

    def _settle(self, outcome: Outcome, at: float, use: Use) -> float:
        """Attribute the time since the last settlement."""
        if self._until is None:
            commit(self, outcome, rec.TimeSpent(use, 0.0, at))
        assert self._until is not None
        seconds = max(0.0, at - self._until)
        if seconds > 0:
            commit(self, outcome, rec.TimeSpent(use, seconds, self._until + seconds))
        return seconds

    def _move(self, outcome: Outcome, seconds: float, before: Use, now: Use) -> None:
        """Seconds that were attributed already turn out to have had another use."""
        assert self._until is not None
        commit(self, outcome, rec.TimeSpent(before, -seconds, self._until))
        commit(self, outcome, rec.TimeSpent(now, seconds, self._until))

    # ---- durable state --------------------------------------------------------------------------

    def validate(self) -> None:
        """No use has taken a negative time, and all together not more than the job's time."""
        until = self._until or 0.0
        for use, seconds in self._spent.items():
            assert seconds >= -1e-6 * max(1.0, until), (use, seconds)
        assert sum(self._spent.values()) <= until * (1 + 1e-9) + 1e-6, (self._spent, until)
        assert [*self._incidents] == sorted(self._incidents), [*self._incidents]

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

    def incident_of(self, round: int, *, late: bool = False) -> int:
        """The number of the incident that ended this round or, with `late`, of its late first step;
        0 if there is none."""
        for note in reversed(self._incidents.values()):
            if note.round == round and (note.late_s >= 0) == late:
                return note.number
        return 0

    def view(self, now: float, saved_step: int = -1) -> dict[str, object]:
        """Steps, goodput and the story of every incident.

        `saved_step` is the newest that is known to be saved: a beat may not have told it yet.
        """
        spent, stage_s = dict(self._spent), 0.0
        if self._until is not None and not self._ended:
            stage_s = max(0.0, now - self._until)
            spent[self._use] += stage_s
        total, last_step_at = sum(spent.values()), self._heard.last_step_at
        reached = self._reached()
        productive_s = spent[Use.PRODUCTIVE]
        is_known = self._has_stepped() or productive_s > 0
        incidents = [_view(note) for note in self._incidents.values()]
        for incident in incidents[:-1]:
            incident["closed"] = True  # Another one followed, whatever came of it.
        newest = self._newest_incident()
        if newest is not None and not incidents[-1]["closed"]:
            is_open = _open_incident(newest, self._use, self._heard, now, stage_s)
            incidents[-1] |= {"closed": True} if self._ended else is_open
        is_stepping = self._use is Use.PRODUCTIVE and not self._ended
        # What was saved may count something else than optimizer steps.
        step = max(reached if reached >= 0 else self._heard.saved, saved_step)
        return {
            "step": step,
            "step_age_s": round(now - last_step_at, 3) if last_step_at >= 0 else -1.0,
            "steps_total": self._steps_before + self._heard.steps,
            **_speed(self._heard, now, is_stepping=is_stepping),
            "stage": str(self._use),
            "stage_s": round(stage_s, 3),
            "seconds": {str(use): round(seconds, 3) for use, seconds in spent.items()},
            "goodput": round(productive_s / total, 4) if is_known and total > 0 else None,
            "incidents": incidents,
        }


def _speed(heard: _Heard, now: float, *, is_stepping: bool) -> dict[str, object]:
    """How fast the training is, and how long it still takes, where that is known."""
    per_s = heard.pace.per_s(now) if is_stepping else None
    own_per_s = heard.own_pace.per_s(now) if is_stepping else None
    left_s = None
    if heard.total > 0 and own_per_s:
        left_s = round(max(0, heard.total - heard.step) / own_per_s, 1)
    return {
        "steps_per_s": None if per_s is None else round(per_s, 4),
        "steps_wanted": heard.total,
        "left_s": left_s,
    }


def _open_incident(
    note: rec.IncidentNoted, use: Use, heard: _Heard, now: float, stage_s: float
) -> dict[str, object]:
    """Which stage the newest incident is in, and how long nothing has been trained."""
    part = ""
    if use in (Use.START, Use.RESTORE) and heard.asked:
        part = "import" if heard.imported_at < 0 else "load"
        part = part if heard.loaded_at < 0 else "first step"
    open_s = round(now - note.at_s + max(note.detect_s, note.late_s, 0.0), 3)
    return {
        "stage": str(use),
        "part": part,
        "stage_s": round(stage_s, 3),
        "open_s": open_s,
        "recovery_s": open_s,
    }


def _stepless_since(use: Use, until: float, heard: _Heard) -> float | None:
    """Since when the workers may be at work without any step; None if they are not that far."""
    if use is Use.START:
        return until
    # Loading may take long. Ranks that have not asked for a checkpoint do not load, or have loaded
    # under an earlier master.
    if use is Use.RESTORE and (heard.loaded_at >= 0 or not heard.asked):
        return max(until, heard.loaded_at)
    return None


def _with_stage(note: rec.IncidentNoted, use: Use, took_s: float) -> rec.IncidentNoted:
    stages = {
        Use.RENDEZVOUS: note.rendezvous_s,
        Use.RESTART: note.restart_s,
        Use.RESTORE: note.restore_s,
    }
    use = Use.RESTORE if use is Use.START else use
    if use not in stages or stages[use] >= 0:
        return note
    stages[use] = took_s
    return replace(
        note,
        rendezvous_s=stages[Use.RENDEZVOUS],
        restart_s=stages[Use.RESTART],
        restore_s=stages[Use.RESTORE],
    )


def _with_parts(note: rec.IncidentNoted, heard: _Heard, began_at: float) -> rec.IncidentNoted:
    """What the time from running processes to the first step went into, if that is known."""
    if not began_at <= heard.imported_at <= heard.loaded_at <= began_at + note.restore_s:
        return note
    import_s, load_s = heard.imported_at - began_at, heard.loaded_at - heard.imported_at
    return replace(note, import_s=import_s, load_s=load_s)


def _closed(note: rec.IncidentNoted) -> ev.IncidentClosed:
    return ev.IncidentClosed(
        Round(note.round),
        note.reason,
        detect_s=max(note.detect_s, 0.0),
        rendezvous_s=max(note.rendezvous_s, 0.0),
        restart_s=max(note.restart_s, 0.0),
        restore_s=max(note.restore_s, 0.0),
        number=note.number,
    )


def _view(note: rec.IncidentNoted) -> dict[str, object]:
    stages = {
        "detect": note.detect_s,
        "rendezvous": note.rendezvous_s,
        "restart": note.restart_s,
        "restore": note.restore_s,
    }
    known = {name: round(seconds, 3) for name, seconds in stages.items() if seconds >= 0}
    parts = {}
    if note.import_s >= 0:
        first_step_s = note.restore_s - note.import_s - note.load_s
        parts = {"import": note.import_s, "load": note.load_s, "first step": first_step_s}
    return {
        "number": note.number,
        "round": note.round,
        "at_s": round(note.at_s, 3),
        "reason": note.reason,
        "node_rank": note.node_rank,
        "stages": known,
        "restore_parts": {name: round(seconds, 3) for name, seconds in parts.items()},
        "recovery_s": round(sum(known.values()), 3),
        "closed": note.restore_s >= 0,
        "late": note.late_s >= 0,
    }
