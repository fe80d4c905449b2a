# SPDX-License-Identifier: Apache-2.0
"""Hangs: workers that live, answer and make no step any more.

A world hangs when *each* of its nodes says that it has made no step for longer than the job is
allowed to pause. Only what nodes themselves say counts: a master that was away, a broken stream or
a beat that is late is no evidence. Nodes that are done are not asked. A world in which a node has
not made its first steps yet is never judged, so neither is a script that reports no steps.

How long a pause may be, unless the user says it in seconds:

- `FACTOR` times the longest pause between two steps that this job has come out of by itself, but at
  most `PATIENT_S` more than it; at least `FLOOR_S`, and `PATIENT_S` while the job is young, because
  its first evaluation or save may still be ahead.
- A round whose first step does not come within `first_step_s` is said to be late. It is restarted
  only if the job has made steps before: a script that never reports any may be at work. It is
  restarted once: if the next round makes no step either, what is left to do may be an evaluation
  or an export, and a restart would only begin it again.
- After a hang the place where it happened gets `FACTOR` times as long, until it is passed. So a
  pause that was taken for a hang is interrupted a few times at most, and known from then on.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from msgspec.structs import replace

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick, commit
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.model.world import World
from holdfast.protocol import messages as m

FACTOR = 5.0
FLOOR_S = 30.0
PATIENT_S = 300.0
YOUNG_FOR_S = 3600.0
"""Counted from the first step of the job."""

WARM_STEPS = 3
"""The first steps of a round compile and allocate: how long they take says nothing of the rest."""

NOTED_GROWTH = 1.2
"""A longest pause is written down again when it has grown by this much: not at every step."""


@dataclass(slots=True)
class _Said:
    """What a node said last of the present round."""

    node_rank: NodeRank
    since: float
    """When it attached: this master cannot have heard of earlier steps."""
    steps: int = 0
    step: int = -1
    made: int = 0
    """Steps, by either way of counting."""
    stepped_at: float = -1.0
    quiet_s: float = 0.0


Handled = (
    ev.BeatReceived
    | ev.WorldFormed
    | ev.WorldFound
    | ev.NodeReady
    | ev.NodeAbsent
    | ev.DoneReported
    | ev.WorldBroken
    | ev.JobFinished
    | ev.JobOpened
    | Tick
)


class Hangs:
    """Who has not stepped for how long, and what this job's pauses are like."""

    OWNS = (rec.PatienceSet,)

    def __init__(self, spec: JobSpec) -> None:
        #: None when the pauses that were seen decide.
        self._asked_s = spec.hang_after_s
        # Durable.
        self._known = rec.PatienceSet()
        # Volatile: beats say it again to a restarted master.
        self._round = Round(0)
        self._said: dict[NodeId, _Said] = {}
        #: Nodes that have paused for too long, by their own last word.
        self._still: set[NodeId] = set()
        #: Steps since the last hang, of the rounds that are over.
        self._made_before = 0
        self._first_step_s = spec.first_step_s
        #: When the first step of the present round is late; None once every node has made one.
        self._late_at: float | None = None

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.BeatReceived():
                said = self._said.get(event.node_id)
                if said is not None and event.beat.round == self._round and event.beat.steps > 0:
                    return self._beat(event.node_id, said, event.beat, now)
            case ev.WorldFormed() | ev.WorldFound():
                self._watch(event.world, now)
            case ev.NodeReady():
                self._came_back(event.member.node_id, now)
            case ev.NodeAbsent():
                self._still.discard(event.node_id)
            case ev.DoneReported():
                if event.report.round == self._round:
                    self._said.pop(event.node_id, None)
                    self._still.discard(event.node_id)
            case ev.WorldBroken() | ev.JobFinished():
                self._watch_nobody()
            case ev.JobOpened():
                if self._asked_s is None and event.rules.max_restarts == 0:
                    # Nothing may be restarted: a mere suspicion must not end the job.
                    self._asked_s = math.inf
            case Tick():
                if self._late_at is not None and self._late_at <= now:
                    return self._late(now)
            case _:
                assert_never(event)
        return NOTHING

    def deadline(self) -> float | None:
        return self._late_at

    def _watch(self, world: World, now: float) -> None:
        self._watch_nobody()
        self._round = world.round
        self._late_at = now + self._first_step_s if math.isfinite(self._first_step_s) else None
        self._said = {one.node_id: _Said(one.node_rank, now) for one in world.members}

    def _watch_nobody(self) -> None:
        self._made_before += max((said.made for said in self._said.values()), default=0)
        self._said.clear()
        self._still.clear()
        self._late_at = None

    def _late(self, now: float) -> Outcome:
        """The time for the first step of the round is over."""
        self._late_at = None
        has_stepped = self._known.first_step_at >= 0 and not any(
            said.steps for said in self._said.values()
        )
        if not has_stepped or self._asked_s == math.inf or self._known.was_late:
            return Outcome(facts=[ev.FirstStepLate(self._round, self._first_step_s)])
        message = f"no worker has made its first step in {self._first_step_s:.0f} s"
        outcome = Outcome(
            facts=[ev.WorldHurt(self._round, ExitReason.STALLED, message, NodeRank(-1), None, -1.0)]
        )
        commit(self, outcome, replace(self._known, was_late=True))
        self._watch_nobody()
        return outcome

    def _came_back(self, node_id: NodeId, now: float) -> None:
        """Its workers may have been held still while it was away: that was no pause of theirs."""
        if node_id in self._said:
            self._said[node_id] = _Said(self._said[node_id].node_rank, now)
            self._still.discard(node_id)

    def _beat(self, node_id: NodeId, said: _Said, beat: m.Beat, now: float) -> Outcome:
        outcome = Outcome()
        if self._known.first_step_at < 0:
            commit(self, outcome, replace(self._known, first_step_at=now))
        if self._known.was_late:
            commit(self, outcome, replace(self._known, was_late=False))
        quiet_s = min(beat.last_step_ago_s, now - said.since)
        if said.steps == 0:
            said.made = beat.steps
        elif (beat.steps, beat.step) != (said.steps, said.step):
            made = max(beat.steps - said.steps, beat.step - said.step, 1)
            pause_s = max(said.quiet_s, (now - quiet_s - said.stepped_at) / made)
            if said.made >= WARM_STEPS:
                self._learn(outcome, pause_s)
            said.made += made
            self._pass(outcome, self._made_before + said.made, beat.step)
        said.steps, said.step = beat.steps, beat.step
        said.stepped_at, said.quiet_s = now - quiet_s, quiet_s
        if self._late_at is not None and all(other.steps for other in self._said.values()):
            self._late_at = None
        if said.made < WARM_STEPS or quiet_s <= self._patience_s(now):
            self._still.discard(node_id)
        else:
            self._still.add(node_id)
            if len(self._still) == len(self._said):
                self._hang(outcome, now)
        return outcome

    def _patience_s(self, now: float) -> float:
        if self._asked_s is not None:
            return self._asked_s
        known = self._known
        usual_s = known.longest_pause_s + min((FACTOR - 1) * known.longest_pause_s, PATIENT_S)
        is_young = now < known.first_step_at + YOUNG_FOR_S
        return max(PATIENT_S if is_young else FLOOR_S, usual_s, known.allowed_s)

    def _learn(self, outcome: Outcome, pause_s: float) -> None:
        """The workers went on by themselves after a pause."""
        if FACTOR * pause_s > FLOOR_S and pause_s > NOTED_GROWTH * self._known.longest_pause_s:
            commit(self, outcome, replace(self._known, longest_pause_s=pause_s))

    def _pass(self, outcome: Outcome, made: int, step: int) -> None:
        """Whether the place of the last hang lies behind: by step numbers, if there are any.

        Without them it does when as many steps were made as the round that hung had made.
        """
        known = self._known
        has_numbers = step >= 0 and known.hung_step >= 0
        is_past = step > known.hung_step if has_numbers else made > known.hung_after
        if known.allowed_s and is_past:
            commit(self, outcome, replace(known, allowed_s=0.0))

    def _hang(self, outcome: Outcome, now: float) -> None:
        all_said = list(self._said.values())
        allowed_s = self._patience_s(now)
        quiet_s = now - max(said.stepped_at for said in all_said)
        behind, where = _behind(all_said)
        message = (
            f"no worker has made a step for {quiet_s:.0f} s, where {allowed_s:.0f} s are allowed"
            f"{self._why_allowed()}{where}"
        )
        if self._asked_s is None:
            hung = replace(
                self._known,
                allowed_s=FACTOR * allowed_s,
                hung_step=max(said.step for said in all_said),
                hung_after=max(said.made for said in all_said),
            )
            commit(self, outcome, hung)
        outcome.facts.append(
            ev.WorldHurt(self._round, ExitReason.STALLED, message, behind, None, quiet_s)
        )
        self._watch_nobody()
        self._made_before = 0

    def _why_allowed(self) -> str:
        longest_s = self._known.longest_pause_s
        if self._asked_s is not None or longest_s == 0:
            return ""
        return f" (the longest pause before was {longest_s:.0f} s)"

    # ---- durable state --------------------------------------------------------------------------

    def validate(self) -> None:
        assert self._still <= self._said.keys(), self._still
        assert self._said or self._late_at is None, self._late_at

    def apply(self, record: Record) -> None:
        match record:
            case rec.PatienceSet():
                self._known = record
            case _:
                raise TypeError(f"{record!r} is not a record of hangs")

    def snapshot(self) -> Iterable[Record]:
        if self._known != rec.PatienceSet():
            yield self._known


def _behind(all_said: list[_Said]) -> tuple[NodeRank, str]:
    """Who made the fewest steps, and that in words; node rank -1 when all are equal."""
    if len(all_said) == 1:
        return all_said[0].node_rank, ""
    first = min(all_said, key=lambda said: (said.steps, said.step))
    last = max(all_said, key=lambda said: (said.steps, said.step))
    if (first.steps, first.step) == (last.steps, last.step):
        return NodeRank(-1), "; all nodes are at the same step"
    few, most = (first.step, last.step) if first.step != last.step else (first.steps, last.steps)
    words = f"; node rank {first.node_rank} is behind, at step {few} when others are at {most}"
    return first.node_rank, words
