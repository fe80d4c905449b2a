# SPDX-License-Identifier: Apache-2.0
"""Job time over the restarts of a master, with wall clocks that are wrong."""

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job.flow import build
from holdfast.model.job import JobSpec
from holdfast.ports.journal import Entry
from holdfast.runtime.loop import JobClock
from holdfast.runtime.observe import monotonic_name

HOUR_S = 3600.0
DIED = [Entry(100.0, 1_000_000.0, b"")]
"""The last word of a master: at job time 100, with this wall clock."""


def now_of(
    wall_s: float, monotonic_s: float, *, name: str = "boot", kept: tuple[str, float]
) -> float:
    return JobClock(DIED, wall_s, lambda: monotonic_s, name=name, kept=kept).now()


@pytest.mark.parametrize("jump_s", [0.0, HOUR_S, -HOUR_S])
def test_on_one_boot_the_wall_clock_does_not_count(jump_s: float) -> None:
    """Job time began at 5000 on the machine's clock; the next master is there 7 s later."""
    assert now_of(1_000_007.0 + jump_s, 5107.0, kept=("boot", 5000.0)) == 107.0


def test_the_next_master_keeps_the_beginning() -> None:
    clock = JobClock(DIED, 2_000_000.0, lambda: 5107.0, name="boot", kept=("boot", 5000.0))
    assert (clock.name, clock.zero_s) == ("boot", 5000.0)


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("boot", ("another boot", 5.0)),
        ("boot", ("", 0.0)),  # A journal of an older version.
        ("", ("", 5.0)),  # No clock has a name here.
    ],
)
def test_elsewhere_the_wall_clock_counts_and_never_goes_back(
    name: str, kept: tuple[str, float]
) -> None:
    assert now_of(1_000_007.0, 5107.0, name=name, kept=kept) == 107.0
    assert now_of(1_000_000.0 - HOUR_S, 5107.0, name=name, kept=kept) == 100.0


def test_a_clock_that_is_behind_the_journal_is_another_one() -> None:
    assert now_of(1_000_007.0, 5099.0, kept=("boot", 5000.0)) == 107.0


def test_it_goes_on_from_there_and_begins_at_0() -> None:
    shown = [50.0]
    clock = JobClock([], 1_000_000.0, lambda: shown[0], name="boot")
    assert (clock.now(), clock.zero_s) == (0.0, 50.0)
    shown[0] = 53.0
    assert clock.now() == 3.0


def test_the_journal_and_its_snapshot_keep_the_clock_of_the_last_master() -> None:
    job = build(JobSpec(), "job")
    assert job.nodes.last_clock() == ("", 0.0)
    job.core.handle(ev.MasterStarted("m1", 0, "boot", 5.0), 0.0)
    job.core.handle(ev.MasterStarted("m2", 9, "boot 2", -7.5), 1.0)
    again = build(JobSpec(), "job")
    for record in job.core.snapshot():
        again.core.replay(record)
    assert again.nodes.last_clock() == job.nodes.last_clock() == ("boot 2", -7.5)


def test_this_machine_has_one_clock() -> None:
    assert monotonic_name() == monotonic_name() != ""
