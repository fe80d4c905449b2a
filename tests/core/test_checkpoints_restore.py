# SPDX-License-Identifier: Apache-2.0
"""The restore agreement: every rank the same version or nobody any, from the nearest copy."""

import pytest

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.gathering import PATIENCE_S
from holdfast.model.checkpoint import NONE, SHARED, Holding, Shape, Stored, Version, rank_part
from holdfast.model.ids import Round
from holdfast.model.parity import Block
from holdfast.protocol import checkpoints as c
from tests.core.ledger import COPIED, DIR, SHARDED, Ledger, holding, member


def own(node: int, version: Version, shape: Shape = SHARDED) -> Holding:
    return holding(version, rank_part(node), shape)


def plans(ledger: Ledger, *calls: int) -> list[c.RestorePlan]:
    return [ledger.answer(call, c.RestorePlan) for call in calls]


def test_nobody_is_answered_before_everybody_has_asked() -> None:
    ledger = Ledger(2)
    ledger.restore(0, own(0, Version(1, 5)))
    assert ledger.answers == {}


def test_nothing_anywhere_is_a_start_from_the_beginning() -> None:
    ledger = Ledger(2)
    for plan in plans(ledger, ledger.restore(0), ledger.restore(1)):
        assert (plan.version, plan.go, plan.lineage) == (NONE, True, 0)


def test_step_0_is_a_checkpoint() -> None:
    """The prior art takes step 0 for no checkpoint at all."""
    ledger, zero = Ledger(2), Version(1, 0)
    calls = [ledger.restore(node, own(node, zero)) for node in (0, 1)]
    assert [plan.version for plan in plans(ledger, *calls)] == [zero, zero]


def test_a_mixed_step_restore_is_impossible() -> None:
    """Prior art: a torn rank falls back to an older step while the others go on with memory."""
    ledger = Ledger(2)
    calls = [
        ledger.restore(0, own(0, Version(1, 10)), own(0, Version(1, 11))),
        ledger.restore(1, own(1, Version(1, 9)), own(1, Version(1, 10))),
    ]
    for plan in plans(ledger, *calls):
        assert (plan.version, plan.go) == (Version(1, 10), False)
        assert "step 11 is not whole: no copy of rank-00001 is left" in plan.notes


def test_steps_that_are_equal_as_floats_are_not_equal() -> None:
    """The prior art votes in float32, where 16777216 equals 16777217."""
    ledger = Ledger(2)
    ledger.restore(0, own(0, Version(1, 16777216)))
    last = ledger.restore(1, own(1, Version(1, 16777217)))
    assert ledger.answer(last, c.RestorePlan).version == NONE


def test_the_newer_lineage_wins_over_the_higher_step() -> None:
    """After a rollback the same steps are reached again, with another state."""
    ledger, rolled_back = Ledger(2), Version(2, 7)
    calls = [
        ledger.restore(node, own(node, Version(1, 9)), own(node, rolled_back)) for node in (0, 1)
    ]
    assert {plan.version for plan in plans(ledger, *calls)} == {rolled_back}


def test_it_is_go_once_everybody_has_it_at_hand() -> None:
    ledger, version = Ledger(2), Version(3, 10)
    for node in (0, 1):
        ledger.restore(node, own(node, version))
    first = ledger.restore(0, own(0, version), prepared=version)
    second = ledger.restore(1, own(1, version))  # It has not got that far.
    assert not any(plan.go for plan in plans(ledger, first, second))
    calls = [ledger.restore(node, own(node, version), prepared=version) for node in (0, 1)]
    for plan in plans(ledger, *calls):
        assert (plan.version, plan.go, plan.lineage) == (version, True, 4)


def test_it_is_not_go_while_nodes_have_different_versions_at_hand() -> None:
    ledger = Ledger(2)
    calls = [ledger.restore(node, prepared=Version(1, 5 + node)) for node in (0, 1)]
    assert not any(plan.go for plan in plans(ledger, *calls))


