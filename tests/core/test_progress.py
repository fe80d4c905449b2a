# SPDX-License-Identifier: Apache-2.0
"""Where the time goes: every second has one use, and every incident its stages."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.job import events as ev
from holdfast.core.job.accounting.progress import STEPLESS_S
from holdfast.model.checkpoint import NONE
from holdfast.model.ids import Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.protocol import checkpoints as c
from tests.core.harness import Job, checkpoint, of_kind, running_pair

CLOSE = 1e-6


def stepping(at: float = 10.0) -> Job:
    """Two nodes whose workers started at 4 and made 5 steps from 6 to 10."""
    job = Job(JobSpec(max_nodes=2, silence_s=10_000.0, lease_s=20_000.0))
    job.attach("a", at=1.0)
    job.attach("b", at=2.0)
    job.started("a", 1, at=3.0)
    job.started("b", 1, at=4.0)
    job.beat("a", at=at, round=1, steps=5, step=4, first=at - 6.0, last=at - 10.0)
    return job


def test_the_stages_of_a_start() -> None:
    job = stepping()
    assert job.seconds() == pytest.approx(
        {
            "idle": 1.0,
            "restart": 2.0,
            "start": 2.0,
            "restore": 0,
            "productive": 4.0,
            "checkpoint": 0,
            "detect": 0,
            "rendezvous": 0,
            "lost": 0,
        }
    )


def test_a_recovery_is_the_sum_of_its_stages() -> None:
    job = stepping()
    job.failed("b", 1, at=12.0, last=0.5)
    job.started("a", 2, at=12.2)
    job.started("b", 2, at=12.3)
    closed = job.beat("a", at=14.0, round=2, steps=1, step=5, first=1.0, last=1.0)
    (fact,) = of_kind(ev.IncidentClosed, closed.facts)
    stages = (fact.detect_s, fact.rendezvous_s, fact.restart_s, fact.restore_s)
    assert stages == pytest.approx((0.5, 0.0, 0.3, 0.7))
    (incident,) = job.incidents()
    assert incident["closed"] is True
    assert incident["recovery_s"] == pytest.approx(13.0 - 11.5)
    assert job.seconds()["productive"] == pytest.approx(11.5 - 6.0 + 1.0)
    assert job.seconds()["detect"] == pytest.approx(0.5)


def test_without_a_report_the_last_step_heard_of_ends_the_productive_time() -> None:
    job = stepping()
    job.leave("b", at=12.0)
    assert job.seconds()["productive"] == pytest.approx(4.0)
    assert job.seconds()["detect"] == pytest.approx(2.0)


def test_waiting_for_nodes_is_rendezvous() -> None:
    job = Job(JobSpec(min_nodes=2, max_nodes=2, silence_s=10_000.0, lease_s=20_000.0))
    job.attach("a")
    job.attach("b")
    job.leave("b", at=5.0)
    job.attach("c", at=25.0)
    assert job.seconds()["rendezvous"] == pytest.approx(20.0)
    assert job.incidents()[0]["stages"] == {"detect": 0.0, "rendezvous": 20.0}


def test_steps_done_again_are_lost_work() -> None:
    job = stepping()
    job.failed("b", 1, at=10.0, last=0.0)
    job.started("a", 2)
    job.started("b", 2)
    # Steps 3 and 4 are done again: the checkpoint held step 2. One step took 1 s.
    job.beat("a", at=12.0, round=2, steps=1, step=3, first=0.0, last=0.0)
    assert job.seconds()["lost"] == pytest.approx(2.0)
    assert job.seconds()["productive"] == pytest.approx(4.0 - 2.0)
    job.beat("a", at=13.0, round=2, steps=2, step=4, first=1.0, last=0.0)
    assert job.seconds()["lost"] == pytest.approx(2.0), "a loss is counted once"


def test_a_loss_is_counted_once_whichever_master_hears_of_it() -> None:
    for compacted in (False, True):
        job = stepping()
        job.failed("b", 1, at=10.0, last=0.0)
        job.restart(compacted=compacted)
        job.attach("a", round=2)
        job.attach("b", round=2)
        job.beat("a", at=12.0, round=2, steps=1, step=3, first=0.0, last=0.0)
        assert job.seconds()["lost"] == pytest.approx(2.0)
        job.restart(compacted=compacted)
        job.beat("a", at=13.0, round=2, steps=2, step=4, first=1.0, last=0.0)
        assert job.seconds()["lost"] == pytest.approx(2.0)


def test_a_world_that_grows_was_productive_until_then() -> None:
    job = Job(JobSpec(max_nodes=2, last_call_s=1.0, silence_s=10_000.0, lease_s=20_000.0))
    job.attach("a")
    job.wait(1.0)
    job.started("a", 1, at=2.0)
    job.beat("a", at=4.0, round=1, steps=2, step=1, first=1.0, last=0.0)
    job.attach("b", at=8.0)
    assert job.round() == 2
    assert job.seconds()["productive"] == pytest.approx(5.0)
    assert job.seconds()["detect"] == 0.0
    (incident,) = job.incidents()
    assert incident["stages"] == {"detect": 0.0, "rendezvous": 0.0}
    job.started("a", 2, at=8.5)
    job.started("b", 2, at=9.0)
    job.beat("b", at=10.0, round=2, steps=1, step=2, first=0.0, last=0.0)
    assert job.incidents()[0]["stages"] == pytest.approx(
        {"detect": 0.0, "rendezvous": 0.0, "restart": 1.0, "restore": 1.0}
    )


def test_growth_of_a_world_that_reports_no_steps_leaves_the_new_incident_open() -> None:
    job = Job(JobSpec(max_nodes=2, last_call_s=1.0, silence_s=10_000.0, lease_s=20_000.0))
    job.attach("a")
    job.wait(1.0)
    job.started("a", 1, at=2.0)
    job.attach("b", at=8.0)
    assert job.incidents()[0]["closed"] is False


def test_a_first_step_heard_of_before_the_last_start_closes_the_incident() -> None:
    job = stepping()
    job.failed("b", 1, at=12.0, last=0.0)
    job.started("a", 2, at=12.2)
    job.beat("a", at=13.0, round=2, steps=1, step=5, first=0.5, last=0.5)
    job.started("b", 2, at=13.1)
    (incident,) = job.incidents()
    assert incident["closed"] is True
    assert incident["recovery_s"] == pytest.approx(0.5)
    assert job.machines.progress.view(job.now)["stage"] == "productive"


def progress_of(job: Job) -> dict[str, Any]:
    return job.machines.progress.view(job.now)


def test_before_the_first_step_nothing_is_called_productive() -> None:
    """A script that fails at its imports has no goodput, however long that takes."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    job.wait(50.0)
    assert progress_of(job)["goodput"] is None
    job.failed("a", 1, at=60.0)
    assert job.seconds()["start"] == pytest.approx(60.0)
    assert (job.seconds()["productive"], progress_of(job)["goodput"]) == (0.0, None)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_script_that_reports_no_steps_is_not_for_ever_on_its_way_to_the_first(
    compacted: bool,
) -> None:
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    job.failed("a", 1, at=10.0)
    job.started("a", 2)
    job.started("b", 2)
    job.wait(10.0 + STEPLESS_S - 1.0)
    assert progress_of(job)["stage"] == "start"
    assert job.incidents()[0]["closed"] is False
    job.wait(10.0 + STEPLESS_S)
    assert progress_of(job)["stage"] == "productive"
    assert job.seconds()["productive"] == pytest.approx(STEPLESS_S)
    assert job.incidents()[0]["closed"] is True
    # From now on it is known: the next round is at work as soon as its workers run.
    job.restart(compacted=compacted)
    job.attach("a", round=2)
    job.attach("b", round=2)
    job.failed("a", 2, at=700.0)
    job.started("a", 3)
    job.started("b", 3)
    assert progress_of(job)["stage"] == "productive"
    assert all(incident["closed"] for incident in job.incidents())


