# SPDX-License-Identifier: Apache-2.0
"""Verdicts and relaunches: each class of failure has a budget of its own."""

from collections.abc import Callable

import pytest

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId
from holdfast.model.job import NODE_RELAUNCHES, JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.protocol import messages as m
from tests.core.harness import Job, answers, of_kind, rules

NOT_THE_PROGRAM = [
    ExitReason.KILLED,
    ExitReason.HARDWARE,
    ExitReason.LOST,
    ExitReason.STALLED,
]


def job_with(max_restarts: int, **budgets: int) -> Job:
    spec = JobSpec()
    spec.worker_restarts.update({ExitReason(name): count for name, count in budgets.items()})
    job = Job(spec)
    job.attach("a", job_rules=rules(max_restarts=max_restarts))
    return job


def fail_until_the_end(job: Job, reason: ExitReason, at_most: int = 300) -> int:
    """How often the world was formed again before the job failed for this reason."""
    for count in range(at_most):
        job.failed("a", job.round(), reason=reason, last=0.0)
        if job.state() != "running":
            return count
    raise AssertionError("the job never failed")


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
@pytest.mark.parametrize("reason", [ExitReason.ERROR, ExitReason.OOM, ExitReason.UNKNOWN])
def test_failures_of_the_program_count_against_max_restarts(
    reason: ExitReason, max_restarts: int
) -> None:
    assert fail_until_the_end(job_with(max_restarts), reason) == max_restarts


@pytest.mark.parametrize("reason", NOT_THE_PROGRAM)
def test_other_failures_have_their_own_budget(reason: ExitReason) -> None:
    job = job_with(1, **{str(reason): 4})
    assert fail_until_the_end(job, reason) == 4


@pytest.mark.parametrize("reason", NOT_THE_PROGRAM)
def test_max_restarts_raises_every_smaller_budget(reason: ExitReason) -> None:
    job = job_with(6, **{str(reason): 4})
    assert fail_until_the_end(job, reason) == 6


def test_with_max_restarts_0_no_worker_is_restarted_but_a_lost_node_is_no_worker() -> None:
    for reason in (ExitReason.KILLED, ExitReason.HARDWARE, ExitReason.STALLED):
        assert fail_until_the_end(job_with(0), reason) == 0
    assert fail_until_the_end(job_with(0, lost=2), ExitReason.LOST) == 2


def test_preemptions_do_not_use_up_the_patience_for_bugs() -> None:
    job = job_with(2)
    for _ in range(20):
        job.failed("a", job.round(), reason=ExitReason.KILLED, last=0.0)
    assert job.state() == "running"
    assert fail_until_the_end(job, ExitReason.ERROR) == 2


def test_the_verdict_names_the_cause() -> None:
    job = job_with(0)
    outcome = job.failed("a", 1)
    (finish,) = of_kind(cmd.FinishJob, outcome.commands)
    assert not finish.end.ok
    assert finish.end.reason == "rank 0 on node rank 0 exited with code 1"
    assert finish.end.cause is not None
    assert finish.end.cause.pid == 77
    assert finish.end.cause_node_rank == 0


def test_an_exhausted_budget_is_said_in_words() -> None:
    job = job_with(1)
    fail_until_the_end(job, ExitReason.ERROR)
    reason = str(job.machines.view(job.now)["reason"])
    assert reason.endswith("; it failed 2 times; --max-restarts is 1")


@pytest.mark.parametrize("compacted", [False, True])
def test_budgets_survive_the_master(compacted: bool) -> None:
    job = job_with(3)
    job.failed("a", 1)
    job.failed("a", 2, last=0.0)
    job.restart(compacted=compacted)
    job.attach("a", job_rules=rules(max_restarts=3), round=3)
    assert fail_until_the_end(job, ExitReason.ERROR) == 1


