# SPDX-License-Identifier: Apache-2.0
"""A process outside of a world that dies alone: what it had of the data goes to others.

No round ends with it, and its node lives on: only its agent can notice.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast.client import AgentClient
from holdfast.client.data import DataShards
from holdfast.client.data.ledgers import AgentLedger
from holdfast.protocol.data import Consumed, ShardsTake
from holdfast.runtime.token import read_token
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs, MasterCommand
from tests.waiting import until

SIZE = 40


class Node:
    """One node whose worker idles, and processes beside the worker that read data."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.master: MasterCommand = jobs.master("--http", "off")
        self.agent: Command = jobs.node(self.master, "--no-spares", str(SCRIPTS / "idles.py"))
        jobs.wait_for("main")
        self.address = (jobs.folder / "socket-0").read_text()

    def shards(self) -> DataShards:
        client = AgentClient(self.address, read_token(self.master.token_file), scope=0)
        return DataShards("train", size=SIZE, shard_size=10, ledger=AgentLedger(client))

    @contextmanager
    def reader(self) -> Iterator[subprocess.Popen[str]]:
        """A process that reads; it has opened the dataset."""
        words = (self.address, str(self.master.token_file), str(SIZE))
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "outside.py"), *words],
            env=self.jobs.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert said(process) == "open"
            yield process
        finally:
            process.kill()
            process.communicate()

    def finish(self) -> None:
        self.jobs.finish()
        self.agent.succeeds()
        self.master.succeeds()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def all_of(shards: DataShards) -> list[int]:
    return sorted(int(record) for batch in shards.batches(10) for record in batch)


@pytest.fixture
def node(jobs: Jobs) -> Node:
    return Node(jobs)


def test_what_a_killed_process_had_is_read_by_others(node: Node) -> None:
    """9.5: the prior art gives a lost reader's shard back when a time-out of half an hour ends."""
    with node.reader() as process:
        assert said(process) == "read 0 1 2 3 4"
        process.kill()
        # Waits for the first two parts: the first was being read, the next was fetched ahead.
        assert all_of(node.shards()) == list(range(SIZE))
    node.finish()


def test_what_a_killed_process_would_have_been_given_is_not_lost(node: Node) -> None:
    """It dies while its request is held; the answer comes when nobody is there to take it."""
    shards = node.shards()
    shards.holdings.open()
    ledger = shards.ledger
    *_, last = ledger.take(ShardsTake(0, "train", 0, 0, 4)).leases
    assert (last.piece.begin, last.piece.end) == (30, SIZE)

    def somebody_waits() -> bool:
        return bool(ledger.take(ShardsTake(0, "train", 0, 0, 0)).wanted)

    with node.reader() as process:
        until(somebody_waits, LIMIT_S)
        process.kill()
        process.wait(LIMIT_S)
        returned = (Consumed(last.number, 33, returned=True),)
        ledger.take(ShardsTake(0, "train", 0, 0, 0, returned))
        (again,) = ledger.take(ShardsTake(0, "train", 0, 0, 1, timeout_s=LIMIT_S)).leases
    assert (again.piece.begin, again.piece.end) == (33, SIZE)
    node.finish()


def test_a_living_process_that_closes_its_connections_keeps_what_it_has(node: Node) -> None:
    client = AgentClient(node.address, read_token(node.master.token_file), scope=0)
    shards = DataShards("train", size=SIZE, shard_size=10, ledger=AgentLedger(client))
    reading = shards.batches(5)
    first = next(reading).tolist()
    client.close()
    with node.reader() as process:
        read = [int(number) for number in said(process).removeprefix("read ").split()]
        assert set(read).isdisjoint(range(10)), "the first part is with a process that lives"
        process.kill()
        rest = [int(record) for batch in reading for record in batch]
    assert sorted(first + rest) == list(range(SIZE))
    node.finish()
