# SPDX-License-Identifier: Apache-2.0
"""What a dataset is cut into: every kind, every order, and what cannot be registered."""

import msgspec
import pytest

from holdfast.core.job import events as ev
from holdfast.model.dataset import (
    BY_SAMPLE,
    BY_SHARD,
    LINES,
    LISTED,
    STREAM,
    Dataset,
    Extent,
    Lease,
    Piece,
)
from holdfast.model.permutation import Permutation
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from tests.core.data_ledger import DataLedger, done, returned

RANGE_25 = Dataset("train", size=25, shard_size=10)


def read_epoch(ledger: DataLedger, *, want: int = 1, epoch: int = 0) -> list[Lease]:
    """Everything that one worker gets when it reads an epoch alone."""
    found: list[Lease] = []
    while leases := ledger.take("a", *map(done, found[-want:]), want=want, epoch=epoch):
        found += leases
    assert ledger.is_over("a")
    return found


def extents(leases: list[Lease]) -> list[tuple[int, int, int]]:
    return [(lease.piece.extent, lease.piece.begin, lease.piece.end) for lease in leases]


@pytest.mark.parametrize("want", [1, 2, 3])
def test_lines_are_cut_by_bytes_and_never_across_files(want: int) -> None:
    files = (Extent("empty", 0), Extent("a", 25), Extent("b", 10), Extent("none", 0))
    ledger = DataLedger(Dataset("train", LINES, shard_size=10, extents=files))
    assert extents(read_epoch(ledger, want=want)) == [
        (1, 0, 10),
        (1, 10, 20),
        (1, 20, 25),
        (2, 0, 10),
    ]


@pytest.mark.parametrize("want", [1, 2, 5])
def test_partitions_of_a_stream_take_turns_and_no_remainder_is_lost(want: int) -> None:
    partitions = (Extent("p", 25, 100), Extent("q", 7), Extent("r", 10, 3))
    ledger = DataLedger(Dataset("train", STREAM, shard_size=10, extents=partitions))
    assert extents(read_epoch(ledger, want=want)) == [
        (0, 100, 110),
        (1, 0, 7),
        (2, 3, 13),
        (0, 110, 120),
        (0, 120, 125),
    ]


def test_a_stream_without_end_goes_on_for_ever_and_survives_restarts() -> None:
    partitions = (Extent("p", -1, 5), Extent("q", -1))
    ledger = DataLedger(Dataset("train", STREAM, shard_size=10, extents=partitions))
    found: list[Lease] = []
    for turn in range(20):
        (lease,) = ledger.take("a", *map(done, found[-1:]))
        found.append(lease)
        ledger.restart(compact=turn % 2 == 0)
    assert extents(found[:4]) == [(0, 5, 15), (1, 0, 10), (0, 15, 25), (1, 10, 20)]
    assert [lease.piece.begin for lease in found if lease.piece.extent == 1] == [*range(0, 100, 10)]
    assert ledger.view()["size"] == -1


def test_listed_shards_are_dealt_as_they_are_named() -> None:
    ledger = DataLedger(Dataset("train", LISTED, epochs=2))
    ledger.take("a")
    assert ledger.answer["a"] is None, "more may be named"
    ledger.ask("b", d.ShardsAdd(0, "train", 0, (("x", 5), ("y", 3))))
    (first,) = ledger.leases(ledger.answer["a"])
    assert first == Lease(1, Piece(0, 0, 0, 5), "x")
    ledger.ask("b", d.ShardsAdd(0, "train", 1, (("y", 3), ("z", 4)), is_last=True))
    ledger.restart(compact=True)
    rest = ledger.take("b", done(first), want=9)
    assert [(lease.key, lease.piece.end) for lease in rest] == [("y", 3), ("z", 4)]
    ledger.report("b", *map(done, rest))
    assert [lease.key for lease in read_epoch(ledger, epoch=1)] == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (d.ShardsAdd(0, "train", 3, (("z", 1),)), "2 shards of dataset 'train' are named"),
        (d.ShardsAdd(0, "train", 1, (("q", 1),)), "shard 1 of dataset 'train' is ('y', 3)"),
        (d.ShardsAdd(0, "train", 2, (("z", 0),)), "has 0 samples"),
    ],
)
def test_shards_that_cannot_be_named_like_this(body: d.ShardsAdd, why: str) -> None:
    ledger = DataLedger(Dataset("train", LISTED))
    ledger.ask("a", d.ShardsAdd(0, "train", 0, (("x", 5), ("y", 3))))
    ledger.ask("a", body)
    assert why in ledger.refusal("a").message


