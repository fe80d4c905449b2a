# SPDX-License-Identifier: Apache-2.0
"""The agent's private socket for its workers: the master or the vault answers what they ask."""

from collections.abc import Callable
from typing import Protocol

from holdfast.agent.readers import Readers
from holdfast.protocol import messages as m
from holdfast.protocol.services import METHODS, Answerer, Sender, may_send
from holdfast.runtime.transport import Link


class Upstream(Protocol):
    """The way to the master."""

    def call(
        self,
        body: m.AnyMessage,
        answered: Callable[[m.AnyMessage], None],
        session: str = "",
        seq: int = 0,
    ) -> int: ...

    def forget(self, number: int) -> None: ...


class Keeper(Protocol):
    """Answers requests about checkpoints."""

    def handle(self, link: Link, frame: m.Frame) -> None: ...

    def link_closed(self, link: Link) -> None: ...


class Relay:
    """Passes requests on, to the master or to the vault. Knows nothing about what they mean."""

    def __init__(self, upstream: Upstream, vault: Keeper) -> None:
        self._upstream = upstream
        self._vault = vault
        self._readers = Readers(lambda rests: _tell(upstream, rests))
        self._pending: dict[int, set[int]] = {}

    def opened(self, link: Link) -> None:
        self._pending[link.number] = set()

    def received(self, link: Link, frame: m.Frame) -> None:
        asked = frame.body
        if not may_send(Sender.WORKER, asked):
            refusal = f"a worker may not send {type(asked).__name__}"
            link.send(m.Refused("rejected", refusal), frame.call)
        elif METHODS[type(asked)].answerer is Answerer.VAULT:
            self._vault.handle(link, frame)
        else:
            self._pass_on(link, frame)

    def _pass_on(self, link: Link, frame: m.Frame) -> None:
        pending, call, asked = self._pending[link.number], frame.call, frame.body
        reader = self._readers.asks(link, asked)

        def answered(body: m.AnyMessage) -> None:
            pending.discard(number)
            if reader is not None:
                reader.answered(asked, body)
            link.answer(body, call)

        number = self._upstream.call(asked, answered, frame.session, frame.seq)
        if reader is None:
            # A reader's request outlives its link: leases that come after its death must go back.
            pending.add(number)

    def closed(self, link: Link) -> None:
        for number in self._pending.pop(link.number, ()):
            self._upstream.forget(number)
        self._readers.closed(link)
        self._vault.link_closed(link)


def _tell(upstream: Upstream, body: m.AnyMessage) -> None:
    """Send without waiting for a reply."""
    upstream.call(body, lambda answer: None)