def test_it_is_not_go_with_nothing_while_a_rank_has_something_at_hand() -> None:
    """One rank of a node took a version that another rank found bad, and there is no other."""
    ledger = Ledger(1)
    (plan,) = plans(ledger, ledger.restore(0, mixed=True))
    assert (plan.version, plan.go) == (NONE, False)
    (plan,) = plans(ledger, ledger.restore(0))
    assert (plan.version, plan.go) == (NONE, True)


def test_every_node_is_told_the_places_of_what_it_wants_and_no_more() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    first = ledger.restore(0, own(0, version), wants=[rank_part(0)])
    second = ledger.restore(1, stored=[Stored(version, SHARDED)], wants=[rank_part(1), "rank-9"])
    (mine,), (stored,) = (plan.sources for plan in plans(ledger, first, second))
    assert (mine.part, mine.kind, mine.node_id, mine.digest) == (rank_part(0), "memory", 0, 10)
    assert (stored.part, stored.kind, stored.node_id) == (rank_part(1), "storage", -1)


def test_a_lost_nodes_part_comes_from_the_peer_that_keeps_a_copy() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    ledger.restore(0, own(0, version), own(1, version))
    plan = ledger.answer(ledger.restore(1), c.RestorePlan)
    (source,) = plan.sources
    assert plan.version == version
    assert (source.kind, source.node_id, source.address) == ("peer", 0, "host-0:7000")


def test_many_who_want_the_same_begin_with_different_holders() -> None:
    ledger, version = Ledger(6), Version(1, 10)
    shape = Shape(6, shared=True)
    calls = []
    for node in range(6):
        held = [holding(version, SHARED, shape), own(node, version, shape)] if node < 3 else []
        calls.append(ledger.restore(node, *held, wants=[SHARED]))
    asked = [plan.sources[0].node_id for plan in plans(ledger, *calls[3:])]
    assert sorted(asked) == [0, 1, 2]


def test_nodes_without_a_place_in_the_world_are_asked_too() -> None:
    ledger, version = Ledger(2, spares=1), Version(1, 10)
    calls = [ledger.restore(0, own(0, version)), ledger.restore(1)]
    ((node, question),) = ledger.pushed(c.InventoryWanted)
    assert node == 2
    assert ledger.answers == {}
    ledger.call(2, c.InventoryTaken(DIR, question.number, (own(1, version),)))
    first, second = plans(ledger, *calls)
    assert first.version == second.version == version
    assert second.sources[0].address == "host-2:7000"


def test_a_spare_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    ledger = Ledger(1, spares=1)
    call = ledger.restore(0)
    assert ledger.answers == {}
    ledger.wait(ledger.now + PATIENCE_S)
    assert ledger.answer(call, c.RestorePlan).go


def test_a_spare_that_missed_the_question_is_asked_again() -> None:
    ledger = Ledger(1, spares=1)
    ledger.restore(0)
    asked = ledger.pushed(c.InventoryWanted)
    ledger.absent(1)
    ledger.arrive(1)
    assert ledger.pushed(c.InventoryWanted) == asked


def test_a_lost_spare_is_not_waited_for() -> None:
    ledger = Ledger(1, spares=1)
    call = ledger.restore(0)
    ledger.lose(1)
    assert ledger.answer(call, c.RestorePlan).go


def test_a_bad_copy_is_replaced_by_another_copy() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    bad = [c.BadCopy(version, rank_part(1), 1, "the digest differs")]
    ledger.restore(0, own(0, version), own(1, version))
    plan = ledger.answer(ledger.restore(1, own(1, version), bad=bad), c.RestorePlan)
    assert plan.version == version
    assert plan.sources[0].node_id == 0
    where = "rank-00001 of step 10 in the memory of node id 1"
    assert f"{where} cannot be used: the digest differs" in plan.notes