def test_the_job_ends_once() -> None:
    job = job_with(0)
    job.failed("a", 1)
    again = job.feed(ev.StopRequested(9, 1, "the user asked"))
    assert answers(again) == [m.Done()]
    assert not of_kind(cmd.FinishJob, again.commands)
    assert "exited with code 1" in str(job.machines.view(job.now)["reason"])


def test_only_the_first_failure_of_a_round_counts() -> None:
    job = Job(JobSpec(min_nodes=2, max_nodes=2))
    job.attach("a")
    job.attach("b")
    job.failed("a", 1)
    job.failed("b", 1)
    assert job.machines.view(job.now)["restarts"] == {"error": 1}


def launch_of_next(job: Job, lost: Outcome) -> tuple[cmd.LaunchNode, float] | None:
    """The one launch that follows from a lost node, and how long that takes; None if none does."""
    began = job.now
    if not of_kind(ev.NodeOrdered, lost.facts):
        return None
    launches = of_kind(cmd.LaunchNode, lost.commands)
    if not launches:
        assert job.deadline is not None
        launches = of_kind(cmd.LaunchNode, job.wait(job.deadline).commands)
    (launch,) = launches
    return launch, job.now - began


@pytest.mark.parametrize("reason", list(ExitReason))
def test_a_node_rank_is_relaunched_as_often_as_its_class_allows(reason: ExitReason) -> None:
    job = Job(JobSpec(min_nodes=1, max_nodes=2, managed=True, join_timeout_s=1e6))
    node, relaunched = 1, 0
    job.seen(node, Phase.RUNNING)
    while found := launch_of_next(job, job.seen(node, Phase.FAILED, reason)):
        relaunched += 1
        assert found[0].order.node_rank == 1
        node = found[0].order.node_id
        job.seen(node, Phase.RUNNING)
    assert relaunched == NODE_RELAUNCHES[reason]


@pytest.mark.parametrize("pending", [False, True])
def test_a_platform_that_starts_nothing_for_minutes_uses_up_no_budget(pending: bool) -> None:
    """CP 6.4: no back-off. Found by the simulator: a rank's five relaunches were gone at once."""
    job = Job(JobSpec(min_nodes=2, max_nodes=2, managed=True, join_timeout_s=3600.0))
    node, pauses = NodeId(1), []
    for _ in range(12):
        if pending:
            job.seen(node, Phase.PENDING)
        found = launch_of_next(job, job.seen(node, Phase.FAILED, ExitReason.HARDWARE))
        assert found is not None
        node = found[0].order.node_id
        pauses.append(found[1])
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60]
    assert job.state() == "running"
    # The nodes that run have their whole budget.
    for _ in range(NODE_RELAUNCHES[ExitReason.HARDWARE]):
        job.seen(node, Phase.RUNNING)
        found = launch_of_next(job, job.seen(node, Phase.FAILED, ExitReason.HARDWARE))
        assert found is not None
        node = found[0].order.node_id
    job.seen(node, Phase.RUNNING)
    assert launch_of_next(job, job.seen(node, Phase.FAILED, ExitReason.HARDWARE)) is None
    assert job.state() == "failed"


def test_a_job_without_a_world_does_not_wait_for_its_platform_for_ever() -> None:
    job = Job(JobSpec(min_nodes=1, max_nodes=1, managed=True, join_timeout_s=100.0))
    node = 0
    while job.state() == "running":
        (order,) = of_kind(ev.NodeOrdered, job.seen(node, Phase.FAILED, ExitReason.HARDWARE).facts)
        node = order.node_id
        job.wait(job.now + order.pause_s)
    assert job.now >= 100.0
    assert "no world formed within 100 s" in str(job.machines.view(job.now)["reason"])


def test_an_agent_that_fails_before_it_attaches_is_not_started_for_ever() -> None:
    job = Job(JobSpec(min_nodes=1, max_nodes=1, managed=True))
    job.seen(0, Phase.PENDING)
    assert launch_of_next(job, job.seen(0, Phase.FAILED, ExitReason.ERROR)) is None
    assert job.state() == "failed"


