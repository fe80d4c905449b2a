# SPDX-License-Identifier: Apache-2.0
"""The ledger of shards: leases, waits, epochs, repeats, losses, and what is set aside."""

import tracemalloc

import pytest

from holdfast.core.job import events as ev
from holdfast.model.dataset import Dataset, Piece
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from tests.core.data_ledger import DataLedger, done, failed, member, returned, span, upto

TRAIN = Dataset("train", size=25, shard_size=10)


def test_pieces_are_dealt_in_order_and_the_last_one_is_shorter() -> None:
    ledger = DataLedger(TRAIN)
    first, second = ledger.take("a", want=2)
    (third,) = ledger.take("b", want=5)
    assert [span(first), span(second), span(third)] == [(0, 10), (10, 20), (20, 25)]
    assert [first.number, second.number, third.number] == [1, 2, 3]


def test_a_waiting_worker_is_held_until_the_epoch_is_over() -> None:
    ledger = DataLedger(TRAIN)
    leases = ledger.take("a", want=3)
    ledger.take("b")
    assert ledger.answer["b"] is None
    ledger.report("a", done(leases[0]), done(leases[1]), upto(leases[2], 24))
    assert ledger.answer["b"] is None
    ledger.report("a", done(leases[2]))
    assert ledger.is_over("b")
    assert [fact.epoch for fact in ledger.said(ev.EpochOver)] == [0]


def test_what_comes_back_is_dealt_first_and_from_where_it_was_left() -> None:
    ledger = DataLedger(TRAIN)
    (one,) = ledger.take("a")
    ledger.report("a", returned(one, 4))
    (rest,) = ledger.take("b")
    assert span(rest) == (4, 10)
    assert rest.number == 2


def test_the_longest_waiting_gets_what_comes_back() -> None:
    ledger = DataLedger(TRAIN)
    leases = ledger.take("a", want=3)
    ledger.take("b")
    ledger.take("c")
    ledger.report("a", returned(leases[1], 10))
    assert [span(lease) for lease in ledger.leases(ledger.answer["b"])] == [(10, 20)]
    assert ledger.answer["c"] is None


def test_a_wait_ends_with_an_answer_that_has_nothing_in_it() -> None:
    ledger = DataLedger(TRAIN)
    ledger.take("a", want=3)
    ledger.take("b")
    assert ledger.shards.deadline() == 60.0
    ledger.wait(60.0)
    assert ledger.answer["b"] == d.ShardsTaken(())
    assert ledger.shards.deadline() is None


def test_who_does_not_want_to_wait_is_answered_at_once() -> None:
    ledger = DataLedger(TRAIN)
    ledger.take("a", want=3)
    ledger.ask("b", d.ShardsTake(0, "train", 0, 0, 1, timeout_s=0.0))
    assert ledger.answer["b"] == d.ShardsTaken(())


def test_a_straggler_is_asked_for_what_it_has() -> None:
    ledger = DataLedger(TRAIN)
    begun, spare, other = ledger.take("a", want=3)
    assert ledger.report("a", upto(begun, 3)).wanted == ()
    ledger.take("b")
    wanted = (begun.number, spare.number, other.number)
    assert ledger.report("a", upto(begun, 4)).wanted == wanted
    ledger.report("a", returned(spare, 10))
    assert [span(lease) for lease in ledger.leases(ledger.answer["b"])] == [(10, 20)]


def test_a_new_round_gets_what_the_old_one_had_not_reported() -> None:
    ledger = DataLedger(TRAIN)
    ledger.form(1)
    first, second = ledger.take("a", want=2)
    ledger.report("a", upto(first, 7), done(second))
    ledger.form(2)
    assert [span(lease) for lease in ledger.take("b", want=5)] == [(7, 10), (20, 25)]


def test_an_old_round_is_fenced() -> None:
    ledger = DataLedger(TRAIN)
    ledger.form(1)
    ledger.take("a")
    ledger.take("b", want=5)
    ledger.take("c")
    ledger.form(2)
    assert ledger.refusal("c") == m.Refused("fenced", "round 1 is over")
    for restarted in (False, True):
        if restarted:
            ledger.restart()
        ledger.ask("a", d.ShardsTake(1, "train", 0, 0, 1))
        assert ledger.refusal("a").kind == "fenced"
        ledger.ask("a", d.DatasetOpen(1, TRAIN))
        assert ledger.refusal("a").kind == "fenced"


