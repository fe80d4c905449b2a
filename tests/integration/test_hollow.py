# SPDX-License-Identifier: Apache-2.0
"""The benchmark's hollow agents are real enough: a job of them forms, and replaces a lost one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.hollow import Fleet, KvLoad
from holdfast.runtime.token import read_token
from tests.masters import Master

AGENTS = 50
LIMIT_S = 120.0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path / "state").start()
    yield master
    master.kill()


def test_fifty_agents_join_and_one_is_replaced(master: Master) -> None:
    async def scenario() -> None:
        token = read_token(master.token_file)
        fleet = Fleet(f"127.0.0.1:{master.port}", token, AGENTS)
        try:
            await fleet.cold_join(LIMIT_S)
            await fleet.all_started(LIMIT_S)
            assert {agent.round for agent in fleet.agents} == {1}

            await fleet.replace_one(LIMIT_S)
            await fleet.all_started(LIMIT_S)
            assert {agent.round for agent in fleet.agents} == {2}
            assert len(fleet.agents) == AGENTS
        finally:
            await fleet.close()

    asyncio.run(scenario())


def test_every_durable_set_of_the_load_is_answered(master: Master) -> None:
    async def scenario() -> None:
        token = read_token(master.token_file)
        load = KvLoad(f"127.0.0.1:{master.port}", token, sessions=8, links=2)
        latencies = await load.run(0.2)
        assert len(latencies) > 0
        assert min(latencies) > 0

    asyncio.run(scenario())
