# SPDX-License-Identifier: Apache-2.0
"""Writes that must arrive in spite of outages of the API server, and that hold up no caller."""

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.platforms.kubernetes.answers import NotFound, Refusal, Unavailable
from holdfast.platforms.kubernetes.pauses import Pauses
from holdfast.runtime.observe import Level, Say

FORBIDDEN = 403
FORBIDDEN_TRIES = 6
"""A server that has just started may forbid what it allows later; a missing right stays missing."""

Write = Callable[[], Awaitable[None]]


class Outbox:
    """Does writes one after the other, in the order in which their keys came first.

    Of one key only the newest write counts. A write without an answer is repeated; a refused write
    is logged once and dropped; a write to an object that is gone is dropped silently.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._writes: dict[str, Write] = {}
        self._has_work = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._worker = asyncio.create_task(self._work())

    def put(self, key: str, write: Write) -> None:
        """Queue a write; it replaces an older write of this key that is not done yet."""
        self._writes[key] = write
        self._is_empty.clear()
        self._has_work.set()

    async def close(self, within_s: float) -> bool:
        """Wait for all writes, at most this long; whether all were done."""
        try:
            async with asyncio.timeout(within_s):
                await self._is_empty.wait()
        except TimeoutError:
            pass
        self._worker.cancel()
        await asyncio.gather(self._worker, return_exceptions=True)
        return self._is_empty.is_set()

    async def _work(self) -> None:
        outage, forbidden = Pauses(), Pauses()
        while True:
            await self._has_work.wait()
            key, write = next(iter(self._writes.items()))
            try:
                await write()
            except Unavailable as exc:
                if outage.failures == 0:
                    self._say(f"{exc}; what is to be written waits until it answers", Level.WARNING)
                await asyncio.sleep(outage.after(exc))
                continue
            except NotFound:
                pass
            except Refusal as exc:
                if exc.status == FORBIDDEN and forbidden.failures < FORBIDDEN_TRIES:
                    await asyncio.sleep(forbidden.after(exc))
                    continue
                self._say(f"the {key} cannot be written: {exc}", Level.WARNING)
            outage.renew()
            forbidden.renew()
            # A newer write of the key may have come meanwhile.
            if self._writes[key] is write:
                del self._writes[key]
            if not self._writes:
                self._has_work.clear()
                self._is_empty.set()