def test_a_corrupt_newest_falls_back_to_the_next_and_says_so() -> None:
    ledger, newest, older = Ledger(2), Version(1, 10), Version(1, 5)
    stored = [Stored(older, SHARDED), Stored(newest, SHARDED)]
    for node in (0, 1):
        ledger.restore(node, stored=stored)
    bad = [c.BadCopy(newest, rank_part(1), -1, "the file is short")]
    calls = [ledger.restore(0, stored=stored, prepared=newest), ledger.restore(1, bad=bad)]
    for plan in plans(ledger, *calls):
        assert (plan.version, plan.go) == (older, False)
        assert "rank-00001 of step 10 on storage cannot be used: the file is short" in plan.notes


def test_a_bad_copy_stays_bad_for_the_whole_agreement() -> None:
    ledger, version = Ledger(1), Version(1, 10)
    shape = Shape(1, shared=False)
    held = holding(version, rank_part(0), shape)
    bad = [c.BadCopy(version, rank_part(0), 0, "the digest differs")]
    assert ledger.answer(ledger.restore(0, held), c.RestorePlan).version == version
    assert ledger.answer(ledger.restore(0, held, bad=bad), c.RestorePlan).version == NONE


def test_what_is_committed_counts_even_if_the_listing_misses_it() -> None:
    """Never older than the newest committed, unless that was tried and found bad."""
    ledger = Ledger(2)
    version = Version(ledger.go_fresh(), 10)
    ledger.commit(version, SHARDED)
    ledger.form([0, 1])
    calls = [ledger.restore(node, own(node, Version(0, 7))) for node in (0, 1)]
    assert {plan.version for plan in plans(ledger, *calls)} == {version}


def test_a_version_that_never_gets_everywhere_is_passed_over() -> None:
    ledger, newest, older = Ledger(1), Version(1, 10), Version(1, 9)
    shape = Shape(1, shared=False)
    held = [holding(version, rank_part(0), shape) for version in (older, newest)]
    seen = [ledger.answer(ledger.restore(0, *held), c.RestorePlan) for _ in range(6)]
    assert [plan.version for plan in seen] == [newest] * 5 + [older]
    assert "step 10 could not be brought to every node in 5 tries" in seen[-1].notes


# ---- a shared part ------------------------------------------------------------------------------


def test_a_shared_part_of_any_survivor_serves_all() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    ledger.restore(0, holding(version, SHARED, COPIED), own(0, version, COPIED))
    plan = ledger.answer(ledger.restore(1), c.RestorePlan)
    assert plan.version == version
    assert [(s.asked, s.part, s.kind) for s in plan.sources] == [
        (SHARED, SHARED, "peer"),
        (rank_part(1), rank_part(0), "peer"),
    ]
    assert "rank-00001 of step 10: lost, another rank's part stands in" in plan.notes


def test_a_torn_copy_of_one_rank_costs_a_step_and_not_its_data_position() -> None:
    """A worker that dies while it copies leaves its node's shared part and the step before."""
    ledger, torn, before = Ledger(2), Version(1, 11), Version(1, 10)
    held = [[holding(v, SHARED, COPIED) for v in (before, torn)] for _ in (0, 1)]
    first = ledger.restore(0, *held[0], own(0, before, COPIED), own(0, torn, COPIED))
    second = ledger.restore(1, *held[1], own(1, before, COPIED))
    for plan in plans(ledger, first, second):
        assert plan.version == before
        assert {source.asked for source in plan.sources} == {s.part for s in plan.sources}
        assert "step 11 is not whole: no copy of rank-00001 is left" in plan.notes


def test_a_torn_copy_of_the_first_step_goes_back_to_what_the_world_began_with() -> None:
    ledger, base = Ledger(1), Version(3, 10)
    shape = Shape(1, shared=True)
    whole = [holding(base, SHARED, shape), holding(base, rank_part(0), shape)]
    lineage = ledger.answer(ledger.restore(0, *whole, prepared=base), c.RestorePlan).lineage
    ledger.form([0])
    torn = holding(Version(lineage, 11), SHARED, shape)
    call = ledger.restore(0, *whole, torn)
    assert ledger.answer(call, c.RestorePlan).version == base


