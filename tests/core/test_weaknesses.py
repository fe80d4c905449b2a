# SPDX-License-Identifier: Apache-2.0
"""Weaknesses of the prior art that a pure core can show, each made impossible here.

The docstrings name the sections: CP is spec/control-plane.md, AC spec/agent-and-checkpoint.md, PA
spec/prior-art-today.md.
"""

import pytest

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.membership.admission import rules_of
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.protocol import messages as m
from tests.core.harness import Job, answers, of_kind, pushes, rules, running_pair, worlds


def quiet(**spec: int | float | bool) -> Job:
    return Job(JobSpec(silence_s=10_000.0, lease_s=20_000.0, **spec))  # type: ignore[arg-type]


def run_worlds(job: Job) -> dict[int, m.RunWorld]:
    """Attach ten agents at once; the world each node was told to run."""
    told: dict[int, m.RunWorld] = {}
    for number in range(10):
        outcome = job.attach(f"n{number}", rank=number)
        told |= {node: body for node, body in pushes(outcome) if isinstance(body, m.RunWorld)}
    return told


# ---- rendezvous (CP 10.5, AC 10) -----------------------------------------------------------------


def test_weakness_unit_rounding_never_gives_an_empty_world() -> None:
    """CP 10.5, AC 10: rounding down to the unit completed empty worlds and used up rounds."""
    job = quiet(min_nodes=1, max_nodes=6, node_unit=3, last_call_s=1.0)
    job.attach("a")
    job.attach("b")
    job.wait(100.0)
    assert (job.round(), job.world()) == (0, [])
    job.attach("c")
    assert worlds(job.wait(101.0)) == [[0, 1, 2]]


def test_weakness_more_than_max_does_not_wait_for_the_last_call() -> None:
    """AC 10: with more than max waiting, "equals max" was never true."""
    job = quiet(min_nodes=2, max_nodes=2, last_call_s=1000.0)
    for name in "abcd":
        job.attach(name)
    assert job.world() == [0, 1]
    assert worlds(job.failed("a", 1)) == [[0, 1]]
    assert worlds(job.leave("a")) == [[1, 2]]


def test_weakness_max_respects_the_unit() -> None:
    """CP 10.5: reaching max ignored the node unit."""
    job = quiet(min_nodes=2, max_nodes=5, node_unit=2)
    for name in "abcde":
        job.attach(name)
    assert job.world() == [0, 1, 2, 3]


def test_weakness_no_world_before_the_rules_are_known() -> None:
    """CP 10.5, PA 5.2: with min = max = 0 any node completed a world alone."""
    job = quiet()
    job.wait(1000.0)
    assert job.round() == 0
    refused = job.attach("a", job_rules=rules(min_nodes=0, max_nodes=0))
    assert isinstance(answers(refused)[0], m.Refused)
    assert job.round() == 0


def test_weakness_rules_that_differ_are_refused_and_not_ignored() -> None:
    """AC 10: the first report won silently, whatever the others were started with."""
    job = quiet(min_nodes=1, max_nodes=2)
    job.attach("a")
    (refusal,) = answers(job.attach("b", job_rules=rules(min_nodes=1, max_nodes=8)))
    assert isinstance(refusal, m.Refused)
    assert refusal.kind == "usage"
    assert "max_nodes is 2, not 8" in refusal.message


def test_weakness_a_late_join_does_not_take_the_world_away() -> None:
    """CP 10.5 "lost world": a late join cleared a world that a member had not polled yet."""
    job = quiet(min_nodes=2, max_nodes=2, reconnect_s=50.0)
    job.attach("a")
    job.attach("b")
    job.absent("b")
    job.attach("late")
    returned = job.attach("b", round=0)
    (told,) = [body for _, body in pushes(returned) if isinstance(body, m.RunWorld)]
    assert (told.round, told.group_size) == (1, 2)


