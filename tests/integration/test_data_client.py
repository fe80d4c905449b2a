# SPDX-License-Identifier: Apache-2.0
"""DataShards against a real ledger in this process, and against one that is away at times."""

import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.client.data import DataShards
from holdfast.client.data.ledgers import Ledger, OwnLedger
from holdfast.model.dataset import Dataset
from holdfast.model.errors import FencedError, StateError, UsageError
from holdfast.protocol.data import DatasetOpened, ShardsTake, ShardsTaken
from tests.waiting import until

LIMIT_S = 120.0


class Away:
    """A ledger whose way can be cut: requests wait until it is there again. It counts them."""

    scope = 0
    is_here = False

    def __init__(self, ledger: OwnLedger | None = None, series: str = "") -> None:
        self.ledger = ledger or OwnLedger()
        self.is_there = threading.Event()
        self.is_there.set()
        self.requests: list[ShardsTake] = []
        self.opened = 0
        self.fenced = ""
        self._series = series

    def series(self, name: str, directory: str) -> str:
        return self._series

    def open(self, dataset: Dataset) -> DatasetOpened:
        assert self.is_there.wait(LIMIT_S)
        if self.fenced:
            raise FencedError(self.fenced)
        self.opened += 1
        return self.ledger.open(dataset)

    def take(self, request: ShardsTake) -> ShardsTaken:
        self.requests.append(request)
        assert self.is_there.wait(LIMIT_S)
        if self.fenced:
            raise FencedError(self.fenced)
        return self.ledger.take(request)

    def add(self, name: str, first: int, shards: Sequence[tuple[str, int]], last: bool) -> None:
        self.ledger.add(name, first, shards, last)


def shards_of(ledger: Ledger | None = None, **options: Any) -> DataShards:
    return DataShards("train", **{"size": 1000, "shard_size": 30, "ledger": ledger, **options})


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def everything(shards: DataShards) -> list[int]:
    return [int(record) for batch in shards.batches(32) for record in batch]


# ---- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["none", "shards", "samples"])
def test_every_record_of_every_epoch_comes_once(shuffle: str) -> None:
    shards = shards_of(epochs=3, shuffle=shuffle, seed=1)
    orders = [(epoch, everything(shards)) for epoch in shards.epochs()]
    assert [epoch for epoch, _ in orders] == [0, 1, 2]
    for _, order in orders:
        assert sorted(order) == list(range(1000))
    assert (orders[0][1] != orders[1][1]) == (shuffle != "none")
    again = shards_of(epochs=3, shuffle=shuffle, seed=1)
    assert [everything(again) for _ in again.epochs()] == [order for _, order in orders]


def test_records_one_by_one_have_the_order_of_the_batches() -> None:
    assert list(shards_of(shuffle="samples")) == everything(shards_of(shuffle="samples"))


@pytest.mark.parametrize("size", [0, 1, 29, 30, 31, 1000, 1009])
def test_no_tail_is_dropped(size: int) -> None:
    """9.5: the prior art rounds up in one place and down in another, and loses the tail."""
    shards = shards_of(size=size, epochs=2)
    for _ in shards.epochs():
        batches = list(shards.batches(8))
        assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)
        assert np.concatenate([[], *batches]).tolist() == list(range(size))


def test_an_epoch_that_was_left_goes_on_where_it_was() -> None:
    shards = shards_of(epochs=2)
    read: list[tuple[int, int]] = []
    for epoch in shards.epochs():
        for batch in shards.batches(7):
            read += [(epoch, int(record)) for record in batch]
            if len(read) % 3 == 0:
                break
    assert sorted(read) == [(epoch, record) for epoch in range(2) for record in range(1000)]


def test_threads_share_the_samples_and_all_of_them_end(threads: ThreadPoolExecutor) -> None:
    """9.5: with more readers than it has end marks (128), the prior art's queue hangs them."""
    shards = shards_of(shard_size=7)
    everybody = threading.Barrier(8)

    def read() -> list[int]:
        everybody.wait(LIMIT_S)
        return list(shards)

    found = [reading.result(LIMIT_S) for reading in [threads.submit(read) for _ in range(8)]]
    assert sorted(record for records in found for record in records) == list(range(1000))
    with ThreadPoolExecutor(200) as many:
        readers = [many.submit(everything, shards) for _ in range(200)]
        assert [reader.result(LIMIT_S) for reader in readers] == [[]] * 200