def test_nothing_is_named_after_the_last_one_nor_of_other_kinds() -> None:
    ledger = DataLedger(Dataset("train", LISTED), Dataset("other", size=5))
    for _ in range(2):
        answer = ledger.ask("a", d.ShardsAdd(0, "train", 0, (("x", 5),), is_last=True))
        assert answer == m.Done()
    ledger.ask("a", d.ShardsAdd(0, "train", 1, (("y", 5),)))
    assert "no more can be named" in ledger.refusal("a").message
    ledger.ask("a", d.ShardsAdd(0, "other", 0, (("y", 5),)))
    assert "its shards are not named" in ledger.refusal("a").message


# ---- orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["range", "lines"])
def test_shuffled_shards_are_the_same_shards_in_another_order_in_each_epoch(kind: str) -> None:
    files = (Extent("a", 95), Extent("b", 101)) if kind == LINES else ()
    size = 196 if not files else 0
    dataset = Dataset(
        "train", kind, size, shard_size=10, epochs=2, shuffle=BY_SHARD, seed=3, extents=files
    )
    ordered = extents(read_epoch(DataLedger(msgspec.structs.replace(dataset, shuffle="none"))))
    ledger = DataLedger(dataset)
    first = extents(read_epoch(ledger))
    second = extents(read_epoch(ledger, epoch=1))
    assert sorted(first) == sorted(second) == ordered
    assert len({tuple(first), tuple(second), tuple(ordered)}) == 3


def test_samples_are_shuffled_by_the_reader_so_the_ledger_deals_positions() -> None:
    dataset = Dataset("train", size=25, shard_size=10, shuffle=BY_SAMPLE, seed=3)
    assert extents(read_epoch(DataLedger(dataset))) == [(0, 0, 10), (0, 10, 20), (0, 20, 25)]


def test_the_order_depends_on_the_seed_and_not_on_who_asks_or_what_fails() -> None:
    """Prior art 9.1: a shuffle without a seed was another one after every restart."""
    dataset = Dataset("train", size=300, shard_size=10, shuffle=BY_SHARD, seed=5)
    quiet = extents(read_epoch(DataLedger(dataset)))
    ledger = DataLedger(dataset)
    found: list[Lease] = []
    for turn in range(30):
        (lease,) = ledger.take("abc"[turn % 3])
        if turn % 4 == 0:
            ledger.restart(compact=turn % 8 == 0)
        found.append(lease)
    assert extents(found) == quiet
    other = msgspec.structs.replace(dataset, seed=6)
    assert extents(read_epoch(DataLedger(other))) != quiet


# ---- registration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Dataset("", size=1), "1 to 200 printable characters"),
        (Dataset("x" * 201, size=1), "1 to 200 printable characters"),
        (Dataset("a\nb", size=1), "1 to 200 printable characters"),
        (Dataset("train", "table", 1), "is of kind 'table'; known are range"),
        (Dataset("train", size=-1), "has -1 records"),
        (Dataset("train", size=1 << 62), "records; that must be"),
        (Dataset("train", size=1, shard_size=0), "has shards of 0"),
        (Dataset("train", size=1, epochs=-1), "has -1 epochs"),
        (Dataset("train", size=0, epochs=0), "is empty and has no end of epochs"),
        (Dataset("train", size=1, shuffle="yes"), "cannot be shuffled by 'yes'"),
        (Dataset("train", size=1, task="fun"), "is for 'fun'"),
        (Dataset("train", size=1, attempts=0), "allows 0 attempts"),
        (Dataset("train", LINES), "of kind lines has 0 files"),
        (Dataset("train", size=1, extents=(Extent("a", 1),)), "of kind range has 1 files"),
        (Dataset("train", LINES, extents=(Extent("a", -1),)), "has 'a' with -1 from 0 on"),
        (Dataset("train", LINES, extents=(Extent("a", 1, 2),)), "has 'a' with 1 from 2 on"),
        (Dataset("train", STREAM, extents=(Extent("a", -2),)), "has 'a' with -2 from 0 on"),
        (Dataset("train", LINES, extents=(Extent("a", 1),) * 10_001), "use listed shards"),
        (Dataset("train", STREAM, epochs=2, extents=(Extent("a", 1),)), "a stream has one"),
        (
            Dataset("train", STREAM, shuffle=BY_SHARD, extents=(Extent("a", 1),)),
            "of kind stream cannot be shuffled by 'shards', only 'none'",
        ),
        (Dataset("train", LISTED, shuffle=BY_SHARD), "of kind listed cannot be shuffled"),
    ],
)
def test_what_cannot_be_registered(dataset: Dataset, why: str) -> None:
    ledger = DataLedger()
    ledger.open("a", dataset)
    assert ledger.refusal("a").kind == "usage"
    assert why in ledger.refusal("a").message
    assert ledger.journal == []


