# SPDX-License-Identifier: Apache-2.0
"""What all nodes of a job together may ask for, and what a job may change by itself.

The prior art has both fields in its manifests and uses the limits for its optimizer only: a scale
plan, or memory that is raised, goes over them without a word.
"""

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.job import events as ev
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Move, Order, Plan
from holdfast.model.resources import Limits, Resources
from holdfast.model.role import RoleSpec
from tests.core.harness import Job, fail, join, orders, reason_of_the_end, settled

SERVERS = RoleSpec(
    nodes=2,
    relaunches=dict.fromkeys(ExitReason, 3),
    ends_the_job=False,
    critical_others=3,
    node_memory_mib=500,
    node_cpu_milli=1000,
)


def job_of(size: int, **spec: Any) -> Job:
    """Nodes of 1000 MiB, 2 cores and 4 GPUs each."""
    return Job(spec_of(size, **spec))


def spec_of(size: int, **spec: Any) -> JobSpec:
    return JobSpec(
        max_nodes=size,
        managed=True,
        size_from_platform=True,
        node_memory_mib=1000,
        node_cpu_milli=2000,
        node_gpus=4,
        **spec,
    )


def out_of_memory(job: Job, order_or_node: Order | int) -> Order | None:
    """The order of the successor; None if there is none."""
    node = order_or_node if isinstance(order_or_node, int) else order_or_node.node_id
    return fail(job, node, ExitReason.OOM)


# ---- how many nodes, and how large --------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (Limits(memory_mib=3000), "4000 MiB of memory, more than 3000 MiB of memory"),
        (Limits(cpu_milli=7500), "8 cores, more than 7.5 cores"),
        (Limits(gpus=12), "16 GPUs, more than 12 GPUs"),
    ],
)
@pytest.mark.parametrize("plan", [{"nodes": 4}, {"add": (NodeRank(3),)}])
def test_a_plan_over_a_limit_is_refused_whole(
    limits: Limits, text: str, plan: dict[str, Any]
) -> None:
    job = job_of(3, limits=limits)
    outcome = job.plan(**plan)
    assert settled(outcome) == (False, f"all nodes together would ask for {text}")
    assert orders(outcome) == []
    assert job.machines.view(job.now)["wanted"]["nodes"] == 3  # type: ignore[index]


def test_a_plan_up_to_the_limits_is_done() -> None:
    job = job_of(2, limits=Limits(memory_mib=4000, cpu_milli=8000, gpus=16))
    assert len(orders(job.plan(nodes=4))) == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_what_a_plan_gives_every_new_node_counts_for_all_of_them(restarts: bool) -> None:
    job = job_of(3, limits=Limits(memory_mib=4000, cpu_milli=9000))
    assert not settled(job.plan(memory_mib=1400))[0]
    assert settled(job.plan(memory_mib=1300))[0]
    if restarts:
        job.restart(compacted=True)
    ok, text = settled(job.plan(nodes=4))
    assert (ok, "5200 MiB of memory" in text) == (False, True)
    assert settled(job.plan(cpu_milli=3000))[0]
    assert not settled(job.plan(cpu_milli=3001))[0]


def test_of_a_node_that_moves_only_the_new_one_counts() -> None:
    job = job_of(2, limits=Limits(memory_mib=3000))
    for node in range(2):
        join(job, node)
    assert not settled(job.plan(migrate=(Move(node_id=NodeId(1), memory_mib=2001),)))[0]
    assert settled(job.plan(migrate=(Move(node_id=NodeId(1), memory_mib=2000),)))[0]
    ok, text = settled(job.plan(nodes=3))
    assert (ok, "4000 MiB" in text) == (False, True)


def test_less_is_never_too_much() -> None:
    """A limit that was lowered under a running job must not keep it from shrinking."""
    job = job_of(4)
    assert settled(job.plan(limits=Limits(memory_mib=2000)))[0]
    assert settled(job.plan(nodes=3)) == (True, "the job has 3 nodes now, 4 before")
    assert not settled(job.plan(nodes=4))[0]


def test_limits_of_a_running_job_can_be_raised() -> None:
    job = job_of(2, limits=Limits(gpus=8))
    assert not settled(job.plan(nodes=3))[0]
    assert settled(job.plan(limits=Limits(gpus=12))) == (
        True,
        "the job has other limits from now on",
    )
    assert settled(job.plan(nodes=3))[0]


def test_nodes_come_back_within_the_limits() -> None:
    """A rank that waits for its next node keeps its part of the limits for it."""
    job = job_of(3, limits=Limits(memory_mib=3500))
    job.seen(2, Phase.RUNNING)
    outcome = job.seen(2, Phase.FAILED, ExitReason.KILLED)
    raised = out_of_memory(job, 1)
    assert [order.memory_mib for order in (*orders(outcome), raised) if order] == [0, 1500]


