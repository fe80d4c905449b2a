# SPDX-License-Identifier: Apache-2.0
"""An event loop of asyncio in virtual time, on which real drivers run as they are.

When nothing is ready, time jumps to the next timer. There are no sockets and no threads: who
listens and connects gets streams in memory (sim/wires.py), and what would run in a thread runs
here, a while later. Everything that runs belongs to a *process*, which can be killed.
"""

import asyncio
import math
import weakref
from asyncio import events
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from typing import Any, Protocol, TypeVar

from holdfast.model.errors import HoldfastError
from holdfast.sim.clock import Clock, Timer

Result = TypeVar("Result")


class Process:
    """A process on a machine: it has tasks, and nobody notices what they do after its death."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.is_alive = True
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = Context()
        self._context.run(_current.set, self)

    def run(self, function: Callable[..., object], *args: object) -> None:
        """Let it do something, unless it is dead."""
        if self.is_alive:
            self._context.copy().run(function, *args)

    def end(self) -> None:
        """It is dead. Its tasks only clean up."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()


_current: ContextVar[Process] = ContextVar("current")


def current_process() -> Process | None:
    """Whose code runs now; None for what belongs to the simulation itself."""
    return _current.get(None)


class Streams(Protocol):
    """Who makes connections: see asyncio's loop for what is given and returned."""

    async def create_server(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> object: ...

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]: ...


class LoopClock(Clock):
    """The loop's time, for models that plan with a `Clock`."""

    def __init__(self, loop: "VirtualLoop") -> None:
        super().__init__()
        self._loop = loop

    def at(self, at: float, action: Callable[[], None]) -> Timer:
        timer = Timer(max(at, self.now), action)

        def due() -> None:
            if timer.action is not None:
                timer.action()

        # In nobody's name: a model goes on when the process dies that happened to touch it.
        self._loop.call_at(timer.at, due, context=Context())
        return timer


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order that depends on nothing but what was planned."""

    def __init__(self, work_s: Callable[[], float]) -> None:
        """`work_s` says how long something takes that would run in a thread."""
        super().__init__()
        self.clock = LoopClock(self)
        self.streams: Streams | None = None
        self.surprises: list[str] = []
        """Errors that nobody handled."""
        #: Every task that there still is, in the order in which they began.
        self.tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], None]
        self.tasks = weakref.WeakKeyDictionary()
        self._work_s = work_s
        #: By time: when the last callback planned for it really runs.
        self._planned: dict[float, float] = {}
        # What the base class asks when nothing is ready.
        self._selector = self
        self.set_task_factory(_make_task)
        self.set_exception_handler(self._surprised)

    # ---- time -----------------------------------------------------------------------------------

    def time(self) -> float:
        return self.clock.now

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Of two at the same time the one that was planned first comes first: asyncio leaves that
        open, but bytes must not overtake each other."""
        at = when if when not in self._planned else math.nextafter(self._planned[when], math.inf)
        self._planned[when] = at
        process = _owner(context)

        def due() -> None:
            if process is None or process.is_alive:
                callback(*args)

        return super().call_at(at, due, context=context)

    def select(self, timeout: float | None) -> list[object]:
        """Nothing is ready: time passes."""
        if timeout is None:
            raise RuntimeError("nothing is planned any more: everybody waits for somebody")
        self.clock.now += timeout
        self.clock.actions += 1
        return []

    def _process_events(self, event_list: object) -> None:
        """There are none from outside."""

    def _write_to_self(self) -> None:
        """Nobody calls from other threads."""

    # ---- what would be outside ------------------------------------------------------------------

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Result], *args: object
    ) -> asyncio.Future[Result]:
        """Do it after a while, and say so after another: a process may die in between."""
        future: asyncio.Future[Result] = self.create_future()
        process = current_process()

        def work() -> None:
            if process is not None and not process.is_alive:
                return
            try:
                result = func(*args)
            except (HoldfastError, OSError, AssertionError) as exc:
                self.call_later(self._work_s(), _settle, future.set_exception, future, exc)
            else:
                self.call_later(self._work_s(), _settle, future.set_result, future, result)

        self.call_later(self._work_s(), work)
        return future

    async def create_server(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **_options: object
    ) -> object:
        assert self.streams is not None
        return await self.streams.create_server(factory, host, port)

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **_options: object
    ) -> tuple[asyncio.Transport, Any]:
        assert self.streams is not None
        return await self.streams.create_connection(factory, host, port)

    def add_reader(self, fd: object, callback: object, *args: object) -> None:
        """Modelled processes write nothing to their pipes."""

    def remove_reader(self, fd: object) -> bool:
        return False

    # ---- ends -----------------------------------------------------------------------------------

    def run(self, main: Awaitable[Result]) -> Result:
        """Run to the end, then end whatever is left."""
        events.set_event_loop(self)
        try:
            return self.run_until_complete(main)
        finally:
            for task in list(self.tasks):
                task.cancel()
            self.run_until_complete(asyncio.sleep(0.1))
            self.run_until_complete(self.shutdown_asyncgens())
            events.set_event_loop(None)
            self.close()

    def _surprised(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.surprises.append(f"{context['message']}: {error!r}")


def _owner(context: Context | None) -> Process | None:
    # An empty context counts as false, and belongs to nobody.
    return (copy_context() if context is None else context).get(_current)


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Any, context: Context | None = None
) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    task = asyncio.Task(coro, loop=loop, context=context)
    loop.tasks[task] = None
    process = _owner(context)
    if process is not None:
        process.tasks.append(task)
        if not process.is_alive:
            task.cancel()
    return task


def _settle(settle: Callable[[Any], None], future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        settle(value)