def test_a_whole_version_of_an_abandoned_lineage_is_not_gone_back_to() -> None:
    ledger, abandoned, newest = Ledger(1), Version(1, 10), Version(2, 3)
    whole = [holding(abandoned, part, COPIED) for part in (SHARED, rank_part(0), rank_part(1))]
    call = ledger.restore(0, *whole, holding(newest, SHARED, COPIED), own(0, newest, COPIED))
    assert ledger.answer(call, c.RestorePlan).version == newest


def test_storage_is_not_gone_back_to_for_the_part_of_one_rank() -> None:
    ledger, stored, newest = Ledger(2), Version(1, 10), Version(1, 90)
    left = [holding(newest, SHARED, COPIED), own(0, newest, COPIED)]
    ledger.restore(0, *left, stored=[Stored(stored, COPIED)])
    assert ledger.answer(ledger.restore(1), c.RestorePlan).version == newest


def test_what_was_stored_since_the_last_copy_costs_no_rank_its_random_state() -> None:
    """The soak found it: a node is lost when a step is on storage, but not yet on its peer."""
    ledger, copied, stored, newest = Ledger(2), Version(1, 9), Version(1, 10), Version(1, 11)
    left = [holding(v, SHARED, COPIED) for v in (copied, stored, newest)]
    left += [own(0, v, COPIED) for v in (copied, stored, newest)]
    ledger.restore(0, *left, own(1, copied, COPIED), stored=[Stored(stored, COPIED)])
    plan = ledger.answer(ledger.restore(1), c.RestorePlan)
    assert plan.version == stored
    assert (rank_part(1), rank_part(1), "storage") in [
        (s.asked, s.part, s.kind) for s in plan.sources
    ]


def test_a_rank_that_is_new_gets_another_ranks_part() -> None:
    ledger, version = Ledger(3), Version(1, 10)
    for node in (0, 1):
        ledger.restore(node, holding(version, SHARED, COPIED), own(node, version, COPIED))
    plan = ledger.answer(ledger.restore(2), c.RestorePlan)
    assert [source.part for source in plan.sources] == [SHARED, rank_part(0)]


def test_without_the_shared_part_a_version_is_lost() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    for node in (0, 1):
        call = ledger.restore(node, own(node, version, COPIED))
    assert ledger.answer(call, c.RestorePlan).version == NONE


def test_without_any_ranks_part_a_version_is_lost() -> None:
    """Every rank would find its part nowhere, turn after turn."""
    ledger, before, torn = Ledger(2), Version(0, 10), Version(1, 1)
    for node in (0, 1):
        call = ledger.restore(node, holding(torn, SHARED, COPIED), stored=[Stored(before, COPIED)])
    assert ledger.answer(call, c.RestorePlan).version == before


def test_the_part_that_stands_in_on_storage_is_not_looked_for_by_trial() -> None:
    """A rack was lost while the step was written. A try for each of its ranks would be too many,
    and what is committed would be given up for an older step, or for nothing."""
    ledger, version, there = Ledger(2), Version(0, 20), rank_part(12)
    stored = [Stored(version, Shape(16, shared=True), first_rank=12)]
    calls = [ledger.restore(node, stored=stored if node == 0 else ()) for node in (0, 1)]
    for rank, plan in enumerate(plans(ledger, *calls)):
        assert plan.version == version
        found = [(s.asked, s.part, s.kind) for s in plan.sources]
        assert found == [(SHARED, SHARED, "storage"), (rank_part(rank), there, "storage")]