def test_weakness_all_members_have_one_round_and_one_store() -> None:
    """CP 10.5 "split store": a leftover kept the round of its join and waited for other keys."""
    job = quiet(min_nodes=4, max_nodes=10, node_unit=4, last_call_s=1.0)
    run_worlds(job)
    formed = [body for _, body in pushes(job.wait(5.0)) if isinstance(body, m.RunWorld)]
    job.failed("n0", 1)
    job.attach("n10")
    formed += [body for _, body in pushes(job.attach("n11")) if isinstance(body, m.RunWorld)]
    for number in {body.round for body in formed}:
        same = [body for body in formed if body.round == number]
        assert len({(b.generation, b.store_host, b.store_port, b.world_size) for b in same}) == 1
        assert [body.group_rank for body in same] == list(range(len(same)))
        assert len(same) == same[0].group_size


def test_weakness_a_duplicate_join_is_the_same_join() -> None:
    """CP 10.5: a second join of a waiting node was an error that cost ten retries."""
    job = quiet(min_nodes=2, max_nodes=2)
    first = answers(job.attach("a"))
    assert answers(job.attach("a")) == first
    (row,) = job.machines.nodes.view(0.0)
    assert (row["node_id"], row["incarnation"], row["phase"]) == (0, 1, "running")


def test_weakness_a_rejoin_brings_its_new_address_and_size() -> None:
    """AC 10: a re-join with another address or process count kept the old record."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0, reconnect_s=50.0)
    job.absent("a")
    job.attach("a", round=1, host="moved", nproc=4)
    told = [body for _, body in pushes(job.failed("b", 1)) if isinstance(body, m.RunWorld)]
    assert {(body.store_host, body.world_size) for body in told} == {("moved", 5)}


def test_weakness_ids_and_ranks_are_not_mixed_up() -> None:
    """CP 10.5, AC 10: a relaunched node (new id, same rank) counted as not joined."""
    job = quiet(min_nodes=2, max_nodes=2, managed=True)
    job.attach("a", node=0)
    job.attach("b", node=1)
    job.seen(1, Phase.FAILED, ExitReason.KILLED)
    assert worlds(job.attach("c", node=2)) == [[0, 1]]
    rows = {row["node_rank"]: row["node_id"] for row in job.machines.nodes.view(0.0)[:2]}
    assert rows == {0: 0, 1: 2}


@pytest.mark.parametrize("kind", ["failed", "done", "started"])
def test_weakness_a_stale_report_does_not_count(kind: str) -> None:
    """CP 10.5: there was no fencing by round."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    job.failed("a", 1)
    before = job.snapshot()
    for name in "ab":
        report = {"failed": job.failed, "done": job.done, "started": job.started}[kind]
        outcome = report(name, 1)
        assert outcome.facts == []
        assert answers(outcome) == [m.Done()]
    assert job.snapshot() == before


def test_weakness_everybody_is_told_in_the_step_that_decides() -> None:
    """CP 13.6, PA 5.2: members learned of a change one poll interval after the other."""
    job = quiet(min_nodes=1, max_nodes=10)
    run_worlds(job)
    told = {node for node, body in pushes(job.failed("n3", 1)) if isinstance(body, m.RunWorld)}
    assert told == set(range(10))


def test_weakness_a_correlated_loss_is_one_incident() -> None:
    """A switch fails, all its nodes are lost in one step: one round breaks, one unit is used."""
    spec = JobSpec(min_nodes=1, max_nodes=10)
    job = Job(spec)
    for number in range(10):
        job.attach(f"n{number}")
    for at in (5.0, 10.0):
        for number in range(3):
            job.beat(f"n{number}", at=at)
    formed = worlds(job.wait(15.0))
    assert formed == [[0, 1, 2]]
    assert job.machines.view(job.now)["restarts"] == {"lost": 1}
    assert len(job.incidents()) == 1


