# SPDX-License-Identifier: Apache-2.0
"""Steps per second, from what beats say: the pace of now, not of the whole job."""

import pytest

from holdfast.core.job.pace import SILENT_S, Pace
from tests.core.harness import running_pair


def test_one_step_is_no_pace() -> None:
    pace = Pace()
    assert pace.per_s(0.0) is None
    pace.heard(1, 10.0)
    pace.heard(1, 10.0)
    assert pace.per_s(10.0) is None
    pace.heard(2, 10.5)
    assert pace.per_s(10.5) == pytest.approx(2.0)


def test_the_pace_is_that_of_the_last_half_minute() -> None:
    pace = Pace()
    steps = 0
    for beat in range(100):  # One step a second, then ten.
        steps += 5 if beat < 50 else 50
        pace.heard(steps, 5.0 * beat)
    assert pace.per_s(5.0 * 99) == pytest.approx(10.0)


def test_a_late_word_of_a_slower_node_changes_nothing() -> None:
    pace = Pace()
    pace.heard(1, 0.0)
    pace.heard(11, 10.0)
    pace.heard(9, 10.1)
    pace.heard(12, 9.0)
    assert pace.per_s(10.1) == pytest.approx(1.0)


def test_a_pause_ends_the_pace_but_slow_steps_do_not() -> None:
    quick, slow = Pace(), Pace()
    for pace, step_s in ((quick, 1.0), (slow, 60.0)):
        pace.heard(1, 0.0)
        pace.heard(4, 3 * step_s)
    assert quick.per_s(3.0 + SILENT_S) == pytest.approx(1.0)
    assert quick.per_s(3.1 + SILENT_S) is None
    assert slow.per_s(180.0 + 4 * 60.0) == pytest.approx(1 / 60)
    assert slow.per_s(180.0 + 6 * 60.0) is None


def test_each_node_has_its_use_its_pace_and_the_age_of_its_beat() -> None:
    job = running_pair()
    job.beat("a", at=10.0, round=1, steps=11, first=5.0, last=0.0)
    job.beat("a", at=15.0, round=1, steps=21, first=10.0, last=0.0)
    first, second = job.machines.nodes.view(17.0)
    assert (first["cpu"], first["memory_bytes"]) == (0.5, 1000)
    assert first["steps_per_s"] == pytest.approx(2.0)
    assert first["beat_age_s"] == pytest.approx(2.0)
    assert (second["cpu"], second["steps_per_s"], second["beat_age_s"]) == (None, None, None)


def test_a_new_round_begins_with_a_new_pace() -> None:
    job = running_pair()
    job.beat("a", at=10.0, round=1, steps=11, first=5.0, last=0.0)
    job.beat("a", at=15.0, round=1, steps=21, first=10.0, last=0.0)
    job.beat("a", at=16.0, round=2, steps=1, first=0.0, last=0.0)
    assert job.machines.nodes.view(16.0)[0]["steps_per_s"] is None
