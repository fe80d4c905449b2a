# SPDX-License-Identifier: Apache-2.0
"""The master killed with SIGKILL at every commit of a job's life, and at awkward moments."""

import shutil
from collections import Counter
from itertools import count, pairwise

import pytest

from holdfast.agent.network import ReservedPort
from holdfast.core.job import records as rec
from holdfast.runtime.token import make_token
from tests.integration.control import Forwarder, observe, records_of, wait_held
from tests.integration.crash_journal import crashing_master
from tests.integration.jobs import SCRIPTS, Jobs, playground
from tests.soaking import WHOLE

SHARDS = 3
STRIDE = SHARDS if WHOLE else 2 * SHARDS
LIFE_COMMITS_MIN = 10
"""The life of the job below has at least this many commits; more if they are not shared."""

OF_A_BEAT = ("warm", "cpu", "memory_bytes", "steps_per_s", "beat_age_s")
"""What a master knows of a node from its last beat, and a new master from the next one on."""


@pytest.mark.timeout(480)
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_a_kill_at_every_commit(side: str, shard: int) -> None:
    """Joining, the first world, one failure, the next world, the end: until no commit is left.

    Every run kills it before and after each commit of an odd number, so that the next master finds
    each state that the journal may be in; `make soak` does so at all commits.
    """
    for number in count(1 + (shard if WHOLE else 2 * shard), STRIDE):
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
    # An add that was lost or done twice would leave a gap.
    added = sorted((event.round, event.step) for event in jobs.events("added"))
    assert added == [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]
    totals = [(event.round, event.step) for event in jobs.events("total")]
    assert totals == [(1, 4), (1, 4), (2, 2), (2, 2)]
    check_journal(jobs, restarted=restarted)


def check_journal(jobs: Jobs, *, restarted: bool) -> None:
    """Nothing was decided twice, no round left out, and generations only rise."""
    records = records_of(jobs.folder / "state")
    kinds = Counter(type(record) for record in records)
    worlds = [record.world for record in records if isinstance(record, rec.WorldAgreed)]
    assert [world.round for world in worlds] == [1, 2]
    assert kinds[rec.NodeAdmitted] == 2
    assert kinds[rec.RestartCounted] == 1
    assert kinds[rec.JobClosed] == 1
    # Who has heard of the end leaves; before it nobody was given up.
    (end,) = (n for n, record in enumerate(records) if isinstance(record, rec.JobClosed))
    assert not any(isinstance(record, rec.NodePhaseChanged) for record in records[:end])
    # A report whose answer was lost is made again.
    assert len({r.node_id for r in records if isinstance(r, rec.NodeDone)}) == 2
    assert kinds[rec.GenerationSet] == (2 if restarted else 1)
    generations = [
        record.generation if isinstance(record, rec.GenerationSet) else record.world.generation
        for record in records
        if isinstance(record, rec.GenerationSet | rec.WorldAgreed)
    ]
    assert all(earlier < later for earlier, later in pairwise(generations))


def test_a_wait_goes_on_over_a_restart(jobs: Jobs) -> None:
    """A worker that waits for a key neither fails nor notices when its master is replaced."""
    master = jobs.master("--http", "off")
    node = jobs.node(master, "--nproc-per-node", "2", "--no-spares", str(SCRIPTS / "awaits.py"))
    jobs.wait_for("awaits")
    wait_held(master)
    master.kill()
    master = jobs.master("--http", "off", listen=master.address)
    master.wait_line("came back")
    wait_held(master)
    jobs.finish()
    node.succeeds()
    master.succeeds()
    assert [event.step for event in jobs.events("got")] == [7]
    assert [event.step for event in jobs.events("added")] == [1, 2, 3, 4, 5, 6]
    assert len(jobs.events("main")) == 2


def test_the_master_moves_to_another_host(jobs: Jobs) -> None:
    """The old state directory and port are gone; a copy serves elsewhere behind the same name."""
    first = jobs.master("--http", "off")
    with Forwarder(first.address) as way:
        words = ("--nproc-per-node", "2", "--no-spares", str(SCRIPTS / "awaits.py"))
        where = ("--master", way.address, "--token-file", str(first.token_file))
        node = jobs.run(*where, *words)
        jobs.wait_for("awaits")
        before = observe(first)
        first.kill()
        elsewhere = jobs.folder / "elsewhere"
        shutil.copytree(jobs.folder / "state", elsewhere)
        second = jobs.master("--http", "off", state=elsewhere)
        way.target = second.address
        second.wait_line("came back")
        after = observe(second)
        for node_view in (*before["nodes"], *after["nodes"]):
            for of_a_beat in OF_A_BEAT:
                del node_view[of_a_beat]
        for part in ("job", "nodes", "state", "restarts"):
            assert after[part] == before[part]
        assert after["world"]["round"] == before["world"]["round"] == 1
        assert after["store"]["keys"] == before["store"]["keys"]
        jobs.finish()
        node.succeeds()
        second.succeeds()
    assert [event.step for event in jobs.events("added")] == [1, 2, 3, 4, 5, 6]
    assert len(jobs.events("main")) == 2