@pytest.mark.parametrize("roles", [{}, {"ps": SERVERS, "worker": SERVERS}])
def test_a_job_that_is_too_large_from_the_start_orders_nothing(roles: dict[str, RoleSpec]) -> None:
    """Its operator does not start it; a master whose state was lost may still meet such a job."""
    job = Job(spec_of(4, limits=Limits(memory_mib=1999), roles=roles), started=False)
    outcome = job.start()
    assert orders(outcome) == []
    asked = 2000 if roles else 4000
    assert (
        f"all nodes together would ask for {asked} MiB of memory, more than 1999 MiB of memory"
    ) in reason_of_the_end(job)


# ---- memory that is raised ----------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [None, False, True])
def test_memory_is_raised_as_far_as_all_nodes_together_leave_room(compacted: bool | None) -> None:
    job = job_of(2, limits=Limits(memory_mib=4500))
    first = out_of_memory(job, 0)
    assert first is not None
    second = out_of_memory(job, 1)
    assert second is not None
    if compacted is not None:
        job.restart(compacted=compacted)
    third = out_of_memory(job, first)
    assert third is not None
    assert (first.memory_mib, second.memory_mib, third.memory_mib) == (2000, 2000, 2500)
    assert out_of_memory(job, second) is None


@pytest.mark.parametrize("compacted", [None, True])
def test_without_auto_scale_a_node_is_launched_again_as_it_was(compacted: bool | None) -> None:
    job = job_of(1, auto_scale=False)
    node, asked = 0, []
    while (order := out_of_memory(job, node)) is not None:
        asked.append(order.memory_mib)
        node = order.node_id
        if compacted is not None:
            job.restart(compacted=compacted)
    assert asked == [0, 0, 0]
    assert (
        "node rank 0 has used its 3 relaunches for the reason oom; it has 1000 MiB, and its memory "
        "is not raised (autoScale is off, or optimizeMode manual)"
    ) in reason_of_the_end(job)


def test_without_auto_scale_people_still_change_the_job() -> None:
    job = job_of(2, auto_scale=False)
    assert settled(job.plan(nodes=3, memory_mib=3000))[0]
    order = out_of_memory(job, 0)
    assert order is not None
    assert order.memory_mib == 3000


def test_without_auto_scale_the_others_train_on_when_a_node_is_lost() -> None:
    """That is fault tolerance, and not scaling."""
    job = job_of(2, auto_scale=False)
    for node in range(2):
        join(job, node)
    job.seen(1, Phase.FAILED, ExitReason.KILLED)
    assert job.world() == [0]


# ---- nodes without agents -----------------------------------------------------------------------


def server_job(**spec: Any) -> Job:
    workers = RoleSpec(nodes=1, relaunches=SERVERS.relaunches, node_memory_mib=1000)
    return Job(JobSpec(managed=True, roles={"ps": SERVERS, "worker": workers}, **spec))


def test_a_plan_for_servers_over_a_limit_is_refused() -> None:
    job = server_job(limits=Limits(memory_mib=2500, cpu_milli=4000))
    assert settled(job.plan(role="ps", nodes=4)) == (
        False,
        "all nodes together would ask for 3000 MiB of memory, more than 2500 MiB of memory",
    )
    assert settled(job.plan(role="ps", nodes=3))[0]
    assert not settled(job.plan(role="ps", memory_mib=501))[0]
    assert not settled(job.plan(role="ps", cpu_milli=1500))[0]
    assert settled(job.plan(role="ps", remove=(NodeId(0),)))[0]
    assert settled(job.plan(role="ps", memory_mib=750))[0]
    assert settled(job.plan(limits=Limits()))[0]
    assert settled(job.plan(role="ps", nodes=50))[0]


def test_the_memory_of_servers_is_raised_within_the_limits_of_the_whole_job() -> None:
    job = server_job(limits=Limits(memory_mib=2300))
    first = out_of_memory(job, 0)
    assert first is not None
    assert first.memory_mib == 800
    assert out_of_memory(job, first) is None
    assert "it has 800 MiB of memory and may not have more" in reason_of_the_end(job)


def test_without_auto_scale_of_its_role_a_server_is_launched_again_as_it_was() -> None:
    servers = RoleSpec(
        nodes=1,
        relaunches=SERVERS.relaunches,
        critical_others=1,
        node_memory_mib=500,
        auto_scale=False,
    )
    job = Job(JobSpec(managed=True, roles={"worker": servers}))
    order = out_of_memory(job, 0)
    assert order is not None
    assert order.memory_mib == 0
    assert out_of_memory(job, order) is None
    assert "it has 500 MiB, and its memory is not raised (autoScale is off" in (
        reason_of_the_end(job)
    )


