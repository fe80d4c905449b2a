# SPDX-License-Identifier: Apache-2.0
"""`holdfast data` against live jobs: what people read, what tools read, and the user's mistakes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.model.dataset import LINES, Dataset, Extent
from holdfast.protocol import data as d
from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs
from tests.integration.live_master import HollowAgent, Home, Master, running_master
from tests.waiting import until

READS = str(SCRIPTS / "reads.py")
SIZE = 10_000
BATCH = 32
"""What scripts/reads.py reads at once."""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def words(text: str) -> str:
    return " ".join(text.split())


def said(jobs: Jobs, *arguments: str, **env: str) -> str:
    command = jobs.start("data", *arguments, **env)
    command.succeeds()
    return "\n".join(command.out)


def test_a_job_that_reads(jobs: Jobs) -> None:
    """Both workers hold with their tenth batch in hand, which is from two shards."""
    job = jobs.run("--nproc-per-node", "2", "--no-spares", READS, SIZE=str(SIZE), HOLD="10")
    jobs.wait_for("reads", count=2)
    seen: list[dict[str, Any]] = [{}]

    def nothing_moves() -> bool:
        """What was reported in the background has arrived."""
        seen.append(json.loads(said(jobs, "show", "train", "--json")))
        return all(seen[-1][field] == seen[-2].get(field) for field in ("consumed", "leases"))

    until(nothing_moves, LIMIT_S)
    found = seen[-1]
    listed, shown = said(jobs, "ls", COLUMNS="80"), said(jobs, "show", "train", COLUMNS="80")
    jobs.go()
    job.succeeds()

    # Nine batches are finished; the last of them may be told with the next request only.
    assert 2 * 7 * BATCH <= found["consumed"] <= 2 * 9 * BATCH
    # The two shards of the batch in hand, and maybe one more.
    assert 4 <= found["leases_total"] == len(found["leases"]) <= 6
    assert {lease["round"] for lease in found["leases"]} == {1}
    assert (found["kind"], found["task"], found["size"]) == ("range", "train", SIZE)
    assert found["per_s"] > 0
    assert found["epoch_left_s"] > 0

    heading, row = listed.splitlines()
    assert words(heading) == "dataset epoch done rate left leases set aside"
    assert words(row).startswith(f"train 1 of 1 {found['consumed'] / SIZE:.1%} ")
    assert words(row).endswith(f" {found['leases_total']} 0")
    assert max(map(len, [heading, row, *shown.splitlines()])) <= 80
    assert f"consumed {found['consumed']:,} of 10,000 records" in words(shown)
    assert "goes with nothing: after a failure samples may be read twice" in words(shown)
    for lease in found["leases"]:
        begin, end = lease["piece"]["begin"], lease["piece"]["end"]
        line = f"{lease['number']} 0 1 {begin:,} to {end:,} {lease['consumed']}"
        assert line in words(shown)


FILES = Dataset(
    name="a-name-that-is-much-longer-than-it-should-be",
    kind=LINES,
    shard_size=1000,
    extents=(Extent("/data/a", 5000), Extent("/data/b", 2_000_000)),
    attempts=1,
)


async def read_and_fail(master: Master) -> HollowAgent:
    """Six shards are taken; one is read, and one cannot be read."""
    agent = await HollowAgent.attached(master)
    assert isinstance(await agent.ask(d.DatasetOpen(0, FILES)), d.DatasetOpened)
    taken = await agent.ask(d.ShardsTake(0, FILES.name, 0, 0, want=6))
    assert isinstance(taken, d.ShardsTaken)
    first, second = (lease.number for lease in taken.leases[:2])
    consumed = (d.Consumed(first, 1000), d.Consumed(second, 1500, problem="no\x1b[31m such\nfile"))
    assert await agent.ask(d.ShardsTake(0, FILES.name, 0, 0, 0, consumed)) == d.ShardsTaken(())
    return agent


def test_what_was_set_aside_is_told_with_its_reason(home: Home) -> None:
    """1.8: the prior art drops what failed too often, and nobody hears of it."""

    async def look(master: Master) -> tuple[str, str, dict[str, Any]]:
        agent = await read_and_fail(master)
        listed = await home.run_beside("data", "ls")
        shown = await home.run_beside("data", "show", FILES.name)
        state = await home.run_beside("data", "show", FILES.name, "--json")
        agent.hang_up()
        return listed.stdout, shown.stdout, json.loads(state.stdout)

    with running_master(home, "t", "--http", "off") as master:
        listed, shown, state = asyncio.run(look(master))
    assert max(map(len, [*listed.splitlines(), *shown.splitlines()])) <= 80
    # The name folds, and no number is cut.
    assert "1 of 1 0.1% " in words(listed)
    assert " 4 1 " in words(listed)
    assert " of 2,005,000 bytes (0.1%), " in words(shown)
    assert "3 0 0 file 0, 2,000 to 3,000 0" in words(shown)
    assert "6 0 0 file 1, 0 to 1,000 0" in words(shown)
    # Epochs are counted from 1, as everywhere that people look; nothing reaches the terminal raw.
    assert "epoch 1, file 0, 1,500 to 2,000: no [31m such file" in words(shown)
    assert state["set_aside_total"] == 1
    assert state["set_aside"][0]["why"] == "no\x1b[31m such\nfile"


def test_without_datasets_and_with_a_wrong_name(home: Home) -> None:
    async def look(master: Master) -> None:
        nothing = await home.run_beside("data", "ls")
        assert (nothing.returncode, nothing.stderr) == (0, "")
        assert nothing.stdout == "no worker of this job reads a dataset in shards\n"
        none = await home.run_beside("data", "show", "train")
        assert (none.returncode, none.stdout) == (2, "")
        assert none.stderr == "holdfast: the job has no dataset 'train'; it has: none\n"
        agent = await read_and_fail(master)
        wrong = await home.run_beside("data", "show", "train", "--json")
        agent.hang_up()
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert f"it has: {FILES.name}\n" in wrong.stderr

    with running_master(home, "t", "--http", "off") as master:
        asyncio.run(look(master))


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("ls",), 2, "no job runs here"),
        (("show",), 2, "NAME"),
        (("ls", "--master", "127.0.0.1:1"), 2, "--token-file"),
    ],
)
def test_mistakes(home: Home, arguments: tuple[str, ...], code: int, sentence: str) -> None:
    ended = home.run("data", *arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1
