# SPDX-License-Identifier: Apache-2.0
"""Nodes that are launched again: with what, how often, where not; and nodes that stay pending."""

from typing import Any

import pytest

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.membership.awaiting_reason import WORD_S
from holdfast.core.job.membership.failed_hosts import AVOIDED_MAX, REMEMBERED_S
from holdfast.core.kernel import Outcome
from holdfast.model.errors import UsageError
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.resources import Limits
from tests.core.harness import (
    Job,
    fail,
    join,
    of_kind,
    orders,
    reason_of_the_end,
    removed,
    running_fleet,
)


def new_fleet(size: int, **spec: Any) -> Job:
    """A job whose size comes from its platform; no agent has come yet."""
    return Job(JobSpec(max_nodes=size, managed=True, size_from_platform=True, **spec))


# ---- memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [None, False, True])
def test_a_node_that_was_out_of_memory_gets_twice_as_much_up_to_the_most(
    compacted: bool | None,
) -> None:
    job = new_fleet(2, node_memory_mib=1000, limits=Limits(memory_mib=4000))
    node, asked = 1, []
    while (order := fail(job, node, ExitReason.OOM)) is not None:
        assert order.node_rank == 1
        asked.append((order.memory_mib, order.relaunches))
        node = order.node_id
        if compacted is not None:
            job.restart(compacted=compacted)
    assert asked == [(2000, 1), (3000, 2)]
    # The other node alone is enough.
    assert job.state() == "running"


def test_a_job_that_ends_for_want_of_memory_says_so() -> None:
    job = new_fleet(1, node_memory_mib=1000, limits=Limits(memory_mib=1000))
    assert fail(job, 0, ExitReason.OOM) is None
    assert reason_of_the_end(job) == (
        "0 of at least 1 nodes are left, and node rank 0 was out of memory with 1000 MiB, and all "
        "nodes together may ask for 1000 MiB, which leaves nothing; the last word on it: the "
        "platform reports it as failed"
    )


def test_what_was_raised_stays_raised_for_whatever_reason_the_next_one_goes() -> None:
    job = new_fleet(1, node_memory_mib=1000)
    first = fail(job, 0, ExitReason.OOM)
    assert first is not None
    second = fail(job, first.node_id, ExitReason.KILLED)
    assert second is not None
    assert (second.memory_mib, second.relaunches) == (2000, 2)


def test_memory_that_nobody_knows_is_not_raised() -> None:
    order = fail(new_fleet(1), 0, ExitReason.OOM)
    assert order is not None
    assert order.memory_mib == 0


# ---- the platform's word ----------------------------------------------------------------------


def test_the_successor_of_a_node_that_fell_silent_waits_for_the_platform_to_say_why() -> None:
    """Found with a real kubelet: a stream breaks before anybody says that the memory was out."""
    job = running_fleet(2, node_memory_mib=1000)
    job.absent("n1")
    outcome = job.wait(job.now + 0.3)
    assert job.world() == [0]
    assert orders(outcome) == []
    assert removed(outcome) == []
    outcome = job.seen(1, Phase.FAILED, ExitReason.OOM, job.now + 1.0)
    (order,) = orders(outcome)
    assert (order.node_rank, order.memory_mib) == (1, 2000)
    assert removed(outcome) == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_platform_that_says_nothing_is_not_waited_for_long(restarts: bool) -> None:
    job = running_fleet(2)
    job.absent("n1")
    job.wait(job.now + 0.3)
    if restarts:
        job.restart()
    outcome = job.wait(job.now + WORD_S)
    assert [order.node_rank for order in orders(outcome)] == [1]
    assert removed(outcome) == [1]


# ---- budgets ----------------------------------------------------------------------------------


def test_evictions_use_up_nobody_s_budget() -> None:
    spec = JobSpec()
    spec.node_relaunches.update({ExitReason.KILLED: 1000, ExitReason.HARDWARE: 1})
    job = new_fleet(1, node_relaunches=spec.node_relaunches, job_relaunches=1, critical={0: 1})
    node = 0
    for _ in range(30):
        order = fail(job, node, ExitReason.KILLED)
        assert order is not None
        node = order.node_id
    order = fail(job, node, ExitReason.HARDWARE)
    assert order is not None
    assert fail(job, order.node_id, ExitReason.HARDWARE) is None


def test_a_job_has_a_limit_of_its_own() -> None:
    job = new_fleet(3, job_relaunches=2)
    for node in (0, 1):
        assert fail(job, node, ExitReason.HARDWARE) is not None
    assert fail(job, 2, ExitReason.OOM) is None
    assert job.state() == "running"