def test_registration_can_be_repeated_and_the_first_one_decides() -> None:
    ledger = DataLedger(RANGE_25)
    records = len(ledger.journal)
    assert isinstance(ledger.open("b", RANGE_25), d.DatasetOpened)
    assert len(ledger.journal) == records
    ledger.open("b", msgspec.structs.replace(RANGE_25, shard_size=20, seed=4))
    why = "dataset 'train' is registered with shard_size 10, not 20"
    assert ledger.refusal("b") == m.Refused("usage", why)
    assert [fact.dataset for fact in ledger.said(ev.DatasetRegistered)] == [RANGE_25]


def test_the_first_file_that_differs_is_named() -> None:
    files = Dataset("train", LINES, shard_size=5, extents=(Extent("a", 10), Extent("b", 10)))
    ledger = DataLedger(files)
    ledger.open("b", msgspec.structs.replace(files, extents=(Extent("a", 10), Extent("b", 11))))
    assert "file or partition 1 b (10 from 0 on), not b (11" in ledger.refusal("b").message
    ledger.open("b", msgspec.structs.replace(files, extents=(Extent("a", 10),)))
    assert "2, not 1" in ledger.refusal("b").message


def test_whoever_opens_learns_where_it_goes_on() -> None:
    ledger = DataLedger(Dataset("train", size=20, shard_size=10, epochs=2))
    (lease,) = ledger.take("a")
    opened = ledger.open("b", Dataset("train", size=20, shard_size=10, epochs=2))
    assert isinstance(opened, d.DatasetOpened)
    assert (opened.position.epoch, opened.position.cut, opened.term) == (0, (1,), 0)
    ledger.take("a", returned(lease, 10), want=2)
    ledger.report("a", d.Consumed(2, 20))
    opened = ledger.open("b", Dataset("train", size=20, shard_size=10, epochs=2))
    assert isinstance(opened, d.DatasetOpened)
    assert (opened.position.epoch, opened.position.cut) == (1, (0,))


# ---- the permutation -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_a_permutation_has_every_number_once(size: int) -> None:
    assert sorted(Permutation(size, 7, 0)[i] for i in range(size)) == [*range(size)]


def test_a_permutation_never_changes() -> None:
    """Positions in saved checkpoints refer to it: these numbers are part of the format."""
    assert [Permutation(10, 0, 0)[i] for i in range(10)] == GOLDEN_10
    assert [Permutation(10**9, 42, 3)[i] for i in range(5)] == GOLDEN_BILLION


def test_seeds_and_epochs_give_other_orders_and_numbers_outside_are_refused() -> None:
    orders = {
        tuple(Permutation(50, seed, epoch)[i] for i in range(50))
        for seed in (-1, 0, 1, 2**63)
        for epoch in range(5)
    }
    assert len(orders) == 20
    for index in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5, 0, 0)[index]


def test_a_permutation_is_spread_evenly() -> None:
    """The first tenth of an order comes from everywhere, over many seeds."""
    counts = [0] * 10
    for seed in range(200):
        order = Permutation(100, seed, 0)
        for i in range(10):
            counts[order[i] // 10] += 1
    assert min(counts) > 150
    assert max(counts) < 250


GOLDEN_10 = [7, 1, 3, 6, 0, 2, 9, 4, 8, 5]
GOLDEN_BILLION = [40114286, 530797448, 207818328, 34915155, 719729909]