def test_a_first_step_that_comes_very_late_was_no_work_before() -> None:
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    job.wait(900.0)
    assert job.seconds()["productive"] == pytest.approx(900.0)
    steps = job.beat("a", at=1000.0, round=1, steps=11, step=10, first=50.0, last=0.0)
    assert of_kind(ev.FirstStepMade, steps.facts) == [ev.FirstStepMade(Round(1), 950.0)]
    for _ in range(2):
        assert job.seconds()["start"] == pytest.approx(950.0)
        assert job.seconds()["productive"] == pytest.approx(50.0)
        job.restart()
        job.attach("a", round=1)
        job.attach("b", round=1)
        job.beat("a", round=1, steps=11, step=10, first=50.0, last=0.0)


def restored_at(loaded_at: float) -> Job:
    """A job that has stepped; its second round runs since 13 and has loaded a checkpoint."""
    job = stepping()
    job.failed("b", 1, at=12.0, last=0.0)
    job.started("a", 2, at=13.0)
    job.started("b", 2, at=13.0)
    asks = [restore_ask(), restore_ask()]
    checkpoint(job, asks[0], "a")
    job.wait(loaded_at)
    assert progress_of(job)["stage"] == "restore", "loading takes as long as it takes"
    checkpoint(job, asks[1], "b")
    return job


