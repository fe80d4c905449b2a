# SPDX-License-Identifier: Apache-2.0
"""The check behind the demo's claim must find what is broken, not only praise what is whole."""

from pathlib import Path

import pytest

from holdfast.cli.demo_curve import StepFile, StepLine, committed, first_after, pace


def line(round_number: int, step: int, *, loss: float | None = None, rank: int = 0) -> StepLine:
    return StepLine(
        t=100.0 * round_number + step,
        rank=rank,
        world=2,
        round=round_number,
        pid=1000 * round_number + rank,
        step=step,
        loss=4.0 - 0.1 * step if loss is None else loss,
    )


def test_steps_done_again_count_once() -> None:
    lines = [line(1, step) for step in range(1, 8)] + [line(2, step) for step in range(6, 11)]
    curve = committed(lines)
    assert [kept.step for kept in curve.steps] == list(range(1, 11))
    assert [kept.round for kept in curve.steps] == [1] * 5 + [2] * 5
    assert curve.redone == {2: 2}
    assert curve.broken == ""


def test_a_round_may_start_from_the_beginning() -> None:
    curve = committed([line(1, 1), line(1, 2), line(2, 1), line(2, 2), line(2, 3)])
    assert (curve.redone, curve.broken, len(curve.steps)) == ({2: 2}, "", 3)


def test_ranks_of_a_round_count_as_one() -> None:
    lines = [line(1, step, rank=rank) for step in (1, 2) for rank in (0, 1)]
    assert [kept.step for kept in committed(lines).steps] == [1, 2]


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([line(1, 1), line(1, 2), line(2, 4)], "step 4 of round 2 came where 3 was due"),
        ([line(1, 2)], "step 2 of round 1 came where 1 was due"),
        ([line(1, 1, loss=3.0), line(2, 1, loss=3.1)], "another loss, by 0.1000"),
        ([], "no step was finished"),
    ],
)
def test_a_broken_curve_is_called_broken(lines: list[StepLine], sentence: str) -> None:
    assert sentence in committed(lines).broken


def test_the_first_step_after_a_kill_is_one_of_a_later_round() -> None:
    lines = [line(1, 1), line(1, 9), line(2, 9), line(2, 10)]
    assert first_after(lines, 105.0, round_above=1) == line(2, 9)
    assert first_after(lines, 105.0) == line(1, 9)
    assert first_after(lines, 105.0, round_above=2) is None


def test_the_pace_knows_the_slowest_step_near_a_moment() -> None:
    lines = [line(1, step) for step in (1, 2, 3, 7, 8, 9)]
    found = pace(lines, 1, since=105.0, until=105.5)
    assert found is not None
    assert (found.median_s, found.slowest_s) == (1.0, 4.0)
    assert pace(lines, 2, since=0.0, until=999.0) is None


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = StepFile(path)
    assert steps.new_lines() == []
    first = '{"t":1,"rank":0,"world":1,"round":1,"pid":7,"step":1,"loss":3.5}\n'
    path.write_text(first + first[:20])
    assert [found.step for found in steps.new_lines()] == [1]
    path.write_text(first + first)
    assert len(steps.new_lines()) == 1
