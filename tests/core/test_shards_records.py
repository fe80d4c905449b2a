# SPDX-License-Identifier: Apache-2.0
"""What the ledger of shards writes for a request, and that older journals mean the same."""

from msgspec.structs import replace

from holdfast.core.job import records as rec
from holdfast.core.job.data.positions import NAMES_MAX
from holdfast.core.job.data.shards import Shards
from holdfast.core.kernel import Record
from holdfast.model.dataset import LISTED, Dataset
from holdfast.protocol import data as d
from tests.core.data_ledger import DataLedger, done, failed, returned
from tests.core.harness import of_kind

TRAIN = Dataset("train", size=100, shard_size=10)


def written(ledger: DataLedger) -> list[Record]:
    return [rec.decode_record(payload) for payload in ledger.journal]


def kinds(ledger: DataLedger) -> list[str]:
    return [type(record).__name__ for record in written(ledger)]


def test_a_request_that_reports_and_takes_is_one_record() -> None:
    ledger = DataLedger(TRAIN)
    (first,) = ledger.take("a")
    (second,) = ledger.take("a", done(first))
    assert kinds(ledger) == ["DatasetRegistered", "ShardsLeased", "ShardsLeased"]
    last = written(ledger)[-1]
    assert isinstance(last, rec.ShardsLeased)
    assert (last.consumed, last.leases) == ((done(first),), (second,))
    ledger.restart()
    assert ledger.take("a", done(second))[0].number == second.number + 1


def test_a_report_that_takes_nothing_is_a_record_of_its_own() -> None:
    ledger = DataLedger(TRAIN)
    (first,) = ledger.take("a")
    ledger.report("a", done(first))
    assert kinds(ledger) == ["DatasetRegistered", "ShardsLeased", "ShardsReported"]
    ledger.restart()


def test_what_goes_back_is_dealt_in_the_record_that_gives_it_back() -> None:
    ledger = DataLedger(Dataset("train", size=20, shard_size=10))
    first, second = ledger.take("a", want=2)
    ledger.take("b")
    assert ledger.answer["b"] is None
    # Who waits gets it before the one that has given it back.
    assert ledger.take("a", returned(first, 4), failed(second, 10, "unreadable")) != []
    assert len(ledger.leases(ledger.answer["b"])) == 1
    assert kinds(ledger)[2:] == ["ShardsLeased", "ShardsLeased"]
    ledger.restart()
    ledger.restart(compact=True)


def test_a_journal_with_a_record_for_each_report_leads_to_the_same_state() -> None:
    """Masters before wrote the report and the lease of one request as two records."""
    ledger = DataLedger(TRAIN)
    held = ledger.take("a", want=2)
    for _ in range(3):
        held = ledger.take("a", *(done(lease) for lease in held), want=2)
    before = Shards()
    for record in written(ledger):
        if isinstance(record, rec.ShardsLeased) and record.consumed:
            before.apply(rec.ShardsReported(record.name, record.consumed))
            record = replace(record, consumed=())
        before.apply(record)
    assert list(before.snapshot()) == list(ledger.shards.snapshot())


def test_a_snapshot_of_many_named_shards_is_in_pieces() -> None:
    ledger = DataLedger(Dataset("train", LISTED))
    count, step = 3 * NAMES_MAX + 5, NAMES_MAX // 2
    names = tuple((f"folder/shard-{number:08}.tar", 7) for number in range(count))
    for first in range(0, count, step):
        is_last = first + step >= count
        ledger.ask("a", d.ShardsAdd(0, "train", first, names[first : first + step], is_last))
    assert len(ledger.take("a", want=5)) == 5
    snapshot = list(ledger.shards.snapshot())
    assert max(len(rec.encode_record(record)) for record in snapshot) < 1024 * 1024
    assert len(of_kind(rec.ShardsListed, snapshot)) == 3
    before = ledger.shards.position("train")
    assert before is not None
    assert before.listed == names
    ledger.restart(compact=True)
    assert ledger.shards.position("train") == before
    assert list(ledger.shards.snapshot()) == snapshot