def test_a_round_that_has_loaded_and_makes_no_step_is_at_its_last_evaluation() -> None:
    job = restored_at(2 * STEPLESS_S)
    job.wait(3 * STEPLESS_S - 1.0)
    assert progress_of(job)["stage"] == "restore"
    assert job.incidents()[0]["closed"] is False
    told = job.wait(3 * STEPLESS_S)
    assert progress_of(job)["stage"] == "productive"
    assert len(of_kind(ev.IncidentClosed, told.facts)) == 1
    (incident,) = job.incidents()
    assert incident["closed"] is True
    assert incident["stages"]["restore"] == pytest.approx(2 * STEPLESS_S - 13.0)
    job.wait(4 * STEPLESS_S)
    assert job.seconds()["restore"] == pytest.approx(2 * STEPLESS_S - 13.0)
    assert job.seconds()["productive"] == pytest.approx(12.0 - 6.0 + 2 * STEPLESS_S)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_master_waits_no_longer_for_what_was_loaded_before_it(compacted: bool) -> None:
    job = restored_at(20.0)
    job.restart(at=30.0, compacted=compacted)
    job.attach("a", round=2)
    job.attach("b", round=2)
    job.wait(13.0 + STEPLESS_S)
    assert progress_of(job)["stage"] == "productive"


def test_a_late_first_step_after_a_restore_was_no_work_before() -> None:
    job = restored_at(20.0)
    job.wait(900.0)
    assert progress_of(job)["stage"] == "productive"
    step = job.beat("a", at=1000.0, round=2, steps=11, step=15, first=50.0, last=0.0)
    assert of_kind(ev.FirstStepMade, step.facts) == [ev.FirstStepMade(Round(2), 950.0)]
    again = job.beat("b", at=1000.0, round=2, steps=11, step=15, first=50.0, last=0.0)
    assert not of_kind(ev.FirstStepMade, again.facts)
    assert job.seconds()["restore"] == pytest.approx(950.0 - 13.0)
    assert job.seconds()["productive"] == pytest.approx(12.0 - 6.0 + 50.0)
    (incident,) = job.incidents()
    assert incident["stages"]["restore"] == pytest.approx(950.0 - 13.0)
    assert sum(job.seconds().values()) == pytest.approx(1000.0 - 1.0)


def test_what_a_round_without_a_step_did_is_lost_when_it_breaks() -> None:
    job = restored_at(20.0)
    job.wait(900.0)
    job.failed("a", 2, at=1000.0)
    assert job.seconds()["lost"] == pytest.approx(980.0)
    assert job.seconds()["detect"] == 0
    assert job.incidents()[-1]["stages"]["detect"] == 0


