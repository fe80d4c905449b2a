# SPDX-License-Identifier: Apache-2.0
"""Bringing versions to storage: committed as a whole or not at all, and never by counting."""

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.attempts import RESUMED_S, SILENCE_S
from holdfast.core.job.checkpoints.gathering import PATIENCE_S
from holdfast.model.checkpoint import NONE, SHARED, FileEntry, Shape, Version, rank_part
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from tests.core.ledger import COPIED, DIR, SHARDED, V5, V6, Ledger, begin, holding

# ---- who writes what ----------------------------------------------------------------------------


def test_an_attempt_begins_when_every_part_is_there() -> None:
    ledger = Ledger(2)
    first = ledger.ask(0, V5, SHARDED, rank_part(0))
    assert ledger.answers == {}
    second = ledger.ask(1, V5, SHARDED, rank_part(1))
    plans = [ledger.answer(call, c.PersistPlan) for call in (first, second)]
    assert plans[0].attempt == plans[1].attempt
    assert [plan.parts for plan in plans] == [(rank_part(0),), (rank_part(1),)]


def test_a_part_that_all_hold_is_written_by_one() -> None:
    ledger = Ledger(2)
    calls = [ledger.ask(node, V5, COPIED, SHARED, rank_part(node)) for node in (1, 0)]
    parts = [ledger.answer(call, c.PersistPlan).parts for call in calls]
    assert parts == [(rank_part(1),), (SHARED, rank_part(0))]


def test_a_plan_that_was_missed_is_given_again() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger, shape=COPIED)
    again = ledger.ask(0, V5, COPIED, SHARED, rank_part(0))
    assert ledger.answer(again, c.PersistPlan) == c.PersistPlan(attempt, (SHARED, rank_part(0)))


def test_a_newer_step_takes_the_place_of_one_that_waits() -> None:
    ledger = Ledger(2)
    begin(ledger)
    waiting = [ledger.ask(node, V6, SHARDED, rank_part(node)) for node in (0, 1)]
    ledger.ask(0, Version(0, 7), SHARDED, rank_part(0))
    assert [ledger.refusal(call) for call in waiting] == ["superseded by step 7"] * 2
    late = ledger.ask(1, V6, SHARDED, rank_part(1))
    assert ledger.refusal(late) == "superseded by step 7"


def test_the_step_that_waited_begins_when_the_one_before_is_over() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    waiting = [ledger.ask(node, V6, SHARDED, rank_part(node)) for node in (0, 1)]
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(0), problem="the disk is full")
    assert {ledger.answer(call, c.PersistPlan).attempt for call in waiting} != {attempt}


def test_what_an_old_world_wanted_is_stale() -> None:
    ledger = Ledger(2)
    call = ledger.ask(0, V5, SHARDED, rank_part(0))
    ledger.form([0, 1])
    assert ledger.answer(call, m.Refused).kind == "stale"


def test_a_plan_that_was_missed_is_given_again_after_the_round() -> None:
    """Found by the simulator, seed 20481: the answer was lost with the stream, the next world was
    formed without the node, its ask was stale, and the attempt waited for it for an hour."""
    ledger = Ledger(2)
    attempt, asked = begin(ledger), c.PersistAsk(DIR, ledger.round, V5, SHARDED, (rank_part(1),))
    ledger.form([0])
    again = ledger.call(1, asked)
    assert ledger.answer(again, c.PersistPlan) == c.PersistPlan(attempt, (rank_part(1),))


def test_nodes_that_name_different_parts_are_told_so() -> None:
    ledger = Ledger(2)
    ledger.ask(0, V5, SHARDED, rank_part(0))
    call = ledger.ask(1, V5, Shape(3, shared=False), rank_part(1))
    assert "do not agree on which parts step 5 has" in ledger.refusal(call)


# ---- the commit ---------------------------------------------------------------------------------