def test_a_lost_node_gives_everything_back_and_gets_nothing_any_more() -> None:
    ledger = DataLedger(TRAIN)
    (lost,) = ledger.take("b")
    ledger.take("a", want=2)
    ledger.report("b", upto(lost, 3))
    ledger.take("c")
    ledger.lose("b")
    assert [span(lease) for lease in ledger.leases(ledger.answer["c"])] == [(3, 10)]
    ledger.ask("b2", d.ShardsTake(0, "train", 0, 0, 1))
    assert ledger.refusal("b2").kind == "fenced"


def test_node_losses_are_never_counted_as_failures_of_a_piece() -> None:
    ledger = DataLedger(Dataset("train", size=10, shard_size=10, attempts=1))
    for number in range(1, 6):
        ledger.form(number)
        assert [span(lease) for lease in ledger.take("a")] == [(0, 10)]


def test_a_piece_that_fails_again_and_again_is_set_aside_and_stays_visible() -> None:
    ledger = DataLedger(Dataset("train", size=20, shard_size=10, attempts=2))
    (one,) = ledger.take("a")
    (other,) = ledger.take("b")
    (again,) = ledger.take("a", failed(one, 6, "no such record"))
    assert span(again) == (6, 10)
    ledger.report("a", failed(again, 6, "no such record"))
    fact = ev.PieceSetAside("train", Piece(0, 0, 6, 10), 2, "no such record")
    assert ledger.said(ev.PieceSetAside) == [fact]
    ledger.take("a")
    ledger.report("b", done(other))
    assert ledger.is_over("a")
    for compact in (False, True):
        ledger.restart(compact=compact)
        aside = {"epoch": 0, "extent": 0, "begin": 6, "end": 10, "why": "no such record"}
        assert ledger.view()["set_aside"] == [aside]
        assert ledger.view()["consumed"] == ledger.view()["size"] - 4
        assert ledger.position().aside == (Piece(0, 0, 6, 10),)


def test_a_piece_that_got_further_starts_to_count_anew() -> None:
    ledger = DataLedger(Dataset("train", size=10, shard_size=10, attempts=2))
    (lease,) = ledger.take("a")
    for at in (1, 2, 3, 4):
        (lease,) = ledger.take("a", failed(lease, at))
        assert span(lease) == (at, 10)
    assert not ledger.said(ev.PieceSetAside)


def test_giving_back_does_not_wash_failures_away() -> None:
    ledger = DataLedger(Dataset("train", size=10, shard_size=10, attempts=2))
    (lease,) = ledger.take("a")
    (lease,) = ledger.take("a", failed(lease, 0))
    (lease,) = ledger.take("b", returned(lease, 0))
    ledger.restart(compact=True)
    ledger.report("b", failed(lease, 0))
    assert len(ledger.said(ev.PieceSetAside)) == 1


def test_epochs_do_not_overlap() -> None:
    ledger = DataLedger(Dataset("train", size=10, shard_size=10, epochs=2))
    (lease,) = ledger.take("a")
    ledger.take("b", epoch=1)
    assert ledger.answer["b"] is None
    ledger.report("a", done(lease))
    (second,) = ledger.leases(ledger.answer["b"])
    assert second.piece == Piece(1, 0, 0, 10)
    assert ledger.take("a", epoch=0) == []
    assert ledger.is_over("a")
    ledger.take("c", epoch=1)
    ledger.report("b", done(second))
    assert ledger.is_over("c")
    assert ledger.take("a", epoch=2) == []
    assert ledger.is_over("a")


def test_epochs_without_end() -> None:
    ledger = DataLedger(Dataset("train", size=10, shard_size=10, epochs=0))
    for epoch in range(50):
        (lease,) = ledger.take("a", epoch=epoch)
        ledger.report("a", done(lease))
        assert lease.piece.epoch == epoch


def test_an_empty_dataset_is_over_at_once() -> None:
    ledger = DataLedger(Dataset("train", size=0, epochs=3))
    for epoch in range(4):
        assert ledger.take("a", epoch=epoch) == []
        assert ledger.is_over("a")


# ---- repeats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
def test_a_repeated_request_gets_the_leases_that_it_got_before(restarted: bool) -> None:
    ledger = DataLedger(TRAIN)
    first = ledger.take("a")
    if restarted:
        ledger.restart(compact=True)
    body = d.ShardsTake(0, "train", 0, 0, 1)
    assert ledger.leases(ledger.repeat("a", body)) == first
    assert span(ledger.take("b")[0]) == (10, 20)


def test_a_late_echo_takes_nothing() -> None:
    ledger = DataLedger(TRAIN)
    body = d.ShardsTake(0, "train", 0, 0, 1)
    ledger.ask("a", body, seq=7)
    ledger.ask("a", body, seq=8)
    ledger.ask("a", body, seq=7)
    assert ledger.refusal("a").kind == "stale"
    assert ledger.view()["leases_total"] == 2


