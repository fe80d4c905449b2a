# SPDX-License-Identifier: Apache-2.0
"""The positions of data go with the checkpoints: neither is restored without the other.

The prior art keeps the position of data in the master and that of the model in checkpoints. After
every restore the two differ: samples are trained twice, or never.
"""

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.checkpoints.attempts import NO_POSITION
from holdfast.model.checkpoint import NONE, Holding, Stored, Version, rank_part
from holdfast.model.dataset import Position
from holdfast.protocol import checkpoints as c
from tests.core.ledger import DIR, SHARDED, Ledger, begin, holding, positions

V4, V5, V6 = (Version(0, step) for step in (4, 5, 6))


def followed() -> Ledger:
    """Two nodes that read data with respect to the directory, and have begun to save."""
    ledger = Ledger(2)
    ledger.follow()
    restored(ledger)
    return ledger


def parts_of(node: int, *versions: Version) -> list[Holding]:
    return [holding(version, rank_part(node), SHARDED) for version in versions]


def restored(
    ledger: Ledger,
    *held: Version,
    stored: tuple[Stored, ...] = (),
    step: int = -1,
    lineage: int = -1,
) -> ev.RestoreAgreed:
    """Both nodes load, in the lineage that they are in; what they agreed on in the end."""
    prepared = NONE
    for _ in range(4):
        calls = [
            ledger.restore(
                node,
                *parts_of(node, *held),
                prepared=prepared,
                stored=stored if node == 0 else (),
                step=step,
                lineage=lineage,
            )
            for node in ledger.members
        ]
        plan = ledger.answer(calls[0], c.RestorePlan)
        if plan.go:
            fact = ledger.facts[-1]
            assert isinstance(fact, ev.RestoreAgreed)
            return fact
        prepared = plan.version
    raise AssertionError("they did not agree")


def orders(ledger: Ledger) -> list[c.CommitOrder]:
    return [order for _, order in ledger.pushed(c.CommitOrder)]


# ---- memory --------------------------------------------------------------------------------------


def test_model_and_data_are_restored_together() -> None:
    ledger = followed()
    ledger.mark(V5)
    ledger.mark(V6, held=[V5])
    ledger.form([0, 1])
    agreed = restored(ledger, V5, V6)
    assert (agreed.version, agreed.positions) == (V6, positions(V6))


def test_a_version_that_not_every_rank_has_marked_is_passed_over() -> None:
    """A rank died between its save and its word: what it had read by then nobody knows."""
    ledger = followed()
    ledger.mark(V5)
    ledger.form([0, 1])
    agreed = restored(ledger, V5, V6)
    assert (agreed.version, agreed.positions) == (V5, positions(V5))
    assert "step 6 is passed over: not every rank has said how far its data were" in agreed.notes


def test_a_late_mark_takes_no_position_from_what_is_being_restored() -> None:
    """It is of a node that was given up, and nobody of the new world has said what it holds."""
    ledger = followed()
    ledger.mark(V4)
    ledger.mark(V5, held=[V4])
    ledger.form([0, 1])
    ledger.feed(ev.VersionMarked(DIR, V6, positions(V6)))
    agreed = restored(ledger, V5)
    assert (agreed.version, agreed.positions) == (V5, positions(V5))


def test_what_all_have_at_hand_is_not_taken_without_its_position() -> None:
    ledger = followed()
    ledger.form([0, 1])
    calls = [ledger.restore(node, *parts_of(node, V5), prepared=V5) for node in (0, 1)]
    plan = ledger.answer(calls[0], c.RestorePlan)
    assert (plan.version, plan.go) == (NONE, False)


def test_no_marked_version_is_a_start_from_the_beginning_for_both() -> None:
    ledger = followed()
    ledger.form([0, 1])
    agreed = restored(ledger, V5, V6)
    assert (agreed.version, agreed.positions, agreed.fresh) == (NONE, (), False)


