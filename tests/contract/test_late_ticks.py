# SPDX-License-Identifier: Apache-2.0
"""A master that stood still (SIGSTOP, a paused machine) hears what has arrived before it judges."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.core.kernel import NOTHING, Core, Event, Outcome, Record, Tick
from holdfast.runtime.journal import MemoryJournal
from holdfast.runtime.loop import Driver
from tests.hearing import Heard

LIMIT_S = 60.0
SILENCE_S = 0.01


@dataclass(frozen=True, slots=True)
class Beat(Event):
    """A node is alive."""


class Listener:
    """Gives a node up when it was silent for too long."""

    OWNS = ()

    def __init__(self, judged: Callable[[], None]) -> None:
        self._judged = judged
        self._due: float | None = None
        self.heard: list[type[Event]] = []

    def handle(self, event: Event, now: float) -> Outcome:
        self.heard.append(type(event))
        self._due = now + SILENCE_S if isinstance(event, Beat) else None
        if isinstance(event, Tick):
            self._judged()
        return NOTHING

    def apply(self, record: Record) -> None:
        raise TypeError(record)

    def snapshot(self) -> Iterable[Record]:
        return ()

    def deadline(self) -> float | None:
        return self._due

    def validate(self) -> None:
        pass


class Watch:
    """Job time, as the test has it. It says when it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looked: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        self.looked()
        return self.now


async def stand_still(*, is_alive: bool) -> list[type[Event]]:
    """What a core hears after it stood still far beyond a deadline, until all is decided."""
    loop, decided = asyncio.get_running_loop(), asyncio.Event()
    listener, watch = Listener(decided.set), Watch()
    core = Core([listener])
    core.route(Beat, listener)

    def fail(exc: Exception) -> None:
        raise exc

    driver = Driver(
        core,
        MemoryJournal(),
        clock=watch,
        wall=lambda: 0.0,
        encode=lambda record: b"",
        execute=lambda command: None,
        observe=lambda event, now: None,
        failed=fail,
        say=Heard(),
    )
    driver.feed(Beat())

    def beat() -> None:
        driver.feed(Beat())
        decided.set()

    def looked() -> None:
        """The timer rings. A beat has arrived, and the loop is about to read it."""
        watch.looked = lambda: None
        if is_alive:
            loop.call_soon(beat)

    watch.now, watch.looked = 1000.0, looked
    await asyncio.wait_for(decided.wait(), LIMIT_S)
    driver.stop()
    return listener.heard


def test_a_beat_that_arrived_meanwhile_is_heard_first() -> None:
    """Else a master that was stopped for a minute would give up every node at once."""
    assert asyncio.run(stand_still(is_alive=True)) == [Beat, Beat]


def test_a_node_of_which_nothing_arrived_is_given_up_all_the_same() -> None:
    assert asyncio.run(stand_still(is_alive=False)) == [Beat, Tick]
