# SPDX-License-Identifier: Apache-2.0
"""Ray Data under the shard ledger, with a real local Ray: what it has read ahead does not count."""

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from holdfast.client.data import DataShards, Part
from holdfast.client.data.ledgers import OwnLedger
from holdfast.model.errors import UsageError
from tests.integration.adapters.launching import LAUNCH_S, SCRIPTS, needs
from tests.integration.jobs import ROOT, Jobs

pytestmark = [
    needs("ray", "pyarrow"),
    pytest.mark.timeout(480),
]

SHARDS, ROWS = 4, 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of this module's own. It leaves nothing: no token, no report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's own workers run at nice 15: beside busy tests they would get next to no processor.
        patch.setenv("RAY_worker_niceness", "0")
        import ray
        import ray.data

        # Its newer reader starts processes for every dataset, which takes seconds.
        ray.data.DataContext.get_current().use_datasource_v2 = False
        started = ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            # Below the folder of the test run, and short: Ray makes Unix sockets there.
            _temp_dir=tempfile.mkdtemp(prefix="ray"),
            log_to_driver=False,
        )
        try:
            yield started.address_info["address"]
        finally:
            ray.shutdown()


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[str, int]]:
    """Parquet files whose rows are numbers, and how many rows each has."""
    import pyarrow
    from pyarrow import parquet

    listed = []
    for shard in range(SHARDS):
        numbers = range(shard * ROWS, (shard + 1) * ROWS)
        path = str(tmp_path / f"{shard}.parquet")
        parquet.write_table(pyarrow.table({"number": numbers}), path, row_group_size=30)
        listed.append((path, ROWS))
    return listed


def rows(part: Part) -> Any:
    import ray.data

    read = ray.data.read_parquet(part.name)
    return read.map_batches(lambda batch: {"twice": batch["number"] * 2})


def batches_of(shards: DataShards, **options: Any) -> Any:
    from holdfast.platforms.ray.data import ray_batches

    return ray_batches(shards, rows, 16, **options)


def numbers(batch: Any) -> list[int]:
    return [number // 2 for number in batch["twice"].tolist()]


@pytest.mark.usefixtures("cluster")
def test_every_row_comes_once_in_every_epoch(files: list[tuple[str, int]]) -> None:
    shards = DataShards("train", listed=files[:3], epochs=2)
    for _ in shards.epochs():
        read = [number for batch in batches_of(shards) for number in numbers(batch)]
        assert sorted(read) == list(range(3 * ROWS))
        by_shard = [read[at : at + ROWS] for at in range(0, len(read), ROWS)]
        assert all(shard == sorted(shard) for shard in by_shard), "the order of the rows is kept"


@pytest.mark.soak
@pytest.mark.usefixtures("cluster")
def test_a_checkpoint_counts_the_batches_that_the_training_had(
    files: list[tuple[str, int]],
) -> None:
    """The next one begins in the middle of a shard; what Ray has read ahead is not lost.

    Beside a busy machine an assertion of Ray 2.60 (reference_counter.cc:624) ended the process of
    pytest once, as a read was broken off. Every run has a whole job that is killed and goes on,
    below, in processes of its own.
    """
    shards = DataShards("train", listed=files[:3])
    batches = batches_of(shards)
    before = [number for _ in range(9) for number in numbers(next(batches))]
    state = shards.state_dict()
    assert state["consumed"] == len(before) == 100 + 2 * 16
    lost = numbers(next(batches))
    again = DataShards("train", listed=files[:3])
    again.load_state_dict(state)
    after = [number for batch in batches_of(again) for number in numbers(batch)]
    assert sorted(before + after) == list(range(3 * ROWS))
    assert after[: len(lost)] == lost
    # Going back in the same process, and leaving the loop: nothing is lost, nothing comes twice.
    shards.load_state_dict(state)
    assert numbers(next(batches)) == lost
    batches.close()
    after = [number for batch in batches_of(shards) for number in numbers(batch)]
    assert sorted(before + lost + after) == list(range(3 * ROWS))


@pytest.mark.usefixtures("cluster")
def test_it_says_that_it_has_nothing_now_or_waits(files: list[tuple[str, int]]) -> None:
    ledger = OwnLedger()
    first, second = (
        DataShards("train", listed=files[:2], ledger=ledger, prefetch=0) for _ in range(2)
    )
    next(first.pieces())
    batches = batches_of(second, wait=False)
    read = []
    while (batch := next(batches)) is not None:
        read += numbers(batch)
    assert read == list(range(ROWS, 2 * ROWS))
    first.close()
    for batch in batches:
        read += [] if batch is None else numbers(batch)
    assert sorted(read) == list(range(2 * ROWS))


@pytest.mark.usefixtures("cluster")
def test_a_slow_reader_shares_the_rest_of_its_shard(files: list[tuple[str, int]]) -> None:
    ledger = OwnLedger()
    first, second = (
        DataShards("train", listed=files[:1], ledger=ledger, prefetch=0, report_every_s=0.0)
        for _ in range(2)
    )
    read: list[list[int]] = [[], []]
    for pair in zip_longest(batches_of(first, wait=False), batches_of(second, wait=False)):
        for numbers_read, batch in zip(read, pair, strict=True):
            numbers_read += [] if batch is None else numbers(batch)
    assert sorted(read[0] + read[1]) == list(range(ROWS))
    assert all(read), "the second one had nothing until the first one shared"


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_counted_is_told(files: list[tuple[str, int]]) -> None:
    with pytest.raises(UsageError, match="'train' has no listed shards"):
        next(batches_of(DataShards("train", size=10)))
    short = DataShards("train", listed=[(files[0][0], 120)])
    with pytest.raises(UsageError, match="has 100 rows only"):
        list(batches_of(short))


def test_a_killed_worker_loses_no_row(
    jobs: Jobs, cluster: str, files: list[tuple[str, int]]
) -> None:
    """It is killed with a batch in hand, and more read ahead by Ray.

    What it had not reported is read again, and no more.
    """
    words = ("--nproc-per-node", "1", "--no-spares", str(SCRIPTS / "ray_reading.py"))
    env = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "RAY_ADDRESS": cluster,
        "LISTED": json.dumps(files),
        "FAULTS": "kill read 0",
    }
    jobs.run(*words, **env).succeeds(LAUNCH_S)
    assert len(jobs.events("fault")) == 1
    lines = (jobs.folder / "read.log").read_text().splitlines()
    read = Counter(number for line in lines for number in json.loads(line)["numbers"])
    assert set(read) == set(range(SHARDS * ROWS))
    assert max(read.values()) == 2