def test_an_echo_of_a_wait_that_ended_takes_nothing() -> None:
    ledger = DataLedger(TRAIN)
    leases = ledger.take("a", want=3)
    ledger.take("b")
    ledger.wait(60.0)
    ledger.report("a", returned(leases[0], 0))
    assert ledger.leases(ledger.repeat("b", d.ShardsTake(0, "train", 0, 0, 1))) == []
    assert ledger.view()["leases_total"] == 2


def test_a_report_may_be_said_twice_and_after_the_end() -> None:
    ledger = DataLedger(TRAIN)
    (lease,) = ledger.take("a")
    ledger.report("a", upto(lease, 5))
    records = len(ledger.journal)
    ledger.report("a", upto(lease, 5))
    ledger.report("a", upto(lease, 3))
    assert len(ledger.journal) == records
    ledger.report("a", failed(lease, 6))
    ledger.report("a", failed(lease, 6))
    ledger.report("a", done(lease))
    assert [span(again) for again in ledger.take("b")] == [(6, 10)]


def test_a_claim_that_cannot_be_true_is_refused() -> None:
    ledger = DataLedger(TRAIN)
    (lease,) = ledger.take("a")
    ledger.ask("a", d.ShardsTake(0, "train", 0, 0, 0, (upto(lease, 11),)))
    assert ledger.refusal("a") == m.Refused("rejected", "lease 1 is 0 to 10, and not read up to 11")
    ledger.ask("a", d.ShardsTake(0, "train", 0, 0, 0, (d.Consumed(9, 1),)))
    assert "no lease 9" in ledger.refusal("a").message
    ledger.ask("a", d.ShardsTake(0, "other", 0, 0, 1))
    assert ledger.refusal("a").kind == "usage"


def test_whoever_went_away_gets_nothing() -> None:
    ledger = DataLedger(TRAIN)
    leases = ledger.take("a", want=3)
    ledger.take("b")
    ledger.feed(ev.RequestDropped("session of b", 1))
    ledger.take("c")
    ledger.feed(ev.NodeAbsent(member("c").node_id))
    ledger.take("d")
    ledger.feed(ev.NodeReady(member("d"), member("d").node_id, True))  # type: ignore[arg-type]
    ledger.report("a", returned(leases[0], 0))
    assert [ledger.answer[who] for who in "bcd"] == [None, None, None]
    assert ledger.view()["open_total"] == 1


# ---- restarts and sizes --------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_a_restarted_master_goes_on_where_the_last_one_was(compact: bool) -> None:
    ledger = DataLedger(TRAIN)
    first, second = ledger.take("a", want=2)
    ledger.report("a", upto(first, 4), returned(second, 12))
    position = ledger.position()
    ledger.restart(compact=compact)
    assert ledger.position() == position
    assert position.open == (Piece(0, 0, 4, 10), Piece(0, 0, 12, 20))
    assert [span(lease) for lease in ledger.take("b", want=3)] == [(12, 20), (20, 25)]
    ledger.report("a", done(first))
    assert ledger.position().open == (Piece(0, 0, 12, 20), Piece(0, 0, 20, 25))


def test_a_billion_samples_cost_no_more_than_ten() -> None:
    tracemalloc.start()
    ledger = DataLedger(Dataset("train", size=10**9, shard_size=100, shuffle="shards", seed=1))
    (lease,) = ledger.take("a")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lease.piece.end - lease.piece.begin == 100
    assert taken < 1_000_000
    assert sum(map(len, ledger.journal)) < 1_000


def test_people_see_how_far_it_is_and_who_has_what() -> None:
    ledger = DataLedger(TRAIN)
    first, second = ledger.take("a", want=2)
    ledger.now = 5.0
    ledger.report("a", done(first), upto(second, 15))
    ledger.now = 10.0
    view = ledger.view()
    assert (view["name"], view["epoch"], view["consumed"], view["size"]) == ("train", 0, 15, 25)
    piece = {"epoch": 0, "extent": 0, "begin": 10, "end": 20}
    assert view["leases"] == [
        {"number": 2, "node_id": 0, "round": 0, "piece": piece, "consumed": 5}
    ]
    assert view["per_s"] == pytest.approx(1.0)
    assert view["epoch_left_s"] == pytest.approx(10.0)
    ledger.now = 100.0
    assert ledger.view()["per_s"] == 0.0
    assert ledger.view()["epoch_left_s"] == -1.0
