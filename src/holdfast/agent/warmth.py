# SPDX-License-Identifier: Apache-2.0
"""Keeps a node ready before it is needed: modules learned from the job, the next round's store.

What the workers of a job import is written down in the job's key-value store. A node that comes
later loads the same modules before it lets a healthy world stop for it. A node that waits for a
place from the start loads them as soon as they are known, and later what is learned after that.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine

from holdfast.agent.group import Group, Program
from holdfast.agent.processes import Processes, RunMode
from holdfast.agent.store_host import StoreHost
from holdfast.agent.stream import MasterStream
from holdfast.core.node.environment import worker_environment
from holdfast.protocol import messages as m
from holdfast.runtime.observe import Level, Say

MODULES_KEY = "holdfast/modules"
"""The key of all known modules. With a number at its end: a sign that the list of this number is
there."""
NUMBER_KEY = "holdfast/modules/newest"
"""The number of the newest list. The job counts, because the node that publishes may be lost, and
the job may go on from its journal."""
TORCH_STORE = "torch.distributed"
"""A worker that imports this will want a store."""

RESTART = "ready for a fast restart"
WARM_UP_S = 60.0
"""A node that is not warm by then takes part cold."""

_NO_WORLD = m.RunWorld(0, 0, 0, 1, 0, 1, "", 0, False, 0, "", False)


class Warmth:
    """Keeps the node ready for its next start."""

    def __init__(
        self,
        program: Program,
        processes: Processes,
        stream: MasterStream,
        *,
        run: Callable[[Coroutine[None, None, None]], None],
        say: Say,
    ) -> None:
        """`run` starts an errand and does not wait for it."""
        self._program = program
        self._processes = processes
        self._stream = stream
        self._run = run
        self._say = say
        self._stores = StoreHost(processes, self._offer_store)
        #: The number of the newest list that was seen; 0 if none was.
        self._seen = 0
        #: The request that waits for the next list, while this node has no workers.
        self._asked: int | None = None
        self._session = secrets.token_hex(8)
        self._requests = 0
        #: Whether everything is prepared for the round after the present one.
        self._is_ready = False
        #: Fires when the master waits for this node to become warm and it takes too long.
        self._patience: asyncio.TimerHandle | None = None

    @property
    def hosted_port(self) -> int:
        """Where a fresh store server listens for the next round; 0 if none does."""
        return self._stores.port

    @property
    def is_cold(self) -> bool:
        """Whether a worker started now would have to import everything."""
        state = self._processes.spare_state
        return self._program.mode is not RunMode.COMMAND and state in ("none", "warming")

    @property
    def is_warm(self) -> bool | None:
        """Whether a worker started now would find its modules loaded; None if none ever does."""
        if self._program.mode is RunMode.COMMAND:
            return None
        return self._processes.spare_state in ("ready", "one-shot")

    def attached(self, welcome: m.Attached) -> None:
        """This node has no workers: learn what to load, now or as soon as it is known."""
        if self._asked is None and self.is_cold:
            loop = asyncio.get_running_loop()
            if self._patience is None:
                self._patience = loop.call_later(WARM_UP_S, self._warmed)
            self._ask(0.0 if welcome.round == 0 else 1.0)

    def spares_ready(self, group: Group | None) -> None:
        """The spares are warm: say so, share what they know, prepare the next store."""
        self._warmed()
        if group is None:
            self._ready("ready for a fast start")
            return
        if group.run.group_rank == 0:
            self._stream.call(m.KvGet(0, (MODULES_KEY, NUMBER_KEY), 0.0), self._publish_after)
        if TORCH_STORE in self._processes.learned:
            self._run(self._prepare_store(group.environment(0)))
        else:
            self._ready(RESTART)

    async def _prepare_store(self, env: dict[str, str]) -> None:
        """Only a help: without it worker rank 0 serves the store, a little later."""
        try:
            await self._stores.prepare(env)
        except OSError as exc:
            self._say(f"the store of the next round cannot be prepared: {exc}", Level.WARNING)

    def round_begins(self, run: m.RunWorld) -> None:
        """The workers start now, whatever was still being prepared."""
        self._warmed()
        self._stop_asking()
        self._is_ready = False
        self._stores.round_begins(run.store_port)

    def close(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._stores.close()

    def _publish_after(self, newest: m.AnyMessage) -> None:
        """Share what the workers import, as the list after the newest one of the job."""
        names, number = "\n".join(self._processes.learned).encode(), 1
        if isinstance(newest, m.Values):
            known, last = newest.values
            if known == names:
                return
            number += int(last)
        elif not _is_missing(newest):
            return
        keys = (MODULES_KEY, NUMBER_KEY, f"{MODULES_KEY}/{number}")
        shared = m.KvMultiSet(0, keys, (names, str(number).encode(), b""))
        self._stream.call(shared, lambda _: None)

    def _ask(self, timeout_s: float) -> None:
        """Ask for all known modules, once there is a newer list than the newest one seen."""
        keys: tuple[str, ...] = (MODULES_KEY, NUMBER_KEY)
        if self._seen > 0:
            keys = (*keys, f"{MODULES_KEY}/{self._seen + 1}")
        asked = m.KvGet(0, keys, timeout_s)
        # With a session, so that the master forgets it when this node gets workers.
        self._requests += 1
        self._asked = self._stream.call(asked, self._modules_known, self._session, self._requests)

    def _stop_asking(self) -> None:
        if self._asked is not None:
            self._stream.forget(self._asked)
            self._asked = None

    def _modules_known(self, body: m.AnyMessage) -> None:
        self._asked = None
        if _is_missing(body):
            self._warmed()  # Nothing is known yet: no world has to wait for this node's imports.
            self._ask(math.inf)
        if not isinstance(body, m.Values):
            return
        self._seen = int(body.values[1])
        self._ask(math.inf)
        names = body.values[0].decode(errors="replace").split("\n")
        env = worker_environment(
            self._program.env, self._program.launch, _NO_WORLD, 0, error_file="", progress=""
        )
        self._processes.preload(names, env, self._program.launch.nproc)

    def _warmed(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
            self._stream.call(m.Warmed(), lambda _: None)

    def _offer_store(self, port: int) -> None:
        self._stream.call(m.StoreOffered(port), lambda _: self._ready(RESTART) if port else None)

    def _ready(self, what: str) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._say(what)


def _is_missing(body: m.AnyMessage) -> bool:
    """Whether the keys that were asked for are not there yet."""
    return isinstance(body, m.Refused) and body.kind == "timeout"