def test_weakness_a_newcomer_does_not_hide_the_loss_of_the_one_it_replaces() -> None:
    """CP 10.5: one join both broke the world and completed another; the loss went uncounted."""
    job = quiet(min_nodes=2, max_nodes=4, last_call_s=1.0)
    job.attach("a", rank=0)
    job.attach("b", rank=1)
    job.wait(1.0)
    job.attach("c", rank=2)
    outcome = job.attach("b2", rank=1)
    assert worlds(outcome) == [[0, 1, 2]]
    assert [fact.planned for fact in of_kind(ev.WorldFormed, outcome.facts)] == [False]
    assert job.machines.progress.view(job.now)["stage"] == "restart"


def test_weakness_a_closed_stream_of_somebody_who_left_delays_nobody() -> None:
    """A node that left must not be expected: the next world would wait a last call for it."""
    job = quiet(min_nodes=1, max_nodes=4, last_call_s=5.0)
    for name in "abc":
        job.attach(name)
    job.wait(5.0)
    job.leave("c")
    job.absent("c")
    assert worlds(job.failed("a", 2)) == [[0, 1]]


@pytest.mark.parametrize("compacted", [False, True])
def test_weakness_a_master_restart_loses_neither_rounds_nor_keys(compacted: bool) -> None:
    """AC 10, PA 5.2: all state was in memory."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0, join_timeout_s=60.0)
    job.answer(m.KvSet(1, "k", b"v"), "a")
    generation = job.machines.rendezvous.view(job.now)["generation"]
    job.restart(compacted=compacted)
    for name in "ab":
        (welcome,) = answers(job.attach(name, round=1))
        assert isinstance(welcome, m.Attached)
        assert welcome.round == 1, "its workers are not stale"
        assert welcome.generation > generation  # type: ignore[operator]
    assert job.answer(m.KvGet(1, ("k",), 1.0), "b") == m.Values((b"v",))
    assert worlds(job.wait(1000.0)) == []
    assert (job.state(), job.round(), job.world()) == ("running", 1, [0, 1])


def test_weakness_an_old_agent_does_not_come_in_through_a_new_master() -> None:
    """AC 13: node identity was whatever the client said."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    job.attach("b2", rank=1)
    for _ in range(3):
        job.restart(compacted=True)
        (refusal,) = answers(job.attach("b", rank=1, round=1))
        assert isinstance(refusal, m.Refused)
        assert refusal.kind == "fenced"


# ---- node lifecycle (CP 3.5, 6.x, AC 15) ---------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.GONE])
def test_weakness_a_deleted_or_vanished_running_node_is_replaced(phase: Phase) -> None:
    """CP 6.2, 6.3: Running + DELETED had no row, and a vanished node stayed Running for ever."""
    job = quiet(managed=True)
    job.attach("a", node=0)
    outcome = job.seen(0, phase)
    (launch,) = of_kind(cmd.LaunchNode, outcome.commands)
    assert (launch.order.node_id, launch.order.node_rank) == (1, 0)


def test_weakness_a_deleted_pending_node_is_not_pending() -> None:
    """CP 6.3: it kept the status Pending."""
    job = quiet(managed=True)
    job.seen(0, Phase.PENDING)
    job.seen(0, Phase.GONE, ExitReason.KILLED)
    phases = {row["node_id"]: row["phase"] for row in job.machines.nodes.view(0.0)}
    assert phases == {1: "initial", 0: "gone"}


@pytest.mark.parametrize("late", [Phase.PENDING, Phase.RUNNING, Phase.SUCCEEDED])
def test_weakness_a_late_report_neither_overwrites_nor_revives(late: Phase) -> None:
    """CP 6.3: the status was overwritten on illegal steps, and stale events re-added old ids."""
    job = quiet(managed=True)
    job.seen(0, Phase.FAILED, ExitReason.KILLED)
    before = job.snapshot()
    # What should be over and is seen alive is removed once more, and that is all.
    again = [] if late.is_final else [cmd.RemoveNode(NodeId(0))]
    assert job.seen(0, late).commands == again
    assert job.snapshot() == before


