# SPDX-License-Identifier: Apache-2.0
"""Streams that grow: nobody gets records that are not written, and nobody leaves before the end."""

import msgspec
import pytest

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.model.checkpoint import Version
from holdfast.model.dataset import RANGE, STREAM, Dataset, Extent, Lease
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from tests.core.data_ledger import DIRECTORY, DataLedger, done

ENDLESS = Dataset(
    "train", STREAM, shard_size=10, extents=(Extent("p", -1, 100), Extent("q", -1)), grows=True
)
SHORT = msgspec.structs.replace(ENDLESS, extents=(Extent("p", 25, 100), Extent("q", 10)))


def grow(ledger: DataLedger, *ends: int, worker: str = "w") -> m.Answer | None:
    """Somebody on node `a` has seen the partitions end here."""
    return ledger.ask(f"a{worker}", d.ShardsGrown(ledger.round, "train", ends))


def growths(ledger: DataLedger) -> list[tuple[int, ...]]:
    records = [rec.decode_record(payload) for payload in ledger.journal]
    return [record.ends for record in records if isinstance(record, rec.StreamGrown)]


def pieces(leases: list[Lease]) -> list[tuple[int, int, int]]:
    return [(lease.piece.extent, lease.piece.begin, lease.piece.end) for lease in leases]


def test_a_shard_is_dealt_when_all_its_records_are_written() -> None:
    """Prior art: shards of an endless stream are made 10,000 records ahead of what there is."""
    ledger = DataLedger(ENDLESS)
    assert ledger.take("a") == []
    assert grow(ledger, 109, 9) == m.Done()
    assert ledger.answer["a"] is None, "no shard is whole yet: it waits"
    grow(ledger, 110, 9)
    assert pieces(ledger.leases(ledger.answer["a"])) == [(0, 100, 110)]
    grow(ledger, 131, 20)
    assert pieces(ledger.take("b", want=2)) == [(1, 0, 10), (0, 110, 120)]
    assert pieces(ledger.take("b", want=2)) == [(1, 10, 20), (0, 120, 130)]
    assert ledger.take("b", want=2) == []
    assert not ledger.is_over("b")


def test_growth_is_durable_said_twice_or_late_it_changes_nothing() -> None:
    """Prior art: a second look at the stream gives the same shards again."""
    ledger = DataLedger(ENDLESS)
    grow(ledger, 120, 10)
    for late in [(120, 10), (110, 0), (100, 10), (119, 19)]:
        assert grow(ledger, *late) == m.Done()
    assert growths(ledger) == [(120, 10)]
    found = ledger.take("a")
    for compact in (True, False):
        ledger.restart(compact=compact)
        found += ledger.take("a")
    assert pieces(found) == [(0, 100, 110), (1, 0, 10), (0, 110, 120)]
    assert ledger.take("a") == []
    grow(ledger, 0, 20)
    assert pieces(ledger.leases(ledger.answer["a"])) == [(1, 10, 20)]


def test_a_stream_with_an_end_is_over_when_all_of_it_is_consumed() -> None:
    ledger = DataLedger(SHORT)
    found = ledger.take("b")
    for ends in [(0, 10), (123, 10), (999, 999)]:
        assert not ledger.is_over("b")
        grow(ledger, *ends)
        found += ledger.leases(ledger.answer["b"])
        while leases := ledger.take("b", *map(done, found)):
            found += leases
    assert pieces(found) == [(1, 0, 10), (0, 100, 110), (0, 110, 120), (0, 120, 125)]
    assert ledger.is_over("b")


def test_going_back_to_a_checkpoint_forgets_no_growth() -> None:
    """What is written stays so: the position goes back, and the records are dealt again."""
    ledger = DataLedger(msgspec.structs.replace(ENDLESS, series=DIRECTORY))
    ledger.form(1)
    grow(ledger, 120, 0)
    (one,) = ledger.take("a")
    version = Version(0, 1)
    ledger.mark("a", version, {0: {one.number: 107}, 1: {}})
    (marked,) = ledger.said(ev.VersionMarked)
    ledger.take("a", done(one))
    ledger.restore(version, *marked.positions)
    assert pieces(ledger.take("a", want=5)) == [(0, 107, 110), (0, 110, 120)]
    assert ledger.take("b") == []


def test_a_new_job_goes_on_from_a_checkpoint_before_it_knows_the_ends() -> None:
    followed = msgspec.structs.replace(ENDLESS, series=DIRECTORY)
    old = DataLedger(followed)
    grow(old, 130, 0)
    (one,) = old.take("a")
    old.take("a", done(one))
    old.mark("a", Version(0, 1), {0: {one.number: 110}, 1: {}})
    (marked,) = old.said(ev.VersionMarked)
    new = DataLedger(followed)
    new.restore(Version(0, 1), *marked.positions)
    assert pieces(new.take("a")) == [(0, 110, 120)], "it was cut, so it is known to be there"
    assert new.take("a") == []
    grow(new, 130, 0)
    assert pieces(new.leases(new.answer["a"])) == [(0, 120, 130)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (d.ShardsGrown(0, "train", (5,)), "dataset 'train' has 2 partitions, not 1"),
        (d.ShardsGrown(0, "train", (5, -1)), "partition 'q' of dataset 'train' cannot end at -1"),
        (d.ShardsGrown(0, "fixed", (5, 5)), "dataset 'fixed' is not a stream that grows"),
    ],
)
def test_growth_that_cannot_be(body: d.ShardsGrown, why: str) -> None:
    ledger = DataLedger(ENDLESS, msgspec.structs.replace(ENDLESS, name="fixed", grows=False))
    ledger.ask("a", body)
    assert ledger.refusal("a").message == why


def test_only_streams_grow() -> None:
    ledger = DataLedger()
    ledger.open("a", Dataset("train", RANGE, size=5, grows=True))
    assert "of kind range cannot grow" in ledger.refusal("a").message
