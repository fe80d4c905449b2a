# SPDX-License-Identifier: Apache-2.0
"""What goes to storage without the program asking, and what the end of the job waits for."""

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.agreement import TURNS_MAX
from holdfast.core.job.checkpoints.checkpoints import RETURN_S, SETTLE_S
from holdfast.core.job.checkpoints.gathering import PATIENCE_S
from holdfast.model.checkpoint import NONE, SHARED, Shape, Version, rank_part
from holdfast.model.ids import Round
from holdfast.protocol import checkpoints as c
from tests.core.harness import of_kind
from tests.core.ledger import COPIED, DIR, SHARDED, V5, V6, Ledger, begin, holding


def settled(ledger: Ledger) -> bool:
    return bool(of_kind(ev.WorkSettled, ledger.facts))


# ---- breakpoints and flushes --------------------------------------------------------------------


def test_what_is_restored_from_memory_goes_to_storage() -> None:
    """Breakpoint: the newest whole state is on storage before anything can overwrite it."""
    ledger = Ledger(2)
    held = [holding(V5, rank_part(node), SHARDED) for node in (0, 1)]
    for node in (0, 1):
        ledger.restore(node, held[node], prepared=V5, breakpoint=True)
    orders = ledger.pushed(c.PersistOrder)
    assert [(node, order.parts) for node, order in orders] == [
        (0, (rank_part(0),)),
        (1, (rank_part(1),)),
    ]


def test_a_part_is_written_by_who_runs_its_rank_and_not_from_a_copy() -> None:
    """A copy that is held for a slow storage would stop the copies of all later steps."""
    ledger, shape = Ledger(2), Shape(2, shared=True)
    everything = [holding(V5, part, shape) for part in (SHARED, rank_part(0), rank_part(1))]
    for node in (0, 1):
        ledger.restore(node, *everything, prepared=V5, breakpoint=True)
    orders = ledger.pushed(c.PersistOrder)
    assert [(node, order.parts) for node, order in orders] == [
        (0, (rank_part(0), SHARED)),
        (1, (rank_part(1),)),
    ]


def test_what_is_on_storage_already_is_not_written_again() -> None:
    ledger = Ledger(2)
    version = Version(ledger.go_fresh(), 5)
    ledger.commit(version, SHARDED)
    ledger.form([0, 1])
    for node in (0, 1):
        held = holding(version, rank_part(node), SHARDED)
        ledger.restore(node, held, prepared=version, breakpoint=True)
    assert ledger.pushed(c.PersistOrder) == []


def test_a_breakpoint_does_not_wait_for_an_older_step() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    for node in (0, 1):
        held = holding(V6, rank_part(node), SHARDED)
        ledger.restore(node, held, prepared=V6, breakpoint=True)
    (_, order), _ = ledger.pushed(c.PersistOrder)
    for node in (0, 1):
        ledger.persisted(node, order.attempt, V6, SHARDED, rank_part(node))
    ledger.call(0, c.CommitDone(DIR, V6, order.attempt))
    assert ledger.committed() == V6
    late = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    assert ledger.answer(late, c.PersistState).committed == V6


def test_what_is_older_than_a_commit_is_over() -> None:
    ledger, newer = Ledger(2), Version(0, 9)
    attempt = begin(ledger)
    report = ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    waiting = ledger.ask(0, V6, SHARDED, rank_part(0))
    for node in (0, 1):
        held = holding(newer, rank_part(node), SHARDED)
        ledger.restore(node, held, prepared=newer, breakpoint=True)
    (_, order), _ = ledger.pushed(c.PersistOrder)
    for node in (0, 1):
        ledger.persisted(node, order.attempt, newer, SHARDED, rank_part(node))
    ledger.call(0, c.CommitDone(DIR, newer, order.attempt))
    assert "superseded by step 9" in ledger.refusal(report)
    assert "superseded by step 9" in ledger.refusal(waiting)