def test_an_open_incident_says_what_it_is_at_and_since_when() -> None:
    job = stepping()
    job.failed("b", 1, at=12.0, last=0.5)
    job.started("a", 2, at=12.2)
    job.wait(20.0)
    (incident,) = job.incidents()
    assert (incident["stage"], incident["stage_s"]) == ("restart", pytest.approx(8.0))
    assert incident["open_s"] == incident["recovery_s"] == pytest.approx(20.0 - 11.5)


def test_the_way_to_the_first_step_is_told_in_parts() -> None:
    """A spare's workers that import for long are not taken for a slow checkpoint."""
    job = stepping()
    job.failed("b", 1, at=12.0, last=0.0)
    job.started("a", 2, at=13.0)
    job.started("b", 2, at=13.0)
    asks = [restore_ask(), restore_ask()]
    job.now = 14.0
    checkpoint(job, asks[0], "a")
    assert job.incidents()[0]["part"] == "import", "the other node is not there yet"
    job.now = 33.0
    agreed = checkpoint(job, asks[1], "b")
    assert of_kind(ev.RestoreAgreed, agreed.facts)
    assert job.incidents()[0]["part"] == "first step"
    job.beat("a", at=35.0, round=2, steps=1, step=5, first=0.0, last=0.0)
    (incident,) = job.incidents()
    assert incident["stages"]["restore"] == pytest.approx(22.0)
    assert incident["restore_parts"] == pytest.approx({"import": 20.0, "load": 0, "first step": 2})


def restore_ask() -> c.NodeRestore:
    return c.NodeRestore(directory="/c", round=2, holdings=(), stored=(), prepared=NONE, wants=())


def test_steps_after_the_last_beat_are_counted_when_the_next_round_tells_of_them() -> None:
    job = stepping()
    job.failed("b", 1, at=12.5, last=0.0)
    job.started("a", 2)
    job.started("b", 2)
    # The last beat told of step 4 at 10; the next round goes on after step 6.
    job.beat("a", at=14.0, round=2, steps=1, step=7, first=0.0, last=0.0)
    assert (progress_of(job)["step"], progress_of(job)["steps_total"]) == (7, 8)
    assert progress_of(job)["step_age_s"] == 0.0


def test_after_the_end_no_time_is_counted() -> None:
    job = stepping()
    job.done("a", 1, at=11.0)
    job.done("b", 1, at=12.0)
    job.wait(500.0)
    assert sum(job.seconds().values()) == pytest.approx(11.0)


def test_beats_of_a_dead_round_and_of_the_future_count_for_nothing() -> None:
    job = stepping()
    for round_number in (0, 2, -1):
        job.beat("a", at=11.0, round=round_number, steps=900, step=900, first=1.0, last=0.0)
    assert job.machines.progress.view(job.now)["step"] == 4


def test_steps_are_counted_over_rounds_and_not_twice() -> None:
    job = stepping()
    job.failed("b", 1, at=11.0)
    job.beat("a", at=12.0, round=2, steps=3, step=7, first=0.5, last=0.0)
    job.beat("b", at=12.1, round=2, steps=2, step=6, first=0.5, last=0.0)
    view = job.machines.progress.view(job.now)
    assert (view["step"], view["steps_total"]) == (7, 8)


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_master_goes_on_in_the_same_stage(compacted: bool) -> None:
    job = stepping()
    job.restart(at=20.0, compacted=compacted)
    job.attach("a", round=1, at=21.0)
    job.attach("b", round=1, at=21.0)
    job.beat("b", at=22.0, round=1, steps=17, step=16, first=16.0, last=0.0)
    view = job.machines.progress.view(job.now)
    assert (view["stage"], view["step"], view["steps_total"]) == ("productive", 16, 17)
    assert job.seconds()["productive"] == pytest.approx(16.0)
    assert sum(job.seconds().values()) == pytest.approx(21.0)


def test_time_before_the_first_world_survives_the_master() -> None:
    job = Job(JobSpec(min_nodes=2, max_nodes=2, silence_s=10_000.0, lease_s=20_000.0))
    job.attach("a", at=5.0)
    job.restart(at=20.0)
    job.attach("a", at=25.0)
    assert job.seconds()["idle"] == pytest.approx(20.0)


