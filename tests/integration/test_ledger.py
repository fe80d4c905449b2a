# SPDX-License-Identifier: Apache-2.0
"""The ledger of checkpoints behind a real master: calls over a socket, and what people see."""

import asyncio
from pathlib import Path

import pytest

from holdfast.model.checkpoint import NONE, FileEntry, Shape, Version, rank_part
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from tests.integration.live_master import HollowAgent, Home, Master, running_master

DIR = "/ckpt"
SHAPE = Shape(2, shared=False)
PARTS = tuple(SHAPE.parts())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


async def fresh_lineage(agent: HollowAgent, round_number: int) -> int:
    ask = c.NodeRestore(DIR, round_number, (), (), NONE, (), fresh=True)
    plan = await agent.ask(ask)
    assert isinstance(plan, c.RestorePlan)
    assert plan.go
    return plan.lineage


async def begin(agent: HollowAgent, round_number: int, version: Version) -> str:
    plan = await agent.ask(c.PersistAsk(DIR, round_number, version, SHAPE, PARTS))
    assert isinstance(plan, c.PersistPlan)
    assert plan.parts == PARTS
    return plan.attempt


def report(attempt: str, version: Version, problem: str = "") -> c.PartsPersisted:
    files = tuple(FileEntry(f"{part}.bin", 1, 1) for part in PARTS)
    return c.PartsPersisted(DIR, version, SHAPE, attempt, PARTS, files, problem)


def test_a_commit_and_a_failure_are_seen_by_people(home: Home) -> None:
    async def save(master: Master) -> str:
        agent = await HollowAgent.attached(master)
        world = await agent.world()
        lineage = await fresh_lineage(agent, world.round)
        version = Version(lineage, 16777217)
        attempt = await begin(agent, world.round, version)
        held = asyncio.create_task(agent.ask(report(attempt, version)))
        order = await agent.pushed(c.CommitOrder)
        assert [entry.name for entry in order.files] == [f"{rank_part(r)}.bin" for r in (0, 1)]
        assert await agent.ask(c.CommitDone(DIR, version, attempt)) == m.Done()
        assert await held == c.PersistState(version)
        later = Version(lineage, 16777218)
        attempt = await begin(agent, world.round, later)
        refused = await agent.ask(report(attempt, later, "no space left on device"))
        assert isinstance(refused, m.Refused)
        text = (await home.run_beside("status")).stdout
        agent.hang_up()
        return text

    with running_master(home) as master:
        words = " ".join(asyncio.run(save(master)).split())
    assert "checkpoints /ckpt: step 16,777,217 committed" in words
    assert "step 16777218 did not reach storage: no space left on device" in words


def test_what_only_workers_and_peers_ask_is_refused(home: Home) -> None:
    async def ask(master: Master) -> list[m.AnyMessage]:
        agent = await HollowAgent.attached(master)
        answers = [
            await agent.ask(c.PartsClose(DIR)),
            await agent.ask(c.PartGet(DIR, Version(0, 1), rank_part(0))),
        ]
        agent.hang_up()
        return answers

    with running_master(home) as master:
        for answer in asyncio.run(ask(master)):
            assert isinstance(answer, m.Refused)
            assert "is not a request" in answer.message
