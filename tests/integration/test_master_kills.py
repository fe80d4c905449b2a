# SPDX-License-Identifier: Apache-2.0
"""The master killed with SIGKILL at every commit of a job's life, and at awkward moments."""

from collections import Counter
from itertools import count, pairwise

import pytest

from holdfast.agent.network import ReservedPort
from holdfast.core.job import records as rec
from holdfast.runtime.token import make_token
from tests.integration.crash_journal import crashing_master, records_of
from tests.integration.jobs import SCRIPTS, Jobs, playground

SHARDS = 3
LIFE_COMMITS_MIN = 12
"""The life of the job below has at least this many commits; more if they are not shared."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_kill_at_every_commit(side: str, shard: int) -> None:
    """Joining, the first world, one failure, the next world, the end: until no commit is left."""
    for number in count(1 + shard, SHARDS):
        with playground() as jobs:
            was_killed = live_through(jobs, side, number)
            check_life(jobs, restarted=was_killed and (side, number) != ("before", 1))
        if not was_killed:
            assert number > LIFE_COMMITS_MIN
            return


def live_through(jobs: Jobs, side: str, number: int) -> bool:
    """Run the job with a master that dies at one commit; whether the life had so many."""
    state = jobs.folder / "state"
    state.mkdir(mode=0o700)
    token_file = state / "token"
    make_token(token_file)
    # Ours for the whole time, as no other test may get the port between the two masters.
    port = ReservedPort()
    address = f"127.0.0.1:{port.number}"
    try:
        master = crashing_master(jobs, side, number, address, state)
        where = ("--master", address, "--token-file", str(token_file), "--nnodes", "2")
        nodes = [
            jobs.run(*where, "--no-spares", "--node-rank", str(rank), str(SCRIPTS / "counts.py"))
            for rank in (0, 1)
        ]
        code = master.wait()
        if code != 0:
            assert code == -9, master.text
            jobs.master("--http", "off", listen=address).succeeds()
        for node in nodes:
            node.succeeds()
    except AssertionError as error:
        raise AssertionError(f"{side} commit {number}: {error}\n{jobs.story()}") from error
    finally:
        port.close()
    return code != 0


def check_life(jobs: Jobs, *, restarted: bool) -> None:
    starts = Counter((event.round, event.rank) for event in jobs.events("main"))
    assert starts == {(1, 0): 1, (1, 1): 1, (2, 0): 1, (2, 1): 1}
    for round in (1, 2):
        # An add that was lost or done twice would leave a gap.
        added = [event.step for event in jobs.events("added") if event.round == round]
        assert sorted(added) == [1, 2, 3, 4]
    assert [event.step for event in jobs.events("total")] == [4, 4, 4, 4]

    records = records_of(jobs.folder / "state")
    kinds = Counter(type(record) for record in records)
    worlds = [record.world for record in records if isinstance(record, rec.WorldAgreed)]
    assert [world.round for world in worlds] == [1, 2]
    assert kinds[rec.NodeAdmitted] == 2
    assert kinds[rec.RestartCounted] == 1
    assert kinds[rec.NodePhaseChanged] == 0
    assert kinds[rec.NodeDone] == 2
    assert kinds[rec.JobClosed] == 1
    assert kinds[rec.GenerationSet] == (2 if restarted else 1)
    generations = [
        record.generation if isinstance(record, rec.GenerationSet) else record.world.generation
        for record in records
        if isinstance(record, rec.GenerationSet | rec.WorldAgreed)
    ]
    assert all(earlier < later for earlier, later in pairwise(generations))