ACTIONS = st.sampled_from(
    ["start a", "start b", "beat a", "beat b", "fail", "leave", "join", "wait", "restart"]
)


@given(st.lists(st.tuples(ACTIONS, st.floats(0.0, 7.0), st.integers(0, 9)), max_size=25))
@settings(max_examples=120, deadline=None)
def test_every_second_has_exactly_one_use(history: list[tuple[str, float, int]]) -> None:
    spec = JobSpec(max_nodes=2, silence_s=10_000.0, lease_s=20_000.0)
    spec.worker_restarts[ExitReason.ERROR] = 1000
    job, extra, steps = Job(spec), 0, 0
    job.attach("a")
    job.attach("b")
    for action, pause_s, number in history:
        job.now += pause_s
        verb, _, name = action.partition(" ")
        round_number = job.round()
        match verb:
            case "start":
                job.started(name, round_number)
            case "beat":
                steps += number
                job.beat(
                    name,
                    round=round_number,
                    steps=number,
                    step=steps - number // 2,
                    first=pause_s,
                    last=pause_s / 2,
                )
            case "fail":
                job.failed("a", round_number, last=float(number))
            case "leave":
                job.leave("b")
            case "join":
                extra += 1
                job.attach(f"extra-{extra}")
            case "restart":
                job.restart()
        assert sum(job.seconds().values()) == pytest.approx(job.now, abs=0.01)
        assert all(seconds >= -CLOSE for seconds in job.seconds().values())


def late_pair() -> Job:
    """Two nodes whose workers run and have made no step in all the time they have for it."""
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=7200.0)
    job.wait(7200.0)
    return job


@pytest.mark.parametrize("compacted", [False, True])
def test_a_round_without_a_first_step_is_an_incident_until_it_makes_one(compacted: bool) -> None:
    job = late_pair()
    (incident,) = job.incidents()
    assert (incident["closed"], incident["round"]) == (False, 1)
    assert incident["reason"] == "no first step within 7200 s"
    job.restart(compacted=compacted)
    job.attach("a", round=1)
    job.attach("b", round=1)
    assert [one["closed"] for one in job.incidents()] == [False]
    step = job.beat("a", at=7500.0, round=1, steps=1, step=0, first=1.0, last=1.0)
    assert [fact.number for fact in of_kind(ev.IncidentClosed, step.facts)] == [1]
    (incident,) = job.incidents()
    assert incident["closed"] is True
    assert incident["recovery_s"] == pytest.approx(job.seconds()["start"])


def test_a_late_first_step_took_the_time_of_its_round_only() -> None:
    """The rounds before were of a script without steps, for all that was known: that was work."""
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=7200.0)
    job.wait(5000.0)
    job.failed("a", 1, at=5000.0)
    job.wait(5010.0)
    for name in "ab":
        job.started(name, 2, at=5010.0)
    job.wait(12_500.0)
    job.beat("a", at=12_500.0, round=2, steps=1, step=0, first=0.0, last=0.0)
    assert [one["round"] for one in job.incidents()] == [1, 2]
    assert job.incidents()[1]["recovery_s"] == pytest.approx(7500.0, abs=10.0)


def test_the_late_first_step_of_a_job_that_succeeds_is_no_matter_any_more() -> None:
    """Its script reports no steps."""
    job = late_pair()
    for name in "ab":
        job.done(name, 1)
    assert job.state() == "succeeded"
    job.restart()
    assert [one["closed"] for one in job.incidents()] == [True]


def test_a_first_step_that_only_some_workers_made_is_an_incident_too() -> None:
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=7200.0)
    job.beat("a", at=5.0, round=1, steps=1, step=0, first=0.0, last=0.0)
    job.wait(7200.0)
    assert [one["reason"] for one in job.incidents()] == ["no first step within 7200 s"]
    assert [one["closed"] for one in job.incidents()] == [True]


def test_an_open_incident_is_not_joined_by_that_of_a_late_first_step() -> None:
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=300.0)
    job.failed("a", 1, at=10.0)
    job.wait(400.0)
    assert len(job.incidents()) == 1
