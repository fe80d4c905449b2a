# SPDX-License-Identifier: Apache-2.0
"""Virtual time: what happens when, in an order that one seed decides.

Everything that happens is an action at a time; of two actions at the same time, the one planned
first runs first. A *task* is a coroutine that waits for virtual time or for promises, so that a
model of something that takes long reads from top to bottom.
"""

from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Timer:
    """A planned action."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[], None] | None) -> None:
        self.at = at
        self.action = action

    def cancel(self) -> None:
        self.action = None


class Promise(Generic[Value]):
    """A value that arrives once; tasks wait for it with `await`."""

    def __init__(self, clock: "Clock") -> None:
        self._clock = clock
        self._value: list[Value] = []
        self._waiting: list[Task] = []

    @property
    def is_kept(self) -> bool:
        return bool(self._value)

    def keep(self, value: Value) -> None:
        """Set the value. Only the first value counts."""
        if self._value:
            return
        self._value.append(value)
        for task in self._waiting:
            self._clock.after(0.0, task.resume)
        self._waiting.clear()

    def __await__(self) -> "Generator[Promise[Any], None, Value]":
        while not self._value:
            yield self
        return self._value[0]

    def add_waiter(self, task: "Task") -> None:
        self._waiting.append(task)


class Task:
    """A running coroutine."""

    def __init__(self, clock: "Clock", coroutine: Coroutine[Any, None, None]) -> None:
        self._coroutine = coroutine
        self.is_over = False
        clock.after(0.0, self.resume)

    def resume(self) -> None:
        """Go on until the next wait."""
        if self.is_over:
            return
        try:
            promise = self._coroutine.send(None)
        except StopIteration:
            self.is_over = True
            return
        promise.add_waiter(self)

    def cancel(self) -> None:
        """Stop it where it waits. The task itself must not call this."""
        if not self.is_over:
            self.is_over = True
            self._coroutine.close()


class Clock:
    """Virtual time in seconds, and the planned actions."""

    def __init__(self) -> None:
        self.now = 0.0
        self.actions = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._planned = 0

    def at(self, at: float, action: Callable[[], None]) -> Timer:
        timer = Timer(max(at, self.now), action)
        self._planned += 1
        heappush(self._heap, (timer.at, self._planned, timer))
        return timer

    def after(self, pause_s: float, action: Callable[[], None]) -> Timer:
        return self.at(self.now + pause_s, action)

    def pause(self, pause_s: float) -> Promise[None]:
        """A promise that is kept after a while."""
        promise: Promise[None] = Promise(self)
        self.after(pause_s, lambda: promise.keep(None))
        return promise

    def promise(self) -> Promise[Any]:
        return Promise(self)

    def spawn(self, coroutine: Coroutine[Any, None, None]) -> Task:
        return Task(self, coroutine)

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Let time pass until `is_over`, until `until`, or until nothing is planned any more."""
        while self._heap and not is_over():
            if self._heap[0][0] > until:
                return
            at, _, timer = heappop(self._heap)
            action, timer.action = timer.action, None
            if action is not None:
                self.now = at
                self.actions += 1
                action()
