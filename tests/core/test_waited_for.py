# SPDX-License-Identifier: Apache-2.0
"""Nodes that do not come: nobody is waited for for ever, and the end says what was waited for."""

from typing import Any

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job.membership.pending import LOOK_S
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Move
from tests.core.harness import Job, answers, join, of_kind, orders, removed, running_fleet, worlds

RESTARTS = [None, False, True]
"""No restart of the master; one that reads the journal; one that reads a snapshot of it."""


def fleet(size: int, **spec: Any) -> Job:
    """A job whose size comes from its platform; no agent has come yet, and none falls silent."""
    return Job(
        JobSpec(
            max_nodes=size,
            managed=True,
            size_from_platform=True,
            silence_s=1e6,
            lease_s=1e6,
            **spec,
        )
    )


def restarted(job: Job, compacted: bool | None) -> None:
    if compacted is not None:
        job.restart(compacted=compacted)
        for name, node in list(job.node_of.items()):
            job.attach(name, node=node, round=job.round())


def launched(job: Job, outcome: Outcome) -> int:
    """The node that was ordered, once its pause is over."""
    if not orders(outcome):
        assert job.deadline is not None
        outcome = job.wait(job.deadline)
    (order,) = orders(outcome)
    return order.node_id


def given_up(outcome: Outcome) -> list[tuple[int, str]]:
    return [(fact.node_rank, fact.why) for fact in of_kind(ev.RankGivenUp, outcome.facts)]


def reason_of_the_end(job: Job) -> str:
    assert job.state() == "failed"
    return str(job.machines.view(job.now)["reason"])


# ---- the restart time-out ---------------------------------------------------------------------


@pytest.mark.parametrize("compacted", RESTARTS)
def test_weakness_a_restart_time_out_gives_up_a_rank_that_never_runs(
    compacted: bool | None,
) -> None:
    """CP 9.3: the prior art's restartTimeout looked at evaluation shards only, never at nodes."""
    job = fleet(2, restart_timeout_s=300.0)
    join(job, 0)
    job.seen(1, Phase.PENDING, at=10.0, message="0/3 machines have room")
    job.wait(100.0)
    restarted(job, compacted)
    assert given_up(job.wait(299.0)) == []
    outcome = job.wait(300.0)
    why = (
        "node rank 1 has had no agent for its restart time-out of 300 s: "
        "it is pending (0/3 machines have room)"
    )
    assert given_up(outcome) == [(1, why)]
    assert removed(outcome) == [1]
    # The other goes on alone, and nobody is ordered in its place.
    job.wait(5000.0)
    assert job.state() == "running"
    assert job.world() == [0]
    assert orders(job.restart()) == []


@pytest.mark.parametrize("compacted", RESTARTS)
def test_a_relaunch_does_not_begin_the_restart_time_out_anew(compacted: bool | None) -> None:
    job = running_fleet(2, restart_timeout_s=300.0)
    job.wait(1000.0)
    node = launched(job, job.seen(1, Phase.FAILED, ExitReason.HARDWARE, message="XID 79"))
    for at in (1050.0, 1100.0, 1200.0):
        job.wait(at)
        restarted(job, compacted)
        failed = job.seen(node, Phase.FAILED, ExitReason.KILLED, message="evicted")
        node = launched(job, failed)
    assert given_up(job.wait(1299.0)) == []
    ((rank, why),) = given_up(job.wait(1300.0))
    assert rank == 1
    assert why.endswith(
        "of 300 s: it was ordered, and its platform has not shown it yet; "
        "the node before it ended: evicted"
    )


@pytest.mark.parametrize("compacted", RESTARTS)
def test_a_rank_that_ran_has_its_whole_time_again(compacted: bool | None) -> None:
    job = running_fleet(2, restart_timeout_s=300.0)
    node = launched(job, job.seen(1, Phase.FAILED, ExitReason.KILLED))
    job.wait(250.0)
    join(job, node)
    restarted(job, compacted)
    job.wait(1000.0)
    node = launched(job, job.seen(node, Phase.FAILED, ExitReason.KILLED))
    restarted(job, compacted)
    assert given_up(job.wait(1299.0)) == []
    assert [rank for rank, _ in given_up(job.wait(1300.0))] == [1]