def test_without_data_every_version_counts() -> None:
    ledger = Ledger(2)
    assert restored(ledger, V5, V6).version == V6


def test_a_new_master_knows_the_positions() -> None:
    """Prior art: what the master's process knew of the data was gone with it."""
    for compacted in (False, True):
        ledger = followed()
        ledger.mark(V5)
        ledger.mark(V6, held=[V5])
        ledger.restart(compacted=compacted)
        for node in (0, 1):
            ledger.arrive(node)
        ledger.form([0, 1])
        agreed = restored(ledger, V5, V6)
        assert (agreed.version, agreed.positions) == (V6, positions(V6))


def test_a_rollback_to_an_older_step_rolls_the_data_back() -> None:
    ledger = followed()
    ledger.mark(V5)
    ledger.mark(V6, held=[V5])
    agreed = restored(ledger, V5, V6, step=5, lineage=0)
    assert (agreed.version, agreed.positions) == (V5, positions(V5))


def test_a_step_that_is_saved_again_restores_nothing() -> None:
    """The ranks go on as they are, in a new lineage: their data must not jump."""
    ledger = followed()
    ledger.mark(V5)
    for node in (0, 1):
        ledger.restore(node, fresh=True, lineage=0)
    fact = ledger.facts[-1]
    assert isinstance(fact, ev.RestoreAgreed)
    assert (fact.fresh, fact.lineage) == (True, 1)


def test_nodes_that_read_nothing_are_told_that_others_do() -> None:
    """Of a pipeline only some ranks read data, but all must say so with every save."""
    ledger = Ledger(2)
    calls = [ledger.restore(node) for node in (0, 1)]
    assert not ledger.answer(calls[0], c.RestorePlan).follows
    ledger.follow()
    ledger.form([0, 1])
    calls = [ledger.restore(node) for node in (0, 1)]
    assert all(ledger.answer(call, c.RestorePlan).follows for call in calls)


# ---- storage -------------------------------------------------------------------------------------


def test_the_commit_carries_the_position() -> None:
    ledger = followed()
    ledger.mark(V5)
    attempt = begin(ledger)
    for node in (0, 1):
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    (order,) = orders(ledger)
    assert order.positions == positions(V5)


def test_a_commit_that_a_new_master_orders_carries_it_too() -> None:
    ledger = followed()
    ledger.mark(V5)
    attempt = begin(ledger)
    ledger.mark(V6, held=[V5])
    ledger.restart(compacted=True)
    for node in (0, 1):
        ledger.arrive(node)
        ledger.persisted(node, attempt, V5, SHARDED, rank_part(node))
    (order,) = orders(ledger)
    assert (order.attempt, order.positions) == (attempt, positions(V5))


def test_what_has_no_position_does_not_go_to_storage() -> None:
    ledger = followed()
    for node in (0, 1):
        call = ledger.ask(node, V5, SHARDED, rank_part(node))
    assert ledger.refusal(call) == NO_POSITION
    (view,) = ledger.machine.view()
    assert view["problem"] == f"step 5 did not reach storage: {NO_POSITION}"
    ledger.mark(V6)
    assert begin(ledger, V6)


def test_an_attempt_of_an_earlier_master_without_a_position_is_given_up() -> None:
    """The node whose word was missing is lost, but what it had written is on storage."""
    ledger = followed()
    ledger.restart()
    for node in (0, 1):
        ledger.arrive(node)
        call = ledger.persisted(node, "start1-1-9", V5, SHARDED, rank_part(node))
    assert NO_POSITION in ledger.refusal(call)
    assert orders(ledger) == []


def test_a_new_job_adopts_the_position_on_storage() -> None:
    ledger = Ledger(2)
    ledger.follow()
    stored = (Stored(V4, SHARDED), Stored(V5, SHARDED, positions(V5)))
    agreed = restored(ledger, stored=stored)
    assert (agreed.version, agreed.positions) == (V5, positions(V5))
    # The storage may be out of reach when it is needed again.
    ledger.restart(compacted=True)
    for node in (0, 1):
        ledger.arrive(node)
    ledger.form([0, 1])
    assert restored(ledger, V5).positions == positions(V5)


