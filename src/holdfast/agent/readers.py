# SPDX-License-Identifier: Apache-2.0
"""Processes outside of a world that read data: when one dies, the agent gives back its leases.

When a worker dies its whole round ends, and the leases end with the round. A process of scope 0
dies alone. So the agent watches which leases it gets, notices its end, and gives back in its name
what is left.
"""

import asyncio
import os
from collections.abc import Callable

from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link

NO_WORLD = 0


class Reader:
    """One process of scope 0, and the leases that it may still have."""

    def __init__(self, give_back: Callable[[d.ShardsTake], None]) -> None:
        self.links: set[int] = set()
        self.is_dead = False
        self._give_back = give_back
        #: Where each lease begins and ends, by dataset and term.
        self._leases: dict[tuple[str, int], dict[int, tuple[int, int]]] = {}
        #: Datasets that go with a model: restoring the model decides what was read of them.
        self._following: set[str] = set()

    def asks(self, body: d.DataCall) -> None:
        match body:
            case d.DatasetOpen(dataset=dataset) if dataset.series:
                self._following.add(dataset.name)
            case d.ShardsTake():
                leases = self._leases.get((body.name, body.term), {})
                for said in body.consumed:
                    begin, end = leases.get(said.lease, (0, 0))
                    if said.returned or said.problem or said.upto >= end:
                        leases.pop(said.lease, None)
                    elif said.end > -1:
                        leases[said.lease] = begin, min(end, said.end)

    def answered(self, asked: m.AnyMessage, answer: m.AnyMessage) -> None:
        """The master gave it leases; the process may have died meanwhile."""
        if isinstance(asked, d.ShardsTake) and isinstance(answer, d.ShardsTaken):
            leases = self._leases.setdefault((asked.name, asked.term), {})
            for lease in answer.leases:
                leases[lease.number] = lease.piece.begin, lease.piece.end
            self.settle()

    def settle(self) -> None:
        """Give back the leases, once the process is dead and nothing more can come from it."""
        if not self.is_dead or self.links:
            return
        for (name, term), leases in self._leases.items():
            rests = tuple(
                d.Consumed(number, begin, returned=True) for number, (begin, _) in leases.items()
            )
            if rests and name not in self._following:
                self._give_back(d.ShardsTake(NO_WORLD, name, term, 0, 0, rests))
        self._leases.clear()


class Readers:
    """All processes of scope 0 that ask for data here."""

    def __init__(self, give_back: Callable[[d.ShardsTake], None]) -> None:
        self._give_back = give_back
        self._living: dict[int, Reader] = {}
        self._of_link: dict[int, Reader] = {}
        self._loop = asyncio.get_running_loop()

    def asks(self, link: Link, body: m.AnyMessage) -> Reader | None:
        """The process that sent this request; None if the request is not about data, or comes from
        a worker of a world."""
        if not isinstance(body, d.DataCall) or body.scope != NO_WORLD:
            return None
        if link.number not in self._of_link:
            reader = self._of_link[link.number] = self._of_process(link.peer_pid())
            reader.links.add(link.number)
        reader = self._of_link[link.number]
        reader.asks(body)
        return reader

    def closed(self, link: Link) -> None:
        """The link is closed: every request that came through it has been handled."""
        reader = self._of_link.pop(link.number, None)
        if reader is not None:
            reader.links.discard(link.number)
            reader.settle()

    def _of_process(self, pid: int) -> Reader:
        if pid in self._living:
            return self._living[pid]
        reader = self._living[pid] = Reader(self._give_back)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._died(pid)
            return reader

        def ended() -> None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
            self._died(pid)

        self._loop.add_reader(descriptor, ended)
        return reader

    def _died(self, pid: int) -> None:
        reader = self._living.pop(pid)
        reader.is_dead = True
        reader.settle()