def test_lines_belong_to_the_part_where_they_begin(tmp_path: Path) -> None:
    texts = [b"", b"no line break", b"\n\n\n", b"".join(b"%d\n" % n * (n % 5) for n in range(300))]
    files = [tmp_path / str(number) for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text)
    for shard_size in (1, 3, 64, 100_000):
        shards = shards_of(size=None, files=files, shard_size=shard_size, shuffle="shards")
        found: dict[str, dict[int, bytes]] = {str(file): {} for file in files}
        for part in shards.pieces():
            for end, line in shards.lines(part):
                found[part.name][end - len(line)] = line
        read = [b"".join(lines[at] for at in sorted(lines)) for lines in found.values()]
        assert read == texts


def test_a_file_that_became_shorter_is_told(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"one\ntwo\n")
    shards = shards_of(size=None, files=[file])
    file.write_bytes(b"one\n")
    for part in shards.pieces():
        with pytest.raises(StateError, match="has 4 bytes, but it had 8 at least"):
            list(shards.lines(part))


def test_partitions_and_listed_shards() -> None:
    stream = shards_of(size=None, partitions={"a": (5, 25), "b": (0, 12)}, shard_size=8)
    found = {(part.name, n) for part in stream.pieces() for n in range(part.begin, part.end)}
    assert found == {("a", n) for n in range(5, 25)} | {("b", n) for n in range(12)}
    listed = shards_of(size=None, listed=[("x.tar", 3), ("y.tar", 2)])
    assert [(part.name, part.begin, part.end) for part in listed.pieces()] == [
        ("x.tar", 0, 3),
        ("y.tar", 0, 2),
    ]


def test_listed_shards_can_be_named_while_they_are_read(threads: ThreadPoolExecutor) -> None:
    shards = shards_of(Away(), size=None, listed=[])
    names = threads.submit(lambda: [part.name for part in shards.pieces()])
    shards.add([("a", 1), ("b", 2)])
    until(lambda: shards.holdings.consumed() >= 1, LIMIT_S)
    assert not names.done()
    shards.add([("c", 1)], is_last=True)
    assert names.result(LIMIT_S) == ["a", "b", "c"]
    with pytest.raises(UsageError, match="was named already"):
        shards.add([("d", 1)])


def test_a_part_that_cannot_be_read_is_tried_again_and_then_set_aside() -> None:
    shards = shards_of(size=90, attempts=3)
    tried: list[tuple[int, int]] = []
    for part in shards.pieces():
        tried.append((part.begin, part.end))
        if part.begin <= 40 < part.end:
            if part.begin < 40:
                shards.consumed(part, 40)
            shards.failed(part, "a broken record")
    assert sorted(set(tried)) == [(0, 30), (30, 60), (40, 60), (60, 90)]
    assert tried.count((40, 60)) == 2


def test_what_is_not_a_dataset_is_told() -> None:
    with pytest.raises(UsageError, match="either a size, or files"):
        DataShards("train")
    with pytest.raises(UsageError, match="read it with pieces"):
        list(shards_of(size=None, listed=[("x", 1)]))
    with pytest.raises(UsageError, match="shards of 0"):
        list(shards_of(shard_size=0))
    with pytest.raises(UsageError, match="1 record at least"):
        list(shards_of().batches(0))


# ---- the ledger is away, or says no --------------------------------------------------------------


def test_reading_goes_on_while_the_ledger_is_away(threads: ThreadPoolExecutor) -> None:
    """9.5: an outage must not look like the end of the data, nor may requests be lost by it."""
    ledger = Away()
    shards = shards_of(ledger)
    reading = iter(shards)
    first = [next(reading)]
    until(lambda: len(ledger.requests) == 3, LIMIT_S)  # Opened, the first part, the next one.
    ledger.is_there.clear()
    first += [next(reading) for _ in range(59)]
    rest = threads.submit(list, reading)
    until(lambda: len(ledger.requests) == 4, LIMIT_S)
    assert not rest.done()
    ledger.is_there.set()
    assert first + rest.result(LIMIT_S) == list(range(1000))


