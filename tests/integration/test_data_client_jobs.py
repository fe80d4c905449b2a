# SPDX-License-Identifier: Apache-2.0
"""DataShards in whole jobs, with real kills of workers and of the master."""

import json
from collections import Counter

from holdfast.client.data.parts import records
from holdfast.core.job import records as rec
from holdfast.core.job.data.shards import Shards
from holdfast.model.dataset import BY_SAMPLE, Dataset, Piece
from tests.integration.control import records_of
from tests.integration.jobs import SCRIPTS, Jobs

READS = str(SCRIPTS / "reads.py")
SIZE = 10_000
LEASES_MAX = 6
"""What one worker has at most: a batch in hand can be from two shards, one is ready, one may be
under way to it, and the word that two more are finished may be under way from it."""
OF_THE_LEDGER = rec.DatasetRegistered | rec.ShardsLeased | rec.ShardsReported | rec.LeasesReturned


def samples(jobs: Jobs) -> Counter[tuple[int, int]]:
    """How often each sample of each epoch was read."""
    lines = (jobs.folder / "read.log").read_text().splitlines()
    said = [json.loads(line) for line in lines]
    return Counter((one["epoch"], sample) for one in said for sample in one["samples"])


def test_a_killed_worker_loses_no_sample(jobs: Jobs) -> None:
    """Without a checkpoint every sample is read at least once; twice only what was not reported.

    The prior art gives a shard of a lost worker back as a whole, or after half an hour.
    """
    master = jobs.master("--http", "off")
    words = ("--nproc-per-node", "2", "--no-spares", READS)
    node = jobs.node(master, *words, SIZE=str(SIZE), FAULTS="kill read 1")
    node.succeeds()
    master.succeeds()
    assert len(jobs.events("fault")) == 1
    read = samples(jobs)
    assert set(read) == {(0, sample) for sample in range(SIZE)}
    pieces = outstanding(jobs)
    assert len(pieces) <= 2 * LEASES_MAX
    dataset = Dataset("train", size=SIZE, shuffle=BY_SAMPLE)
    unreported = {
        int(sample) for piece in pieces for sample in records(dataset, 0, piece.begin, piece.end)
    }
    assert {sample for (_, sample), times in read.items() if times > 1} <= unreported


def outstanding(jobs: Jobs) -> list[Piece]:
    """What was in leases, and not reported, when the second round began."""
    ledger = Shards()
    for record in records_of(jobs.folder / "state"):
        if isinstance(record, rec.LeasesReturned) and record.before == 2:
            position = ledger.position("train")
            assert position is not None
            return list(position.open)
        if isinstance(record, OF_THE_LEDGER):
            ledger.apply(record)
    raise AssertionError("there was no second round")


def test_nobody_takes_the_absence_of_the_master_for_the_end_of_the_data(jobs: Jobs) -> None:
    """9.5: the prior art's client ends quietly when its master is away for too long.

    Workers go on with what they hold, then wait; nobody reads anything twice.
    """
    master = jobs.master("--http", "off")
    node = jobs.node(
        master, "--nproc-per-node", "2", "--no-spares", READS, SIZE=str(SIZE), EPOCHS="2"
    )
    jobs.wait_for("reads", count=2)
    master.kill()
    master = jobs.master("--http", "off", listen=master.address)
    node.succeeds()
    master.succeeds()
    assert samples(jobs) == {(epoch, sample): 1 for epoch in range(2) for sample in range(SIZE)}
    ends = [(event.rank, event.step) for event in jobs.events("epoch")]
    assert sorted(ends) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_second_node_takes_its_share_and_a_lost_one_gives_it_back(jobs: Jobs) -> None:
    """A node that is killed with everything on it: what it had taken is read by the others."""
    master = jobs.master("--http", "off")
    words = (
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--no-spares",
        "--rdzv-conf",
        "last_call_timeout=1",
    )
    first = jobs.node(master, *words, READS, name="first", SIZE=str(SIZE), HOLD="10")
    second = jobs.node(master, *words, READS, name="second", SIZE=str(SIZE), HOLD="10")
    reading = jobs.wait_for("reads", lambda event: event.world == 2, count=2)
    second.kill()
    jobs.go()
    first.succeeds()
    master.succeeds()
    assert {event.node for event in reading} == {"first", "second"}
    assert set(samples(jobs)) == {(0, sample) for sample in range(SIZE)}
