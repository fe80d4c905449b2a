# SPDX-License-Identifier: Apache-2.0
"""The agent's stream to the master, for an agent that was given up and rejoins.

The master here is a server of the real transport that takes every agent.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from holdfast.agent.stream import MasterStream
from holdfast.model.errors import RetryableError, UsageError
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, Server, listen

LIMIT_S = 120.0
TRIES = 5
TOKEN = b"t" * 32
OTHER_TOKEN = b"o" * 32
RULES = m.JobRules(
    min_nodes=1, max_nodes=1, node_unit=1, last_call_s=1.0, join_timeout_s=60.0, max_restarts=3
)


class Yes:
    """A master that takes everyone."""

    def opened(self, link: Link) -> None:
        pass

    def received(self, link: Link, frame: m.Frame) -> None:
        assert isinstance(frame.body, m.Attach)
        link.answer(m.Attached("job", 0, 0, frame.body.incarnation + 1, 1, 1.0, 5.0, 0), frame.call)

    def closed(self, link: Link) -> None:
        pass


class Owner:
    """An agent that writes down what its stream tells it."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.tries = 0
        self._attached: asyncio.Queue[m.Attached] = asyncio.Queue()
        self._tried = asyncio.Event()

    def attachment(self) -> m.Attach:
        return m.Attach(agent_key="", rules=RULES, nproc=1, host="here", store_port=1)

    def attached(self, welcome: m.Attached, *, sent_at: float) -> None:
        self._attached.put_nowait(welcome)

    def pushed(self, body: m.AnyMessage) -> None:
        raise AssertionError(f"nothing pushes here: {body}")

    def refused(self, refusal: m.Refused) -> None:
        raise AssertionError(f"nothing refuses here: {refusal}")

    def stream_lost(self, why: str) -> None:
        pass

    def not_our_master(self, why: str) -> None:
        self.complaints.append(why)

    def pause(self, low: float, high: float) -> float:
        """The chance in the pauses: asked once before each further try."""
        self.tries += 1
        self._tried.set()
        return 0.01

    async def welcomed(self) -> m.Attached:
        return await self._attached.get()

    async def tries_on(self) -> None:
        """Wait until it has tried that often again."""
        enough = self.tries + TRIES
        while self.tries < enough:
            self._tried.clear()
            await self._tried.wait()


@contextlib.asynccontextmanager
async def attached_once() -> AsyncIterator[tuple[MasterStream, Owner, asyncio.Task[None], str]]:
    """A stream that had a master, which is gone, and that is past its time for the first contact:
    it had none. Fails the test if the stream has ended."""
    owner, server = Owner(), await listen("127.0.0.1:0", Yes(), TOKEN)
    stream = MasterStream(
        owner, server.address, TOKEN, tls=None, first_contact_s=0.0, uniform=owner.pause
    )
    async with asyncio.timeout(LIMIT_S):
        task = asyncio.create_task(stream.run())
        assert (await owner.welcomed()).incarnation == 1
        await server.close()
        try:
            yield stream, owner, task, server.address
            assert not task.done()
        finally:
            task.cancel()
            stream.close()


async def serve_again(address: str, token: bytes = TOKEN) -> Server:
    return await listen(address, Yes(), token)


async def unless_ended(task: asyncio.Task[None], wanted: asyncio.Task[None]) -> None:
    """Wait for something, or raise what ended the stream instead."""
    await asyncio.wait((task, wanted), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        wanted.cancel()
        task.result()


def test_a_master_that_dies_while_an_agent_rejoins_is_tried_on() -> None:
    async def scenario() -> None:
        async with attached_once() as (stream, owner, task, address):
            stream.rejoin()
            await unless_ended(task, asyncio.create_task(owner.tries_on()))
            again = await serve_again(address)
            # As a new agent: its first incarnation.
            assert (await owner.welcomed()).incarnation == 1
            await again.close()

    asyncio.run(scenario())


def test_what_is_not_our_master_is_said_once_while_an_agent_rejoins() -> None:
    async def scenario() -> None:
        async with attached_once() as (stream, owner, task, address):
            stream.rejoin()
            other = await serve_again(address, OTHER_TOKEN)
            await unless_ended(task, asyncio.create_task(owner.tries_on()))
            assert len(owner.complaints) == 1, owner.complaints
            await other.close()
            again = await serve_again(address)
            assert (await owner.welcomed()).incarnation == 1
            await again.close()

    asyncio.run(scenario())


def test_an_agent_that_never_had_a_master_ends() -> None:
    """Where no master answers, and where another one does."""

    async def scenario() -> None:
        owner, server = Owner(), await listen("127.0.0.1:0", Yes(), OTHER_TOKEN)
        stream = MasterStream(owner, server.address, TOKEN, tls=None, first_contact_s=0.0)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(UsageError, match="no master of this job at"):
                await stream.run()
            await server.close()
            with pytest.raises(RetryableError, match="the master does not answer"):
                await stream.run()

    asyncio.run(scenario())
