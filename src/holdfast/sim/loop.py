# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop in virtual time, on which the real drivers run unchanged.

When nothing is ready, time jumps to the next timer. There are no sockets and no threads: servers
and clients get streams in memory (sim/wires.py), and work for a thread runs in the loop, a while
later. All code that runs belongs to a *process*, which can be killed.
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
    """A process on a machine: it has tasks, and what they do after its death has no effect."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.is_alive = True
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = Context()
        self._context.run(_current.set, self)

    def run(self, function: Callable[..., object], *args: object) -> None:
        """Run a function in it, unless it is dead."""
        if self.is_alive:
            self._context.copy().run(function, *args)

    def end(self) -> None:
        """Kill it. Its tasks only clean up."""
        self.is_alive = False
        for task in self.tasks:
            task.cancel()


_current: ContextVar[Process] = ContextVar("current")


def current_process() -> Process | None:
    """The process whose code runs now; None for the code of the simulation itself."""
    return _current.get(None)


class Streams(Protocol):
    """What makes connections: see asyncio's loop for arguments and results."""

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

        # In no process's name: the model goes on if the process that planned this dies.
        self._loop.call_at(timer.at, due, context=Context())
        return timer


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order that depends only on what was planned."""

    def __init__(self, work_s: Callable[[], float]) -> None:
        """`work_s` says how long a piece of work for a thread takes."""
        super().__init__()
        self.clock = LoopClock(self)
        self.streams: Streams | None = None
        self.surprises: list[str] = []
        """Errors that no code handled."""
        #: Every task that there still is, in the order in which they began.
        self.tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], None]
        self.tasks = weakref.WeakKeyDictionary()
        self._work_s = work_s
        #: By time: when the last callback planned for it really runs.
        self._planned: dict[float, float] = {}
        # The base class calls `select` on this when nothing is ready.
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
        """Of two callbacks at the same time, the one planned first runs first: asyncio leaves that
        open, but bytes must not overtake each other."""
        at = when if when not in self._planned else math.nextafter(self._planned[when], math.inf)
        self._planned[when] = at
        process = _owner(context)

        def due() -> None:
            if process is None or process.is_alive:
                callback(*args)

        return super().call_at(at, due, context=context)

    def select(self, timeout: float | None) -> list[object]:
        """Nothing is ready: let time pass."""
        if timeout is None:
            raise RuntimeError("nothing is planned any more: everybody waits for somebody")
        self.clock.now += timeout
        self.clock.actions += 1
        return []

    def _process_events(self, event_list: object) -> None:
        """Nothing to do: there are no events from outside."""

    def _write_to_self(self) -> None:
        """Nothing to do: no other thread calls."""

    # ---- what would be outside ------------------------------------------------------------------

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Result], *args: object
    ) -> asyncio.Future[Result]:
        """Run it after a while, and give the result after another: a process may die in between."""
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
        """Nothing to do: modelled processes write nothing to their pipes."""

    def remove_reader(self, fd: object) -> bool:
        return False

    # ---- ends -----------------------------------------------------------------------------------

    def run(self, main: Awaitable[Result]) -> Result:
        """Run to the end, then end all tasks that are left."""
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
    # An empty context is falsy, and belongs to no process.
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
