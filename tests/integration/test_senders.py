# SPDX-License-Identifier: Apache-2.0
"""Who may send which request: at the master's door, and at that of an agent's workers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.agent.relay import Relay, Upstream
from holdfast.agent.vault.vault import Vault
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.services import METHODS, Answerer, Sender
from holdfast.runtime.transport import connect, listen
from tests.hearing import Heard
from tests.integration.live_master import HollowAgent, Home, Master, running_master
from tests.integration.patient_master import PatientMaster
from tests.wire.samples import MESSAGES

TOKEN = b"the token of this test's job"
REQUESTS = [body for body in MESSAGES if type(body) in METHODS]
NO_REQUESTS: tuple[m.AnyMessage, ...] = (m.Done(), m.StopWork(1, "a worker's invention"))


def not_from(sender: Sender) -> list[m.AnyMessage]:
    return [body for body in REQUESTS if sender not in METHODS[type(body)].senders]


def refusal(answer: m.AnyMessage) -> str:
    assert isinstance(answer, m.Refused), answer
    assert answer.kind == "rejected"
    return answer.message


class Stream:
    """The way to a real master, on the link of an agent that it admitted."""

    def __init__(self, agent: HollowAgent) -> None:
        self._agent = agent
        self._asking: set[asyncio.Task[m.AnyMessage]] = set()

    def call(
        self,
        body: m.AnyMessage,
        answered: Callable[[m.AnyMessage], None],
        session: str = "",
        seq: int = 0,
    ) -> int:
        task = asyncio.get_running_loop().create_task(self._agent.ask(body))
        self._asking.add(task)
        task.add_done_callback(lambda task: answered(task.result()))
        return len(self._asking)

    def forget(self, number: int) -> None:
        """Every call of these tests is answered."""


@asynccontextmanager
async def worker_of(upstream: Upstream, folder: Path) -> AsyncIterator[HollowAgent]:
    """A worker's connection to an agent with this way to the master."""
    vault = Vault(upstream, Heard(), TOKEN, 1)
    address = f"unix:{folder}/agent.sock"
    server = await listen(address, Relay(upstream, vault), TOKEN)
    worker = HollowAgent()
    worker.use(await connect(address, worker, TOKEN))
    try:
        yield worker
    finally:
        worker.hang_up()
        await server.close()
        await vault.close()


async def refused_to_a_stranger(master: Master) -> None:
    stranger = await HollowAgent.connected(master)
    for body in [*not_from(Sender.ANYONE), *NO_REQUESTS]:
        # A late beat of an agent that was given up is no mistake of its, and has no answer.
        if not isinstance(body, m.Beat):
            why = f"{type(body).__name__} came before the agent was attached"
            assert refusal(await stranger.ask(body)) == why
    assert isinstance(await stranger.ask(m.Observe(follow=False)), m.Observed)
    assert await stranger.ask(m.KvCount(0)) == m.Number(0)
    stranger.hang_up()


async def refused_to_an_agent(master: Master) -> None:
    agent = await HollowAgent.attached(master)
    others = [
        body for body in REQUESTS if METHODS[type(body)].answerer in (Answerer.VAULT, Answerer.PEER)
    ]
    for body in (*others, *NO_REQUESTS, m.WorkersFailed(1, ())):
        assert refusal(await agent.ask(body)) == f"{type(body).__name__} is not a request"
    for body in REQUESTS:
        method = METHODS[type(body)]
        if method.answerer is Answerer.SERVICE:
            assert type(await agent.ask(body)) is method.answer
    agent.hang_up()


def test_the_master_refuses_what_a_sender_may_not_send(tmp_path: Path) -> None:
    with running_master(Home(tmp_path)) as master:
        asyncio.run(refused_to_a_stranger(master))
        asyncio.run(refused_to_an_agent(master))


def test_an_agent_refuses_what_a_worker_may_not_send(tmp_path: Path) -> None:
    async def ask() -> None:
        upstream = PatientMaster()
        async with worker_of(upstream, tmp_path) as worker:
            for body in [*not_from(Sender.WORKER), *NO_REQUESTS]:
                why = f"a worker may not send {type(body).__name__}"
                assert refusal(await worker.ask(body)) == why
            assert not upstream.calls, "nothing of it was passed on"

    asyncio.run(ask())


def test_a_worker_s_request_of_a_third_family_reaches_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the store nor about data: the row alone decides that an agent relays it."""
    row = METHODS[c.PeersAsk]
    home = Home(tmp_path)

    async def ask(master: Master) -> None:
        agent = await HollowAgent.attached(master)
        world = await agent.world()
        request = c.PeersAsk(world.round, replicas=1, parity=0)
        async with worker_of(Stream(agent), tmp_path) as worker:
            assert refusal(await worker.ask(request)) == "a worker may not send PeersAsk"
            monkeypatch.setitem(METHODS, c.PeersAsk, replace(row, senders=Sender.WORKER))
            assert await worker.ask(request) == c.Peers(())
            assert await worker.ask(m.KvCount(0)) == m.Number(0), "the store heard nothing of it"
        agent.hang_up()

    with running_master(home) as master:
        asyncio.run(ask(master))
