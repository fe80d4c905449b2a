# SPDX-License-Identifier: Apache-2.0
"""When saves are due: by steps, by time, and by what a failure costs."""

import itertools
import math

import pytest

from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint.policies import (
    Auto,
    Every,
    EveryMinutes,
    EverySteps,
    KeepEvery,
    KeepLast,
    Schedule,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def due(every: Every | None, steps: range, step_s: float = 1.0, **facts: float) -> list[int]:
    clock = Clock()
    schedule = Schedule(every, 1, clock)
    schedule.cost_s = facts.get("cost_s", 0.0)
    schedule.failures_per_s = facts.get("failures_per_s", 0.0)
    found = []
    for step in steps:
        clock.now += step_s * steps.step
        if schedule.is_due(step):
            found.append(step)
    return found


def test_by_steps() -> None:
    assert due(EverySteps(3), range(8)) == [0, 3, 6]
    assert due(None, range(8)) == []


def test_by_minutes_whatever_a_step_takes() -> None:
    for step_s in (0.5, 1.0, 10.0):
        found = due(EveryMinutes(2), range(1, 2000), step_s)
        gaps = {(b - a) * step_s for a, b in itertools.pairwise(found)}
        assert found
        assert gaps == {120.0}


def test_by_minutes_when_save_is_called_at_few_steps_only() -> None:
    found = due(EveryMinutes(2), range(0, 5000, 50))
    assert {b - a for a, b in itertools.pairwise(found)} == {150}


def test_the_interval_follows_cost_and_failures() -> None:
    """Young's rule, in bounds."""
    auto = Auto(minutes_min=1, minutes_max=60)
    assert auto.interval_s(10, 1 / 3600) == pytest.approx(math.sqrt(2 * 10 * 3600))
    assert auto.interval_s(0.001, 1 / 3600) == 60
    assert auto.interval_s(100, 0) == 3600
    assert auto.interval_s(500, 1.0) == 1000
    seldom = due(auto, range(1, 20_000), cost_s=20, failures_per_s=1 / 36_000)
    often = due(auto, range(1, 20_000), cost_s=20, failures_per_s=1 / 3_600)
    assert len(often) > 2 * len(seldom) > 0


def test_several_ranks_need_a_process_group_to_agree_on_time() -> None:
    schedule = Schedule(EveryMinutes(1), 2)
    with pytest.raises(UsageError, match="init_process_group"):
        [schedule.is_due(step) for step in range(20)]


@pytest.mark.parametrize(
    "make",
    [lambda: EverySteps(0), lambda: EveryMinutes(0), lambda: KeepLast(0), lambda: KeepEvery(0)],
)
def test_nonsense_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(UsageError):
        make()
