# SPDX-License-Identifier: Apache-2.0
"""Plans: what people ask of a running job is done once, in order, across restarts of its master."""

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.membership.departures import LEAVE_S
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Move, Plan
from holdfast.protocol import messages as m
from tests.core.harness import (
    Job,
    answers,
    join,
    of_kind,
    orders,
    pushes,
    removed,
    running_fleet,
    settled,
    worlds,
)


def step(job: Job, name: str) -> Outcome:
    """A node of the present world tells of its first step."""
    return job.beat(name, job.now + 1.0, round=job.round(), steps=1, step=7, first=0.5, last=0.5)


# ---- the size of the job ----------------------------------------------------------------------


def test_a_job_grows_by_a_plan_and_its_world_with_it() -> None:
    job = running_fleet(2)
    outcome = job.plan(nodes=4)
    assert settled(outcome) == (True, "the job has 4 nodes now, 2 before")
    assert [(o.node_id, o.node_rank, o.size) for o in orders(outcome)] == [(2, 2, 4), (3, 3, 4)]
    join(job, 2)
    assert worlds(join(job, 3)) == [[0, 1, 2, 3]]


def test_weakness_a_new_node_never_gets_the_rank_of_a_live_one() -> None:
    """CP 8.5: rank = count + i duplicated a live rank when a middle one was missing."""
    job = running_fleet(4)
    job.plan(remove=(NodeId(1),))
    job.leave("n1")
    assert job.world() == [0, 2, 3]
    outcome = job.plan(nodes=5)
    assert [o.node_rank for o in orders(outcome)] == [1, 4]


def test_weakness_two_plans_in_a_row_never_give_an_id_twice() -> None:
    """CP 8.5: a second scale-up before the first was done used the queued ids again."""
    job = running_fleet(1)
    first, second = orders(job.plan(nodes=2)), orders(job.plan(nodes=4))
    assert [o.node_id for o in (*first, *second)] == [1, 2, 3]


def test_a_job_shrinks_without_a_failure_and_keeps_what_nodes_hold_until_the_next_step() -> None:
    job = running_fleet(4, min_nodes=2)
    outcome = job.plan(nodes=2)
    assert settled(outcome)[0]
    assert worlds(outcome) == [[0, 1]]
    assert of_kind(ev.WorldFormed, outcome.facts)[0].planned
    assert not of_kind(rec.RestartCounted, outcome.records)
    assert {node for node, body in pushes(outcome) if isinstance(body, m.StopWork)} == {2, 3}
    assert removed(outcome) == []
    assert sorted(removed(step(job, "n0"))) == [2, 3]
    for name in ("n2", "n3"):
        assert orders(job.leave(name)) == []
    assert job.machines.view(job.now)["wanted"] == {"nodes": 2, "suspended": False, "roles": {}}
    assert job.world() == [0, 1]


def test_a_script_that_reports_no_step_does_not_keep_a_node_for_ever() -> None:
    job = running_fleet(2)
    job.plan(nodes=1)
    assert removed(job.wait(job.now + LEAVE_S - 1)) == []
    assert removed(job.wait(job.now + 1)) == [1]


def test_who_is_of_least_use_goes_first() -> None:
    """Nodes that nobody has heard of, then spares, then the highest ranks; critical ones never."""
    job = running_fleet(4, critical={3: 2})
    job.plan(nodes=5)
    pending = job.plan(nodes=4)
    assert removed(pending) == [4]
    assert worlds(job.plan(nodes=3)) == [[0, 1, 3]]
    ok, text = settled(job.plan(nodes=2, remove=(NodeId(3),)))
    assert (ok, text) == (False, "node id 3 cannot be removed: its rank 3 is critical")


