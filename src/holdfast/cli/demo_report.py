# SPDX-License-Identifier: Apache-2.0
"""The result of the demo: each kill and how the job went on, and whether every check passed."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from holdfast.cli.demo_curve import Curve, StepLine, committed, first_after, pace
from holdfast.master.view import IncidentView, JobView

AROUND_S = 1.0
"""How long after the return of the master a slow step still counts as its effect."""


class Victim(enum.StrEnum):
    """What is killed, in this order."""

    WORKER = "worker"
    NODE = "node"
    MASTER = "master"


@dataclass(slots=True, kw_only=True)
class Kill:
    """One SIGKILL, and the state of the job just before it."""

    victim: Victim
    who: str
    pid: int
    at: float
    round: int
    step: int
    workers: dict[int, int]
    back_at: float = 0.0
    """When the next master answered."""


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table: a kill, or a change of the world that followed from it."""

    what: str
    killed: str
    """The victim among the three; empty if the job itself changed its world."""
    at_s: float
    step: int
    next_step_s: float | None
    """From the kill (or the last step before the change) to the next finished step."""
    stages: dict[str, float]
    steps_redone: int


class MasterLoss(msgspec.Struct, frozen=True, kw_only=True):
    """How the master's death affected the workers."""

    workers_restarted: int
    slowest_step_s: float
    median_step_s: float
    back_after_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one demo, as --json writes it."""

    failure: str
    """Why the demo failed; empty if every check passed."""
    steps: int
    loss_first: float
    loss_last: float
    unbroken: bool
    worst_difference: float
    took_s: float
    first_step_s: float
    goodput: float
    seconds: dict[str, float]
    interruptions: tuple[Interruption, ...]
    master: MasterLoss | None
    curve: tuple[tuple[int, float], ...]


def make_report(
    *,
    failure: str,
    started_at: float,
    took_s: float,
    lines: Sequence[StepLine],
    kills: Sequence[Kill],
    view: JobView | None,
) -> Report:
    """Put the observations together; `failure` says what has gone wrong so far, if anything."""
    curve = committed(lines)
    incidents = view.progress.incidents if view is not None else ()
    rows = _interruptions(started_at, lines, kills, incidents, curve)
    master = _master_loss(lines, kills)
    failure = failure or _what_failed(curve, kills, rows, master)
    return Report(
        failure=failure,
        steps=len(curve.steps),
        loss_first=curve.steps[0].loss if curve.steps else 0.0,
        loss_last=curve.steps[-1].loss if curve.steps else 0.0,
        unbroken=not curve.broken,
        worst_difference=round(curve.worst_difference, 5),
        took_s=round(took_s, 2),
        first_step_s=round(lines[0].t - started_at, 2) if lines else 0.0,
        goodput=(view.progress.goodput or 0.0) if view is not None else 0.0,
        seconds=view.progress.seconds if view is not None else {},
        interruptions=tuple(rows),
        master=master,
        curve=tuple((line.step, line.loss) for line in curve.steps),
    )


def _what_failed(
    curve: Curve,
    kills: Sequence[Kill],
    rows: Sequence[Interruption],
    master: MasterLoss | None,
) -> str:
    for victim in Victim:
        if victim not in {kill.victim for kill in kills}:
            return f"the job ended before the {victim} could be killed"
    for row in rows:
        if row.next_step_s is None:
            return f"no step was finished after this: {row.what}"
    if master is None:
        return "no step was finished around the death of the master"
    if master.workers_restarted:
        return f"the death of the master restarted {master.workers_restarted} workers"
    return curve.broken


def _interruptions(
    started_at: float,
    lines: Sequence[StepLine],
    kills: Sequence[Kill],
    incidents: Sequence[IncidentView],
    curve: Curve,
) -> list[Interruption]:
    rows: list[Interruption] = []
    told: set[int] = set()
    for kill in kills:
        is_master = kill.victim is Victim.MASTER
        following = first_after(lines, kill.at, round_above=0 if is_master else kill.round)
        until_round = following.round if following is not None else kill.round + 1
        mine = [note for note in incidents if kill.round <= note.round < until_round]
        told.update(note.number for note in mine)
        rows.append(
            Interruption(
                what=kill.who,
                killed=str(kill.victim),
                at_s=round(kill.at - started_at, 3),
                step=kill.step,
                next_step_s=_rounded(following.t - kill.at if following is not None else None),
                stages=_sum_of_stages(mine),
                steps_redone=0 if is_master else curve.redone.get(until_round, 0),
            )
        )
    for note in incidents:
        if note.number not in told:
            row = _change(started_at, lines, note, curve)
            if row is not None:
                rows.append(row)
    return sorted(rows, key=lambda row: row.at_s)


def _change(
    started_at: float, lines: Sequence[StepLine], note: IncidentView, curve: Curve
) -> Interruption | None:
    """The row of an incident without a kill: it begins with the last step of the old world."""
    before = [line for line in lines if line.round <= note.round]
    if not before:
        return None
    last = max(before, key=lambda line: line.t)
    following = first_after(lines, last.t, round_above=note.round)
    return Interruption(
        what=note.reason,
        killed="",
        at_s=round(last.t - started_at, 3),
        step=last.step,
        next_step_s=_rounded(following.t - last.t if following is not None else None),
        stages=_sum_of_stages([note]),
        steps_redone=curve.redone.get(following.round, 0) if following is not None else 0,
    )


def _sum_of_stages(incidents: Sequence[IncidentView]) -> dict[str, float]:
    total: dict[str, float] = {}
    for note in incidents:
        for stage, seconds in note.stages.items():
            total[stage] = round(total.get(stage, 0.0) + seconds, 3)
    return total


def _master_loss(lines: Sequence[StepLine], kills: Sequence[Kill]) -> MasterLoss | None:
    kill = next((kill for kill in kills if kill.victim is Victim.MASTER), None)
    if kill is None or not kill.back_at:
        return None
    seen = pace(lines, kill.round, kill.at, kill.back_at + AROUND_S)
    if seen is None:
        return None
    after = {line.pid for line in lines if line.t > kill.at}
    return MasterLoss(
        workers_restarted=len(after - set(kill.workers.values())),
        slowest_step_s=round(seen.slowest_s, 3),
        median_step_s=round(seen.median_s, 3),
        back_after_s=round(kill.back_at - kill.at, 3),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
