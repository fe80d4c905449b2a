# SPDX-License-Identifier: Apache-2.0
"""What the parts of the vault work with: the arenas, threads, the way to the master, errands.

The event loop decides and owns the arenas; threads move bytes and decide nothing. The failure of an
errand is reported: a saver that died in silence is worse than none.
"""

import asyncio
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from holdfast.agent.relay import Upstream
from holdfast.agent.vault.arenas import Arenas
from holdfast.agent.vault.fence import Fence
from holdfast.agent.vault.tally import TallyBook
from holdfast.checkpoint.maps import SlotMaps
from holdfast.checkpoint.memory import low_priority
from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.storage_port import Storage
from holdfast.model.errors import FencedError, HoldfastError, RejectedError
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointCall
from holdfast.protocol.data import DataMarked
from holdfast.runtime.observe import Level, Say

URGENT_THREADS = 4
"""Training waits for these: restoring, listing, committing."""

QUIET_THREADS = 3
"""For what happens beside training: digests, storage, copies to peers."""

Expected = TypeVar("Expected", bound=m.Message)
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Means:
    """Shared by the parts of one vault."""

    def __init__(
        self,
        arenas: Arenas,
        open_storage: Callable[[str], Storage],
        upstream: Upstream,
        say: Say,
        peer: Callable[[str], PeerClient],
        fence: Fence,
        job: str,
    ) -> None:
        self.say = say
        self.arenas = arenas
        """Where the slots are: only the event loop uses it."""
        self.open_storage = open_storage
        """The storage of a directory; may take a while."""
        self.peer = peer
        """The byte service of another agent, by its address."""
        self.fence = fence
        self.job = job
        """Names the job, the same on all of its nodes and for all of its masters."""
        self.node_id = -1
        """The id of this node; -1 until the master has given it."""
        self.group_rank = 0
        """The place of this node among those of the present round."""
        self.maps = SlotMaps()
        """Mappings of slots for readers, in any thread."""
        self.tally = TallyBook()
        self._upstream = upstream
        self._urgent = ThreadPoolExecutor(URGENT_THREADS, "vault")
        self._quiet = ThreadPoolExecutor(QUIET_THREADS, "vault-quiet", initializer=low_priority)
        #: In the order in which they began, in which they are ended.
        self._errands: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.get_running_loop()

    async def ask(self, body: CheckpointCall | DataMarked, expected: type[Expected]) -> Expected:
        """Ask the master, however long it takes; RejectedError if it refuses."""
        answer: asyncio.Future[m.AnyMessage] = self._loop.create_future()

        def answered(message: m.AnyMessage) -> None:
            if not answer.done():
                answer.set_result(message)

        number = self._upstream.call(body, answered)
        try:
            message = await answer
        except asyncio.CancelledError:
            self._upstream.forget(number)
            raise
        if isinstance(message, m.Refused):
            kind = FencedError if message.kind in ("stale", "fenced") else RejectedError
            raise kind(message.message)
        if not isinstance(message, expected):
            raise RejectedError(f"{type(body).__name__} was answered {type(message).__name__}")
        return message

    async def urgently(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run in a thread a function that training waits for."""
        return await self._loop.run_in_executor(self._urgent, lambda: function(*args, **kwargs))

    async def quietly(
        self,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Result:
        """Run in a thread of low priority a function that must not slow training down."""
        return await self._loop.run_in_executor(self._quiet, lambda: function(*args, **kwargs))

    def spawn(self, errand: Coroutine[None, None, None], what: str) -> asyncio.Task[None]:
        """Do this beside everything else; a failure is reported."""
        task = self._loop.create_task(errand)
        self._errands[task] = None
        task.add_done_callback(lambda task: self._ended(task, what))
        return task

    def _ended(self, task: asyncio.Task[None], what: str) -> None:
        self._errands.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.report(error, what)

    def report(self, error: BaseException, what: str) -> None:
        """Report what went wrong: in one line, or with a traceback if the error was not
        expected."""
        if isinstance(error, HoldfastError | OSError):
            self.say(f"{what}: {error}", Level.WARNING)
            return
        trace = "".join(traceback.format_exception(error))
        self.say(
            f"{what} failed, which is a bug in Holdfast; training goes on\n{trace}", Level.ERROR
        )

    async def close(self) -> None:
        """End the errands and, once they are through with what they do now, the threads."""
        for task in list(self._errands):
            task.cancel()
        if self._errands:
            await asyncio.wait(self._errands)
        for pool in (self._urgent, self._quiet):
            pool.shutdown(wait=False, cancel_futures=True)
        self.maps.close()
        self.arenas.close()