def test_a_commit_needs_every_part_and_not_a_number_of_reports() -> None:
    """The prior art counts done files: two of one rank stand for two ranks."""
    ledger = Ledger(2)
    attempt = begin(ledger)
    for _ in range(3):
        ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    assert ledger.pushed(c.CommitOrder) == []
    ledger.persisted(1, attempt, V5, SHARDED, rank_part(1))
    ((node, order),) = ledger.pushed(c.CommitOrder)
    assert node == 0
    assert [entry.name for entry in order.files] == ["rank-00000.bin", "rank-00001.bin"]


def test_more_reports_than_parts_do_not_prevent_a_commit() -> None:
    """Prior art: a second node's done file makes 2 != 1, and nothing is ever committed."""
    ledger = Ledger(2)
    attempt = begin(ledger, shape=COPIED)
    ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    ledger.persisted(1, attempt, V5, COPIED)
    ledger.persisted(1, attempt, V5, COPIED, rank_part(1))
    assert len(ledger.pushed(c.CommitOrder)) == 1


def test_a_report_of_an_earlier_attempt_counts_for_nothing() -> None:
    """Prior art: a stale done directory of an earlier try lets a node believe in this one."""
    ledger = Ledger(2)
    stale = begin(ledger)
    ledger.persisted(1, stale, V5, SHARDED, rank_part(1), problem="the disk is full")
    attempt = begin(ledger)
    assert attempt != stale
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    late = ledger.persisted(1, stale, V5, SHARDED, rank_part(1))
    assert "the disk is full" in ledger.refusal(late)
    assert ledger.pushed(c.CommitOrder) == []


def test_latest_moves_only_after_the_commit() -> None:
    """The prior art writes the tracker before the commit: a reader finds half a checkpoint."""
    ledger = Ledger(2)
    attempt = begin(ledger)
    calls = [ledger.persisted(n, attempt, V5, SHARDED, rank_part(n)) for n in (0, 1)]
    assert ledger.committed() == NONE
    assert not any(call in ledger.answers for call in calls)
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert ledger.committed() == V5
    assert [ledger.answer(call, c.PersistState).committed for call in calls] == [V5, V5]


def test_two_saves_of_one_step_are_two_attempts() -> None:
    ledger = Ledger(2)
    assert ledger.commit(V5, SHARDED) != ledger.commit(V5, SHARDED)
    assert ledger.committed() == V5


def test_step_0_and_steps_that_no_float32_holds_are_committed() -> None:
    ledger = Ledger(2)
    for step in (0, 16777216, 16777217):
        ledger.commit(Version(0, step), SHARDED)
        assert ledger.committed() == Version(0, step)


def test_an_older_step_is_not_committed_after_a_newer_one() -> None:
    ledger = Ledger(2)
    ledger.commit(V6, SHARDED)
    call = ledger.ask(0, V5, SHARDED, rank_part(0))
    assert ledger.refusal(call) == "superseded by step 6"


def test_a_commit_that_fails_is_told_to_everybody() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    calls = [ledger.persisted(n, attempt, V5, SHARDED, rank_part(n)) for n in (0, 1)]
    ledger.call(0, c.CommitDone(DIR, V5, attempt, "read-only file system"))
    for call in calls:
        assert "step 5 did not reach storage: read-only file system" in ledger.refusal(call)
    assert ledger.committed() == NONE


def test_a_late_word_of_a_committer_that_was_replaced_ends_nothing() -> None:
    """It stood still, was given up, and found that it must not commit any more."""
    ledger = Ledger(3)
    attempt = begin(ledger)
    for node in (0, 1, 2):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    assert [node for node, _ in ledger.pushed(c.CommitOrder)] == [0]
    ledger.lose(0)
    assert [node for node, _ in ledger.pushed(c.CommitOrder)] == [1]
    ledger.call(2, c.CommitDone(DIR, V5, attempt, "the master has given this node up"))
    assert ledger.committed() == NONE
    ledger.call(1, c.CommitDone(DIR, V5, attempt))
    assert ledger.committed() == V5