def test_a_job_never_shrinks_below_what_its_nodes_were_started_with() -> None:
    job = running_fleet(4, min_nodes=3)
    for changes in ({"nodes": 2}, {"remove": (NodeId(2), NodeId(3))}):
        before = job.snapshot()
        outcome = job.plan(**changes)
        assert settled(outcome) == (
            False,
            "the job cannot go on with 2 nodes: its nodes were started with at least 3",
        )
        assert not removed(outcome)
        assert [r for r in job.snapshot() if not isinstance(r, rec.PlanSettled)] == [
            r for r in before if not isinstance(r, rec.PlanSettled)
        ]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"nodes": 0}, "a job has 1 to 100000 nodes, not 0; suspend it to have none"),
        ({"nodes": 10**9}, "a job has 1 to 100000 nodes, not 1000000000; suspend it to have none"),
        ({"add": (NodeRank(-1),)}, "a node rank is between 0 and 99999, not -1"),
        (
            {"remove": (NodeId(7),)},
            "node id 7 cannot be removed: it is not part of the job, or about to go",
        ),
        (
            {"migrate": (Move(node_id=NodeId(7)),)},
            "node id 7 cannot be moved: it is not part of the job, or about to go",
        ),
        ({"role": "ps"}, "this job has no nodes of the role 'ps' that a plan could change"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_in_words(
    changes: dict[str, object], text: str
) -> None:
    job = running_fleet(2)
    assert settled(job.plan(**changes)) == (False, text)
    assert job.world() == [0, 1]


def test_the_size_of_a_job_that_people_started_is_fixed() -> None:
    for spec in (JobSpec(), JobSpec(managed=True)):
        job = Job(spec)
        text = "the size of this job is fixed: it was started with it"
        assert settled(job.plan(nodes=3)) == (False, text)


def test_ranks_are_added_and_nodes_removed_by_name() -> None:
    job = running_fleet(2)
    outcome = job.plan(add=(NodeRank(1), NodeRank(5)))
    assert [o.node_rank for o in orders(outcome)] == [5]
    join(job, 2)
    assert job.world() == [0, 1, 5]
    outcome = job.plan(remove=(NodeId(0),))
    assert worlds(outcome) == [[1, 5]]
    job.leave("n0")
    assert job.machines.view(job.now)["wanted"]["nodes"] == 2  # type: ignore[index]


def test_a_place_that_is_still_being_left_is_filled_when_it_is_free() -> None:
    job = running_fleet(3)
    job.plan(nodes=1)
    outcome = job.plan(nodes=3)
    assert orders(outcome) == []
    assert [o.node_rank for o in orders(job.leave("n1"))] == [1]
    assert [o.node_rank for o in orders(job.leave("n2"))] == [2]


def test_resources_of_a_plan_are_for_nodes_to_come() -> None:
    job = running_fleet(1)
    assert orders(job.plan(memory_mib=4096, cpu_milli=1500)) == []
    (order,) = orders(job.plan(nodes=2))
    assert (order.memory_mib, order.cpu_milli) == (4096, 1500)


# ---- once, and in order -----------------------------------------------------------------------


@pytest.mark.parametrize("compacted", [False, True])
def test_weakness_a_plan_is_done_once_even_if_a_new_master_is_told_again(compacted: bool) -> None:
    """CP 8.9: after a master restart all old manual plans ran again."""
    job = running_fleet(2)
    grow, shrink = Plan(plan_id="a", nodes=4), Plan(plan_id="b", nodes=2)
    job.feed(ev.PlanAsked(grow))
    job.feed(ev.PlanAsked(shrink))
    job.restart(compacted=compacted)
    for plan, text in (
        (grow, "the job has 4 nodes now, 2 before"),
        (shrink, "the job has 2 nodes now, 4 before"),
    ):
        again = job.feed(ev.PlanAsked(plan))
        assert settled(again) == (True, text)
        assert not orders(again)
        assert not again.records
    assert job.machines.view(job.now)["wanted"]["nodes"] == 2  # type: ignore[index]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_master_that_died_before_its_orders_left_gives_them_again(compacted: bool) -> None:
    job = running_fleet(2)
    first = orders(job.plan(nodes=4))
    assert orders(job.restart(compacted=compacted)) == first


@pytest.mark.parametrize("compacted", [False, True])
def test_a_master_that_died_before_a_removal_left_asks_for_it_again(compacted: bool) -> None:
    job = running_fleet(3)
    job.plan(nodes=1)
    job.restart(compacted=compacted)
    assert sorted(removed(job.wait(job.now))) == [1, 2]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_node_that_should_be_gone_is_removed_again_when_it_is_seen(compacted: bool) -> None:
    job = running_fleet(1)
    job.plan(nodes=2)
    job.seen(1, Phase.PENDING)
    assert removed(job.plan(nodes=1)) == [1]
    job.restart(compacted=compacted)
    assert removed(job.seen(1, Phase.PENDING)) == [1]
    # Also when another has had its rank since, and nobody remembers it.
    for node in (2, 3):
        job.plan(nodes=2)
        job.seen(node, Phase.PENDING)
        job.plan(nodes=1)
    assert removed(job.seen(1, Phase.RUNNING)) == [1]
    assert removed(job.seen(1, Phase.GONE)) == []


def test_a_plan_while_the_world_is_forming_holds_for_the_next() -> None:
    job = running_fleet(3, min_nodes=2)
    job.seen(2, Phase.FAILED, ExitReason.KILLED)
    assert job.world() == [0, 1]
    job.seen(1, Phase.FAILED, ExitReason.KILLED)
    assert settled(job.plan(nodes=2))[0]
    join(job, 4)
    assert job.world() == [0, 1]


def test_the_first_plan_of_a_job_tells_what_it_has_anyway() -> None:
    job = running_fleet(2)
    outcome = job.plan(plan_id="spec-1", nodes=2, suspend=False)
    assert settled(outcome) == (True, "nothing had to change")
    assert [type(record) for record in outcome.records] == [rec.JobSized, rec.PlanSettled]
    assert not orders(outcome)


# ---- moving -----------------------------------------------------------------------------------


def test_weakness_a_moved_node_keeps_its_rank_and_nobody_is_launched_in_its_place() -> None:
    """CP 6.7: the old node stayed relaunchable, and deleting it made a third of one rank."""
    job = running_fleet(2, node_memory_mib=1024)
    outcome = job.plan(migrate=(Move(node_id=NodeId(1), memory_mib=2048),))
    (order,) = orders(outcome)
    assert (order.node_id, order.node_rank, order.memory_mib) == (2, 1, 2048)
    assert removed(outcome) == []
    # A newcomer whose workers would start cold does not stop the world.
    assert worlds(join(job, 2, cold=True)) == []
    outcome = job.warmed("n2")
    (formed,) = of_kind(ev.WorldFormed, outcome.facts)
    assert [member.node_id for member in formed.world.members] == [0, 2]
    assert formed.planned
    outcome = job.leave("n1")
    assert orders(outcome) == []
    assert job.world() == [0, 1]


def test_a_move_that_fails_leaves_the_node_where_it_is() -> None:
    job = running_fleet(2)
    job.plan(migrate=(Move(node_id=NodeId(1)),))
    outcome = job.seen(2, Phase.FAILED, ExitReason.ERROR)
    assert orders(outcome) == []
    assert job.state() == "running"
    assert job.world() == [0, 1]
    # And it is launched again if it fails, as if nobody had asked.
    assert [o.node_rank for o in orders(job.seen(1, Phase.FAILED, ExitReason.KILLED))] == [1]


def test_a_node_that_is_lost_before_its_successor_is_ready_has_one_successor() -> None:
    job = running_fleet(2)
    job.plan(migrate=(Move(node_id=NodeId(1)),))
    assert orders(job.seen(1, Phase.FAILED, ExitReason.KILLED)) == []
    join(job, 2)
    assert job.world() == [0, 1]


def test_the_only_node_of_a_job_can_be_moved() -> None:
    """The new one computes when the old one has surely ceased to."""
    job = running_fleet(1)
    job.plan(migrate=(Move(node_id=NodeId(0)),))
    outcome = join(job, 1)
    assert worlds(outcome) == []
    assert removed(outcome) == [0]
    assert not of_kind(rec.RestartCounted, outcome.records)
    assert worlds(job.leave("n0")) == [[0]]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_move_survives_the_master(compacted: bool) -> None:
    job = running_fleet(2)
    job.plan(migrate=(Move(node_id=NodeId(1)),))
    join(job, 2, cold=True)
    job.restart(compacted=compacted)
    for node in (0, 1):
        job.attach(f"n{node}", node=node, round=1)
    assert worlds(job.attach("n2", node=2)) == [[0, 1]]
    assert sorted(member["node_id"] for member in job.machines.nodes.view(0.0)) == [0, 1, 2]


def test_a_node_that_was_to_take_a_place_goes_with_it() -> None:
    """Found by the histories: it stayed, and a restarted master launched it again."""
    job = running_fleet(2)
    job.plan(migrate=(Move(node_id=NodeId(1)),))
    assert 2 in removed(job.plan(nodes=1))
    job.leave("n1")
    assert orders(job.restart()) == []


def test_a_plan_does_not_move_a_node_that_has_to_go_by_it() -> None:
    job = running_fleet(3)
    outcome = job.plan(nodes=2, migrate=(Move(node_id=NodeId(2)),))
    text = "node id 2 cannot be moved: by the same plan it has to go"
    assert settled(outcome) == (False, text)


# ---- suspending -------------------------------------------------------------------------------


def test_a_suspended_job_has_no_nodes_and_goes_on_when_it_is_resumed() -> None:
    job = running_fleet(3, min_nodes=2)
    step(job, "n0")
    outcome = job.plan(suspend=True)
    assert settled(outcome) == (True, "the job is suspended")
    assert sorted(removed(outcome)) == [0, 1, 2]
    assert not of_kind(rec.RestartCounted, outcome.records)
    # They end with grace, and bring what they hold to storage: nobody stops them at once.
    assert not [body for _, body in pushes(outcome) if isinstance(body, m.StopWork)]
    for node in range(3):
        assert orders(job.leave(f"n{node}")) == []
    # The clock of the join time-out stands still.
    job.wait(job.now + 1e6)
    assert job.state() == "running"
    outcome = job.plan(suspend=False)
    assert settled(outcome) == (True, "the job is resumed")
    assert [(o.node_id, o.node_rank) for o in orders(outcome)] == [(3, 0), (4, 1), (5, 2)]
    for node in (3, 4):
        assert worlds(join(job, node, min_nodes=2)) == []
    assert worlds(join(job, 5, min_nodes=2)) == [[0, 1, 2]]
    assert job.machines.view(job.now)["restarts"] == {}


def test_the_time_in_which_a_job_was_suspended_is_idle() -> None:
    job = running_fleet(1)
    step(job, "n0")
    job.plan(job.now + 9.0, suspend=True)
    job.leave("n0")
    before = job.seconds()["idle"]
    job.wait(job.now + 500.0)
    assert job.seconds()["idle"] == before + 500.0
    assert job.incidents() == []


@pytest.mark.parametrize("compacted", [False, True])
def test_a_suspended_job_stays_so_when_its_master_is_restarted(compacted: bool) -> None:
    job = running_fleet(2)
    job.plan(suspend=True)
    job.leave("n0")
    outcome = job.restart(compacted=compacted)
    assert orders(outcome) == []
    assert removed(job.wait(job.now)) == [1]
    job.wait(job.now + 1e5)
    assert job.state() == "running"
    outcome = job.plan(suspend=False)
    # The other place is free as soon as its node has left.
    assert [o.node_rank for o in orders(outcome)] == [0]
    assert [o.node_rank for o in orders(job.seen(1, Phase.GONE))] == [1]


def test_the_size_of_a_suspended_job_can_be_changed() -> None:
    job = running_fleet(2)
    job.plan(suspend=True)
    for name in ("n0", "n1"):
        job.leave(name)
    assert orders(job.plan(nodes=3)) == []
    outcome = job.plan(nodes=1)
    assert settled(outcome) == (True, "the job has 1 node now, 3 before")
    assert [o.node_rank for o in orders(job.plan(suspend=False))] == [0]


def test_a_job_that_begins_suspended_orders_nothing() -> None:
    spec = JobSpec(max_nodes=2, managed=True, size_from_platform=True, suspended=True)
    job = Job(spec, started=False)
    assert orders(job.start()) == []
    assert orders(job.restart()) == []
    assert [o.node_rank for o in orders(job.plan(suspend=False))] == [0, 1]


def test_nobody_comes_in_past_the_platform() -> None:
    job = running_fleet(1)
    (refusal,) = answers(job.attach("stranger"))
    assert refusal == m.Refused(
        "usage", "the nodes of this job are made by its platform, and this agent names none of them"
    )


def test_an_agent_that_is_restarted_on_a_node_that_shall_go_is_not_let_in() -> None:
    job = running_fleet(1)
    job.plan(suspend=True)
    (refusal,) = answers(job.attach("again", node=0))
    assert refusal == m.Refused("fenced", "node id 0 is no longer wanted")
    assert job.world() == [0]


def test_a_node_that_is_ordered_while_it_is_suspended_is_not_let_in() -> None:
    job = running_fleet(1)
    job.plan(nodes=2)
    job.plan(suspend=True)
    (refusal,) = answers(join(job, 1))
    assert refusal == m.Refused("fenced", "node id 1 is no longer wanted")


# ---- the rules come with the first agent ------------------------------------------------------


def test_the_first_agent_opens_a_job_whose_size_the_platform_has() -> None:
    job = Job(JobSpec(max_nodes=4, managed=True, size_from_platform=True), started=False)
    outcome = job.start()
    assert len(orders(outcome)) == 4
    assert not of_kind(ev.JobOpened, outcome.facts)
    (opened,) = of_kind(ev.JobOpened, join(job, 0, min_nodes=3).facts)
    assert (opened.rules.min_nodes, opened.rules.max_nodes) == (3, 4)


def test_more_nodes_than_there_are_cannot_be_needed() -> None:
    job = Job(JobSpec(max_nodes=2, managed=True, size_from_platform=True))
    (opened,) = of_kind(ev.JobOpened, join(job, 0, min_nodes=3).facts)
    assert (opened.rules.min_nodes, opened.rules.max_nodes) == (2, 2)


def test_nodes_made_before_and_after_a_change_of_size_train_together() -> None:
    job = running_fleet(2)
    job.plan(nodes=3)
    join(job, 2)  # It was started with --nnodes=1:3, the others with 1:2.
    assert job.world() == [0, 1, 2]
    rules_differ = m.JobRules(1, 3, 3, 5.0, 600.0, 3)
    job.plan(nodes=4)
    (refusal,) = answers(job.attach("n3", node=3, job_rules=rules_differ))
    assert isinstance(refusal, m.Refused)
    assert refusal.message.endswith("node_unit is 1, not 3")


# ---- the end ----------------------------------------------------------------------------------


def test_nodes_of_which_no_agent_has_come_are_removed_at_the_end() -> None:
    job = running_fleet(1)
    job.plan(nodes=3)
    job.seen(2, Phase.PENDING)
    outcome = job.done("n0", 1)
    assert job.state() == "succeeded"
    assert removed(outcome) == [1, 2]
    again = job.restart()
    assert orders(again) == []
    assert settled(job.plan(nodes=2)) == (False, "the job has ended")