@pytest.mark.parametrize("limit", [0, 1, 3])
@pytest.mark.parametrize("compacted", [None, True])
def test_weakness_one_rule_says_when_a_critical_node_is_launched_again_and_when_the_job_ends(
    limit: int, compacted: bool | None
) -> None:
    """CP 6.4: one place counted with >=, the other with >, and a job ended while its node came."""
    job = new_fleet(2, critical={0: limit})
    node, relaunched = 0, 0
    reasons = [ExitReason.HARDWARE, ExitReason.OOM, ExitReason.UNKNOWN, ExitReason.STALLED]
    for reason in reasons:
        order = fail(job, node, reason)
        assert (order is None) is (job.state() == "failed")
        if order is None:
            break
        node, relaunched = order.node_id, relaunched + 1
        if compacted is not None:
            job.restart(compacted=compacted)
    assert relaunched == limit
    assert reason_of_the_end(job) == (
        f"critical node rank 0 was lost ({reasons[limit]}), and node rank 0 has used the {limit} "
        "relaunches that it has as critical; the last word on it: the platform reports it as failed"
    )


def test_every_node_can_be_critical() -> None:
    job = new_fleet(3, critical={0: 5}, critical_others=0)
    assert fail(job, 0, ExitReason.HARDWARE) is not None
    assert fail(job, 2, ExitReason.HARDWARE) is None
    assert job.state() == "failed"


# ---- priority and groups ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "size", "high"),
    [("0.5", 10, 5), ("0.5", 5, 3), ("0.29", 50, 15), ("1", 4, 4), ("0.01", 3, 0), ("1/3", 3, 1)],
)
def test_weakness_exactly_the_fraction_of_the_ranks_has_high_priority(
    fraction: str, size: int, high: int
) -> None:
    """CP 6.1: one node too many was high, 6 of 10 for a half."""
    job = Job(
        JobSpec(max_nodes=size, managed=True, size_from_platform=True, priority=fraction),
        started=False,
    )
    priorities = [order.priority for order in orders(job.start())]
    assert priorities == ["high"] * high + ["low"] * (size - high)


def test_a_priority_that_is_none_is_refused() -> None:
    for priority in ("urgent", "0", "1.5", "-0.5", "1/0"):
        with pytest.raises(UsageError, match="priority"):
            JobSpec(priority=priority).validate()


def test_a_group_that_cannot_be_completed_is_launched_again_elsewhere() -> None:
    spec = JobSpec(
        max_nodes=4,
        managed=True,
        size_from_platform=True,
        groups={0: 2, 1: 2},
        group_pending_s=300.0,
        group_relaunches=2,
    )
    job = Job(spec, started=False)
    assert [(o.node_rank, o.group) for o in orders(job.start())] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for node in range(4):
        join(job, node)
    order = orders(job.seen(3, Phase.FAILED, ExitReason.HARDWARE))[0]
    assert (order.node_id, order.group) == (4, 1)
    job.seen(4, Phase.PENDING)
    began = job.now
    for node in range(3):
        job.beat(f"n{node}")
    outcome = Outcome()
    while not of_kind(ev.GroupMoved, outcome.facts):
        for node in range(3):
            job.beat(f"n{node}")
        outcome = job.wait(job.now + 10.0)
    assert job.now - began == 300.0
    assert sorted(removed(outcome)) == [2, 4]
    assert [(o.node_rank, o.group) for o in orders(outcome)] == [(3, 1001)]
    # The other one of the group comes when the node before it has left.
    assert [(o.node_rank, o.group) for o in orders(job.leave("n2"))] == [(2, 1001)]


# ---- hosts ------------------------------------------------------------------------------------


def spread(job: Job, size: int) -> None:
    for node in range(size):
        job.seen(node, Phase.RUNNING, host=f"m{node}")


@pytest.mark.parametrize("compacted", [None, False, True])
def test_weakness_a_host_with_a_hardware_failure_is_avoided(compacted: bool | None) -> None:
    """CP 6.4: no anti-affinity to a faulty host."""
    job = new_fleet(3)
    spread(job, 3)
    outcome = job.seen(0, Phase.FAILED, ExitReason.HARDWARE)
    assert of_kind(ev.HostAvoided, outcome.facts) == [ev.HostAvoided("m0", ExitReason.HARDWARE)]
    assert orders(outcome)[0].avoid_hosts == ("m0",)
    if compacted is not None:
        job.restart(compacted=compacted)
    order = orders(job.seen(1, Phase.FAILED, ExitReason.KILLED))[0]
    assert order.avoid_hosts == ("m0",)