def test_names_appear_one_after_the_other() -> None:
    """Two commits at once could move `latest` back to the older one."""
    ledger = Ledger(2)
    attempt = begin(ledger)
    for node in (0, 1):
        held = holding(V6, rank_part(node), SHARDED)
        ledger.restore(node, held, prepared=V6, breakpoint=True)
    (_, order), _ = ledger.pushed(c.PersistOrder)
    for name, version in ((attempt, V5), (order.attempt, V6)):
        for node in (0, 1):
            ledger.persisted(node, name, version, SHARDED, rank_part(node))
    assert [commit.version for _, commit in ledger.pushed(c.CommitOrder)] == [V5]
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert [commit.version for _, commit in ledger.pushed(c.CommitOrder)] == [V6]


def test_a_node_that_has_to_go_brings_the_newest_whole_version_to_storage() -> None:
    ledger = Ledger(2)
    newest = [holding(V6, rank_part(1), SHARDED), holding(V5, rank_part(1), SHARDED)]
    flush = ledger.call(1, c.FlushAsk(DIR, tuple(newest), NONE))
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    assert node == 0
    held = (holding(V5, rank_part(0), SHARDED),)
    ledger.call(0, c.InventoryTaken(DIR, question.number, held))
    orders = ledger.pushed(c.PersistOrder)
    assert [order.version for _, order in orders] == [V5, V5]
    attempt = orders[0][1].attempt
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    assert flush not in ledger.answers
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert ledger.answer(flush, c.PersistState).committed == V5


def test_a_node_that_comes_back_is_ordered_again_until_it_has_reported() -> None:
    """The order may have been lost with its stream, and no other node writes its part."""
    ledger = Ledger(2)
    for node in (0, 1):
        held = holding(V5, rank_part(node), SHARDED)
        ledger.restore(node, held, prepared=V5, breakpoint=True)
    orders = dict(ledger.pushed(c.PersistOrder))
    for _ in range(2):
        ledger.absent(1)
        ledger.arrive(1)
        assert ledger.pushed(c.PersistOrder) == [(1, orders[1])]
    ledger.persisted(1, orders[1].attempt, V5, SHARDED, rank_part(1))
    ledger.absent(1)
    ledger.arrive(1)
    assert ledger.pushed(c.PersistOrder) == []