def test_nodes_with_and_without_agents_share_the_limits() -> None:
    evaluator = RoleSpec(nodes=1, relaunches=SERVERS.relaunches, node_memory_mib=700)
    job = job_of(2, roles={"evaluator": evaluator}, limits=Limits(memory_mib=3000))
    ok, text = settled(job.plan(nodes=3))
    assert (ok, "3700 MiB" in text) == (False, True)
    ok, text = settled(job.plan(role="evaluator", nodes=2))
    assert (ok, "3400 MiB" in text) == (False, True)
    raised = out_of_memory(job, 1)
    assert raised is not None
    assert raised.memory_mib == 1300


def part(role: str, **changes: Any) -> Plan:
    """What a plan asks for another role."""
    return Plan(plan_id=f"part/{role}", role=role, **changes)


def sizes(job: Job) -> tuple[object, object]:
    """Of the nodes with agents, and of each role without."""
    wanted: Any = job.machines.view(job.now)["wanted"]
    return wanted["nodes"], wanted["roles"]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_plan_for_two_roles_is_not_half_done(is_first: bool) -> None:
    """It was one plan for each: the workers got their size, and the servers' was refused."""
    servers = RoleSpec(nodes=2, relaunches=SERVERS.relaunches, holds_variables=True)
    workers = RoleSpec(nodes=1, relaunches=SERVERS.relaunches)
    job = Job(JobSpec(managed=True, roles={"ps": servers, "worker": workers}))
    parts = [part("worker", nodes=8), part("ps", nodes=4)]
    first, other = parts if is_first else reversed(parts)
    both = replace(first, others=(other,))
    outcome = job.feed(ev.PlanAsked(both))
    assert not settled(outcome)[0]
    assert not orders(outcome)
    assert sizes(job)[1] == {"ps": 2, "worker": 1}
    assert settled(job.plan(suspend=True))[0]
    # To tell it again changes nothing; another of the same words is done.
    assert not settled(job.feed(ev.PlanAsked(both)))[0]
    assert settled(job.feed(ev.PlanAsked(replace(both, plan_id="again")))) == (True, "it is done")
    assert sizes(job)[1] == {"ps": 4, "worker": 8}
    assert not settled(job.feed(ev.PlanAsked(replace(both, others=(part("chef", nodes=1),)))))[0]


def test_a_plan_for_nodes_with_and_without_agents_is_weighed_as_a_whole() -> None:
    evaluator = RoleSpec(nodes=1, relaunches=SERVERS.relaunches, node_memory_mib=700)
    job = job_of(2, roles={"evaluator": evaluator}, limits=Limits(memory_mib=4000))
    before = sizes(job)
    # Either fits, and both do not.
    outcome = job.plan(nodes=3, others=(part("evaluator", nodes=2),))
    assert settled(outcome) == (
        False,
        "all nodes together would ask for 4400 MiB of memory, more than 4000 MiB of memory",
    )
    assert (sizes(job), orders(outcome)) == (before, [])
    outcome = job.plan(nodes=1, others=(part("evaluator", nodes=0),))
    text = "it would leave the job without any node of role evaluator"
    assert (settled(outcome), sizes(job)) == ((False, text), before)
    outcome = job.plan(nodes=1, others=(part("evaluator", nodes=4),))
    text = "the job has 1 node now, 2 before; the part for role evaluator is done"
    assert settled(outcome) == (True, text)
    assert [(order.role, order.node_rank) for order in orders(outcome)] == [
        ("evaluator", rank) for rank in (1, 2, 3)
    ]
    outcome = job.plan(role="evaluator", nodes=1, others=(part("worker", nodes=3),))
    assert settled(outcome) == (True, "it is done")
    assert sizes(job) == (3, {"evaluator": 1})


def test_amounts_in_words() -> None:
    limits = Limits(cpu_milli=0, gpus=1)
    assert limits.refusal(Resources()) == ""
    assert limits.refusal(Resources(cpu_milli=1)) == (
        "all nodes together would ask for 0.001 cores, more than 0 cores"
    )
    assert limits.refusal(Resources(gpus=2), before=Resources(gpus=3)) == ""


@pytest.mark.parametrize("plan", [{"nodes": 2**31 - 1}, {"add": (NodeRank(2**31 - 1),)}])
def test_a_number_that_nobody_can_mean_is_refused_before_it_is_counted(
    plan: dict[str, Any],
) -> None:
    text = "a role has at most 100000 nodes"
    assert settled(server_job().plan(role="ps", **plan)) == (False, text)


@pytest.mark.parametrize("change", [{"nodes": 1}, {"remove": (NodeId(1),)}])
def test_a_plan_does_not_move_a_server_that_has_to_go_by_it(change: dict[str, Any]) -> None:
    outcome = server_job().plan(role="ps", migrate=(Move(node_id=NodeId(1)),), **change)
    text = "node id 1 cannot be moved: by the same plan it has to go"
    assert settled(outcome) == (False, text)