def test_what_stands_in_comes_from_storage_if_its_holder_cannot_be_reached() -> None:
    ledger, version, shape = Ledger(2), Version(0, 20), Shape(3, shared=True)
    ledger.feed(ev.NodeReady(member(0, peer_port=0), Round(1), returned=True))
    there = [Stored(version, shape, first_rank=2)]
    held = [holding(version, part, shape) for part in (SHARED, rank_part(0))]
    ledger.restore(0, *held, stored=there)
    plan = ledger.answer(ledger.restore(1), c.RestorePlan)
    found = [(source.asked, source.part, source.kind) for source in plan.sources]
    assert found == [(SHARED, SHARED, "storage"), (rank_part(1), rank_part(2), "storage")]


def test_when_no_ranks_part_on_storage_can_be_read_the_step_before_is_taken() -> None:
    ledger, before, newest = Ledger(2), Version(0, 10), Version(0, 20)
    stored = [Stored(before, COPIED), Stored(newest, COPIED)]
    bad = [c.BadCopy(newest, rank_part(rank), -1, "it is not there") for rank in (0, 1)]
    calls = [ledger.restore(node, stored=stored, bad=[bad[node]]) for node in (0, 1)]
    assert {plan.version for plan in plans(ledger, *calls)} == {before}


# ---- parity -------------------------------------------------------------------------------------


def test_a_part_that_parity_can_rebuild_is_not_lost() -> None:
    ledger, version, shape = Ledger(3), Version(1, 10), Shape(3, shared=False)
    blocks = [holding(version, Block(k, (0, 1, 2)).name, shape, parity=True) for k in range(3)]
    ledger.restore(0, own(0, version, shape), blocks[0])
    ledger.restore(1, own(1, version, shape), blocks[1])
    plan = ledger.answer(ledger.restore(2), c.RestorePlan)
    assert plan.version == version
    assert {source.asked for source in plan.sources} == {rank_part(2)}
    assert {source.kind for source in plan.sources} == {"parity"}
    needed = {blocks[0].part, blocks[1].part, rank_part(0), rank_part(1)}
    assert {source.part for source in plan.sources} == needed


def test_two_losses_in_a_parity_group_are_too_many() -> None:
    ledger, version, shape = Ledger(3), Version(1, 10), Shape(3, shared=False)
    blocks = [holding(version, Block(k, (0, 1, 2)).name, shape, parity=True) for k in range(3)]
    ledger.restore(0, own(0, version, shape), blocks[0])
    ledger.restore(1, blocks[1])
    assert ledger.answer(ledger.restore(2), c.RestorePlan).version == NONE


# ---- repeats, rounds, restarts ------------------------------------------------------------------


def test_a_repeated_ask_is_answered_once_where_it_came_from_last() -> None:
    ledger = Ledger(2)
    lost = ledger.restore(0)
    again = ledger.restore(0)
    ledger.restore(1)
    assert lost not in ledger.answers
    assert ledger.answer(again, c.RestorePlan).go


def test_who_missed_the_go_gets_the_same_again_from_a_new_master() -> None:
    ledger, version = Ledger(2), Version(3, 10)
    for _ in range(2):
        for node in (0, 1):
            call = ledger.restore(node, own(node, version), prepared=version)
    assert ledger.answer(call, c.RestorePlan).go
    ledger.restart(compacted=True)
    ledger.arrive(1)
    again = ledger.restore(1, own(1, version), prepared=version)
    assert ledger.answer(again, c.RestorePlan) == c.RestorePlan(version, SHARDED, True, 4)


def test_a_second_load_in_the_same_round_is_a_new_agreement() -> None:
    ledger, saved = Ledger(2), Version(0, 3)
    assert ledger.go_fresh() == 0
    first = ledger.restore(0, own(0, saved), lineage=0)
    assert first not in ledger.answers
    second = ledger.restore(1, own(1, saved), lineage=0)
    assert {plan.version for plan in plans(ledger, first, second)} == {saved}


def test_a_new_master_agrees_from_the_asks_alone() -> None:
    ledger, version = Ledger(2), Version(3, 10)
    ledger.restore(0, own(0, version))
    ledger.restart()
    for node in (0, 1):
        ledger.arrive(node)
        call = ledger.restore(node, own(node, version))
    assert ledger.answer(call, c.RestorePlan).version == version


