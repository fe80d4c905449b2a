# SPDX-License-Identifier: Apache-2.0
"""tf.data on DataShards, with the real TensorFlow: what it has read ahead does not count."""

import json
import os
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.client.data import DataShards, Part
from holdfast.client.data.ledgers import OwnLedger
from holdfast.model.errors import UsageError
from tests.integration.adapters.launching import LAUNCH_S, SCRIPTS, needs
from tests.integration.jobs import ROOT, Jobs

if TYPE_CHECKING:
    from holdfast.tensorflow.data import ShardedDataset

pytestmark = [
    needs("tensorflow"),
    pytest.mark.timeout(480),
]

LIMIT_S = 60.0
SIZE = 2000


def shards_of(**options: Any) -> DataShards:
    return DataShards("train", **{"size": 300, "shard_size": 30, "shuffle": "samples", **options})


def dataset_of(shards: DataShards, read: Any = int, **options: Any) -> "ShardedDataset":
    # Here, because the import takes seconds that no other test should wait for.
    import tensorflow as tf

    from holdfast.tensorflow.data import ShardedDataset

    options = {"batch_size": 16, "output_signature": tf.TensorSpec([], tf.int64), **options}
    return ShardedDataset(shards, read, **options)


def numbers(dataset: "ShardedDataset") -> list[int]:
    return [int(number) for batch in dataset for number in batch.numpy()]


def test_every_record_comes_once_in_every_epoch_and_in_the_order_of_the_shards() -> None:
    shards = shards_of(epochs=2)
    dataset = dataset_of(shards, transform=lambda batch: batch * 2)
    orders = [numbers(dataset) for _ in shards.epochs()]
    expected = shards_of(epochs=2)
    assert orders == [[2 * number for number in expected] for _ in expected.epochs()]


def test_a_checkpoint_counts_the_batches_that_the_training_had() -> None:
    """Prior art: the reader's hook counts what tf.data has drawn, which is ahead of the model."""
    is_ahead = threading.Event()
    reads = []

    def read(number: int) -> int:
        reads.append(number)
        if len(reads) == 7 * 16:
            is_ahead.set()
        return number

    shards = shards_of()
    batches = iter(dataset_of(shards, read))
    before = [int(number) for _ in range(5) for number in next(batches).numpy()]
    assert is_ahead.wait(LIMIT_S)
    state = shards.state_dict()
    assert state["consumed"] == 5 * 16
    lost = [int(number) for _ in range(3) for number in next(batches).numpy()]
    again = shards_of()
    again.load_state_dict(state)
    after = numbers(dataset_of(again))
    assert sorted(before + after) == list(range(300))
    assert after[: len(lost)] == lost
    # And whoever leaves a loop goes on where it was left.
    del batches
    assert sorted(before + lost + numbers(dataset_of(shards))) == list(range(300))


def test_batches_that_were_read_ahead_are_not_used_after_a_restore() -> None:
    shards = shards_of()
    batches = iter(dataset_of(shards))
    first = next(batches).numpy().tolist()
    state = shards.state_dict()
    next(batches)
    shards.load_state_dict(state)
    rest = [int(number) for batch in batches for number in batch.numpy()]
    assert sorted(first + rest) == list(range(300))


def test_what_another_reader_gives_back_is_read_in_the_same_loop() -> None:
    ledger = OwnLedger()
    first, second = (shards_of(ledger=ledger, size=60, prefetch=0) for _ in range(2))
    held = next(iter(first.pieces()))
    batches = iter(dataset_of(second, batch_size=30))
    found = next(batches).numpy().tolist()
    first.close()
    assert (held.begin, held.end) == (0, 30)
    rest = [int(number) for batch in batches for number in batch.numpy()]
    assert sorted(found + rest) == list(range(60))