def test_a_part_that_another_has_written_does_not_fail_any_more() -> None:
    """A lost node was only cut off: it cannot write into what is being committed."""
    ledger = Ledger(2)
    attempt = begin(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    late = c.PartsPersisted(DIR, V5, SHARDED, attempt, (rank_part(1),), (), "it is gone")
    call = ledger.call(0, late)
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert ledger.answer(call, c.PersistState).committed == V5


def test_a_file_that_two_nodes_wrote_ends_the_attempt() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    same = c.PartsPersisted(DIR, V5, SHARDED, attempt, (rank_part(0),), ())
    files = (FileEntry("model.bin", 1, 1),)
    ledger.call(0, c.PartsPersisted(DIR, V5, SHARDED, attempt, same.parts, files))
    call = ledger.call(1, c.PartsPersisted(DIR, V5, SHARDED, attempt, (rank_part(1),), files))
    assert "two nodes wrote a file 'model.bin'" in ledger.refusal(call)


# ---- what goes wrong ----------------------------------------------------------------------------


def test_a_problem_ends_the_attempt_and_leaves_the_older_one() -> None:
    ledger = Ledger(2)
    ledger.commit(V5, SHARDED)
    attempt = begin(ledger, V6)
    fine = ledger.persisted(0, attempt, V6, SHARDED, rank_part(0))
    ledger.persisted(1, attempt, V6, SHARDED, rank_part(1), problem="no space left")
    assert "no space left" in ledger.refusal(fine)
    assert ledger.committed() == V5
    (view,) = ledger.machine.view()
    assert (view["committed"], view["writing"]) == (5, -1)
    assert view["problem"] == "step 6 did not reach storage: no space left"


def test_silence_ends_an_attempt() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    call = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    ledger.wait(ledger.now + SILENCE_S)
    assert "nothing was heard of rank-00001" in ledger.refusal(call)


def test_a_lost_nodes_part_is_written_by_who_keeps_a_copy() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.lose(1)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    held = tuple(holding(V5, rank_part(n), SHARDED) for n in (0, 1))
    ledger.call(node, c.InventoryTaken(DIR, question.number, held))
    ((writer, order),) = ledger.pushed(c.PersistOrder)
    assert (writer, order.parts, order.attempt) == (0, (rank_part(1),), attempt)
    for part in (rank_part(0), rank_part(1)):
        ledger.persisted(0, attempt, V5, SHARDED, part)
    assert len(ledger.pushed(c.CommitOrder)) == 1


def test_a_lost_nodes_part_of_which_there_is_no_copy_ends_the_attempt() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    call = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    ledger.lose(1)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(node, c.InventoryTaken(DIR, question.number, ()))
    assert "rank-00001 was lost with its node" in ledger.refusal(call)


def test_no_ranks_part_is_left_out_when_peers_hold_a_whole_step() -> None:
    """The soak found it: what was committed without two ranks had to be restored, and they went on
    with the random states of others, although memory had every part of the step before."""
    ledger, before = Ledger(2), Version(V5.lineage, V5.step - 1)
    attempt = begin(ledger, shape=COPIED)
    call = ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    ledger.lose(1)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    held = [holding(V5, part, COPIED) for part in (SHARED, rank_part(0))]
    held += [holding(before, part, COPIED) for part in (SHARED, rank_part(0), rank_part(1))]
    ledger.call(node, c.InventoryTaken(DIR, question.number, tuple(held)))
    assert "rank-00001 was lost with its node" in ledger.refusal(call)
    assert not ledger.pushed(c.CommitOrder)


def test_beside_a_shared_part_a_lost_ranks_part_is_left_out() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger, shape=COPIED)
    ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    ledger.lose(1)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(node, c.InventoryTaken(DIR, question.number, ()))
    assert len(ledger.pushed(c.CommitOrder)) == 1


def test_what_a_lost_node_had_written_counts() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.persisted(1, attempt, V5, SHARDED, rank_part(1))
    ledger.lose(1)
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    assert [node for node, _ in ledger.pushed(c.CommitOrder)] == [0]


