# SPDX-License-Identifier: Apache-2.0
"""A master that answers when the test says so, for tests of what a vault tells it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.model.checkpoint import NONE, Shape
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

LIMIT_S = 120.0
Body = TypeVar("Body", bound=m.Message)


@dataclass
class PatientMaster:
    """The other end of the stream: it answers restores by itself and everything else when told."""

    follows: bool = False
    calls: dict[int, m.AnyMessage] = field(default_factory=dict)
    """What was called and not forgotten, in this order."""
    forgotten: list[m.AnyMessage] = field(default_factory=list)
    _answers: dict[int, Callable[[m.AnyMessage], None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def call(
        self,
        body: m.AnyMessage,
        answered: Callable[[m.AnyMessage], None],
        session: str = "",
        seq: int = 0,
    ) -> int:
        number = len(self.calls) + len(self.forgotten) + 1
        self.calls[number] = body
        self._answers[number] = answered
        if isinstance(body, c.NodeRestore):
            plan = c.RestorePlan(NONE, Shape(0, False), True, 0, follows=self.follows)
            asyncio.get_running_loop().call_soon(self.answer, body, plan)
        self._changed.set()
        self._changed = asyncio.Event()
        return number

    def forget(self, number: int) -> None:
        self.forgotten.append(self.calls.pop(number))

    def answer(self, body: m.AnyMessage, answer: m.AnyMessage) -> None:
        (number,) = [number for number, called in self.calls.items() if called is body]
        self._answers.pop(number)(answer)

    def said(self, kind: type[Body]) -> list[Body]:
        return [body for body in self.calls.values() if isinstance(body, kind)]

    async def hears(self, kind: type[Body], count: int) -> list[Body]:
        async with asyncio.timeout(LIMIT_S):
            while len(self.said(kind)) < count:
                await self._changed.wait()
        return self.said(kind)
