# SPDX-License-Identifier: Apache-2.0
"""torch's DataLoader on DataShards: with worker processes, what is read ahead does not count."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.client.data import DataShards, Part
from holdfast.client.data.ledgers import OwnLedger
from holdfast.model.errors import UsageError
from holdfast.torch.data.datasets import ShardedIterableDataset, ShardedLoader, ShardedMapDataset
from tests.integration.jobs import ROOT, SCRIPTS, Jobs
from tests.integration.test_data_exactly_once import lives, seen_by_the_model

SIZE = 2000


class Numbers:
    """A dataset whose records are their numbers."""

    def __getitem__(self, index: int) -> int:
        return index


def shards_of(**options: Any) -> DataShards:
    return DataShards("train", **{"size": 300, "shard_size": 30, "shuffle": "samples", **options})


def by_number(shards: DataShards, **options: Any) -> ShardedLoader:
    return ShardedLoader(ShardedMapDataset(Numbers(), shards), batch_size=16, **options)


def numbers(loader: ShardedLoader) -> list[int]:
    return [int(number) for batch in loader for number in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_every_record_is_loaded_once_in_every_epoch(workers: int) -> None:
    shards = shards_of(epochs=2)
    loader = by_number(shards, num_workers=workers, persistent_workers=workers > 0)
    orders = [numbers(loader) for _ in shards.epochs()]
    expected = shards_of(epochs=2)
    assert orders == [torch.tensor(list(expected)).tolist() for _ in expected.epochs()]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_checkpoint_counts_the_batches_that_the_training_had(workers: int) -> None:
    """With 2 workers 4 batches and more are read ahead: they are not in the saved position."""
    shards = shards_of()
    loaded = iter(by_number(shards, num_workers=workers))
    before = [int(number) for _ in range(5) for number in next(loaded)]
    state = shards.state_dict()
    assert state["consumed"] == 5 * 16
    lost = [int(number) for _ in range(3) for number in next(loaded)]
    again = shards_of()
    again.load_state_dict(state)
    after = numbers(by_number(again, num_workers=workers))
    assert sorted(before + after) == list(range(300))
    assert after[: len(lost)] == lost
    # And whoever leaves a loop goes on where it was left.
    del loaded
    assert sorted(before + lost + numbers(by_number(shards))) == list(range(300))


def test_batches_that_were_read_ahead_are_not_used_after_a_restore() -> None:
    shards = shards_of()
    loaded = iter(by_number(shards, num_workers=2))
    first = next(loaded).tolist()
    state = shards.state_dict()
    next(loaded)
    shards.load_state_dict(state)
    rest = [int(number) for batch in loaded for number in batch]
    assert sorted(first + rest) == list(range(300))


def test_lines_and_listed_shards_are_loaded(tmp_path: Path) -> None:
    file = tmp_path / "numbers"
    file.write_text("".join(f"{number}\n" for number in range(300)))
    lines = DataShards("lines", files=[file], shard_size=100)
    loader = ShardedLoader(ShardedIterableDataset(lines, int), batch_size=16)
    loaded = iter(loader)
    before = [int(number) for _ in range(3) for number in next(loaded)]
    state = lines.state_dict()
    assert before == list(range(48))
    again = DataShards("lines", files=[file], shard_size=100)
    again.load_state_dict(state)
    loader = ShardedLoader(ShardedIterableDataset(again, int), batch_size=16)
    assert sorted(numbers(loader)) == list(range(48, 300))

    def read(part: Part) -> list[int]:
        return [int(part.name) + number for number in range(part.begin, part.end)]

    listed = DataShards("listed", listed=[("0", 10), ("10", 25)])
    loader = ShardedLoader(ShardedIterableDataset(listed, read), batch_size=4)
    assert sorted(numbers(loader)) == list(range(35))
    short = DataShards("short", listed=[("0", 10)])
    loader = ShardedLoader(ShardedIterableDataset(short, lambda part: [1, 2]), batch_size=4)
    with pytest.raises(UsageError, match="up to 2 only"):
        numbers(loader)


def test_what_would_count_wrongly_is_refused() -> None:
    """A plain DataLoader with workers would count what it has read ahead as consumed."""
    shards = shards_of()
    dataset = ShardedIterableDataset(shards, int)
    with pytest.raises(UsageError, match="read through a ShardedLoader"):
        list(torch.utils.data.DataLoader(dataset))
    with pytest.raises(UsageError, match="worker processes cannot take data on their own"):
        ShardedLoader(dataset, batch_size=4, num_workers=1)
    with pytest.raises(UsageError, match="leave in_order on"):
        by_number(shards, in_order=False)
    with pytest.raises(UsageError, match="shuffle has no place here"):
        by_number(shards, shuffle=True)
    with pytest.raises(UsageError, match="use ShardedIterableDataset"):
        ShardedMapDataset(Numbers(), DataShards("listed", listed=[("a", 1)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_does_not_wait_says_that_it_has_nothing(workers: int) -> None:
    ledger = OwnLedger()
    first, second = (shards_of(ledger=ledger, size=60, prefetch=0) for _ in range(2))
    held = next(iter(first.pieces()))
    loaded = iter(by_number(second, num_workers=workers, wait=False))
    found = [batch.tolist() for batch in (next(loaded), next(loaded))]
    assert next(loaded) is None
    first.close()
    rest = [batch.tolist() for batch in loaded if batch is not None]
    assert (held.begin, held.end) == (0, 30)
    assert sorted(number for batch in found + rest for number in batch) == list(range(60))


def test_the_example_counts_every_sample_once(jobs: Jobs) -> None:
    """Two ranks in step: the tail of an epoch, which only one of them has, holds up neither."""
    job = jobs.run(
        "--nproc-per-node", "2", "--no-spares", str(ROOT / "examples/data.py"), str(jobs.folder)
    )
    job.succeeds(240)
    assert "the sum of all samples is 399980000, it should be 399980000" in job.text


@pytest.mark.parametrize(
    ("how", "start", "faults"),
    [
        ("map", "fork", "kill read 1"),
        ("lines", "fork", "kill read 1"),
        ("lines", "spawn", ""),
        ("left", "fork", ""),
    ],
)
def test_loaders_with_worker_processes_in_a_job(
    jobs: Jobs, how: str, start: str, faults: str
) -> None:
    """Worker processes that are forked or spawned take parts on their own, the rank reports."""
    jobs.write("numbers", "".join(f"{number}\n" for number in range(SIZE)))
    words = ("--nproc-per-node", "2", "--no-spares", str(SCRIPTS / "loads.py"))
    job = jobs.run(*words, SIZE=str(SIZE), HOW=how, START=start, FAULTS=faults)
    job.succeeds(240)
    said = [json.loads(line) for line in (jobs.folder / "read.log").read_text().splitlines()]
    read = Counter((one["epoch"], sample) for one in said for sample in one["samples"])
    assert set(read) == {(epoch, sample) for epoch in range(2) for sample in range(SIZE)}
    if not faults:
        assert set(read.values()) == {1}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("start", "ranks", "faults"),
    [("fork", 2, "kill read 1;kill read 0"), ("spawn", 1, "kill read 0")],
)
def test_loader_processes_and_a_restored_checkpoint(
    jobs: Jobs, start: str, ranks: int, faults: str
) -> None:
    """What loader processes had read ahead when a rank died is not in the model: it comes again.

    9.5: in the prior art it counts as consumed as soon as a loader process has fetched it.
    """
    jobs.write("numbers", "".join(f"{number}\n" for number in range(SIZE)))
    words = ("--nproc-per-node", str(ranks), "--no-spares", str(SCRIPTS / "loads_saved.py"))
    jobs.run(*words, START=start, FAULTS=faults).succeeds(300)
    assert len(jobs.events("fault")) == len(faults.split(";"))
    found = lives(jobs)
    assert any(life.loaded > 0 for life in found.values()), "nothing was restored"
    everything = {(epoch, sample): 1 for epoch in range(2) for sample in range(SIZE)}
    assert seen_by_the_model(found) == everything
