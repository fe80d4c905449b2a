# SPDX-License-Identifier: Apache-2.0
"""A world that lives, answers and makes no step any more is found by its own words."""

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from tests.core.harness import Job, of_kind, rules, worlds

BEAT_S = 5.0
HOUR_S = 3600.0


class Training:
    """Nodes `a` and `b` that beat every 5 s; a step takes one second."""

    def __init__(
        self, *, hang_after_s: float | None = None, max_restarts: int = 3, numbered: bool = True
    ) -> None:
        spec = JobSpec(max_nodes=2, silence_s=1e9, lease_s=1e9, hang_after_s=hang_after_s)
        spec.worker_restarts[ExitReason.ERROR] = max_restarts
        self.job = Job(spec)
        self.numbered = numbered
        self.rules = rules(max_nodes=2, max_restarts=max_restarts)
        for name in ("a", "b"):
            self.job.attach(name, job_rules=self.rules)
        #: By node: steps of the round and when the last was; what the round began from.
        self.steps = dict.fromkeys("ab", 0)
        self.stepped_at = dict.fromkeys("ab", 0.0)
        self.before = 0
        self.silent: set[str] = set()
        self.hangs: list[ev.WorldHurt] = []
        self.job.started("a", 1)
        self.job.started("b", 1)

    def train(self, seconds: float) -> None:
        """Both nodes step, and beat."""
        for _ in range(round(seconds / BEAT_S)):
            self.job.now += BEAT_S
            for name in self.steps:
                self.steps[name] += 5
                self.stepped_at[name] = self.job.now
            self._beats()

    def pause(self, seconds: float) -> list[ev.WorldHurt]:
        """Nobody steps, and everybody beats; answers with the hangs that were called."""
        known = len(self.hangs)
        for _ in range(round(seconds / BEAT_S)):
            self.job.now += BEAT_S
            self._beats()
        return self.hangs[known:]

    def _beats(self) -> None:
        for name, steps in self.steps.items():
            if name in self.silent:
                continue
            ago_s = self.job.now - self.stepped_at[name]
            outcome = self.job.beat(
                name,
                round=self.job.round(),
                steps=steps,
                step=self.before + steps if self.numbered and steps else -1,
                first=ago_s if steps else -1.0,
                last=ago_s if steps else -1.0,
            )
            self.hangs += of_kind(ev.WorldHurt, outcome.facts)
            if worlds(outcome):
                self._begin()
                return

    def _begin(self) -> None:
        """The next world begins where the last one was."""
        self.before += max(self.steps.values())
        self.steps = dict.fromkeys("ab", 0)
        for name in self.steps:
            self.job.started(name, self.job.round())

    def fail(self) -> None:
        """A worker is killed."""
        self.job.failed("a", self.job.round(), reason=ExitReason.KILLED)
        self._begin()

    def go_back(self, steps: int) -> None:
        """The world that just began restored an older checkpoint."""
        self.before -= steps


def grown(**options: float | int | None) -> Training:
    """A job that has trained for more than an hour without a pause."""
    training = Training(**options)  # type: ignore[arg-type]
    training.train(HOUR_S + 10.0)
    return training


def test_nobody_steps_and_the_workers_are_restarted() -> None:
    training = grown()
    (hang,) = training.pause(40.0)
    assert hang.reason is ExitReason.STALLED
    assert 30.0 < hang.last_step_ago_s <= 30.0 + BEAT_S
    assert training.job.round() == 2
    assert training.job.machines.view(training.job.now)["restarts"] == {"stalled": 1}
    (incident,) = training.job.incidents()
    assert incident["reason"] == (
        "no worker has made a step for 35 s, where 30 s are allowed; all nodes are at the same step"
    )
    assert training.job.seconds()["detect"] == pytest.approx(hang.last_step_ago_s)


def test_who_is_behind_is_named() -> None:
    training = grown()
    training.job.now += 1.0
    training.steps["a"] += 1
    training.stepped_at["a"] = training.job.now
    (hang,) = training.pause(60.0)
    assert hang.node_rank == 1
    assert hang.message.endswith("; node rank 1 is behind, at step 3610 when others are at 3611")


def test_one_node_that_steps_is_enough() -> None:
    training = grown()
    for _ in range(100):
        training.job.now += BEAT_S
        training.steps["a"] += 1
        training.stepped_at["a"] = training.job.now
        assert training.pause(BEAT_S) == []
    assert training.job.round() == 1


