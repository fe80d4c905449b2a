# SPDX-License-Identifier: Apache-2.0
"""What a plan is no wish for: ranks that were given up, and restarts that were none."""

import pytest

from holdfast.core.job import events as ev
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Move
from holdfast.protocol import messages as m
from tests.core.harness import Job, join, of_kind, orders, pushes, running_fleet, settled

# ---- ranks that were given up -----------------------------------------------------------------


def fleet_without_rank_1(compacted: bool | None) -> Job:
    """Of three nodes that train, the second has used up its budget."""
    job = running_fleet(3, node_relaunches=dict.fromkeys(ExitReason, 0))
    outcome = job.seen(1, Phase.FAILED, ExitReason.HARDWARE)
    assert [fact.node_rank for fact in of_kind(ev.RankGivenUp, outcome.facts)] == [1]
    assert job.world() == [0, 2]
    return restarted(job, compacted)


def restarted(job: Job, compacted: bool | None) -> Job:
    if compacted is not None:
        job.restart(compacted=compacted)
        for name in ("n0", "n2"):
            job.attach(name, node=job.node_of[name], round=job.round())
    return job


@pytest.mark.parametrize("compacted", [None, False, True])
def test_the_present_size_told_again_orders_nobody_who_was_given_up(
    compacted: bool | None,
) -> None:
    """Every edit of a job's spec tells its size again: that is no wish for a new try."""
    job = fleet_without_rank_1(compacted)
    for _ in range(2):
        outcome = job.plan(nodes=3, memory_mib=4096)
        assert settled(outcome)[0]
        assert orders(outcome) == []
        job = restarted(job, compacted)
    assert job.machines.view(job.now)["wanted"]["nodes"] == 3  # type: ignore[index]
    assert job.world() == [0, 2]


@pytest.mark.parametrize("compacted", [None, False, True])
@pytest.mark.parametrize(("sizes", "ordered"), [((4,), [1, 3]), ((2, 3), [1])])
def test_another_size_is_a_new_try_for_who_was_given_up(
    compacted: bool | None, sizes: tuple[int, ...], ordered: list[int]
) -> None:
    job = fleet_without_rank_1(compacted)
    for size in sizes:
        outcome = job.plan(nodes=size)
        job = restarted(job, compacted)
    assert [order.node_rank for order in orders(outcome)] == ordered


@pytest.mark.parametrize("compacted", [None, False, True])
def test_a_resumed_job_begins_with_all_its_nodes(compacted: bool | None) -> None:
    job = fleet_without_rank_1(compacted)
    job.plan(nodes=3, suspend=True)
    for name in ("n0", "n2"):
        job.leave(name)
    if compacted is not None:
        job.restart(compacted=compacted)
    outcome = job.plan(nodes=3, suspend=False)
    assert [order.node_rank for order in orders(outcome)] == [0, 1, 2]


# ---- how often workers were restarted ---------------------------------------------------------


def restarts_told(outcome: Outcome) -> set[int]:
    """TORCHELASTIC_RESTART_COUNT of the workers that start now."""
    return {body.restarts for _, body in pushes(outcome) if isinstance(body, m.RunWorld)}


@pytest.mark.parametrize("compacted", [None, False, True])
def test_a_resume_is_no_restart_after_a_failure(compacted: bool | None) -> None:
    job = running_fleet(2)
    job.plan(suspend=True)
    for name in ("n0", "n1"):
        job.leave(name)
    if compacted is not None:
        job.restart(compacted=compacted)
    job.plan(suspend=False)
    join(job, 2)
    assert restarts_told(join(job, 3)) == {0}
    # A failure afterwards counts as ever.
    assert restarts_told(job.seen(3, Phase.FAILED, ExitReason.KILLED)) == {1}


@pytest.mark.parametrize("compacted", [None, False, True])
def test_a_failure_before_the_job_was_suspended_still_counts(compacted: bool | None) -> None:
    job = running_fleet(2, min_nodes=2)
    job.seen(1, Phase.FAILED, ExitReason.KILLED)
    job.plan(suspend=True)
    job.leave("n0")
    if compacted is not None:
        job.restart(compacted=compacted)
    job.plan(suspend=False)
    join(job, 3, min_nodes=2)
    assert restarts_told(join(job, 4, min_nodes=2)) == {1}


def test_the_move_of_the_only_node_is_no_restart_either() -> None:
    job = running_fleet(1)
    job.plan(migrate=(Move(node_id=NodeId(0)),))
    join(job, 1)
    assert restarts_told(job.leave("n0")) == {0}