def test_another_node_commits_when_the_first_is_lost() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    assert [node for node, _ in ledger.pushed(c.CommitOrder)] == [0]
    ledger.lose(0)
    assert [node for node, _ in ledger.pushed(c.CommitOrder)] == [1]


def test_an_attempt_ends_when_all_who_wrote_it_are_lost() -> None:
    ledger = Ledger(2, spares=1)
    attempt = begin(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    for node in (0, 1):
        ledger.lose(node)
    assert [fact.why for fact in ledger.facts if isinstance(fact, ev.AttemptFailed)] == [
        "all nodes that wrote it were lost"
    ]


def test_an_attempt_ends_when_all_who_wrote_it_are_lost_while_a_part_is_looked_for() -> None:
    """Found by the simulator: the part that was left out was the last that was missing, nobody was
    left to give the checkpoint its name, and nothing reached storage for an hour."""
    ledger = Ledger(2, spares=1)
    attempt = begin(ledger, shape=COPIED)
    ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    ledger.lose(1)
    questions = ledger.pushed(c.InventoryWanted)
    ledger.lose(0)
    ledger.form([2, 3])
    for node, question in questions:
        if node == 2:
            ledger.call(node, c.InventoryTaken(DIR, question.number, ()))
    ledger.ask(2, V6, COPIED, SHARED, rank_part(0))
    call = ledger.ask(3, V6, COPIED, SHARED, rank_part(1))
    assert ledger.answer(call, c.PersistPlan).attempt != attempt


def test_an_order_that_was_missed_is_given_again() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    ledger.absent(0)
    ledger.pushes.clear()
    ledger.arrive(0)
    assert [node for node, _ in ledger.pushed(c.CommitOrder)] == [0]


# ---- a new master -------------------------------------------------------------------------------


def test_a_new_master_commits_what_the_old_one_began() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    ledger.restart()
    for node in (0, 1):
        ledger.arrive(node)
        call = ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    ((_, order),) = ledger.pushed(c.CommitOrder)
    assert order.attempt == attempt
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert ledger.answer(call, c.PersistState).committed == V5


@pytest.mark.parametrize("report_first", [True, False])
def test_who_had_no_plan_yet_joins_the_attempt_of_the_old_master(report_first: bool) -> None:
    ledger = Ledger(2)
    attempt = begin(ledger, shape=COPIED)
    ledger.restart()
    ledger.arrive(0)
    ledger.arrive(1)
    if report_first:
        ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    call = ledger.ask(1, V5, COPIED, SHARED, rank_part(1))
    if not report_first:
        ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    assert ledger.answer(call, c.PersistPlan) == c.PersistPlan(attempt, (rank_part(1),))


def test_a_commit_that_the_old_master_did_not_hear_of_is_not_done_twice() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    ledger.restart()
    ledger.arrive(0)
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    ledger.pushes.clear()
    call = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    assert ledger.answer(call, c.PersistState).committed == V5
    assert ledger.pushed(c.CommitOrder) == []


def test_who_missed_the_end_of_an_attempt_is_told_by_a_new_master() -> None:
    ledger = Ledger(2)
    attempt = ledger.commit(V5, SHARDED)
    ledger.restart(compacted=True)
    ledger.arrive(1)
    call = ledger.persisted(1, attempt, V5, SHARDED, rank_part(1))
    assert ledger.answer(call, c.PersistState).committed == V5


def test_no_two_attempts_have_one_name_whoever_is_master() -> None:
    ledger = Ledger(2)
    names = [begin(ledger)]
    for _ in range(3):
        ledger.restart()
        names.append(begin(ledger))
    assert len(set(names)) == 4


def test_an_attempt_of_an_old_master_ends_when_a_node_is_lost() -> None:
    """Who still writes is not known: another may not write the same files at the same time."""
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.restart()
    ledger.arrive(0)
    call = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    ledger.lose(1)
    assert "a node was lost that may have been writing it" in ledger.refusal(call)


def test_a_late_report_does_not_open_what_was_given_up_again() -> None:
    """The others have been told that it failed: it would stand in the way of every later step."""
    ledger = Ledger(3)
    shape = Shape(3, shared=False)
    asks = [ledger.ask(node, V5, shape, rank_part(node)) for node in range(3)]
    attempt = ledger.answer(asks[2], c.PersistPlan).attempt
    ledger.restart()
    ledger.arrive(0)
    ledger.persisted(0, attempt, V5, shape, rank_part(0))
    ledger.lose(1)
    ledger.arrive(2)
    late = ledger.persisted(2, attempt, V5, shape, rank_part(2))
    assert "a node was lost that may have been writing it" in ledger.refusal(late)
    ledger.form([0, 2])
    for node, rank in ((0, 0), (2, 1)):
        call = ledger.ask(node, V6, SHARDED, rank_part(rank))
    assert ledger.answer(call, c.PersistPlan).parts == (rank_part(1),)


def test_an_attempt_of_an_old_master_that_is_not_heard_of_again_ends() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.restart()
    ledger.arrive(0)
    call = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    ledger.wait(ledger.now + RESUMED_S)
    assert "nothing was heard of rank-00001" in ledger.refusal(call)


def resumed_with_a_lost_rank(shape: Shape) -> tuple[Ledger, int]:
    """Node 0 has written all that is left of a step; node 1 was lost under the master before."""
    ledger = Ledger(2)
    attempt = begin(ledger, shape=shape)
    ledger.lose(1)
    ledger.form([0])
    ledger.restart()
    ledger.pushes.clear()
    ledger.arrive(0)
    common = (SHARED,) if shape.shared else ()
    return ledger, ledger.persisted(0, attempt, V5, shape, *common, rank_part(0))


def test_a_new_master_leaves_out_a_rank_that_nobody_has_and_commits_at_once() -> None:
    ledger, call = resumed_with_a_lost_rank(COPIED)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    mine = tuple(holding(V5, part, COPIED) for part in (SHARED, rank_part(0)))
    ledger.call(node, c.InventoryTaken(DIR, question.number, mine))
    ((_, order),) = ledger.pushed(c.CommitOrder)
    assert [entry.name for entry in order.files] == ["rank-00000.bin", "shared.bin"]
    ledger.call(0, c.CommitDone(DIR, V5, order.attempt))
    assert ledger.answer(call, c.PersistState).committed == V5


def test_a_new_master_ends_an_attempt_at_once_when_nobody_has_what_it_needs() -> None:
    ledger, call = resumed_with_a_lost_rank(SHARDED)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(node, c.InventoryTaken(DIR, question.number, ()))
    assert "rank-00001 was lost with its node" in ledger.refusal(call)


def test_a_new_master_asks_who_has_what_only_when_all_nodes_are_back() -> None:
    """A node that has not come back yet may be writing what seems to be lost."""
    ledger = Ledger(2)
    attempt = begin(ledger, shape=COPIED)
    ledger.restart()
    ledger.arrive(0)
    first = ledger.persisted(0, attempt, V5, COPIED, SHARED, rank_part(0))
    assert ledger.pushed(c.InventoryWanted) == []
    ledger.arrive(1)
    questions = ledger.pushed(c.InventoryWanted)
    assert [node for node, _ in questions] == [0, 1]
    for node, question in questions:
        mine = (holding(V5, rank_part(node), COPIED),)
        writing = (c.Writing(attempt, (rank_part(node),)),)
        ledger.call(node, c.InventoryTaken(DIR, question.number, mine, writing))
    assert first not in ledger.answers
    assert ledger.pushes == []
    ledger.persisted(1, attempt, V5, COPIED, rank_part(1))
    assert len(ledger.pushed(c.CommitOrder)) == 1


def copy_of_the_lost_rank(ledger: Ledger, writing: tuple[c.Writing, ...] | None) -> None:
    """Node 0 keeps a copy of what node 1 had to write, and says (or not) what it writes itself."""
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    held = tuple(holding(V5, rank_part(rank), SHARDED) for rank in (0, 1))
    ledger.call(node, c.InventoryTaken(DIR, question.number, held, writing))


def test_a_new_master_has_the_part_of_a_lost_writer_written_by_who_keeps_a_copy() -> None:
    """It took 600 s to find out that nobody wrote it any more, and then all of it was given up."""
    ledger, call = resumed_with_a_lost_rank(SHARDED)
    copy_of_the_lost_rank(ledger, writing=())
    ((node, order),) = ledger.pushed(c.PersistOrder)
    assert (node, order.parts) == (0, (rank_part(1),))
    ledger.persisted(0, order.attempt, V5, SHARDED, rank_part(1))
    ((_, commit),) = ledger.pushed(c.CommitOrder)
    assert [entry.name for entry in commit.files] == ["rank-00000.bin", "rank-00001.bin"]
    ledger.call(0, c.CommitDone(DIR, V5, commit.attempt))
    assert ledger.answer(call, c.PersistState).committed == V5


def test_a_new_master_does_not_order_what_the_old_one_has_ordered() -> None:
    ledger, call = resumed_with_a_lost_rank(SHARDED)
    attempt = "start1-1-1"
    copy_of_the_lost_rank(ledger, writing=(c.Writing(attempt, (rank_part(1),)),))
    assert ledger.pushes == []
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(1))
    assert len(ledger.pushed(c.CommitOrder)) == 1
    assert call not in ledger.answers