def test_weakness_an_event_of_an_unknown_node_stops_nothing() -> None:
    """CP 6.3: one bad pod ended the monitor for good."""
    job = quiet(managed=True)
    for phase in Phase:
        outcome = job.seen(4711, phase)
        assert (outcome.records, outcome.commands) == ([], [])


def test_weakness_one_policy_decides_relaunch_and_end() -> None:
    """CP 6.4: "unrecoverable" and "may relaunch" disagreed at the limit."""
    spec = JobSpec(min_nodes=2, max_nodes=2, managed=True)
    spec.node_relaunches[ExitReason.HARDWARE] = 1
    job = Job(spec)
    job.seen(1, Phase.RUNNING)
    first = job.seen(1, Phase.FAILED, ExitReason.HARDWARE)
    assert of_kind(cmd.LaunchNode, first.commands)
    assert not of_kind(cmd.FinishJob, first.commands)
    job.seen(2, Phase.RUNNING)
    second = job.seen(2, Phase.FAILED, ExitReason.HARDWARE)
    assert not of_kind(cmd.LaunchNode, second.commands)
    assert of_kind(cmd.FinishJob, second.commands)


def test_weakness_kills_are_bounded_too() -> None:
    """CP 6.4, AC 15: killed nodes were relaunched without any limit."""
    job = quiet(min_nodes=1, max_nodes=2, managed=True)
    node, launched = 1, 0
    job.seen(node, Phase.RUNNING)
    while orders := of_kind(ev.NodeOrdered, job.seen(node, Phase.FAILED, ExitReason.KILLED).facts):
        node, launched = orders[0].node_id, launched + 1
        assert launched < 1000
        job.seen(node, Phase.RUNNING)
    assert launched == job.spec.node_relaunches[ExitReason.KILLED]


def test_weakness_the_minimum_is_the_job_s_and_not_zero() -> None:
    """AC 15: the min-node rule read its value before anybody had reported it."""
    spec = JobSpec(min_nodes=3, max_nodes=3, managed=True)
    spec.node_relaunches[ExitReason.OOM] = 0
    job = Job(spec)
    outcome = job.seen(2, Phase.FAILED, ExitReason.OOM)
    (finish,) = of_kind(cmd.FinishJob, outcome.commands)
    assert "2 of at least 3 nodes are left" in finish.end.reason


def test_weakness_a_silent_node_is_removed_before_its_rank_has_two() -> None:
    """AC 15: a pod without heartbeats was not deleted, and its rank had two pods."""
    job = Job(JobSpec(min_nodes=1, max_nodes=2, managed=True))
    job.attach("a", node=0)
    job.attach("b", node=1)
    for at in (5.0, 10.0):
        job.beat("a", at=at)
    outcome = job.wait(15.0)
    kinds = [type(c) for c in outcome.commands if not isinstance(c, cmd.Push)]
    assert kinds == [cmd.Drop, cmd.RemoveNode, cmd.LaunchNode]


def test_weakness_a_successor_inherits_the_rank_and_nothing_else() -> None:
    """CP 6.1: the copy inherited exit reason and usage of the node it replaced."""
    job = quiet(managed=True)
    job.attach("a", node=0, nproc=8)
    job.seen(0, Phase.FAILED, ExitReason.HARDWARE)
    successor = job.machines.nodes.view(0.0)[0]
    assert successor == {
        "node_id": 1,
        "node_rank": 0,
        "role": "worker",
        "incarnation": 0,
        "phase": "initial",
        "host": "",
        "nproc": 0,
        "machine": "",
        "relaunches": 1,
        "memory_mib": 0,
        "message": "",
        "warm": None,
        "cpu": None,
        "memory_bytes": None,
        "steps_per_s": None,
        "beat_age_s": None,
        "log_dir": "",
    }