def test_an_ask_of_an_old_round_is_stale() -> None:
    ledger = Ledger(2)
    held = ledger.restore(0)
    ledger.form([0, 1])
    assert "new round" in ledger.refusal(held)
    assert ledger.refusal(ledger.restore(1, round=1)) == "round 1 is over"


def test_a_node_lost_in_the_middle_leaves_everybody_unanswered() -> None:
    ledger = Ledger(2)
    ledger.restore(0)
    ledger.lose(1)
    assert ledger.answers == {}


def test_a_lineage_is_never_given_twice() -> None:
    ledger = Ledger(2)
    assert ledger.go_fresh() == 0
    ledger.form([0, 1])
    ledger.restart(compacted=True)
    assert ledger.go_fresh() == 1
    ledger.form([0])
    call = ledger.restore(0, stored=[Stored(Version(7, 1), SHARDED)], fresh=True)
    assert ledger.answer(call, c.RestorePlan).lineage == 8


@pytest.mark.parametrize("odd", [{"fresh": True}, {"step": 5}], ids=["fresh", "step"])
def test_nodes_that_want_different_things_are_told_so(odd: dict[str, int]) -> None:
    ledger = Ledger(2)
    calls = [ledger.restore(0), ledger.restore(1, **odd)]  # type: ignore[arg-type]
    for call in calls:
        assert "different steps" in ledger.refusal(call) or "save first" in ledger.refusal(call)


def test_one_step_and_no_other_can_be_asked_for() -> None:
    ledger = Ledger(2)
    held = [[own(node, Version(1, step)) for step in (4, 5)] for node in (0, 1)]
    for node in (0, 1):
        call = ledger.restore(node, *held[node], step=4)
    assert ledger.answer(call, c.RestorePlan).version == Version(1, 4)


def test_the_rate_of_failures_is_breaks_over_time() -> None:
    ledger = Ledger(1)
    ledger.feed(ev.WorldBroken(ledger.world().round, "x", ledger.world().members[0].node_rank, -1))
    ledger.now = 100.0
    assert ledger.answer(ledger.restore(0), c.RestorePlan).failures_per_s == pytest.approx(0.01)


# ---- where is a part ----------------------------------------------------------------------------


def test_a_part_is_located_by_the_last_turn() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    for node in (0, 1):
        ledger.restore(node, own(node, version))
    call = ledger.call(1, c.PartsLocate(DIR, version, (rank_part(0),)))
    (source,) = ledger.answer(call, c.PartsLocated).sources
    assert (source.kind, source.node_id) == ("peer", 0)


def test_a_new_master_asks_around_before_it_says_where_a_part_is() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    ledger.restart()
    for node in (0, 1):
        ledger.arrive(node)
    call = ledger.call(1, c.PartsLocate(DIR, version, (rank_part(0), rank_part(1))))
    questions = ledger.pushed(c.InventoryWanted)
    assert [node for node, _ in questions] == [0, 1]
    for node, question in questions:
        held = (own(0, version),) if node == 0 else ()
        ledger.call(node, c.InventoryTaken(DIR, question.number, held))
    kinds = [source.kind for source in ledger.answer(call, c.PartsLocated).sources]
    assert kinds == ["peer", "storage"]


def test_a_broken_stream_to_the_master_is_no_reason_not_to_fetch_from_that_node() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    ledger.restore(0, own(0, version), own(1, version))
    ledger.absent(0)
    plan = ledger.answer(ledger.restore(1), c.RestorePlan)
    assert [source.address for source in plan.sources] == ["host-0:7000"]


def test_a_node_without_a_byte_service_is_no_source() -> None:
    ledger, version = Ledger(2), Version(1, 10)
    ledger.feed(ev.NodeReady(member(0, peer_port=0), Round(1), returned=True))
    ledger.restore(0, own(0, version), own(1, version))
    assert ledger.answer(ledger.restore(1), c.RestorePlan).sources == ()
