# SPDX-License-Identifier: Apache-2.0
"""A script that fails at once is started again after pauses that grow; nothing else waits."""

import signal

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.health.verdicts import PAUSE_S_MAX
from holdfast.core.kernel import Outcome
from holdfast.master.stories import describe_progress, tell
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from tests.core.harness import Job, of_kind, rules, worlds

RULES = rules(max_restarts=100, join_timeout_s=5.0)
QUICK_S = 0.5


def one_node() -> Job:
    job = Job(JobSpec(silence_s=10_000.0, lease_s=20_000.0))
    job.attach("a", job_rules=RULES)
    return job


def fail_at_once(job: Job, reason: ExitReason = ExitReason.ERROR) -> float:
    """How long the next round then waits. Afterwards it runs."""
    job.failed("a", job.round(), job.now + QUICK_S, reason=reason)
    failed_at, number = job.now, job.round()
    for _ in range(2):
        if is_running(job):
            break
        assert job.deadline is not None
        job.wait(job.deadline)
    assert is_running(job)
    assert job.round() == number + (job.now > failed_at)
    return job.now - failed_at


def is_running(job: Job) -> bool:
    return world_view(job)["state"] == "running"


def world_view(job: Job) -> dict[str, object]:
    world = job.machines.view(job.now)["world"]
    assert isinstance(world, dict)
    return world


def pauses(job: Job, count: int) -> list[float]:
    return [fail_at_once(job) for _ in range(count)]


def test_the_first_retry_is_immediate_and_then_pauses_grow() -> None:
    assert pauses(one_node(), 9) == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_thousand_failures_are_not_too_many() -> None:
    job = one_node()
    job.machines.core.replay(rec.RestartCounted(ExitReason.ERROR, failed_starts=5000))
    assert fail_at_once(job) == PAUSE_S_MAX


@pytest.mark.parametrize("reason", [ExitReason.OOM, ExitReason.HARDWARE, ExitReason.UNKNOWN])
def test_every_failure_that_is_its_own_counts(reason: ExitReason) -> None:
    job = one_node()
    assert pauses(job, 2) == [0.0, 1.0]
    assert fail_at_once(job, reason) == 2.0


def test_a_step_ends_the_row_whether_a_beat_told_it_or_the_failure_does() -> None:
    job = one_node()
    assert pauses(job, 3) == [0.0, 1.0, 2.0]
    job.beat("a", round=job.round(), steps=1, step=0, first=0.0, last=0.0)
    assert pauses(job, 3) == [0.0, 0.0, 1.0]
    assert worlds(job.failed("a", job.round(), last=0.1)) == [[0]]
    assert pauses(job, 2) == [0.0, 1.0]


def test_a_long_life_ends_the_row_of_a_script_that_reports_no_steps() -> None:
    job = one_node()
    assert pauses(job, 3) == [0.0, 1.0, 2.0]
    job.wait(job.now + PAUSE_S_MAX)
    assert pauses(job, 2) == [0.0, 0.0]


def test_kills_never_wait_and_do_not_end_the_row() -> None:
    job = one_node()
    assert [fail_at_once(job, ExitReason.KILLED) for _ in range(9)] == [0.0] * 9
    assert pauses(job, 2) == [0.0, 1.0]
    assert fail_at_once(job, ExitReason.KILLED) == 0.0
    assert fail_at_once(job) == 2.0


def test_lost_nodes_never_wait() -> None:
    job = Job(JobSpec(silence_s=10_000.0, lease_s=20_000.0))
    for name in "abcd":
        job.attach(name, job_rules=rules(max_restarts=100, max_nodes=4))
    assert pauses(job, 3) == [0.0, 1.0, 2.0]
    for name, left in (("d", [0, 1, 2]), ("c", [0, 1]), ("b", [0])):
        assert worlds(job.leave(name, job.now + QUICK_S)) == [left]
    assert fail_at_once(job) == 4.0


@pytest.mark.parametrize("compacted", [False, True])
def test_the_next_master_goes_on_with_the_row_but_not_with_the_pause(compacted: bool) -> None:
    job = one_node()
    assert pauses(job, 3) == [0.0, 1.0, 2.0]
    job.failed("a", job.round(), job.now + QUICK_S)
    assert not is_running(job)
    job.restart(compacted=compacted)
    assert worlds(job.attach("a", job_rules=RULES, round=job.round())) == [[0]]
    assert fail_at_once(job) == 8.0


def test_a_job_that_was_stopped_and_goes_on_begins_again() -> None:
    job = one_node()
    assert pauses(job, 3) == [0.0, 1.0, 2.0]
    job.feed(ev.StopRequested(9, 1, "a signal", stopped=signal.SIGTERM))
    job.restart()
    job.attach("a", job_rules=RULES)
    assert pauses(job, 2) == [0.0, 1.0]


def test_the_time_to_join_begins_after_the_pause() -> None:
    job = one_node()
    pauses(job, 5)
    job.failed("a", job.round(), job.now + QUICK_S)
    failed_at = job.now
    job.leave("a", failed_at + 1.0)
    job.wait(failed_at + 16.0 + RULES.join_timeout_s - 0.1)
    assert job.state() == "running"
    job.wait(failed_at + 16.0 + RULES.join_timeout_s)
    assert job.state() == "failed"


def test_a_job_can_be_stopped_in_a_pause() -> None:
    job = one_node()
    pauses(job, 5)
    job.failed("a", job.round(), job.now + QUICK_S)
    job.feed(ev.StopRequested(9, 1, "the user asked"), job.now + 1.0)
    assert job.state() == "failed"
    assert "starts_in_s" not in world_view(job)
    assert worlds(job.wait(job.now + 100.0)) == []


def test_people_see_the_pause() -> None:
    job = one_node()
    pauses(job, 3)
    assert "starts_in_s" not in world_view(job)
    outcome = job.failed("a", job.round(), job.now + QUICK_S)
    assert told(outcome) == (
        "round 4 is over: rank 0 on node rank 0 exited with code 1; round 5 starts in 4 s: "
        "the workers failed before their first step 4 times in a row"
    )
    job.wait(job.now + 1.0)
    assert world_view(job)["starts_in_s"] == 3.0
    line = describe_progress({"job": "j", "time_s": job.now, **job.machines.view(job.now)})
    assert "recovering" in line
    assert "the next round starts in 3 s" in line
    assert "4 restarts" in line


def told(outcome: Outcome) -> str:
    (broken,) = of_kind(ev.WorldBroken, outcome.facts)
    return tell(broken)
