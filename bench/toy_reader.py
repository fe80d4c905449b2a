# SPDX-License-Identifier: Apache-2.0
"""A reader of a dataset that reads nothing: a connection to the master, and the real protocol."""

from __future__ import annotations

import asyncio
import time

from holdfast.model.dataset import Dataset
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect
from hollow import rules_for

LIMIT_S = 60.0


class Reader:
    """One reader on its own connection: takes shards, then the next ones with its report."""

    def __init__(self, number: int, clients: int, dataset: Dataset) -> None:
        self._number, self._clients, self._dataset = number, clients, dataset
        self._link: Link | None = None
        self._answer: asyncio.Future[m.AnyMessage] | None = None
        #: While it reads: set at the end.
        self._read: asyncio.Future[int] | None = None
        self._shards = self._want = self._seq = 0
        self._stops_at = 0.0

    async def join(self, address: str, token: bytes) -> None:
        """Connect, and become a node of the job: only nodes may have leases."""
        self._link = await connect(address, self, token)
        await self._ask(
            m.Attach(
                agent_key=f"reader-{self._number}",
                rules=rules_for(self._clients),
                nproc=1,
                host=f"10.0.0.{self._number}",
                store_port=29500,
            )
        )
        await self._ask(d.DatasetOpen(0, self._dataset))

    async def first(self) -> None:
        """Take one shard."""
        await self._ask(d.ShardsTake(0, self._dataset.name, 0, 0, want=1))

    def read(self, stops_at: float, want: int) -> asyncio.Future[int]:
        """Take so many shards with each request; how many it were when the last is acknowledged."""
        self._stops_at, self._want, self._shards = stops_at, want, 0
        self._read = asyncio.get_running_loop().create_future()
        self._take(())
        return self._read

    def leave(self) -> None:
        self._read = None
        if self._link is not None:
            self._link.close()

    async def _ask(self, body: m.AnyMessage) -> None:
        assert self._link is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._link.send(body, 1)
        answer = await asyncio.wait_for(self._answer, LIMIT_S)
        if isinstance(answer, m.Refused):
            raise RuntimeError(answer.message)

    def _take(self, consumed: tuple[d.Consumed, ...]) -> None:
        assert self._link is not None
        self._seq += 1
        want = self._want if time.monotonic() < self._stops_at else 0
        take = d.ShardsTake(0, self._dataset.name, 0, 0, want, consumed)
        self._link.send(take, 1, f"reader-{self._number}", self._seq)

    # ---- what the link tells --------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def received(self, link: Link, frame: m.Frame) -> None:
        if not frame.call:
            return  # A world of which these readers are no part.
        if self._read is None:
            assert self._answer is not None
            self._answer.set_result(frame.body)
        elif not isinstance(frame.body, d.ShardsTaken):
            self._fail(f"a reader was answered with {frame.body}")
        elif frame.body.leases:
            self._shards += len(frame.body.leases)
            self._take(tuple(d.Consumed(one.number, one.piece.end) for one in frame.body.leases))
        else:
            self._read.set_result(self._shards)

    def closed(self, link: Link) -> None:
        self._fail("the master hung up")

    def _fail(self, why: str) -> None:
        if self._read is not None and not self._read.done():
            self._read.set_exception(RuntimeError(why))