@pytest.mark.parametrize("compacted", RESTARTS)
def test_time_counts_from_the_loss_and_not_from_when_its_reason_was_known(
    compacted: bool | None,
) -> None:
    job = running_fleet(2, restart_timeout_s=300.0)
    job.wait(1000.0)
    job.absent("n1")
    job.wait(1000.3)
    restarted(job, compacted)
    job.wait(1020.0)
    assert given_up(job.wait(1300.2)) == []
    assert [rank for rank, _ in given_up(job.wait(1300.3))] == [1]


def test_a_job_that_cannot_go_on_without_the_rank_ends_with_that_reason() -> None:
    job = fleet(2, restart_timeout_s=60.0)
    join(job, 0, min_nodes=2)
    job.wait(60.0)
    assert reason_of_the_end(job) == (
        "1 of at least 2 nodes are left, and node rank 1 has had no agent for its restart time-out "
        "of 60 s: it was ordered, and its platform has not shown it yet"
    )


def test_a_critical_rank_that_does_not_come_ends_the_job() -> None:
    job = fleet(3, restart_timeout_s=60.0, critical={2: 5})
    for node in (0, 1):
        join(job, node)
    job.seen(2, Phase.RUNNING, at=5.0)
    job.wait(60.0)
    assert reason_of_the_end(job) == (
        "critical node rank 2 is needed, and node rank 2 has had no agent for its restart time-out "
        "of 60 s: it runs and has started no agent"
    )


def test_without_a_restart_time_out_a_rank_is_waited_for_as_before() -> None:
    job = fleet(2)
    join(job, 0)
    job.seen(1, Phase.PENDING, at=10.0)
    job.wait(1e5)
    assert job.state() == "running"
    assert worlds(join(job, 1)) == [[0, 1]]


def test_nobody_is_given_up_for_the_time_of_a_suspended_job() -> None:
    job = fleet(2, restart_timeout_s=300.0)
    job.wait(200.0)
    job.plan(suspend=True)
    job.wait(5000.0)
    assert [order.node_rank for order in orders(job.plan(suspend=False))] == [0, 1]
    assert given_up(job.wait(5299.0)) == []
    assert [rank for rank, _ in given_up(job.wait(5300.0))] == [0, 1]


def test_a_move_that_does_not_come_about_leaves_the_node_where_it_is() -> None:
    job = running_fleet(2, restart_timeout_s=300.0)
    job.wait(100.0)
    job.plan(migrate=(Move(node_id=NodeId(1)),))
    outcome = job.wait(400.0)
    assert removed(outcome) == [2]
    assert given_up(outcome) == []
    assert job.world() == [0, 1]


@pytest.mark.parametrize("compacted", RESTARTS)
def test_a_successor_has_its_time_from_when_its_rank_went_down(compacted: bool | None) -> None:
    job = running_fleet(2, restart_timeout_s=300.0)
    job.wait(100.0)
    job.plan(migrate=(Move(node_id=NodeId(1)),))
    job.seen(1, Phase.FAILED, ExitReason.KILLED, at=350.0)
    restarted(job, compacted)
    assert removed(job.wait(649.0)) == []
    assert [rank for rank, _ in given_up(job.wait(650.0))] == [1]


def test_a_group_that_is_launched_again_elsewhere_goes_on_with_its_time() -> None:
    job = running_fleet(
        2, groups={0: 2}, group_pending_s=200.0, group_relaunches=1, restart_timeout_s=300.0
    )
    job.wait(1000.0)
    node = launched(job, job.seen(1, Phase.FAILED, ExitReason.HARDWARE))
    job.seen(node, Phase.PENDING)
    moved = job.wait(1200.0)
    assert len(of_kind(ev.GroupMoved, moved.facts)) == 1
    assert [order.node_rank for order in orders(moved)] == [1]
    assert [rank for rank, _ in given_up(job.wait(1300.0))] == [1]


