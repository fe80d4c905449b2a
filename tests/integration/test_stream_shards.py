# SPDX-License-Identifier: Apache-2.0
"""StreamShards in one process, with a real broker: what a training script sees of a stream."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nats.js import JetStreamContext

from holdfast.client.data import Record, StreamShards
from holdfast.client.data.nats_reader import NatsReader
from holdfast.model.errors import StateError, UsageError
from tests.brokers import Broker, nats_server
from tests.integration.jobs import Jobs

LONG_S = 60.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    """With the empty partitions p and q."""
    with nats_server(tmp_path) as broker:
        broker.add("p", "q")
        yield broker


def write(broker: Broker, partition: str, first: int, last: int) -> list[Record]:
    made = [Record(partition, n, f"{partition}{n}".encode()) for n in range(first, last + 1)]
    broker.write(partition, [record.data for record in made])
    return made


def make(broker: Broker, **options: int | dict[str, int]) -> StreamShards:
    reader = NatsReader(broker.url, ["p", "q"], timeout_s=LONG_S)
    return StreamShards("stream", reader, shard_size=10, **options)


def test_records_come_as_they_are_written_until_the_end(broker: Broker) -> None:
    written = write(broker, "p", 1, 15)
    with make(broker, end={"p": 26, "q": 8}) as stream, ThreadPoolExecutor(1) as threads:
        batches = stream.read(4)
        first = [next(batches) for _ in range(3)]
        assert [len(batch) for batch in first] == [4, 4, 2]
        rest = threads.submit(list, batches)
        written += write(broker, "q", 1, 7) + write(broker, "p", 16, 25)
        found = [record for batch in (*first, *rest.result(LONG_S)) for record in batch]
        assert sorted(found) == sorted(written)
        assert list(stream.read(4)) == [], "it is over, also for whoever asks again"
        assert list(stream.read(4, wait=False)) == []


def test_ranks_that_step_together_get_an_empty_batch_instead_of_waiting(broker: Broker) -> None:
    with make(broker) as stream:
        batches = stream.read(10, wait=False)
        assert next(batches) == []
        written = write(broker, "q", 1, 10)
        found = next(batch for batch in batches if batch)
        assert found == written
        assert next(batches) == []


def test_the_position_goes_with_what_is_saved_of_the_training(broker: Broker) -> None:
    written = write(broker, "p", 1, 20)
    with make(broker) as stream:
        batches = stream.read(4)
        before = [record for _ in range(2) for record in next(batches)]
        state = stream.state_dict()
        next(batches)
    with make(broker) as stream:
        stream.load_state_dict(state)
        batches = stream.read(4)
        after = [record for _ in range(4) for record in next(batches)]
        assert sorted(before + after) == written


def test_parts_can_be_read_by_hand(broker: Broker) -> None:
    written = write(broker, "p", 1, 20)
    reader = NatsReader(broker.url, ["p", "q"], timeout_s=LONG_S)
    with StreamShards("stream", reader, shard_size=10) as stream:
        parts = stream.pieces()
        found = [
            data
            for part in (next(parts), next(parts))
            for data in reader.read(part.name, part.begin, part.end)
        ]
    assert found == [record.data for record in written]


def test_a_training_begins_where_it_is_told_to(broker: Broker) -> None:
    write(broker, "p", 1, 10)
    later = write(broker, "p", 11, 20)
    with make(broker, begin={"p": 11}) as stream:
        assert next(stream.read(10)) == later


def test_records_that_the_broker_has_deleted_are_an_error_and_never_passed_over(
    broker: Broker,
) -> None:
    write(broker, "p", 1, 20)

    async def trim(broker: JetStreamContext) -> None:
        await broker.purge_stream("p", seq=6)

    broker.do(trim)
    with (
        make(broker) as stream,
        pytest.raises(StateError, match="the records 1 to 5 of 'p' are gone"),
    ):
        next(stream.read(10))


def test_a_partition_that_does_not_exist_ends_the_wait_for_its_records(broker: Broker) -> None:
    reader = NatsReader(broker.url, ["p", "unknown"], timeout_s=LONG_S)
    with (
        StreamShards("stream", reader, shard_size=10) as stream,
        pytest.raises(UsageError, match="there is no stream for the growth of p, unknown"),
    ):
        next(stream.read(10))


def test_only_partitions_of_the_reader_have_a_begin_and_an_end(broker: Broker) -> None:
    with pytest.raises(UsageError, match="'stream' has no partition 'r'"):
        make(broker, begin={"r": 5})
    with pytest.raises(UsageError, match="a batch has 1 record at least"), make(broker) as stream:
        next(stream.read(0))


def test_the_example_sees_every_number_of_the_stream_once(broker: Broker, jobs: Jobs) -> None:
    example = Path(__file__).parents[2] / "examples" / "stream.py"
    command = [sys.executable, str(example), "write", broker.url]
    assert subprocess.run(command, timeout=LONG_S, check=False).returncode == 0
    words = (str(example), "train", broker.url, str(jobs.folder / "saves"))
    job = jobs.run("--nproc-per-node", "2", "--no-spares", *words)
    job.succeeds(LONG_S)
    assert "the sum of all records is 999000, it should be 999000" in job.text
