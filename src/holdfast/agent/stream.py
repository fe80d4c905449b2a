# SPDX-License-Identifier: Apache-2.0
"""The agent's one stream to the master: attached, kept, and picked up again when it breaks.

A request that was not answered is sent again on the next stream, under the same idempotency key
and in the same order: the master may die between any two bytes without anything being lost or done
twice.
"""

import asyncio
import random
import secrets
import ssl
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from holdfast.model.errors import AuthError, ProtocolError, RetryableError, UsageError
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect

BACKOFF_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between tries, each shortened at random, so that thousands of agents do not come back at
the same moment."""

CONNECT_S = 5.0
REASONS_MAX = 8
"""How many reasons are reported in an outage: another server may give a new one each time."""

ANSWERED = Callable[[m.AnyMessage], None]


class Owner(Protocol):
    """What the stream needs from the agent."""

    def attachment(self) -> m.Attach:
        """The request to attach with now (the stream fills in the key and the incarnation)."""

    def attached(self, welcome: m.Attached, *, sent_at: float) -> None:
        """The master knows us; `sent_at` is when we asked (loop time)."""

    def pushed(self, body: m.AnyMessage) -> None:
        """The master sent something of its own accord."""

    def refused(self, refusal: m.Refused) -> None:
        """The master refuses this agent as it is ("stale" or "fenced")."""

    def stream_lost(self, why: str) -> None:
        """The stream broke. Called once per outage."""

    def not_our_master(self, why: str) -> None:
        """The server that answers during an outage cannot be used. Called once per reason and
        outage."""


class MasterStream:
    """Keeps the stream and the requests that are outstanding on it."""

    def __init__(
        self,
        owner: Owner,
        address: str,
        token: bytes,
        *,
        tls: ssl.SSLContext | None,
        first_contact_s: float,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`uniform` makes the pauses random."""
        self._owner = owner
        self._address = address
        self._token = token
        self._tls = tls
        self._first_contact_s = first_contact_s
        self._uniform = uniform
        self._agent_key = secrets.token_hex(8)
        #: The key under which the master declared this process lost.
        self._ended_key = ""
        self._incarnation = 0
        self.has_attached = False
        """Whether a master has ever accepted this agent. If so, the agent tries for ever."""
        #: What a master told last of its journal: no later master's journal may be behind that.
        self._told: m.Told | None = None
        self._link: Link | None = None
        self._is_attached = False
        self._next_call = 1
        #: Unanswered requests, oldest first.
        self._outstanding: dict[int, tuple[m.AnyMessage, str, int, ANSWERED]] = {}
        self._attach_call = 0
        self._sent_at = 0.0
        #: Why the server that answers cannot be used: the reasons already reported in this outage.
        self._reasons: set[str] = set()
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Stay attached until cancelled; RetryableError or UsageError if that can never be."""
        tries, gives_up_at = 0, self._loop.time() + self._first_contact_s
        while True:
            try:
                self._lost.clear()
                self._link = await connect(
                    self._address, self, self._token, tls=self._tls, timeout_s=CONNECT_S
                )
                tries = 0
                self._attach()
                await self._lost.wait()
            except RetryableError as exc:
                if not self.has_attached and self._loop.time() >= gives_up_at:
                    raise RetryableError(
                        f"the master does not answer: {exc} (tried for {self._first_contact_s:g} s)"
                    ) from exc
            except (AuthError, ProtocolError) as exc:
                why = f"no master of this job at {self._address}: {exc}"
                if not self.has_attached:
                    raise UsageError(why) from exc
                # Once there was a master this may pass: another program has its port for now, or
                # its certificate has expired. But perhaps only a person can end it.
                if why not in self._reasons and len(self._reasons) < REASONS_MAX:
                    self._reasons.add(why)
                    self._owner.not_our_master(why)
            pause_s = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            tries += 1
            if pause_s:
                await asyncio.sleep(pause_s * self._uniform(0.5, 1.0))

    def rejoin(self) -> None:
        """Come back as a new agent process would, once the workers of the old one have ended."""
        self._ended_key = self._agent_key
        self._agent_key, self._incarnation = secrets.token_hex(8), 0
        if self._link is not None and self._link.is_open:
            self._attach()

    def call(self, body: m.AnyMessage, answered: ANSWERED, session: str = "", seq: int = 0) -> int:
        """Send a request until it is answered, over as many streams as that takes."""
        number = self._next_call
        self._next_call += 1
        self._outstanding[number] = (body, session, seq, answered)
        if self._is_attached:
            self._deliver(number)
        return number

    def _deliver(self, number: int) -> None:
        """Send an outstanding request; one that no frame can hold is refused here and now."""
        assert self._link is not None
        body, session, seq, answered = self._outstanding[number]
        try:
            self._link.send(body, number, session, seq)
        except ProtocolError as exc:
            del self._outstanding[number]
            self._loop.call_soon(answered, m.Refused("rejected", str(exc)))

    def forget(self, number: int) -> None:
        """The caller no longer wants the answer."""
        entry = self._outstanding.pop(number, None)
        if entry is not None and entry[1] and self._is_attached and self._link is not None:
            self._link.send(m.Dropped(entry[1], entry[2]))

    def beat(self, beat: m.Beat, answered: ANSWERED) -> None:
        """Like a call, but an old beat is not worth repeating."""
        if self._is_attached:
            self.call(beat, answered)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    # ---- the link's side ------------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def received(self, link: Link, frame: m.Frame) -> None:
        if link is not self._link:
            return
        if self._is_attached and self._told is not None and frame.position > self._told.position:
            # Not earlier: a refusal has the position of a master that has not given its name.
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
        was_attached, self._is_attached = self._is_attached, False
        for number, entry in list(self._outstanding.items()):
            if isinstance(entry[0], m.Beat):
                del self._outstanding[number]
        self._lost.set()
        if was_attached:
            self._owner.stream_lost("the stream to the master broke")

    def _attach(self) -> None:
        assert self._link is not None
        self._attach_call = self._next_call
        self._next_call += 1
        self._sent_at = self._loop.time()
        attach = replace(
            self._owner.attachment(),
            agent_key=self._agent_key,
            incarnation=self._incarnation,
            told=self._told,
            ended_key=self._ended_key,
        )
        self._link.send(attach, self._attach_call)

    def _answered_attach(self, body: m.AnyMessage, position: int) -> None:
        match body:
            case m.Attached():
                self._incarnation, self.has_attached = body.incarnation, True
                if body.life:
                    self._told = m.Told(body.journal, body.life, position)
                self._is_attached = True
                self._reasons.clear()
                self._owner.attached(body, sent_at=self._sent_at)
                for number in list(self._outstanding):
                    self._deliver(number)
            case m.Refused():
                self._owner.refused(body)
            case _:
                raise ProtocolError(f"{type(body).__name__} does not answer an attach")
