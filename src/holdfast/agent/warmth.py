# SPDX-License-Identifier: Apache-2.0
"""Being ready before one is needed: modules learned from the job, and the next round's store.

What the workers of a job import is written down once, in the job's key-value store. A node that
comes later loads the same modules before it lets a healthy world stop for it.
"""

import asyncio
from collections.abc import Callable, Coroutine

from holdfast.agent.group import Group, Program
from holdfast.agent.processes import Processes, RunMode
from holdfast.agent.store_host import StoreHost
from holdfast.agent.stream import MasterStream
from holdfast.core.node.environment import worker_environment
from holdfast.protocol import messages as m
from holdfast.runtime.observe import Say

MODULES_KEY = "holdfast/modules"
TORCH_STORE = "torch.distributed"
"""Who imports this will want a store."""

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
        """`run` takes an errand that nobody waits for."""
        self._program = program
        self._processes = processes
        self._stream = stream
        self._run = run
        self._say = say
        self._stores = StoreHost(processes, self._offer_store)
        self._published: tuple[str, ...] = ()
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

    def attached(self, welcome: m.Attached) -> None:
        """A world exists already: learn from it what to load."""
        if self._patience is None and self.is_cold:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(WARM_UP_S, self._warmed)
            asked = m.KvGet(0, (MODULES_KEY,), 0.0 if welcome.round == 0 else 1.0)
            self._stream.call(asked, self._modules_known)

    def spares_ready(self, group: Group | None) -> None:
        """The spares are warm: say so, share what they know, prepare the next store."""
        self._warmed()
        if group is None:
            return
        names = self._processes.learned
        if group.run.group_rank == 0 and names != self._published:
            self._published = names
            shared = m.KvSet(0, MODULES_KEY, "\n".join(names).encode())
            self._stream.call(shared, lambda _: None)
        if TORCH_STORE in names:
            self._run(self._prepare_store(group.environment(0)))
        else:
            self._ready()

    async def _prepare_store(self, env: dict[str, str]) -> None:
        """Only a help: without it worker rank 0 serves the store, a little later."""
        try:
            await self._stores.prepare(env)
        except OSError as exc:
            self._say(f"the store of the next round cannot be prepared: {exc}")

    def round_begins(self, run: m.RunWorld) -> None:
        """Whatever was still being prepared, the workers start now."""
        self._warmed()
        self._is_ready = False
        self._stores.round_begins(run.store_port)

    def close(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._stores.close()

    def _modules_known(self, body: m.AnyMessage) -> None:
        if self._patience is None:
            return
        if not isinstance(body, m.Values):
            self._warmed()  # Nobody has learned anything yet: there is nothing to prepare.
            return
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
        answered = self._ready if port else lambda: None
        self._stream.call(m.StoreOffered(port), lambda _: answered())

    def _ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._say("ready for a fast restart")