def test_weakness_a_partial_failure_is_no_success() -> None:
    """CP 3.5: some failed, some succeeded, exit code 0."""
    job = quiet(min_nodes=2, max_nodes=2)
    for name in "ab":
        job.attach(name, job_rules=rules(min_nodes=2, max_nodes=2, max_restarts=0))
    job.done("a", 1)
    job.failed("b", 1)
    assert job.state() == "failed"


def test_weakness_the_end_is_decided_once() -> None:
    """PA 5.2, AC 15: a job restart was run again every 30 s, and a late hang changed the code."""
    job = quiet()
    job.attach("a")
    job.done("a", 1)
    before = job.snapshot()
    job.failed("a", 1)
    job.feed(ev.StopRequested(9, 1, "late"))
    job.leave("a")
    ends = [record for record in job.records if type(record).__name__ == "JobClosed"]
    assert len(ends) == 1
    assert job.state() == "succeeded"
    assert [r for r in job.snapshot() if type(r).__name__ == "JobClosed"] == [
        r for r in before if type(r).__name__ == "JobClosed"
    ]


def test_weakness_requests_before_any_node_are_served() -> None:
    """CP 3.5: calls that came before the node tables existed hit missing attributes."""
    job = quiet()
    assert job.answer(m.KvSet(0, "k", b"v")) == m.Done()
    assert job.answer(m.KvCount(0)) == m.Number(1)
    assert answers(job.feed(ev.StopRequested(1, 1, "x"))) == [m.Done()]


def test_weakness_an_unknown_class_of_failure_stops_nothing() -> None:
    """AC 13: messages were dispatched by guessing; a newer agent's word must not crash a master."""
    job = quiet()
    job.attach("a")
    outcome = job.failed("a", 1, reason="cosmic ray")
    assert of_kind(ev.WorldHurt, outcome.facts)[0].reason is ExitReason.UNKNOWN


def test_weakness_a_node_given_up_learns_of_it() -> None:
    """CP 13.6: a node that was only slow went on for ever in a world that had left it behind."""
    job = Job(JobSpec(min_nodes=1, max_nodes=2))
    job.attach("a")
    job.attach("b")
    for at in (5.0, 10.0):
        job.beat("a", at=at)
    outcome = job.wait(15.0)
    assert of_kind(cmd.Drop, outcome.commands) == [cmd.Drop(job.node_of["b"])]
    assert answers(job.attach("b", round=1)) == [
        m.Refused("stale", "the master had given this node up: it may join anew")
    ]


# ---- key-value store, syncs, barriers (CP 10.6, 11, 13.5, 13.6, AC 8, 13) ------------------------


def test_weakness_add_is_atomic_at_the_server() -> None:
    """CP 13.6, AC 8: add was read-modify-write on the client and lost counts."""
    job = running_pair()
    numbers = [job.answer(m.KvAdd(1, "n", 1), name) for name in "ab" * 50]
    assert numbers == [m.Number(count) for count in range(1, 101)]


def test_weakness_a_repeated_add_counts_once() -> None:
    """CP 12b, AC 13: requests without an id were blindly repeated."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    for _ in range(5):
        assert job.answer(m.KvAdd(1, "n", 1), "a", session="w", seq=1) == m.Number(1)
        job.restart()
        job.attach("a", round=1)


def test_weakness_missing_and_empty_differ() -> None:
    """CP 10.6, 13.5: a missing key was an empty value, and a time-out returned one."""
    job = running_pair()
    job.answer(m.KvSet(1, "empty", b""), "a")
    assert job.answer(m.KvGet(1, ("empty",), 0.0), "a") == m.Values((b"",))
    job.ask(m.KvGet(1, ("missing",), 1.0), "a")
    (late,) = answers(job.wait(1.0))
    assert isinstance(late, m.Refused)
    assert late.kind == "timeout"


def test_weakness_keys_of_dead_rounds_are_forgotten() -> None:
    """CP 10.6: the store was never pruned."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    for number in range(1, 4):
        for key in range(100):
            job.answer(m.KvSet(number, f"k{key}", b"x" * 10), "a", session="w", seq=key + 1)
        job.failed("b", number, reason=ExitReason.KILLED, last=0.0)
    assert job.machines.sync.view()["keys"] == 0