@pytest.mark.parametrize("reason", [ExitReason.LOST, ExitReason.STALLED, ExitReason.UNKNOWN])
@pytest.mark.parametrize(("apart_s", "avoided"), [(100.0, True), (REMEMBERED_S + 1, False)])
def test_the_second_unexplained_failure_on_a_host_decides(
    reason: ExitReason, apart_s: float, avoided: bool
) -> None:
    job = new_fleet(2)
    spread(job, 2)
    first = fail(job, 0, reason, "m0")
    assert first is not None
    assert first.avoid_hosts == ()
    job.wait(job.now + apart_s)
    second = fail(job, first.node_id, reason, "m0")
    assert second is not None
    assert second.avoid_hosts == (("m0",) if avoided else ())


@pytest.mark.parametrize("reason", [ExitReason.KILLED, ExitReason.OOM])
def test_what_is_no_fault_of_the_host_is_not_held_against_it(reason: ExitReason) -> None:
    job = new_fleet(2)
    spread(job, 2)
    order = fail(job, 0, reason, "m0")
    assert order is not None
    assert fail(job, order.node_id, reason, "m0") is not None
    assert orders(job.plan(nodes=3))[0].avoid_hosts == ()


def test_the_list_of_hosts_is_short_and_never_holds_all_of_them() -> None:
    job = new_fleet(1)
    order = fail(job, 0, ExitReason.HARDWARE, "m0")
    assert order is not None
    assert order.avoid_hosts == (), "there is no other machine"
    job = new_fleet(AVOIDED_MAX + 3)
    spread(job, AVOIDED_MAX + 3)
    for node in range(AVOIDED_MAX + 2):
        job.seen(node, Phase.FAILED, ExitReason.HARDWARE)
    (order,) = orders(job.plan(nodes=AVOIDED_MAX + 4))
    assert order.avoid_hosts == tuple(f"m{node}" for node in range(2, AVOIDED_MAX + 2))


# ---- pending ----------------------------------------------------------------------------------


def pending_job(strategy: str, *, min_nodes: int, running: int, size: int = 3) -> Job:
    job = new_fleet(
        size,
        pending_timeout_s=100.0,
        pending_strategy=strategy,
        silence_s=1e6,
        lease_s=1e6,
    )
    for node in range(running):
        join(job, node, min_nodes=min_nodes)
    for node in range(running, size):
        job.seen(node, Phase.PENDING, message="0/3 hosts have room")
    return job


@pytest.mark.parametrize(
    ("strategy", "min_nodes", "running", "ends"),
    [
        ("skip", 3, 0, False),
        ("skip", 3, 2, False),
        ("necessary", 2, 2, False),
        ("necessary", 3, 2, True),
        ("necessary", 1, 0, True),
        ("all", 1, 2, True),
        ("all", 1, 3, False),
    ],
)
def test_nodes_that_stay_pending_end_the_job_as_its_strategy_says(
    strategy: str, min_nodes: int, running: int, ends: bool
) -> None:
    job = pending_job(strategy, min_nodes=min_nodes, running=running)
    job.wait(99.0)
    assert job.state() == "running"
    # Much longer than the join time-out: that one does not count while nodes are pending.
    job.wait(5000.0)
    assert (job.state() == "failed") is ends
    if ends:
        rank = running
        assert f"node rank {rank} for more than 100 s: 0/3 hosts have room" in reason_of_the_end(
            job
        )


@pytest.mark.parametrize("compacted", [False, True])
def test_the_time_of_a_pending_node_goes_on_when_the_master_is_restarted(compacted: bool) -> None:
    job = pending_job("all", min_nodes=1, running=2)
    job.restart(at=60.0, compacted=compacted)
    job.seen(2, Phase.PENDING)
    job.wait(99.0)
    assert job.state() == "running"
    job.wait(100.0)
    assert job.state() == "failed"


def test_a_node_that_gets_its_place_in_time_ends_nothing() -> None:
    job = pending_job("all", min_nodes=3, running=2)
    job.wait(50.0)
    join(job, 2, min_nodes=3)
    job.wait(5000.0)
    assert job.state() == "running"
    assert job.world() == [0, 1, 2]


def test_the_join_time_out_counts_again_when_nobody_is_pending() -> None:
    job = pending_job("skip", min_nodes=3, running=2)
    job.wait(5000.0)
    job.seen(2, Phase.RUNNING)
    outcome = job.wait(5599.0)
    assert not of_kind(cmd.FinishJob, outcome.commands)
    job.wait(5600.0)
    assert "no world formed within 600 s" in reason_of_the_end(job)


def test_a_strategy_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="none of skip, necessary, all"):
        JobSpec(pending_strategy="2").validate()
