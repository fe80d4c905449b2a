# SPDX-License-Identifier: Apache-2.0
"""An agent's stream to the master, like agent/stream.py: a request without an answer is sent again
on the next stream, under the same key and in the same order."""

from collections.abc import Callable
from random import Random
from typing import Protocol, TypeVar

from msgspec.structs import replace

from holdfast.model.errors import FencedError, RejectedError
from holdfast.protocol import messages as m
from holdfast.sim.clock import Clock, Promise, Task
from holdfast.sim.network import UP, Link, Network

BACKOFF_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
Expected = TypeVar("Expected")
Answered = Callable[[m.AnyMessage], None]


class Owner(Protocol):
    """What the stream needs from the agent: see agent/stream.py."""

    def attachment(self) -> m.Attach: ...

    def attached(self, welcome: m.Attached, *, sent_at: float) -> None: ...

    def pushed(self, body: m.AnyMessage) -> None: ...

    def refused(self, refusal: m.Refused) -> None: ...


class Stream:
    """Keeps the stream and the outstanding requests."""

    def __init__(
        self, clock: Clock, network: Network, place: str, rng: Random, owner: Owner
    ) -> None:
        self._clock = clock
        self._network = network
        self._place = place
        self._rng = rng
        self._owner = owner
        self._key = f"{rng.getrandbits(64):016x}"
        self._ended_key = ""
        self._incarnation = 0
        self._told: m.Told | None = None
        self._link: Link | None = None
        self._is_attached = False
        self._next_call = 1
        self._outstanding: dict[int, tuple[m.AnyMessage, str, int, Answered]] = {}
        self._attach_call = 0
        self._sent_at = 0.0
        self._lost = clock.promise()
        self._task: Task = clock.spawn(self._run())

    async def _run(self) -> None:
        tries = 0
        while True:
            self._lost = self._clock.promise()
            self._link = await self._network.connect(self._place, self)
            if self._link is not None:
                tries = 0
                self._attach()
                await self._lost
            pause_s = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            tries += 1
            await self._clock.pause(pause_s * self._rng.uniform(0.5, 1.0))

    def rejoin(self) -> None:
        """Come back as a new agent process would, once the workers of the old one have ended."""
        self._ended_key = self._key
        self._key, self._incarnation = f"{self._rng.getrandbits(64):016x}", 0
        if self._link is not None:
            self._attach()

    def call(self, body: m.AnyMessage, answered: Answered, session: str = "", seq: int = 0) -> int:
        """Send a request until it is answered, over as many streams as that takes."""
        number = self._next_call
        self._next_call += 1
        self._outstanding[number] = (body, session, seq, answered)
        if self._is_attached:
            self._deliver(number)
        return number

    async def ask(self, body: m.AnyMessage, expected: type[Expected]) -> Expected:
        """Ask the master, however long it takes; RejectedError if it refuses."""
        promise: Promise[m.AnyMessage] = Promise(self._clock)
        self.call(body, promise.keep)
        answer = await promise
        if isinstance(answer, m.Refused):
            kind = FencedError if answer.kind in ("stale", "fenced") else RejectedError
            raise kind(answer.message)
        assert isinstance(answer, expected), answer
        return answer

    def forget(self, number: int) -> None:
        """The asker no longer wants the answer."""
        entry = self._outstanding.pop(number, None)
        if entry is not None and entry[1] and self._is_attached and self._link is not None:
            self._link.send(UP, m.Dropped(entry[1], entry[2]))

    def beat(self, beat: m.Beat, answered: Answered) -> None:
        if self._is_attached:
            self.call(beat, answered)

    def close(self) -> None:
        """The agent is gone; what it sent before still arrives."""
        self._task.cancel()
        self._outstanding.clear()
        if self._link is not None:
            self._link.close(UP)
            self._link = None

    def vanish(self) -> None:
        """The machine is gone: the other end hears nothing."""
        self._task.cancel()
        self._link = None

    def _deliver(self, number: int) -> None:
        assert self._link is not None
        body, session, seq, _ = self._outstanding[number]
        self._link.send(UP, body, number, session, seq)

    def _attach(self) -> None:
        assert self._link is not None
        self._attach_call = self._next_call
        self._next_call += 1
        self._sent_at = self._clock.now
        attach = replace(
            self._owner.attachment(),
            agent_key=self._key,
            incarnation=self._incarnation,
            told=self._told,
            ended_key=self._ended_key,
        )
        self._link.send(UP, attach, self._attach_call)

    # ---- the link's side ------------------------------------------------------------------------

    def received(self, link: Link, frame: m.Frame) -> None:
        if link is not self._link:
            return
        if self._is_attached and self._told is not None and frame.position > self._told.position:
            self._told = replace(self._told, position=frame.position)
        if frame.call == 0:
            self._owner.pushed(frame.body)
        elif frame.call == self._attach_call:
            self._answered_attach(frame.body, frame.position)
        else:
            entry = self._outstanding.pop(frame.call, None)
            if entry is not None:
                entry[3](frame.body)

    def closed(self, link: Link) -> None:
        if link is not self._link:
            return
        self._is_attached, self._link = False, None
        for number, entry in list(self._outstanding.items()):
            if isinstance(entry[0], m.Beat):
                del self._outstanding[number]
        self._lost.keep(None)

    def _answered_attach(self, body: m.AnyMessage, position: int) -> None:
        if isinstance(body, m.Refused):
            self._owner.refused(body)
            return
        assert isinstance(body, m.Attached)
        self._incarnation = body.incarnation
        self._told = m.Told(body.journal, body.life, position)
        self._is_attached = True
        self._owner.attached(body, sent_at=self._sent_at)
        for number in list(self._outstanding):
            self._deliver(number)