def test_weakness_a_barrier_name_can_be_used_again() -> None:
    """CP 11: names were one-shot; the second sync of a name was finished before it began."""
    job = running_pair()
    for generation in (1, 2, 3):
        assert answers(job.ask(m.Barrier(1, "b", "0", 2, 9.0), "a")) == []
        released = answers(job.ask(m.Barrier(1, "b", "1", 2, 9.0), "b"))
        assert released == [m.Number(generation)] * 2


def test_weakness_a_node_that_came_after_the_first_arrival_is_waited_for() -> None:
    """CP 11: the first joiner's snapshot of the nodes was the target for good."""
    job = quiet(min_nodes=1, max_nodes=2)
    job.attach("a")
    job.attach("b")
    job.ask(m.Barrier(0, "b", "a", 0, 90.0), "a")
    job.attach("c")
    assert answers(job.ask(m.Barrier(0, "b", "b", 0, 90.0), "b")) == []
    assert len(answers(job.ask(m.Barrier(0, "b", "c", 0, 90.0), "c"))) == 3


def test_weakness_a_time_out_ends_a_sync_for_those_who_wait_and_forgets_it() -> None:
    """CP 11: the sweep died on a wrong type, skipped members and never forgot the sync."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    for member in range(5):
        job.ask(m.Barrier(1, "b", str(member), 9, 2.0), "a")
    late = answers(job.wait(2.0))
    assert len(late) == 5
    assert all(isinstance(answer, m.Refused) and answer.kind == "timeout" for answer in late)
    assert job.machines.sync.view()["waiting"] == 0
    assert answers(job.ask(m.Barrier(1, "b", "0", 1, 2.0), "a")) == [m.Number(1)]


def test_weakness_a_dead_node_s_arrival_does_not_complete_an_agreement() -> None:
    """AC 10: a dead node's old entry let the survivors agree."""
    job = quiet(min_nodes=1, max_nodes=3)
    for name in "abc":
        job.attach(name)
    job.ask(m.Barrier(0, "save", "c", 0, 90.0), "c")
    job.leave("c")
    assert answers(job.ask(m.Barrier(0, "save", "a", 0, 90.0), "a")) == []
    assert len(answers(job.ask(m.Barrier(0, "save", "b", 0, 90.0), "b"))) == 2


def test_weakness_a_dead_worker_cannot_read_or_write_the_new_world() -> None:
    """CP 10.5: nothing kept an old process from touching the keys of a new round."""
    job = running_pair(silence_s=10_000.0, lease_s=20_000.0)
    job.answer(m.KvSet(1, "addr", b"old"), "a")
    job.failed("a", 1)
    assert job.answer(m.KvCheck(2, ("addr",)), "a") == m.Number(0)
    for body in (m.KvSet(1, "addr", b"x"), m.KvDelete(1, "addr"), m.Barrier(1, "b", "0", 1, 1.0)):
        assert job.answer(body, "b") == m.Refused("fenced", "round 1 is over")


def test_weakness_waiting_costs_no_polling() -> None:
    """PA 5.2, CP 13.5: waits polled every two seconds. A held wait wants one tick: its time-out."""
    job = Job(JobSpec(silence_s=500.0, lease_s=500.0))
    job.attach("a", job_rules=rules_of(job.spec))
    job.ask(m.KvGet(1, ("k",), 100.0), "a")
    assert job.deadline == 100.0
    assert job.wait(99.0).commands == []
    assert job.deadline == 100.0