def test_a_slow_reader_shares_what_tf_data_has_not_drawn() -> None:
    """Prior art: the last shard of a slow worker keeps everybody waiting."""
    ledger = OwnLedger()
    options = {"size": 600, "shard_size": 600, "prefetch": 0, "report_every_s": 0.0}
    first, second = (shards_of(ledger=ledger, **options) for _ in range(2))
    batches, others = iter(dataset_of(first)), second.batches(600, wait=False)
    read = next(batches).numpy().tolist()
    while len(shared := next(others).tolist()) == 0:
        read += next(batches).numpy().tolist()
    read += shared
    second.close()
    rest = [int(number) for batch in batches for number in batch.numpy()]
    assert len(rest) > 0
    assert sorted(read + rest) == list(range(600))


def test_lines_and_structures_and_strings_that_end_with_a_zero_byte(tmp_path: Path) -> None:
    import tensorflow as tf

    file = tmp_path / "numbers"
    # Long lines: in some parts of the file no line begins.
    text = "".join(f"{number} {'x' * (number % 70)}\n" for number in range(300))
    file.write_text(text)
    shards = DataShards("lines", files=[file], shard_size=50)
    signature = {"number": tf.TensorSpec([], tf.int32), "text": tf.TensorSpec([], tf.string)}
    dataset = dataset_of(
        shards,
        lambda line: {"number": int(line.split()[0]), "text": line + b"\0"},
        output_signature=signature,
    )
    found: dict[int, bytes] = {}
    for batch in dataset:
        found.update(zip(batch["number"].numpy().tolist(), batch["text"].numpy(), strict=True))
    assert [found[number] for number in range(300)] == [
        line.encode() + b"\0" for line in text.splitlines(keepends=True)
    ]


def test_listed_shards_and_those_that_have_too_few_or_too_many_samples() -> None:
    def read(part: Part) -> range:
        first = int(part.name)
        return range(first + part.given, first + part.end)

    listed = DataShards("listed", listed=[("0", 10), ("10", 25)])
    assert sorted(numbers(dataset_of(listed, read, batch_size=4))) == list(range(35))
    for name, given, why in (
        ("short", [1, 2], "up to 2 only"),
        ("long", range(20), "more samples"),
    ):
        shards = DataShards(name, listed=[("0", 10)])
        with pytest.raises(UsageError, match=why):
            numbers(dataset_of(shards, lambda part, given=given: given, batch_size=4))


def test_what_is_not_a_batch_is_told() -> None:
    with pytest.raises(UsageError, match="1 sample at least, not 0"):
        dataset_of(shards_of(), batch_size=0)


def read_by_a_job(jobs: Jobs, *, ranks: int, follows: str) -> Counter[int]:
    """A job whose last rank is killed in the middle; how often each sample was handed out."""
    words = ("--nproc-per-node", str(ranks), "--no-spares", str(SCRIPTS / "tensorflow_reading.py"))
    env = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "SIZE": str(SIZE),
        "FOLLOWS": follows,
        "FAULTS": f"kill read {ranks - 1}",
    }
    jobs.run(*words, **env).succeeds(LAUNCH_S)
    assert len(jobs.events("fault")) == 1
    lines = (jobs.folder / "read.log").read_text().splitlines()
    return Counter(sample for line in lines for sample in json.loads(line)["samples"])


@pytest.mark.soak
def test_a_killed_worker_loses_no_sample(jobs: Jobs) -> None:
    """Without a checkpoint, what was not reported when it died is read again, and no more.

    In every run the job below it loses its worker, and of two readers in one loop the one reads
    what the other gives back (above).
    """
    read = read_by_a_job(jobs, ranks=2, follows="nothing")
    assert set(read) == set(range(SIZE))
    # At most the ten batches of the one and what the other had read when it was stopped.
    assert max(read.values()) == 2


def test_a_killed_worker_that_saves_the_position_with_its_model_counts_every_sample_once(
    jobs: Jobs,
) -> None:
    read_by_a_job(jobs, ranks=1, follows="model")
    began = [event.step for event in jobs.events("begin")]
    assert began[0] == 0
    assert began[1] >= 9, "the second life begins where the first one was saved"
    assert json.loads((jobs.folder / "seen").read_text()) == [1] * SIZE