def test_what_a_node_is_ordered_to_write_is_not_in_its_plan_too() -> None:
    """Its report for one write would complete the attempt while it was still at the other."""
    ledger = Ledger(2)
    asked = ledger.ask(1, V5, SHARDED, rank_part(1))  # Node 0 does not ask: its worker is dead.
    ledger.call(1, c.FlushAsk(DIR, (holding(V5, rank_part(1), SHARDED),), NONE))
    ((_, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(0, c.InventoryTaken(DIR, question.number, (holding(V5, rank_part(0), SHARDED),)))
    orders = dict(ledger.pushed(c.PersistOrder))
    assert {node: order.parts for node, order in orders.items()} == {
        0: (rank_part(0),),
        1: (rank_part(1),),
    }
    late = ledger.ask(0, V5, SHARDED, rank_part(0))
    attempt = orders[0].attempt
    for call in (asked, late):
        assert ledger.answer(call, c.PersistPlan) == c.PersistPlan(attempt, ())
    waiting = ledger.persisted(1, attempt, V5, SHARDED)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert ledger.answer(waiting, c.PersistState).committed == V5


def test_a_flush_joins_an_attempt_that_is_open_already() -> None:
    ledger, shape = Ledger(1), Shape(1, shared=False)
    ask = ledger.ask(0, V5, shape, rank_part(0))
    attempt = ledger.answer(ask, c.PersistPlan).attempt
    flush = ledger.call(0, c.FlushAsk(DIR, (holding(V5, rank_part(0), shape),), NONE))
    assert ledger.pushed(c.PersistOrder) == []
    ledger.persisted(0, attempt, V5, shape, rank_part(0))
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert ledger.answer(flush, c.PersistState).committed == V5


def test_nodes_that_go_together_share_one_attempt() -> None:
    ledger = Ledger(2)
    for node in (0, 1):
        ledger.call(node, c.FlushAsk(DIR, (holding(V5, rank_part(node), SHARDED),), NONE))
    for node, question in ledger.pushed(c.InventoryWanted):
        held = (holding(V5, rank_part(node), SHARDED),)
        ledger.call(node, c.InventoryTaken(DIR, question.number, held))
    assert len({order.attempt for _, order in ledger.pushed(c.PersistOrder)}) == 1


def test_a_flush_is_answered_when_there_is_nothing_to_bring() -> None:
    ledger = Ledger(1)
    call = ledger.call(0, c.FlushAsk(DIR, (), NONE))
    assert "nothing to keep" in ledger.refusal(call)
    again = ledger.call(0, c.FlushAsk(DIR, (), V5))
    assert ledger.answer(again, c.PersistState).committed == V5


def test_a_step_without_any_ranks_part_is_not_brought_to_storage() -> None:
    """Found by the simulator: a worker ended between its node's shared part and its own. The step
    was committed, could not be restored, and the job began anew."""
    ledger, torn = Ledger(1), holding(V5, SHARED, Shape(1, shared=True))
    call = ledger.call(0, c.FlushAsk(DIR, (torn,), NONE))
    assert "nothing to keep" in ledger.refusal(call)
    # All have it at hand, and memory has not kept the ranks' parts.
    restore = ledger.restore(0, torn, prepared=V5, breakpoint=True)
    assert ledger.answer(restore, c.RestorePlan).version == V5
    assert not ledger.pushed(c.PersistOrder)


def test_the_last_ranks_part_of_an_attempt_is_not_left_out() -> None:
    ledger = Ledger(2)
    flush = ledger.call(0, c.FlushAsk(DIR, (holding(V5, SHARED, COPIED),), NONE))
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    held = (holding(V5, SHARED, COPIED), holding(V5, rank_part(1), COPIED))
    ledger.call(node, c.InventoryTaken(DIR, question.number, held))
    orders = ledger.pushed(c.PersistOrder)
    assert [(node, order.parts) for node, order in orders] == [(0, (SHARED,)), (1, (rank_part(1),))]
    ledger.persisted(0, orders[0][1].attempt, V5, COPIED, SHARED)
    ledger.lose(1)
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(node, c.InventoryTaken(DIR, question.number, held[:1]))
    assert not ledger.pushed(c.CommitOrder)
    assert "rank-00001 was lost with its node" in ledger.refusal(flush)


def test_a_flush_learns_of_the_failure() -> None:
    ledger = Ledger(1)
    shape = Shape(1, shared=False)
    call = ledger.call(0, c.FlushAsk(DIR, (holding(V5, rank_part(0), shape),), NONE))
    ((_, order),) = ledger.pushed(c.PersistOrder)
    ledger.persisted(0, order.attempt, V5, shape, rank_part(0), problem="no space left")
    assert "no space left" in ledger.refusal(call)


# ---- the end of the job -------------------------------------------------------------------------


def test_the_end_waits_for_what_is_on_its_way_to_storage() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.feed(ev.WorldDone(Round(1)))
    assert not settled(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    assert settled(ledger)


def test_the_end_does_not_wait_for_ever() -> None:
    ledger = Ledger(2)
    begin(ledger)
    ledger.feed(ev.WorldDone(Round(1)))
    ledger.wait(ledger.now + SETTLE_S - 1)
    assert not settled(ledger)
    ledger.wait(ledger.now + 1)
    assert settled(ledger)


def test_with_nothing_under_way_the_end_is_at_once() -> None:
    ledger = Ledger(1)
    ledger.feed(ev.WorldDone(Round(1)))
    assert settled(ledger)


def test_a_new_master_of_a_world_that_is_done_waits_for_its_agents() -> None:
    ledger = Ledger(2)
    attempt = begin(ledger)
    ledger.restart(done=True)
    ledger.arrive(0)
    ledger.persisted(0, attempt, V5, SHARDED, rank_part(0))
    ledger.wait(ledger.now + RETURN_S)
    assert not settled(ledger)
    ledger.persisted(1, attempt, V5, SHARDED, rank_part(1), problem="the disk is full")
    assert settled(ledger)


def test_a_new_master_ends_the_job_when_nobody_has_anything_to_bring() -> None:
    ledger = Ledger(2)
    ledger.restart(done=True)
    assert not settled(ledger)
    ledger.wait(ledger.now + RETURN_S)
    assert settled(ledger)


def leave_with_unreachable_part() -> tuple[Ledger, str, int]:
    """Node 1 leaves and brings what it holds to storage, while node 0, which cannot fetch from it,
    restores: the ledger, the attempt and node 0's ask."""
    ledger = Ledger(2)
    ledger.form([0])
    mine, theirs = (holding(V5, rank_part(node), SHARDED) for node in (0, 1))
    ledger.call(1, c.FlushAsk(DIR, (theirs,), NONE))
    ((_, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(0, c.InventoryTaken(DIR, question.number, (mine,)))
    attempt = ledger.pushed(c.PersistOrder)[0][1].attempt
    bad = c.BadCopy(V5, rank_part(1), 1, "it cannot be reached")
    ask = ledger.restore(0, mine, bad=[bad], wants=[rank_part(0), rank_part(1)])
    ((_, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(1, c.InventoryTaken(DIR, question.number, (theirs,)))
    return ledger, attempt, ask


def test_what_a_leaving_node_brings_to_storage_is_waited_for_and_restored() -> None:
    ledger, attempt, ask = leave_with_unreachable_part()
    assert ask not in ledger.answers
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    ledger.call(0, c.CommitDone(DIR, V5, attempt))
    plan = ledger.answer(ask, c.RestorePlan)
    assert plan.version == V5
    assert [source.kind for source in plan.sources] == ["memory", "storage"]


def test_what_a_leaving_node_cannot_bring_to_storage_is_not_waited_for() -> None:
    ledger, attempt, ask = leave_with_unreachable_part()
    ledger.persisted(1, attempt, V5, SHARDED, rank_part(1), problem="no space left")
    plan = ledger.answer(ask, c.RestorePlan)
    assert (plan.version, plan.go) == (NONE, True)


def test_what_never_gets_everywhere_is_waited_for_on_its_way_to_storage() -> None:
    """Once it is there it is tried again: it comes from another place."""
    ledger, shape = Ledger(1), Shape(1, shared=False)
    held = [holding(version, rank_part(0), shape) for version in (V5, V6)]
    attempt = ledger.answer(ledger.ask(0, V6, shape, rank_part(0)), c.PersistPlan).attempt
    for _ in range(TURNS_MAX):
        assert ledger.answer(ledger.restore(0, *held), c.RestorePlan).version == V6
    waiting = ledger.restore(0, *held)
    assert waiting not in ledger.answers
    ledger.persisted(0, attempt, V6, shape, rank_part(0))
    ledger.call(0, c.CommitDone(DIR, V6, attempt))
    assert ledger.answer(waiting, c.RestorePlan).version == V6


def test_a_silent_node_outside_the_world_is_not_waited_for_again() -> None:
    """Its time is over while the storage is waited for: the master would do nothing else."""
    ledger, shape = Ledger(2), Shape(1, shared=False)
    ledger.form([0])
    held = [holding(version, rank_part(0), shape) for version in (V5, V6)]
    ledger.answer(ledger.ask(0, V6, shape, rank_part(0)), c.PersistPlan)
    for _ in range(TURNS_MAX):
        turn = ledger.restore(0, *held)
        ledger.wait(ledger.now + PATIENCE_S)
        assert ledger.answer(turn, c.RestorePlan).version == V6
    waiting = ledger.restore(0, *held)
    ledger.wait(ledger.now + PATIENCE_S)
    assert waiting not in ledger.answers
