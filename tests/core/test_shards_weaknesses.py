# SPDX-License-Identifier: Apache-2.0
"""Each weakness of the prior art's data sharding (spec/control-plane.md 9.1, 9.4, 9.5,
spec/agent-and-checkpoint.md 14, spec/prior-art-today.md 5.4) that the ledger makes impossible."""

from holdfast.core.job import events as ev
from holdfast.model.dataset import STREAM, Dataset, Extent
from holdfast.protocol import data as d
from tests.core.data_ledger import DataLedger, done, failed, span, upto

TRAIN = Dataset("train", size=25, shard_size=10)


def test_9_4_nobody_leaves_while_work_may_come_back() -> None:
    """Also 5.4: a worker that found nothing to do took it for the end of the data; when another
    died after that, its shards had no reader left."""
    ledger = DataLedger(TRAIN)
    ledger.take("b", want=3)
    ledger.take("a")
    ledger.wait(59.0)
    assert ledger.answer["a"] is None
    ledger.lose("b")
    assert [span(lease) for lease in ledger.leases(ledger.answer["a"])] == [(0, 10)]


def test_9_5_an_answer_without_work_is_not_the_end_of_the_data() -> None:
    ledger = DataLedger(TRAIN)
    ledger.take("b", want=3)
    ledger.take("a")
    ledger.wait(60.0)
    answer = ledger.answer["a"]
    assert isinstance(answer, d.ShardsTaken)
    assert not answer.is_over


def test_9_4_evictions_do_not_use_up_the_attempts_of_a_shard() -> None:
    """Four evictions dropped a shard, and the dataset then counted as complete."""
    ledger = DataLedger(Dataset("train", size=10, shard_size=10))
    for worker in ("a", "b", "c", "d", "e"):
        ledger.take(worker)
        ledger.lose(worker)
    (lease,) = ledger.take("f")
    assert span(lease) == (0, 10)
    assert not ledger.said(ev.EpochOver)


def test_9_4_and_14_a_shard_that_fails_is_never_dropped_in_silence() -> None:
    ledger = DataLedger(Dataset("train", size=10, shard_size=10, attempts=3))
    for _ in range(3):
        (lease,) = ledger.take("a")
        ledger.report("a", failed(lease, 0, "bad record"))
    (fact,) = ledger.said(ev.PieceSetAside)
    assert (fact.attempts, fact.why) == (3, "bad record")
    assert ledger.view()["set_aside_total"] == 1


def test_9_4_a_late_report_of_the_old_owner_does_not_complete_the_new_owners_work() -> None:
    """A task kept its number when it was given to somebody else, and nobody checked the owner."""
    ledger = DataLedger(TRAIN)
    (old,) = ledger.take("b")
    ledger.lose("b")
    (new,) = ledger.take("a")
    assert span(new) == span(old)
    ledger.report("a", done(old))
    assert ledger.view()["consumed"] == 0
    ledger.lose("a")
    assert [span(lease) for lease in ledger.take("c")] == [(0, 10)]


def test_9_4_and_14_a_master_that_restarts_knows_everything() -> None:
    ledger = DataLedger(TRAIN)
    first, second = ledger.take("a", want=2)
    ledger.report("a", done(first), upto(second, 14))
    ledger.restart()
    ledger.lose("a")
    assert [span(lease) for lease in ledger.take("b", want=9)] == [(14, 20), (20, 25)]


def test_9_4_training_shards_come_back_without_any_time_out() -> None:
    """Only evaluation tasks ever timed out: a shard of a dead trainer was lost for good. Here the
    loss of its node or the next round returns it at once, and no slow reader loses its shard."""
    ledger = DataLedger(Dataset("train", size=10, shard_size=10))
    ledger.form(1)
    ledger.take("a")
    ledger.take("b")
    ledger.wait(59.0)
    assert ledger.answer["b"] is None
    ledger.form(2)
    assert [span(lease) for lease in ledger.take("b")] == [(0, 10)]


def test_9_1_epochs_without_end_give_shards() -> None:
    """`num_epochs <= 0` was documented as endless and gave nothing."""
    ledger = DataLedger(Dataset("train", size=5, shard_size=5, epochs=0))
    for epoch in range(3):
        (lease,) = ledger.take("a", epoch=epoch)
        ledger.report("a", done(lease))


def test_9_1_the_number_of_shards_is_not_rounded_down_nor_doubled_for_large_data() -> None:
    """10 instead of 11 shards were counted; more than 50,000 shards were counted twice."""
    for size, shards in ((101, 11), (60_001, 6001)):
        ledger = DataLedger(Dataset("train", size=size, shard_size=10))
        count = 0
        while leases := ledger.take("a", want=64):
            ledger.report("a", *map(done, leases))
            count += len(leases)
        assert count == shards
        assert ledger.is_over("a")


def test_9_1_a_stream_never_gives_the_same_offsets_twice_and_keeps_its_remainder() -> None:
    """The second batch of shards began at the old offsets again; the remainder was cut off;
    partitions had to be called 0, 1, 2."""
    partitions = (Extent("eu-west", 25, 1000), Extent("us", 5))
    ledger = DataLedger(Dataset("train", STREAM, shard_size=10, extents=partitions))
    seen: list[tuple[int, int]] = []
    while leases := ledger.take("a"):
        ledger.report("a", *map(done, leases))
        seen += [(lease.piece.extent, at) for lease in leases for at in range(*span(lease))]
    assert len(seen) == len(set(seen)) == 30
    assert set(seen) == {(0, at) for at in range(1000, 1025)} | {(1, at) for at in range(5)}


def test_14_a_report_about_an_unknown_shard_harms_nobody() -> None:
    """In the prior art's streaming manager it raised, and took the servicer's call with it."""
    ledger = DataLedger(TRAIN)
    (lease,) = ledger.take("a")
    ledger.ask("a", d.ShardsTake(0, "train", 0, 0, 0, (d.Consumed(99, 5),)))
    assert ledger.refusal("a").kind == "rejected"
    ledger.report("a", done(lease))
    assert ledger.view()["consumed"] == 10


def test_5_4_opening_twice_registers_once() -> None:
    ledger = DataLedger(TRAIN)
    ledger.open("a", TRAIN)
    ledger.open("b", TRAIN)
    assert len(ledger.said(ev.DatasetRegistered)) == 1