def test_an_agent_that_does_not_say_what_it_writes_may_write_what_it_holds() -> None:
    """Agents of an earlier release: a new master must not have files written twice."""
    ledger, call = resumed_with_a_lost_rank(SHARDED)
    copy_of_the_lost_rank(ledger, writing=None)
    assert ledger.pushes == []
    ledger.wait(ledger.now + RESUMED_S)
    assert "nothing was heard of rank-00001" in ledger.refusal(call)


def test_who_asks_late_does_not_write_what_was_ordered_meanwhile() -> None:
    """Its plan was lost with the old master, and its ask comes after the survey."""
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.restart()
    for node in (0, 1):
        ledger.arrive(node)
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    for node, question in ledger.pushed(c.InventoryWanted):
        mine = (holding(V5, rank_part(node), SHARDED),)
        ledger.call(node, c.InventoryTaken(DIR, question.number, mine, ()))
    assert [node for node, _ in ledger.pushed(c.PersistOrder)] == [1]
    late = ledger.ask(1, V5, SHARDED, rank_part(1))
    assert ledger.answer(late, c.PersistPlan) == c.PersistPlan(attempt, ())


def test_a_node_that_does_not_say_what_it_has_may_still_be_writing() -> None:
    ledger, call = resumed_with_a_lost_rank(SHARDED)
    ledger.wait(ledger.now + RESUMED_S - 1)
    assert call not in ledger.answers
    ledger.wait(ledger.now + 1)
    assert "nothing was heard of rank-00001" in ledger.refusal(call)


# ---- the end of the job -------------------------------------------------------------------------


def test_what_a_failed_job_has_in_memory_still_goes_to_storage() -> None:
    """A node that does not say what it holds is waited for as before the end, and no longer."""
    ledger = Ledger(2)
    ledger.feed(ev.JobFinished(False, "it failed for good", None, -1))
    assert ledger.machine.deadline() is None
    mine = tuple(holding(V5, part, COPIED) for part in (SHARED, rank_part(0)))
    call = ledger.call(0, c.FlushAsk(DIR, mine, NONE))
    ledger.wait(ledger.now + PATIENCE_S)
    ((node, order),) = ledger.pushed(c.PersistOrder)
    assert node == 0
    ledger.persisted(0, order.attempt, V5, COPIED, *order.parts)
    ((_, commit),) = ledger.pushed(c.CommitOrder)
    ledger.call(0, c.CommitDone(DIR, V5, commit.attempt))
    assert ledger.answer(call, c.PersistState).committed == V5
    assert ledger.machine.deadline() is None