def test_it_holds_no_more_than_it_can_use() -> None:
    """9.5: one part is read and one is fetched ahead, however slow the reader is."""
    ledger = Away()
    shards, other = shards_of(ledger), shards_of(Away(ledger.ledger))
    reading = iter(shards)
    assert next(reading) == 0
    until(lambda: len(ledger.requests) == 3, LIMIT_S)
    assert next(iter(other)) == 60
    shards.close()
    assert sorted(everything(other)) == [*range(60), *range(61, 1000)]


def test_a_part_that_others_wait_for_goes_back(threads: ThreadPoolExecutor) -> None:
    """5.4, 9.5: the prior art's client does not understand WAIT; here who waits gets something."""
    ledger = Away()
    size = {"size": 6000, "shard_size": 3000}
    slow = shards_of(ledger, report_every_s=0.0, **size)
    fast = shards_of(Away(ledger.ledger), **size)
    reading = iter(slow)
    read = [next(reading)]
    until(lambda: len(ledger.requests) == 3, LIMIT_S)
    got: list[int] = []
    others = threads.submit(lambda: got.extend(fast))

    def others_have_something() -> bool:
        # It reports at every record, and each answer may be the one that says that others wait.
        read.append(next(reading))
        return bool(got)

    until(others_have_something, LIMIT_S)
    read += reading
    others.result()
    assert sorted(read + got) == list(range(6000))
    assert len(got) >= 3000


def test_a_reader_waits_while_work_may_come_back(threads: ThreadPoolExecutor) -> None:
    """5.4: the prior art's worker leaves when nothing is left to do, and a late failure's shard
    has no reader."""
    ledger = OwnLedger()
    holder = shards_of(Away(ledger), size=60, prefetch=0)
    waiter = shards_of(Away(ledger), size=60)
    reading = holder.batches(10)
    assert next(reading).tolist() == list(range(10))
    others = threads.submit(everything, waiter)
    until(lambda: waiter.holdings.consumed() == 30, LIMIT_S)
    assert not others.done()
    holder.close()  # With a batch in hand, which may not be finished: it goes back too.
    assert sorted(others.result(LIMIT_S)) == list(range(60))


def test_ranks_in_step_never_wait_for_each_other() -> None:
    """One thread plays both ranks, so a wait for the other would be for ever."""
    ledger = OwnLedger()
    ranks = [shards_of(Away(ledger), size=130, epochs=2) for _ in range(2)]
    read: list[tuple[int, int]] = []
    for epoch in range(2):
        readers = [rank.batches(8, wait=False) for rank in ranks]
        ended: set[int] = set()
        while len(ended) < 2:
            for number, reader in enumerate(readers):
                batch = next(reader, None)
                if batch is None:
                    ended.add(number)
                else:
                    read += [(epoch, int(record)) for record in batch]
    assert sorted(read) == [(epoch, record) for epoch in range(2) for record in range(130)]


def test_a_worker_whose_position_jumped_opens_the_dataset_again() -> None:
    """A restore that it was not told of: its leases are worth nothing, it takes new ones."""
    ledger = OwnLedger()
    shards = shards_of(Away(ledger, series="/run7"))
    shards.holdings.open()
    position = ledger.position(shards.dataset, shards.marks())
    reading = iter(shards)
    before = [next(reading) for _ in range(30)]
    ledger.adopt(shards.dataset, position)
    rest = list(reading)
    assert before == list(range(30))
    # What it held when that happened it may still hand out: it is the restore that counts.
    assert rest[-1000:] == list(range(1000))


def test_reports_are_few_and_say_everything() -> None:
    """A request or two per part, with what was consumed before: no message per batch."""
    ledger = Away()
    assert len(everything(shards_of(ledger, shard_size=100, report_every_s=60.0))) == 1000
    assert len(ledger.requests) <= 25
    reported: Counter[int] = Counter()
    for request in ledger.requests:
        reported.update({said.lease: said.upto for said in request.consumed})
    assert len(reported) == 10


def test_what_is_in_hand_is_not_reported_as_done() -> None:
    """Who dies with a batch in hand has not finished it: it must be read again."""
    ledger = Away()
    reading = shards_of(ledger, shard_size=1000, report_every_s=0.0).batches(1)
    given = [int(next(reading)[0])]

    def reported() -> int:
        given.append(int(next(reading)[0]))
        return max((s.upto for request in ledger.requests for s in request.consumed), default=0)

    # Record n is given and in hand: what is before it is done.
    assert until(reported, LIMIT_S) <= given[-1]


