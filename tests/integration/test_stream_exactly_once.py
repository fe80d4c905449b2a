# SPDX-License-Identifier: Apache-2.0
"""Training on a stream that is being written: every record counts once, whatever dies."""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.model.checkpoint import Series
from holdfast.model.dataset import Position
from tests.brokers import Broker, nats_server
from tests.integration.jobs import SCRIPTS, Command, Jobs, MasterCommand
from tests.integration.test_data_exactly_once import Life, lives, seen_by_the_model

STREAMING = str(SCRIPTS / "streaming.py")
SIZE = 1500
"""Records of each of two partitions."""
SHARD = 50
WRITTEN_AT_ONCE = 300


class Producer:
    """Writes the next records of both partitions; each says which it is."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.written = 0

    def write(self) -> None:
        numbers = range(self.written + 1, self.written + WRITTEN_AT_ONCE + 1)
        for partition in "pq":
            self._broker.write(partition, [f"{partition} {n}".encode() for n in numbers])
        self.written += WRITTEN_AT_ONCE


def start_nodes(jobs: Jobs, master: MasterCommand, broker: Broker) -> list[Command]:
    nodes = []
    for name in "ab":
        memory = jobs.folder / f"memory-{name}"
        memory.mkdir()
        env = {"SIZE": str(SIZE), "SHARD": str(SHARD), "BROKER": broker.url}
        env["HOLDFAST_MEMORY_DIR"] = str(memory)
        options = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "50")
        nodes.append(jobs.node(master, *options, STREAMING, name=name, **env))
    return nodes


def seen_at(found: dict[int, Life], step: int) -> Counter[tuple[int, int]]:
    """What the model had seen at a step on the way to the last one."""
    number = max(found)
    while found[number].loaded >= step:
        number = found[number].saved_in
    life = found[number]
    read = {at: samples for at, samples in life.read.items() if at <= step}
    earlier = {n: one for n, one in found.items() if n < number}
    return seen_by_the_model({**earlier, number: Life(life.loaded, life.saved_in, read)})


def consumed_at(position: Position) -> set[tuple[int, int]]:
    """What a position says that the model has seen."""
    cut = {
        (0, partition * SIZE + number)
        for partition, shards in enumerate(position.cut)
        for number in range(shards * SHARD)
    }
    is_open = {
        (0, piece.extent * SIZE + offset - 1)
        for piece in position.open
        for offset in range(piece.begin, piece.end)
    }
    return cut - is_open


@pytest.mark.timeout(480)
def test_every_record_once_while_workers_the_master_and_the_broker_die(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Prior art: a stream's position is not in the checkpoint, and cannot be restored at all."""
    with nats_server(tmp_path) as broker:
        broker.add("p", "q")
        producer = Producer(broker)
        producer.write()
        master = jobs.master()
        nodes = start_nodes(jobs, master, broker)
        world = jobs.wait_world(4, steps=8)

        os.kill(world[0].pid, signal.SIGKILL)
        producer.write()
        world = jobs.wait_world(4, after=world, steps=8)

        # The round goes on without a master, and its growth is known to the next one.
        master.kill()
        producer.write()
        master = jobs.master(listen=master.address)

        broker.restart()
        producer.write()
        os.kill(world[3].pid, signal.SIGKILL)
        world = jobs.wait_world(4, after=world, steps=8)

        broker.stop()
        os.kill(world[1].pid, signal.SIGKILL)
        broker.start()
        producer.write()
        assert producer.written == SIZE
        for node in nodes:
            node.succeeds(120)

    found = lives(jobs)
    seen = seen_by_the_model(found)
    assert len(found) >= 4, "every kill of a worker began another round"
    assert {record for record, times in seen.items() if times > 1} == set(), "seen twice"
    assert seen.keys() == {(0, number) for number in range(2 * SIZE)}
    expect_offsets_in_the_commit(jobs, found)
    jobs.expect_nothing_left()


def expect_offsets_in_the_commit(jobs: Jobs, found: dict[int, Life]) -> None:
    """The manifest on storage says which offsets its model has seen, and it is right."""
    series = Series(str(jobs.folder / "saves"))
    stored = list_committed(open_storage(series.directory), series)[0].stored
    (position,) = stored.positions
    assert consumed_at(position) == seen_at(found, stored.version.step).keys()
