# SPDX-License-Identifier: Apache-2.0
"""A slow reader gives the tail of what it reads to those who wait, and nothing is read twice.

5.4: in the prior art everybody waits for the slowest worker's shard at the end of an epoch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.client.data import DataShards
from holdfast.client.data.ledgers import OwnLedger
from holdfast.torch.data.datasets import ShardedLoader, ShardedMapDataset
from tests.waiting import until

SIZE = 500
LIMIT_S = 120.0
Read = Callable[[DataShards], Iterator[int]]


def one_by_one(shards: DataShards) -> Iterator[int]:
    return iter(shards)


def in_batches(shards: DataShards) -> Iterator[int]:
    return (int(record) for batch in shards.batches(8) for record in batch)


def through_a_loader(shards: DataShards) -> Iterator[int]:
    loader = ShardedLoader(ShardedMapDataset(range(SIZE), shards), batch_size=8)
    return (int(record) for batch in loader for record in batch)


def in_pieces(shards: DataShards) -> Iterator[int]:
    return (record for part in shards.pieces() for record in range(part.begin, part.end))


def lines(shards: DataShards) -> Iterator[int]:
    return (int(line) for part in shards.pieces() for _, line in shards.lines(part))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def read_slowly(
    threads: ThreadPoolExecutor, slow: DataShards, fast: DataShards, read: Read
) -> tuple[list[int], list[int]]:
    """What each of two has read when all is read; the slow one came first and has the only part."""
    reading = read(slow)
    mine = [next(reading)]
    others: Future[list[int]] = threads.submit(lambda: list(read(fast)))

    def read_on() -> bool:
        mine.extend([record for record in [next(reading, None)] if record is not None])
        return others.done()

    until(read_on, LIMIT_S)
    return mine + list(reading), others.result()


@pytest.mark.parametrize("read", [one_by_one, in_batches, through_a_loader])
def test_who_waits_gets_the_tail_of_what_a_slow_one_reads(
    threads: ThreadPoolExecutor, read: Read
) -> None:
    ledger = OwnLedger()
    slow, fast = (
        DataShards(
            "train", size=SIZE, shard_size=SIZE, shuffle="none", report_every_s=0.0, ledger=ledger
        )
        for _ in range(2)
    )
    mine, others = read_slowly(threads, slow, fast, read)
    assert sorted(mine + others) == list(range(SIZE))
    assert others, "who waited got nothing"


def test_the_tail_of_a_file_goes_to_who_waits(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    """Wherever in a line the cut is: the line is read by the one in whose half it begins."""
    file = tmp_path / "numbers"
    file.write_text("".join(f"{number:0{number % 9}d}\n" for number in range(SIZE)))
    ledger = OwnLedger()
    slow, fast = (
        DataShards("train", files=[file], shard_size=10**6, report_every_s=0.0, ledger=ledger)
        for _ in range(2)
    )
    mine, others = read_slowly(threads, slow, fast, lines)
    assert sorted(mine + others) == list(range(SIZE))
    assert others, "who waited got nothing"


def test_a_part_that_the_caller_reads_on_its_own_is_never_cut(threads: ThreadPoolExecutor) -> None:
    """Nobody knows how far the caller is in it."""
    ledger = OwnLedger()
    slow, fast = (
        DataShards("train", size=100, shard_size=50, report_every_s=0.0, ledger=ledger)
        for _ in range(2)
    )
    mine, others = read_slowly(threads, slow, fast, in_pieces)
    assert sorted(mine + others) == list(range(100))
    assert len(mine) in (50, 100)


def test_ranks_in_step_share_the_tail_of_the_epoch() -> None:
    """One thread plays both ranks: a rank that never waits gets something all the same."""
    ledger = OwnLedger()
    ranks = [
        DataShards("train", size=SIZE, shard_size=SIZE, report_every_s=0.0, ledger=ledger)
        for _ in range(2)
    ]
    read: list[list[int]] = [[], []]
    readers = [rank.batches(8, wait=False) for rank in ranks]
    while len(read[0]) + len(read[1]) < SIZE:
        for reader, mine in zip(readers, read, strict=True):
            mine += next(reader).tolist()
    assert sorted(read[0] + read[1]) == list(range(SIZE))
    assert min(len(mine) for mine in read) > SIZE // 4