def test_a_script_that_reports_no_steps_is_never_hung() -> None:
    """The prior art took a node that reported nothing for a hung one."""
    training = Training(hang_after_s=20.0)
    assert training.pause(10 * HOUR_S) == []


def test_before_everybody_is_warm_nothing_is_called_a_hang() -> None:
    """Compilation, the first batches and a restore take as long as they take."""
    training = Training(hang_after_s=20.0)
    training.job.now += 60.0
    training.steps["a"] = 10
    training.stepped_at["a"] = training.job.now
    assert training.pause(HOUR_S) == []
    training.steps["b"] = 2
    training.stepped_at["b"] = training.job.now
    assert training.pause(HOUR_S) == []
    training.train(10.0)
    assert len(training.pause(30.0)) == 1


def test_a_young_job_is_given_five_minutes() -> None:
    """Its first evaluation or save may still be ahead."""
    training = Training()
    training.train(600.0)
    assert training.pause(300.0) == []
    training.train(10.0)
    (hang,) = training.pause(610.0)
    assert hang.last_step_ago_s > 600.0, "five minutes were an ordinary pause"


def test_a_pause_of_up_to_five_times_the_longest_so_far_is_none_of_our_business() -> None:
    training = grown()
    for seconds in (20.0, 90.0, 300.0):
        assert training.pause(seconds) == []
        training.train(600.0)
    # Five times is too much of a long one: five minutes more are enough.
    (hang,) = training.pause(700.0)
    assert 600.0 < hang.last_step_ago_s < 615.0
    assert "(the longest pause before was 300 s)" in hang.message


def test_a_long_evaluation_is_interrupted_a_few_times_and_then_known() -> None:
    """An hour without a step, which comes again at the same place after every restart."""
    training = grown()
    alarms = 0
    while hangs := training.pause(HOUR_S - 100.0):
        alarms += len(hangs)
        assert alarms < 10
        training.go_back(100)
        training.train(100.0)
    assert alarms == 3
    training.train(600.0)
    assert training.pause(HOUR_S) == [], "the second one is known"


@pytest.mark.parametrize("numbered", [True, False])
def test_a_hang_that_does_not_come_again_makes_nobody_more_patient(numbered: bool) -> None:
    training = grown(numbered=numbered)
    for turn in range(1, 4):
        (hang,) = training.pause(40.0)
        assert hang.last_step_ago_s <= 30.0 + BEAT_S
        # Without step numbers the place is passed when the round has more steps than that one.
        training.train(60.0 if numbered else HOUR_S + 100.0 * turn)


def test_without_step_numbers_the_steps_of_several_rounds_count() -> None:
    """Where something fails every 20 minutes, no round is ever as long as the one that hung."""
    training = grown(numbered=False)
    assert len(training.pause(40.0)) == 1
    for _ in range(4):
        training.train(1000.0)
        training.fail()
    training.train(100.0)
    (hang,) = training.pause(40.0)
    assert hang.last_step_ago_s <= 30.0 + BEAT_S


def test_who_reports_its_present_step_again_is_at_work() -> None:
    """As in an evaluation that says so."""
    training = grown()
    for _ in range(100):
        training.job.now += BEAT_S
        training.stepped_at["a"] = training.job.now
        assert training.pause(BEAT_S) == []
    (hang,) = training.pause(40.0)
    assert hang.last_step_ago_s <= 30.0 + BEAT_S, "that was no pause to learn from"


def test_a_hang_that_comes_again_has_more_time() -> None:
    training = grown()
    assert len(training.pause(40.0)) == 1
    training.go_back(100)
    training.train(50.0)
    assert training.pause(150.0) == []
    (second,) = training.pause(10.0)
    assert second.last_step_ago_s > 150.0


@pytest.mark.parametrize("seconds", [20.0, 120.0])
def test_what_the_user_says_is_what_counts(seconds: float) -> None:
    training = Training(hang_after_s=seconds)
    training.train(100.0)
    for _ in range(3):
        (hang,) = training.pause(seconds + 2 * BEAT_S)
        assert seconds < hang.last_step_ago_s <= seconds + BEAT_S
        training.train(100.0)


def test_off_is_off() -> None:
    training = grown(hang_after_s=float("inf"))
    assert training.pause(10 * HOUR_S) == []


