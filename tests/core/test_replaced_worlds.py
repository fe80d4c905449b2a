# SPDX-License-Identifier: Apache-2.0
"""Worlds that were replaced: nobody computes in one of them beside the present one."""

import pytest

from holdfast.model.job import JobSpec
from holdfast.protocol import messages as m
from tests.core.harness import Job, pushes, worlds


def silent_at_once_with_a_survivor() -> Job:
    """`a` and `b` compute behind a partition; only `a` is given up yet, and `b` has a new world.

    Of round 2, with `c`, node `b` never hears: both go on with round 1 until their leases end.
    """
    job = Job(JobSpec(min_nodes=1, max_nodes=2, lease_s=60.0))
    job.attach("a")
    job.attach("b")
    job.started("a", 1)
    job.started("b", 1)
    job.attach("c")
    job.beat("c", at=5.0)
    job.beat("b", at=9.0)
    job.beat("c", at=14.0)
    assert worlds(job.wait(16.0)) == [[1, 2]], "`a` was silent for 15 s"
    return job


def ends_at(job: Job, at: float) -> list[list[int]]:
    """The worlds that form until then, with `c` as the only one who is heard of."""
    formed = []
    while job.now + 5.0 < at:
        formed += worlds(job.beat("c", job.now + 5.0))
    return formed + worlds(job.wait(at))


def test_a_replaced_world_that_nobody_was_seen_to_leave_is_waited_for() -> None:
    job = silent_at_once_with_a_survivor()
    assert ends_at(job, 59.0) == [], "`a` may compute until 60"
    assert ends_at(job, 61.0) == [[2]]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_master_waits_for_it_too(compacted: bool) -> None:
    """The list was in memory only: a master that died in these seconds forgot it, and two worlds
    computed at once."""
    job = silent_at_once_with_a_survivor()
    job.restart(17.0, compacted=compacted)
    job.attach("c", at=18.0, round=2)
    # `b` is given up after 15 s of silence. Nobody knows how much of the lease of `a` was left.
    assert ends_at(job, 76.0) == []
    assert ends_at(job, 78.0) == [[2]]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_master_goes_on_when_one_of_its_nodes_is_seen_in_the_present_world(
    compacted: bool,
) -> None:
    job = silent_at_once_with_a_survivor()
    job.restart(17.0, compacted=compacted)
    job.attach("c", at=18.0, round=2)
    job.attach("b", at=19.0, round=2)
    assert worlds(job.leave("b", at=20.0)) == [[2]]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_master_goes_on_when_one_of_its_nodes_is_known_to_be_dead(compacted: bool) -> None:
    job = silent_at_once_with_a_survivor()
    job.started("b", 2)
    for at in range(20, 65, 5):
        job.beat("b", float(at))
        job.beat("c", float(at))
    job.wait(61.0)
    job.restart(compacted=compacted)
    job.attach("c", at=62.0, round=2)
    assert ends_at(job, 75.0) == []
    assert ends_at(job, 77.0) == [[2]], "`b` alone cannot go on with round 1, and `a` is dead"


@pytest.mark.parametrize("compacted", [False, True])
def test_a_node_that_may_still_run_is_not_forgotten_for_its_successors(compacted: bool) -> None:
    """Of each rank only the last ended node was kept: a new master took older ones for dead."""
    job = Job(JobSpec(min_nodes=1, max_nodes=1, lease_s=60.0))
    job.attach("a", rank=0)
    job.started("a", 1)
    job.absent("a", at=1.0)
    job.wait(2.0)
    job.attach("a2", at=3.0, rank=0)
    job.leave("a2", at=4.0)
    assert job.world() == [0], "its lease runs"
    assert job.round() == 1
    job.restart(5.0, compacted=compacted)
    assert worlds(job.attach("c", at=6.0, rank=0)) == []
    assert ends_at(job, 64.0) == [], "`a` may still compute"
    assert ends_at(job, 66.0) == [[0]]


def test_a_ready_node_without_a_place_in_the_next_world_is_told_to_stop() -> None:
    """Only the members of the next world were told anything: the workers of the node that was left
    out stayed, in a collective that cannot end."""
    job = Job(JobSpec(min_nodes=2, max_nodes=4, node_unit=2))
    for name in "abcd":
        job.attach(name)
    told = dict(pushes(job.leave("b")))
    kinds = {name: type(told.get(job.node_of[name])) for name in "acd"}
    assert kinds == {"a": m.RunWorld, "c": m.RunWorld, "d": m.StopWork}
    # It is not told again when it comes back without workers, and gets the next place.
    assert [body for _, body in pushes(job.attach("d", round=0))] == []
    assert job.world() == [0, 2]


def test_the_next_world_has_a_member_of_the_one_that_may_still_compute() -> None:
    """Found by the simulator, seed 20187: both nodes of a world were cut off. When the first was
    given up the spares had lower ranks than the second, made a world, and two computed at once."""
    job = Job(JobSpec(min_nodes=2, max_nodes=2))
    job.attach("a", rank=2)
    job.attach("b", rank=3)
    job.attach("c", rank=0)
    job.attach("d", rank=1)
    assert job.world() == [2, 3]
    for name in "bcd":
        job.beat(name, 5.0)
    for name in "cd":
        job.beat(name, 10.0)
    assert worlds(job.wait(16.0)) == [[0, 3]], "`a` was silent for 15 s, and `b` may be as well"


def test_the_next_world_has_a_member_of_each_that_may_still_compute() -> None:
    """Found by the simulator, seed 291953732359: the last node of the first world was left out,
    as spares had lower ranks, and it went on with nodes that were given up before."""
    job = Job(JobSpec(min_nodes=2, max_nodes=4, node_unit=2))
    for name, rank in zip("abcdef", (2, 3, 4, 5, 0, 1), strict=True):
        job.attach(name, rank=rank)
    assert job.world() == [2, 3, 4, 5]
    for at, names in ((1.0, "bcdef"), (2.0, "cdef"), (5.0, "def"), (10.0, "ef"), (14.0, "ef")):
        for name in names:
            job.beat(name, at)
    assert worlds(job.wait(15.5)) == [[0, 3, 4, 5]]
    assert worlds(job.wait(16.5)) == [[0, 1, 4, 5]]
    assert worlds(job.wait(17.5)) == [[0, 5]]