def test_a_checkpoint_without_a_position_is_restored_and_the_data_begin_anew() -> None:
    """It was saved by a program that did not read its data this way."""
    ledger = Ledger(2)
    ledger.follow()
    agreed = restored(ledger, stored=(Stored(V5, SHARDED),))
    assert (agreed.version, agreed.positions) == (V5, ())
    assert "step 5 does not say how far its data were: they begin anew" in agreed.notes


def test_a_node_that_has_to_go_keeps_the_newest_version_with_a_position() -> None:
    ledger = followed()
    ledger.mark(V5)
    flush = ledger.call(0, c.FlushAsk(DIR, tuple(parts_of(0, V5, V6)), NONE))
    ((_, question),) = ledger.pushed(c.InventoryWanted)
    ledger.call(1, c.InventoryTaken(DIR, question.number, tuple(parts_of(1, V5, V6))))
    written = {order.version for _, order in ledger.pushed(c.PersistOrder)}
    assert written == {V5}
    assert flush not in ledger.answers


def test_the_state_in_memory_goes_to_storage_after_a_failure_with_its_position() -> None:
    ledger = followed()
    ledger.mark(V5)
    ledger.form([0, 1])
    for prepared in (NONE, V5):
        for node in (0, 1):
            held = parts_of(node, V5, V6)
            ledger.restore(node, *held, prepared=prepared, breakpoint=True)
    ((_, order), _) = ledger.pushed(c.PersistOrder)
    for node in (0, 1):
        ledger.persisted(node, order.attempt, V5, SHARDED, rank_part(node))
    (commit,) = orders(ledger)
    assert (commit.version, commit.positions) == (V5, positions(V5))


# ---- what is kept --------------------------------------------------------------------------------


def kept(ledger: Ledger) -> list[Version]:
    snapshot = ledger.machine.snapshot()
    return [one.version for one in snapshot if isinstance(one, rec.VersionPositioned)]


def test_positions_are_kept_for_as_long_as_a_node_holds_the_version() -> None:
    """A slow copy to another node, or to storage, may be older than many newer versions."""
    ledger = followed()
    slow = Version(0, 1)
    for step in range(1, 200):
        ledger.mark(Version(0, step), held=[slow, Version(0, step - 1)])
    assert kept(ledger) == [slow, Version(0, 198), Version(0, 199)]
    ledger.mark(Version(0, 200), held=[Version(0, 199)])
    assert kept(ledger) == [Version(0, 199), Version(0, 200)]


def test_what_is_committed_keeps_its_position() -> None:
    ledger = followed()
    ledger.mark(V5)
    ledger.commit(V5, SHARDED)
    for step in range(6, 20):
        ledger.mark(Version(0, step))
    ledger.form([0, 1])
    assert restored(ledger).positions == positions(V5)


def test_however_much_nodes_claim_to_hold_little_is_kept() -> None:
    ledger = followed()
    claimed = [Version(0, step) for step in range(300)]
    for version in claimed:
        ledger.mark(version, held=claimed)
    assert len(kept(ledger)) == 64


def test_a_node_of_another_round_says_nothing_about_what_is_held() -> None:
    ledger = followed()
    ledger.mark(V5)
    ledger.form([1])
    ledger.mark(V6, held=[V5])
    assert kept(ledger) == [V5, V6]


def test_positions_of_several_datasets_travel_together() -> None:
    ledger = followed()
    both = (Position("train", 0, (5,)), Position("images", 1, (2, 3)))
    ledger.feed(ev.VersionMarked(DIR, V5, both))
    ledger.form([0, 1])
    assert restored(ledger, V5).positions == both
