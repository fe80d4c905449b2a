# SPDX-License-Identifier: Apache-2.0
"""A slow worker gives the tail of the piece that it reads to those who wait.

5.4: in the prior art a begun shard stays with its worker to the end, however slow that is, or is
given to a second one while the first still reads it.
"""

from collections.abc import Callable

import pytest

from holdfast.core.job import events as ev
from holdfast.model.checkpoint import Version
from holdfast.model.dataset import Dataset, Lease, Piece
from holdfast.protocol import data as d
from tests.core.data_ledger import DIRECTORY, DataLedger, done, failed, returned, span, upto

TRAIN = Dataset("train", size=10, shard_size=10)
FOLLOWING = Dataset("train", size=10, shard_size=10, series=DIRECTORY)


def cut(lease: Lease, at: int, end: int) -> d.Consumed:
    """Its worker is at `at` and will stop at `end`."""
    return d.Consumed(lease.number, at, end=end)


def slow_and_waiting(dataset: Dataset = TRAIN) -> tuple[DataLedger, Lease]:
    """Worker a reads the only piece, b waits."""
    ledger = DataLedger(dataset)
    (lease,) = ledger.take("a")
    ledger.report("a", upto(lease, 2))
    ledger.take("b")
    return ledger, lease


def spans(ledger: DataLedger, worker: str) -> list[tuple[int, int]]:
    return [span(lease) for lease in ledger.leases(ledger.answer[worker])]


def test_who_waits_gets_the_tail_only_when_its_reader_has_said_where_it_stops() -> None:
    ledger, lease = slow_and_waiting()
    assert ledger.report("a", upto(lease, 3)).wanted == (lease.number,)
    assert ledger.answer["b"] is None, "its reader may be anywhere in it"
    ledger.report("a", cut(lease, 4, 6))
    assert spans(ledger, "b") == [(6, 10)]
    ledger.ask("a", d.ShardsTake(0, "train", 0, 0, 0, (upto(lease, 7),)))
    assert ledger.refusal("a").message == "lease 1 is 0 to 6, and not read up to 7"


@pytest.mark.parametrize("compact", [False, True])
def test_a_cut_that_is_said_twice_or_late_changes_nothing(compact: bool) -> None:
    ledger, lease = slow_and_waiting()
    ledger.report("a", cut(lease, 2, 5))
    ledger.restart(compact=compact)
    position = ledger.position()
    ledger.report("a", cut(lease, 2, 5))
    ledger.report("a", cut(lease, 2, 8))  # An earlier one, on a slower way.
    assert ledger.position() == position
    assert ledger.take("c") == []
    assert spans(ledger, "b") == [(5, 10)]


def test_the_epoch_is_over_when_both_halves_are_read() -> None:
    ledger, lease = slow_and_waiting()
    # That everything up to the cut is read may be known before the cut is.
    ledger.report("a", upto(lease, 6))
    ledger.report("a", cut(lease, 4, 6))
    (tail,) = ledger.leases(ledger.answer["b"])
    ledger.take("c")
    ledger.report("b", done(tail))
    assert ledger.is_over("c")
    assert len(ledger.said(ev.EpochOver)) == 1


def test_a_cut_can_be_cut_again_and_nothing_is_dealt_twice() -> None:
    ledger, lease = slow_and_waiting()
    ledger.report("a", cut(lease, 2, 6))
    ledger.take("c")
    ledger.report("a", cut(lease, 3, 4))
    assert spans(ledger, "b") == [(6, 10)]
    assert spans(ledger, "c") == [(4, 6)]


@pytest.mark.parametrize("let_go", [returned, failed])
def test_a_cut_that_comes_after_the_rest_went_back_is_not_heard(
    let_go: Callable[[Lease, int], d.Consumed],
) -> None:
    ledger, lease = slow_and_waiting()
    ledger.report("a", let_go(lease, 3))
    assert spans(ledger, "b") == [(3, 10)]
    ledger.report("a", cut(lease, 2, 6))
    assert ledger.position().open == (Piece(0, 0, 3, 10),)


def test_nobody_can_stop_before_where_he_is() -> None:
    ledger, lease = slow_and_waiting()
    ledger.ask("a", d.ShardsTake(0, "train", 0, 0, 0, (cut(lease, 5, 4),)))
    assert ledger.refusal("a").message == "lease 1 is read up to 5, it cannot end at 4"


def test_who_cannot_wait_is_heard_too() -> None:
    """Ranks in step ask at every step, and never wait; a prefetch is no reason to share."""
    ledger = DataLedger(TRAIN)
    (lease,) = ledger.take("a")
    ledger.ask("b", d.ShardsTake(0, "train", 0, 0, 1, timeout_s=0.0))
    assert ledger.report("a", upto(lease, 2)).wanted == ()
    ledger.ask("b", d.ShardsTake(0, "train", 0, 0, 1, timeout_s=0.0, is_idle=True))
    assert ledger.report("a", upto(lease, 3)).wanted == (lease.number,)
    ledger.report("a", cut(lease, 3, 6))
    assert [span(tail) for tail in ledger.take("b")] == [(6, 10)]
    assert ledger.report("a", upto(lease, 5)).wanted == (), "who asked has something now"


def test_the_tail_is_in_no_model_until_its_new_reader_has_saved_it() -> None:
    """Whatever version is restored: each half counts as far as the version of its reader has it."""
    ledger, lease = slow_and_waiting(FOLLOWING)
    ledger.report("a", cut(lease, 3, 6))
    (tail,) = ledger.leases(ledger.answer["b"])
    ledger.mark("a", Version(0, 1), {0: {lease.number: 4}, 1: {}})
    ledger.report("a", upto(lease, 6))
    ledger.mark("b", Version(0, 2), {0: {lease.number: 6}, 1: {tail.number: 9}})
    first, second = (fact.positions[0] for fact in ledger.said(ev.VersionMarked))
    assert first.open == (Piece(0, 0, 4, 6), Piece(0, 0, 6, 10))
    assert second.open == (Piece(0, 0, 9, 10),)
    ledger.restore(Version(0, 1), first)
    assert [span(again) for again in ledger.take("b", want=5)] == [(4, 6), (6, 10)]