def test_where_nothing_may_be_restarted_only_the_user_can_call_a_hang() -> None:
    assert grown(max_restarts=0).pause(10 * HOUR_S) == []
    asked = grown(max_restarts=0, hang_after_s=60.0)
    assert len(asked.pause(120.0)) == 1
    assert asked.job.state() == "failed"


def test_a_node_that_is_done_is_not_asked() -> None:
    training = grown()
    training.job.done("a", 1)
    del training.steps["a"]
    training.train(60.0)
    assert len(training.pause(60.0)) == 1


def test_who_says_nothing_has_not_said_that_it_hangs() -> None:
    """Silence is for liveness: no beat is no evidence about steps."""
    training = grown()
    training.silent.add("b")
    assert training.pause(HOUR_S) == []


@pytest.mark.parametrize("compacted", [False, True])
def test_workers_that_were_held_still_while_the_master_was_away_do_not_hang(
    compacted: bool,
) -> None:
    training = grown()
    training.job.restart(training.job.now + 500.0, compacted=compacted)
    for name in ("a", "b"):
        training.job.attach(name, job_rules=training.rules, round=1)
    assert training.pause(5.0) == []
    training.train(60.0)
    # Nor was it a pause of theirs, from which others could be measured.
    (hang,) = training.pause(40.0)
    assert hang.last_step_ago_s <= 30.0 + BEAT_S


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_learned_survives_the_master(compacted: bool) -> None:
    training = grown()
    assert training.pause(25.0) == []
    training.train(60.0)
    training.job.restart(compacted=compacted)
    for name in ("a", "b"):
        training.job.attach(name, job_rules=training.rules, round=1)
    training.train(60.0)
    assert training.pause(120.0) == []
    (hang,) = training.pause(20.0)
    assert 125.0 < hang.last_step_ago_s <= 125.0 + BEAT_S


def test_pauses_are_written_down_seldom() -> None:
    training = grown()
    for seconds in range(10, 200):
        training.pause(float(seconds))
        training.train(20.0)
    assert len(of_kind(rec.PatienceSet, training.job.records)) < 25


LATE_S = 7200.0


def first_step_job(*, hang_after_s: float | None = None) -> Job:
    job = Job(JobSpec(silence_s=1e9, lease_s=1e9, hang_after_s=hang_after_s))
    job.attach("a")
    return job


def late(job: Job) -> list[type[object]]:
    outcome = job.wait(job.now + LATE_S)
    return [
        type(fact) for fact in outcome.facts if isinstance(fact, ev.FirstStepLate | ev.WorldHurt)
    ]


def test_a_job_without_any_step_is_said_to_be_late_and_left_alone() -> None:
    """It may be one that reports no steps."""
    job = first_step_job()
    assert late(job) == [ev.FirstStepLate]
    assert job.round() == 1
    assert late(job) == []


def test_a_round_without_a_step_is_restarted_if_the_job_has_made_steps() -> None:
    job = first_step_job()
    job.beat("a", round=1, steps=1, step=0, first=0.0, last=0.0)
    assert late(job) == []
    job.failed("a", 1, last=0.1)
    assert late(job) == [ev.WorldHurt]
    assert job.round() == 3


@pytest.mark.parametrize("compacted", [False, True])
def test_a_job_that_has_stepped_is_restarted_once_for_want_of_a_first_step(compacted: bool) -> None:
    """In its last evaluation it makes none, and each restart would begin that again."""
    job = first_step_job()
    job.beat("a", round=1, steps=1, step=0, first=0.0, last=0.0)
    job.failed("a", 1, last=0.1)
    assert late(job) == [ev.WorldHurt]
    job.restart(compacted=compacted)
    job.attach("a", round=3)
    assert late(job) == [ev.FirstStepLate]
    assert late(job) == []
    assert job.round() == 3
    # A step shows that the script is not there yet.
    job.beat("a", round=3, steps=1, step=1, first=0.0, last=0.0)
    job.failed("a", 3, last=0.1)
    assert late(job) == [ev.WorldHurt]


def test_where_no_hang_is_looked_for_a_late_step_is_only_said() -> None:
    job = first_step_job(hang_after_s=float("inf"))
    job.beat("a", round=1, steps=1, step=0, first=0.0, last=0.0)
    job.failed("a", 1, last=0.1)
    assert late(job) == [ev.FirstStepLate]
