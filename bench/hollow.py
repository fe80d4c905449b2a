# SPDX-License-Identifier: Apache-2.0
"""Hollow agents: the agent's real stream to the master, and nothing behind it.

Thousands of them live in one process, so that a control plane can be measured at the size of a
large cluster without one. They attach, receive worlds, claim that their workers run, and beat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.agent.stream import MasterStream
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect

CONNECTING_MAX = 1000
"""Handshakes under way at once: more than a kernel's accept queue takes would only be lost."""

FIRST_CONTACT_S = 120.0
WORKERS_PER_NODE = 8
KEYS_PER_SESSION = 16
KV_VALUE = b"v" * 64


def rules_for(nodes: int) -> m.JobRules:
    """A job that needs exactly this many nodes."""
    return m.JobRules(
        min_nodes=nodes,
        max_nodes=nodes,
        node_unit=1,
        last_call_s=30.0,
        join_timeout_s=600.0,
        max_restarts=3,
    )


class HollowAgent:
    """One agent without workers; the stream's owner."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self._fleet = fleet
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._stream = MasterStream(
            self, fleet.address, fleet.token, tls=None, first_contact_s=FIRST_CONTACT_S
        )
        self._task: asyncio.Task[None] | None = None
        self._beat_timer: asyncio.TimerHandle | None = None
        self._beat_s = 0.0
        self._steps = 0
        self.round = 0

    def start(self) -> None:
        self._task = self._loop.create_task(self._stream.run())
        self._task.add_done_callback(self._ended)

    def cut(self) -> float:
        """Close the connection without a word, as a killed process does; answers when that was."""
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        if self._task is not None:
            self._task.cancel()
        at = time.monotonic()
        self._stream.close()
        return at

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._fleet.fail(task.exception() or RuntimeError("a stream ended"))

    def _beat(self) -> None:
        self._steps += 1
        beat = m.Beat(self.round, self._steps, self._steps, 1.0, 0.1, 8.0, 1 << 30)
        self._stream.beat(beat, self._fleet.beat_answered)
        self._beat_timer = self._loop.call_later(self._beat_s, self._beat)

    # ---- what the stream tells its owner --------------------------------------------------------

    def attachment(self) -> m.Attach:
        number = self._number
        return m.Attach(
            agent_key="",
            rules=self._fleet.rules,
            nproc=WORKERS_PER_NODE,
            host=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            store_port=29500,
            round=self.round,
        )

    def attached(self, welcome: m.Attached, *, sent_at: float) -> None:
        self._fleet.agent_attached()
        self._beat_s = welcome.beat_s
        # Spread evenly from the first one on.
        phase = self._number % self._fleet.nodes / self._fleet.nodes
        if self._beat_timer is None:
            self._beat_timer = self._loop.call_later(self._beat_s * phase, self._beat)

    def pushed(self, body: m.AnyMessage) -> None:
        if isinstance(body, m.RunWorld):
            self.round, self._steps = body.round, 0
            self._fleet.world_received(body.round)
            started = m.WorkersStarted(body.round, 29500, "zygote", 0.05)
            self._stream.call(started, self._fleet.start_answered)

    def refused(self, refusal: m.Refused) -> None:
        self._fleet.fail(RuntimeError(f"an agent was refused: {refusal.message}"))

    def stream_lost(self, why: str) -> None:
        self._fleet.streams_lost += 1

    def not_our_master(self, why: str) -> None:
        self._fleet.fail(RuntimeError(why))


class Fleet:
    """Hollow agents of one job, and the times at which the last of them heard of each world."""

    def __init__(self, address: str, token: bytes, nodes: int) -> None:
        self.address = address
        self.token = token
        self.nodes = nodes
        self.rules = rules_for(nodes)
        self.agents: list[HollowAgent] = []
        self.streams_lost = 0
        self.beats_answered = 0
        self._next_number = 0
        self._received: dict[int, int] = {}
        self._told_at: dict[int, float] = {}
        self._started = 0
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._connecting = asyncio.Semaphore(CONNECTING_MAX)

    async def cold_join(self, timeout_s: float) -> float:
        """Seconds from the word "go" until the last agent has the first world."""
        began_at = time.monotonic()
        for _ in range(self.nodes):
            await self._connecting.acquire()
            self._add()
        return await self._told(1, timeout_s) - began_at

    async def replace_one(self, timeout_s: float) -> float:
        """Cut one agent and start another at once: seconds until all have the next world."""
        next_round = self.agents[0].round + 1
        cut_at = self.agents.pop(len(self.agents) // 2).cut()
        await self._connecting.acquire()
        self._add()
        return await self._told(next_round, timeout_s) - cut_at

    async def all_started(self, timeout_s: float) -> None:
        """The master has acknowledged the start of every agent of the present round."""
        await self._until(lambda: self._started >= self.nodes, "every start is known", timeout_s)

    async def close(self) -> None:
        for agent in self.agents:
            agent.cut()
        self.agents.clear()
        await asyncio.sleep(0)

    # ---- what the agents tell -------------------------------------------------------------------

    def agent_attached(self) -> None:
        self._connecting.release()

    def world_received(self, round_number: int) -> None:
        count = self._received[round_number] = self._received.get(round_number, 0) + 1
        if count == 1:
            self._started = 0
        if count == self.nodes:
            self._told_at[round_number] = time.monotonic()
            self._changed.set()

    def start_answered(self, _: m.AnyMessage) -> None:
        self._started += 1
        if self._started == self.nodes:
            self._changed.set()

    def beat_answered(self, _: m.AnyMessage) -> None:
        self.beats_answered += 1

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._changed.set()

    def _add(self) -> None:
        agent = HollowAgent(self, self._next_number)
        self._next_number += 1
        self.agents.append(agent)
        agent.start()

    async def _told(self, round_number: int, timeout_s: float) -> float:
        what = f"round {round_number} has reached every agent"
        await self._until(lambda: round_number in self._told_at, what, timeout_s)
        return self._told_at[round_number]

    async def _until(self, is_true: Callable[[], bool], what: str, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_true():
                    if self._failure is not None:
                        raise self._failure
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s ({self._received})") from None


class KvLoad:
    """Sessions that set keys, each waiting for its answer before its next set."""

    def __init__(self, address: str, token: bytes, *, sessions: int, links: int) -> None:
        self._address = address
        self._token = token
        self._sessions = sessions
        self._links_wanted = links
        self._latencies: list[float] = []
        #: By call number: when the session's present set was sent, and its sequence number.
        self._sent: dict[int, tuple[float, int]] = {}
        self._stops_at = 0.0
        self._idle = asyncio.Event()
        self._failure = ""

    async def run(self, seconds: float) -> list[float]:
        """The latency of every set that was answered in time."""
        links = [await connect(self._address, self, self._token) for _ in range(self._links_wanted)]
        self._stops_at = time.monotonic() + seconds
        for number in range(1, self._sessions + 1):
            self._set(links[number % len(links)], number, 1)
        async with asyncio.timeout(seconds + FIRST_CONTACT_S):
            await self._idle.wait()
        for link in links:
            link.close()
        if self._failure:
            raise RuntimeError(self._failure)
        return self._latencies

    def _set(self, link: Link, number: int, seq: int) -> None:
        key = f"bench/{number}/{seq % KEYS_PER_SESSION}"
        self._sent[number] = (time.monotonic(), seq)
        link.send(m.KvSet(0, key, KV_VALUE), number, f"session-{number}", seq)

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def received(self, link: Link, frame: m.Frame) -> None:
        sent_at, seq = self._sent.pop(frame.call)
        if not isinstance(frame.body, m.Done):
            self._fail(f"a set was answered with {frame.body}")
        now = time.monotonic()
        if now < self._stops_at:
            self._latencies.append(now - sent_at)
            self._set(link, frame.call, seq + 1)
        elif not self._sent:
            self._idle.set()

    def closed(self, link: Link) -> None:
        self._fail("the master hung up")

    def _fail(self, why: str) -> None:
        if not self._idle.is_set():
            self._failure = why
            self._idle.set()