def test_a_new_master_looks_before_it_gives_anybody_up() -> None:
    """What it knows of the waiting is old: the agent may be about to attach."""
    job = fleet(1, restart_timeout_s=300.0)
    job.seen(0, Phase.PENDING, at=5.0)
    job.restart(at=5000.0)
    assert given_up(job.wait(5000.0 + LOOK_S - 1.0)) == []
    assert worlds(join(job, 0)) == [[0]]
    job.wait(9000.0)
    assert job.state() == "running"


def test_a_new_master_looks_before_it_ends_a_job_whose_node_was_pending() -> None:
    job = fleet(1, pending_timeout_s=100.0, pending_strategy="all")
    job.seen(0, Phase.PENDING, at=5.0)
    job.restart(at=5000.0)
    job.wait(5001.0)
    job.seen(0, Phase.RUNNING)
    job.wait(5000.0 + LOOK_S)
    assert job.state() == "running"


# ---- nodes that run and start no agent --------------------------------------------------------

MUTE = (
    "it has run for 1800 s and no agent of Holdfast has attached: "
    "does its command start `holdfast run`?"
)


@pytest.mark.parametrize("compacted", RESTARTS)
def test_a_job_whose_nodes_never_start_an_agent_ends_with_that_reason(
    compacted: bool | None,
) -> None:
    """Nothing had opened the rules, so no time-out counted, and the job waited for ever."""
    relaunches = {**JobSpec().node_relaunches, ExitReason.STALLED: 1}
    job = fleet(2, node_relaunches=relaunches)
    for node in (0, 1):
        job.seen(node, Phase.RUNNING, at=5.0)
    job.wait(1000.0)
    restarted(job, compacted)
    assert orders(job.wait(1804.0)) == []
    outcome = job.wait(1805.0)
    assert removed(outcome) == [0, 1]
    assert [loss.message for loss in of_kind(ev.NodeLost, outcome.facts)] == [MUTE, MUTE]
    assert [order.node_id for order in orders(outcome)] == [2, 3]
    restarted(job, compacted)
    for node in (2, 3):
        job.seen(node, Phase.RUNNING, at=1900.0)
    job.wait(3699.0)
    assert job.state() == "running"
    job.wait(3700.0)
    assert reason_of_the_end(job) == (
        "0 of at least 1 nodes are left, and node rank 1 has used its 1 relaunches for the reason "
        f"stalled; the last word on it: {MUTE}"
    )


def test_an_agent_that_comes_in_time_changes_everything() -> None:
    job = fleet(1)
    job.seen(0, Phase.RUNNING, at=5.0)
    assert worlds(join(job, 0)) == [[0]]
    job.wait(1e5)
    assert job.state() == "running"
    assert job.world() == [0]


def test_an_agent_that_comes_too_late_is_turned_away() -> None:
    job = fleet(1)
    job.seen(0, Phase.RUNNING, at=5.0)
    job.wait(1805.0)
    (refusal,) = answers(join(job, 0))
    assert "node id 0 is no longer wanted" in str(refusal)
    assert worlds(join(job, 1)) == [[0]]


def test_a_job_that_trains_replaces_a_node_that_starts_no_agent() -> None:
    job = fleet(2)
    join(job, 0)
    job.seen(1, Phase.RUNNING, host="m1", at=5.0)
    assert [order.node_rank for order in orders(job.wait(1805.0))] == [1]
    assert worlds(join(job, 2)) == [[0, 1]]


def test_whoever_gives_a_restart_time_out_says_how_long_a_start_may_take() -> None:
    job = fleet(1, restart_timeout_s=7200.0)
    job.seen(0, Phase.RUNNING, at=5.0)
    assert orders(job.wait(7000.0)) == []
    assert worlds(join(job, 0)) == [[0]]
