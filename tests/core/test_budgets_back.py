# SPDX-License-Identifier: Apache-2.0
"""Budgets of restarts come back by training: they stop what comes to nothing, and nothing else."""

import pytest

from holdfast.model.job import WORKER_RESTARTS, JobSpec
from holdfast.model.node import ExitReason
from tests.core.harness import Job, rules
from tests.soaking import WHOLE

RULES = rules(max_restarts=1)


def fail_until_the_end(job: Job, reason: ExitReason) -> int:
    """How often the world was formed again before the job failed for this reason."""
    for count in range(200):
        job.failed("a", job.round(), reason=reason, last=0.0)
        if job.state() != "running":
            return count
    raise AssertionError("the job never failed")


def lose_and_train(job: Job, times: int, trained_s: float) -> int:
    """How often the job went on after a lost node, each time after so much training."""
    for count in range(times):
        round_number = job.round()
        job.beat("a", round=round_number, steps=1, step=count, first=0.0, last=0.0)
        job.now += trained_s
        job.failed("a", round_number, reason=ExitReason.LOST)
        if job.state() != "running":
            return count
    return times


def patient_job(**budgets: int) -> Job:
    spec = JobSpec(silence_s=1e9, lease_s=1e9, hang_after_s=1e9)
    spec.worker_restarts.update({ExitReason(name): count for name, count in budgets.items()})
    job = Job(spec)
    job.attach("a", job_rules=RULES)
    return job


def test_a_job_that_trains_for_months_does_not_run_out_of_restarts() -> None:
    """10,000 nodes lose one every 20 minutes: a budget of 100 would end the job in two days.

    Four days of it take nearly three budgets; `make soak` plays 54 days.
    """
    losses = 72 * (54 if WHOLE else 4)
    assert lose_and_train(patient_job(), losses, 1200.0) == losses


def test_a_job_that_comes_to_no_step_runs_out_of_restarts_however_slowly() -> None:
    job = patient_job()
    job.beat("a", round=1, steps=1, step=0, first=0.0, last=0.0)
    restarts = 0
    while job.state() == "running":
        job.now += 1200.0
        job.failed("a", job.round(), reason=ExitReason.LOST, last=0.0)
        restarts += job.state() == "running"
        assert restarts < 200
    # What the first round trained had nothing to bring back yet.
    assert restarts == WORKER_RESTARTS[ExitReason.LOST]
    reason = str(job.machines.view(job.now)["reason"])
    assert reason.endswith("; 100 restarts in 6 h of training are the limit for lost")


def test_a_budget_comes_back_with_training_and_never_grows_beyond_itself() -> None:
    """Four restarts in six hours of training: one comes back every 90 minutes."""
    for hours, more in ((0.0, 0), (1.4, 0), (1.6, 1), (3.1, 2), (6.1, 4), (600.0, 4)):
        job = patient_job(lost=4)
        for _ in range(4):
            job.failed("a", job.round(), reason=ExitReason.LOST, last=0.0)
        job.beat("a", round=job.round(), steps=1, step=0, first=0.0, last=0.0)
        job.now += hours * 3600.0
        assert fail_until_the_end(job, ExitReason.LOST) == more, hours


def test_time_in_which_the_world_hung_or_nobody_knew_is_no_training() -> None:
    job = patient_job(stalled=1)
    job.failed("a", 1, reason=ExitReason.STALLED)
    job.beat("a", round=2, steps=1, step=0, first=0.0, last=0.0)
    job.now += 10 * 3600.0
    job.failed("a", 2, reason=ExitReason.STALLED, last=9.5 * 3600.0)
    assert job.state() == "failed"


@pytest.mark.parametrize("reason", [ExitReason.ERROR, ExitReason.OOM, ExitReason.UNKNOWN])
def test_what_max_restarts_counts_never_comes_back(reason: ExitReason) -> None:
    """As with torchrun, it is a number for the whole life of the job."""
    job = patient_job()
    job.failed("a", 1, reason=reason)
    job.beat("a", round=2, steps=1, step=0, first=0.0, last=0.0)
    job.now += 1e6
    job.failed("a", 2, reason=reason)
    assert job.state() == "failed"


def test_a_script_that_reports_no_steps_trains_while_its_workers_run() -> None:
    job = patient_job(lost=1)
    for round_number in (1, 2, 3):
        job.started("a", round_number)
        job.now += 7 * 3600.0
        job.failed("a", round_number, reason=ExitReason.LOST)
    assert job.state() == "running"
    job.now += 7 * 3600.0
    assert fail_until_the_end(job, ExitReason.LOST) == 0, "its workers never ran"


@pytest.mark.parametrize("compacted", [False, True])
def test_what_came_back_survives_the_master(compacted: bool) -> None:
    job = patient_job(lost=2)
    for _ in range(2):
        job.failed("a", job.round(), reason=ExitReason.LOST, last=0.0)
    job.beat("a", round=3, steps=1, step=0, first=0.0, last=0.0)
    job.restart(job.now + 3600.0, compacted=compacted)
    job.attach("a", job_rules=RULES, round=3)
    job.now += 2.5 * 3600.0
    job.failed("a", 3, reason=ExitReason.LOST)
    assert job.state() == "running"
    job.restart(compacted=compacted)
    job.attach("a", job_rules=RULES, round=4)
    assert fail_until_the_end(job, ExitReason.LOST) == 0