@pytest.mark.parametrize(("ready_s", "pause_s"), [(59.0, 1.0), (60.0, 0.0)])
def test_a_node_that_was_ready_for_a_minute_ends_the_pauses(ready_s: float, pause_s: float) -> None:
    job = Job(JobSpec(managed=True, silence_s=1000.0, lease_s=1000.0))
    assert launch_of_next(job, job.seen(0, Phase.FAILED, ExitReason.KILLED)) is not None
    job.attach("a", node=1)
    job.wait(ready_s)
    found = launch_of_next(job, job.leave("a"))
    assert found is not None
    assert found[1] == pause_s


def test_relaunch_budgets_are_per_rank() -> None:
    spec = JobSpec(min_nodes=1, max_nodes=2, managed=True)
    spec.node_relaunches[ExitReason.OOM] = 1
    job = Job(spec)
    assert of_kind(cmd.LaunchNode, job.seen(0, Phase.FAILED, ExitReason.OOM).commands)
    assert of_kind(cmd.LaunchNode, job.seen(1, Phase.FAILED, ExitReason.OOM).commands)
    assert not of_kind(cmd.LaunchNode, job.seen(2, Phase.FAILED, ExitReason.OOM).commands)


def test_an_unmanaged_job_launches_nothing() -> None:
    job = Job(JobSpec(min_nodes=1, max_nodes=2))
    job.attach("a")
    job.attach("b")
    outcome = job.leave("b")
    assert not of_kind(cmd.LaunchNode, outcome.commands)
    assert not of_kind(cmd.RemoveNode, outcome.commands)


def test_a_managed_job_orders_its_nodes_and_its_spares() -> None:
    job = Job(JobSpec(min_nodes=1, max_nodes=2, spare_nodes=1, managed=True), started=False)
    outcome = job.feed(ev.MasterStarted())
    assert [one.order.node_rank for one in of_kind(cmd.LaunchNode, outcome.commands)] == [0, 1, 2]


@pytest.mark.parametrize(
    "lose",
    [
        lambda job: job.seen(0, Phase.FAILED, ExitReason.KILLED),
        lambda job: job.seen(0, Phase.GONE),
        lambda job: job.wait(100.0),
        lambda job: job.leave("a"),
    ],
    ids=["failed", "gone", "silent", "left"],
)
def test_no_end_of_a_node_is_replaced_twice(lose: Callable[[Job], object]) -> None:
    """However a node ends, and whatever is heard of it later, one successor is ordered."""
    job = Job(JobSpec(min_nodes=1, max_nodes=1, managed=True))
    job.attach("a", node=0, job_rules=rules_of(job.spec))
    lose(job)
    for phase in (Phase.RUNNING, Phase.FAILED, Phase.GONE, Phase.SUCCEEDED):
        job.seen(0, phase, ExitReason.KILLED)
    planned = [record for record in job.records if type(record).__name__ == "NodePlanned"]
    assert len(planned) == 2


def test_nodes_that_are_lost_together_use_one_unit_of_the_budget() -> None:
    """A switch that fails takes the nodes behind it away one after the other."""
    spec = JobSpec()
    spec.worker_restarts[ExitReason.LOST] = 1
    job = Job(spec)
    names = [f"n{number}" for number in range(6)]
    for name in names:
        job.attach(name, job_rules=rules(min_nodes=2, max_nodes=6, max_restarts=0, last_call_s=0.0))
    assert job.world() == [0, 1, 2, 3, 4, 5]

    def lose(name: str) -> str:
        job.seen(job.node_of[name], Phase.FAILED, ExitReason.LOST)
        return job.state()

    for name in names[:4]:
        job.now += 1.0
        assert lose(name) == "running"
    assert job.machines.view(job.now)["restarts"] == {"lost": 1}
    # All are there: those that are left, and the others again.
    job.now += spec.silence_s
    for name in names:
        job.attach(name)
    assert lose(names[4]) == "failed"
