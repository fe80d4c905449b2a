# SPDX-License-Identifier: Apache-2.0
"""A job that is over: how long its master waits for what its agents still hold in memory."""

import asyncio
from pathlib import Path

import pytest

from holdfast.master import farewell
from holdfast.master.process import MasterSettings, run_master
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import Tally
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import connect
from tests.hearing import Heard
from tests.integration.live_master import RULES, HollowAgent

SILENCE_S, STALL_S = 2.0, 4.0
TURN_S = 0.5
"""A busy machine may hold up a turn for longer than itself, but not for so long as SILENCE_S."""
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(farewell, "FAREWELL_S", SILENCE_S)
    monkeypatch.setattr(farewell, "FLUSH_S", STALL_S)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def beat(written: int) -> m.Beat:
    tally = Tally(1, 0.1, 5, 1.0, written, 0.1, {})
    return m.Beat(0, 0, -1, -1.0, -1.0, 0.0, 0, tally)


class Ending:
    """A master in this process whose job has just failed, and its one agent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.said = Heard()

    async def begin(self, grace_s: float = 0.0) -> None:
        settings = MasterSettings(
            job="t",
            listen="127.0.0.1:0",
            state=self._folder / "state",
            token_file=None,
            http="",
            tls_cert=None,
            tls_key=None,
            insecure=False,
            spec=JobSpec(),
        )
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = run_master(settings, say=self.said, announce=address.set_result)
        self.master = asyncio.create_task(serving)
        self.agent = HollowAgent()
        where = await asyncio.wait_for(address, WAIT_S)
        token = read_token(self._folder / "state" / "token")
        self.agent.use(await connect(where, self.agent, token))
        attach = m.Attach("a", RULES, nproc=2, host="a", store_port=1, grace_s=grace_s)
        assert isinstance(await self.agent.ask(attach), m.Attached)
        await self.agent.ask(m.StopJob("it failed for good"))
        await self.agent.pushed(m.JobEnded)

    async def turn(self, written: int) -> bool:
        """The agent beats and time passes; whether the master is still there."""
        await self.agent.ask(beat(written))
        done, _ = await asyncio.wait((self.master,), timeout=TURN_S)
        return not done

    async def rest(self) -> m.JobEnded:
        return await asyncio.wait_for(self.master, WAIT_S)


def test_it_waits_as_long_as_something_reaches_storage_and_no_longer(tmp_path: Path) -> None:
    """The prior art's master ends with the job, and what was in memory is lost."""

    async def scene() -> None:
        ending = Ending(tmp_path)
        await ending.begin()
        turns = int(1.5 * STALL_S / TURN_S)
        assert [await ending.turn(1000 * turn) for turn in range(turns)] == [True] * turns
        # From here on it only beats.
        left = 0
        while await ending.turn(1000 * turns):
            left += 1
            assert left < 50
        assert left >= 2
        assert not (await ending.rest()).ok
        assert any("did not say that all is saved" in text for text in ending.said)

    asyncio.run(scene())


def test_it_does_not_wait_for_an_agent_of_which_nothing_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        ending = Ending(tmp_path)
        await ending.begin()
        await asyncio.wait_for(ending.master, WAIT_S / 2)

    monkeypatch.setattr(farewell, "FLUSH_S", WAIT_S)
    asyncio.run(scene())


def test_it_waits_for_workers_that_use_their_grace(tmp_path: Path) -> None:
    """With saves in memory alone nothing moves before they have ended and their agent flushes."""

    async def scene() -> None:
        ending = Ending(tmp_path)
        await ending.begin(grace_s=10 * WAIT_S)
        turns = int(1.5 * STALL_S / TURN_S)
        assert [await ending.turn(0) for _ in range(turns)] == [True] * turns
        assert await ending.agent.ask(m.Parting()) == m.Done()
        ending.agent.hang_up()
        await ending.rest()
        assert not any("did not say that all is saved" in text for text in ending.said)

    asyncio.run(scene())


def test_it_ends_at_once_when_all_have_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        ending = Ending(tmp_path)
        await ending.begin()
        assert await ending.agent.ask(m.Parting()) == m.Done()
        ending.agent.hang_up()
        await ending.rest()

    monkeypatch.setattr(farewell, "FAREWELL_S", 10 * WAIT_S)
    asyncio.run(scene())


def test_an_agent_that_hangs_up_without_a_word_is_waited_for(tmp_path: Path) -> None:
    """Only its link may have broken."""

    async def scene() -> None:
        ending = Ending(tmp_path)
        await ending.begin()
        ending.agent.hang_up()
        await ending.rest()
        assert any("1 agent did not say that all is saved" in text for text in ending.said)

    asyncio.run(scene())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0


@pytest.mark.parametrize("grace_s", [0.0, 1000.0])
def test_the_grace_of_the_workers_comes_before_the_time_to_flush(grace_s: float) -> None:
    """While workers use their grace nothing moves, and then the agent flushes with its master."""
    clock, node = Clock(), NodeId(3)
    ending = farewell.Farewell(lambda: clock.now, lambda *_: None)
    ending.gives_grace(grace_s)
    ending.gives_grace(1.0)
    ending.joined(node)
    ending.begin()
    assert ending.left_s() == SILENCE_S, "of an agent that is not heard nothing can be expected"
    clock.now += max(grace_s, 1.0) + STALL_S - 0.5
    ending.heard(node, beat(0))
    assert ending.left_s() == 0.5
    ending.heard(node, beat(1000))
    assert ending.left_s() == SILENCE_S
    clock.now += STALL_S
    ending.heard(node, beat(1000))
    assert ending.left_s() == 0.0


@pytest.mark.parametrize(
    ("word", "doubt"),
    [
        (m.Parting(), ""),
        (m.Parting("it was told to end at once"), "it was told to end at once"),
        (None, "an agent went without a word; what it had only in memory may be lost"),
    ],
)
def test_what_agents_say_before_they_go_is_the_masters_doubt(
    word: m.Parting | None, doubt: str
) -> None:
    async def scene() -> str:
        ending = farewell.Farewell(asyncio.get_running_loop().time, Heard())
        ending.joined(NodeId(1))
        ending.joined(NodeId(2))
        ending.left(NodeId(2))  # Before the end this is no loss that anybody need be told of.

        async def go() -> None:
            if word is not None:
                ending.parting(NodeId(1), word.doubt)
            ending.left(NodeId(1))

        doubt, _ = await asyncio.wait_for(asyncio.gather(ending.wait(), go()), WAIT_S)
        return doubt

    assert asyncio.run(scene()) == doubt
