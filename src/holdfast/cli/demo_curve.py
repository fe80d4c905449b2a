# SPDX-License-Identifier: Apache-2.0
"""The steps that the demo's script wrote, and the check that none of them was lost.

A world that resumes from a checkpoint repeats the steps after it. The committed line has the steps
that remain when each step that a later round repeated is dropped: it must contain every step once,
and a repeated step must have had the same result before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec

LOSS_TOLERANCE = 0.01
"""Two worlds of different sizes add the same numbers up in different orders."""


class StepLine(msgspec.Struct, frozen=True):
    """One line of the metrics file: one rank finished one step."""

    t: float
    rank: int
    world: int
    round: int
    pid: int
    step: int
    loss: float


class StepFile:
    """Reads the metrics file while it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_to = 0
        self._decoder = msgspec.json.Decoder(StepLine)

    def new_lines(self) -> list[StepLine]:
        """The whole lines that came since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to += len(whole)
        return [self._decoder.decode(line) for line in whole.splitlines()]


@dataclass(frozen=True, slots=True)
class Curve:
    """The steps of the resulting model, and the steps that were repeated on the way."""

    steps: tuple[StepLine, ...]
    """The steps of the committed line, in order."""
    redone: dict[int, int]
    """By round: how many steps of earlier rounds it repeated."""
    worst_difference: float
    """The largest difference between the losses of a repeated step."""
    broken: str
    """Why the committed line has a gap or an error; empty if it is whole."""


def committed(lines: Iterable[StepLine]) -> Curve:
    """Drop the steps that were repeated later, and check the rest."""
    kept: list[StepLine] = []
    redone: dict[int, int] = {}
    worst, broken = 0.0, ""
    dropped: dict[int, StepLine] = {}
    for line in _by_round(lines):
        while kept and kept[-1].step >= line.step:
            old = kept.pop()
            dropped[old.step] = old
            redone[line.round] = redone.get(line.round, 0) + 1
        expected = kept[-1].step + 1 if kept else 1
        if line.step != expected and not broken:
            broken = f"step {line.step} of round {line.round} came where {expected} was due"
        before = dropped.pop(line.step, None)
        if before is not None:
            worst = max(worst, abs(before.loss - line.loss))
        kept.append(line)
    if worst > LOSS_TOLERANCE and not broken:
        broken = f"a step that was done again had another loss, by {worst:.4f}"
    if not kept and not broken:
        broken = "no step was finished"
    return Curve(tuple(kept), redone, worst, broken)


def _by_round(lines: Iterable[StepLine]) -> list[StepLine]:
    """One line for each round and step; if the usual rank was killed, another one wrote it."""
    first: dict[tuple[int, int], StepLine] = {}
    for line in lines:
        first.setdefault((line.round, line.step), line)
    return [first[key] for key in sorted(first)]


def first_after(
    lines: Iterable[StepLine], moment: float, *, round_above: int = 0
) -> StepLine | None:
    """The first step finished after `moment`, in a round above `round_above`."""
    later = (line for line in lines if line.round > round_above and line.t > moment)
    return min(later, key=lambda line: line.t, default=None)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the steps of one round took, all of them and those around a moment."""

    median_s: float
    slowest_s: float


def pace(lines: Sequence[StepLine], round_number: int, since: float, until: float) -> Pace | None:
    """The pace of a round, and its slowest step between two moments; None if it had too few."""
    ends = [line.t for line in _by_round(lines) if line.round == round_number]
    took = [(end, end - begin) for begin, end in pairwise(ends)]
    near = [seconds for end, seconds in took if since <= end and end - seconds <= until]
    if not near:
        return None
    return Pace(median(seconds for _, seconds in took), max(near))