def test_a_fenced_worker_is_told_so() -> None:
    ledger = Away()
    shards = shards_of(ledger)
    reading = shards.batches(10)
    next(reading)
    ledger.fenced = "round 3 is over"
    with pytest.raises(FencedError, match=r"a newer world has taken .*round 3 is over"):
        list(reading)


# ---- checkpoints ---------------------------------------------------------------------------------


class Follower:
    """A Checkpointer, as far as data is concerned."""

    directory = "/run7"

    def __init__(self) -> None:
        self.sources: list[DataShards] = []

    def follow(self, source: DataShards) -> None:
        self.sources.append(source)


def test_marks_say_how_far_the_caller_is() -> None:
    follower = Follower()
    ledger = Away(series="/run7")
    shards = shards_of(ledger, checkpointer=follower)
    assert follower.sources == [shards]
    assert ledger.opened == 1, "the ledger knows the dataset before anything is restored"
    reading = shards.batches(40)
    next(reading)
    (mark,) = shards.marks()
    assert [said.upto for said in mark.consumed] == [30, 40]
    next(reading)
    (mark,) = shards.marks()
    # The first part ended since: named once more, with its end. Everything is cumulative.
    assert [said.upto for said in mark.consumed] == [30, 60, 80]
    next(reading)
    assert [said.upto for said in shards.marks()[0].consumed] == [60, 90, 120]


def test_a_restored_position_leaves_nothing_of_the_old_one() -> None:
    """9.5: in the prior art a restore does not clear the queue: old samples come first."""
    shards = shards_of(shuffle="samples", epochs=2)
    order = everything(shards_of(shuffle="samples"))
    reading = iter(shards)
    before = [next(reading) for _ in range(100)]
    state = shards.state_dict()
    lost = [next(reading) for _ in range(300)]
    shards.load_state_dict(state)
    assert before + lost == order[:400]
    assert list(reading) == order[100:]


def test_the_state_of_a_process_on_its_own_is_its_position() -> None:
    shards = shards_of(shuffle="samples", epochs=2)
    for _ in shards.epochs():
        first = everything(shards)
        break
    reading = shards.batches(25)
    second = [int(record) for _ in range(9) for record in next(reading)]
    state = shards.state_dict()
    assert (state["name"], state["epoch"], state["consumed"]) == ("train", 1, 1225)
    again = shards_of(shuffle="samples", epochs=2)
    again.load_state_dict(state)
    assert [epoch for epoch in again.epochs() if second.extend(everything(again)) is None] == [1]
    assert sorted(first) == sorted(second) == list(range(1000))


def test_a_state_of_many_processes_cannot_be_loaded_by_one() -> None:
    with pytest.raises(UsageError, match="only `holdfast run` brings it back"):
        shards_of().load_state_dict({"name": "train", "epoch": 1, "consumed": 10})


def test_a_closed_dataset_gives_back_and_refuses() -> None:
    ledger = OwnLedger()
    with shards_of(ledger) as shards:
        reading = shards.batches(10)
        assert next(reading).tolist() == list(range(10))
    with pytest.raises(UsageError, match="was closed by this process"):
        everything(shards)
    assert sorted(everything(shards_of(ledger))) == list(range(10, 1000))


# ---- other processes -----------------------------------------------------------------------------


def in_child(read: Callable[[], object]) -> str:
    """What reading in a forked child leads to."""
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send(f"read {read()}")
        except UsageError as error:
            theirs.send(str(error))
        finally:
            os._exit(0)
    assert ours.poll(LIMIT_S)
    said = ours.recv()
    os.waitpid(pid, 0)
    return str(said)


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    shards = shards_of()
    reading = iter(shards)
    assert next(reading) == 0
    expected = f"belongs to process {os.getpid()}, not to its child"
    assert expected in in_child(lambda: next(reading))
    assert expected in in_child(lambda: next(shards.batches(2)))
    assert list(reading) == list(range(1, 1000))


def test_several_processes_need_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="start it with `holdfast run`"):
        DataShards("train", size=10)
