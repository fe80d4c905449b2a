# SPDX-License-Identifier: Apache-2.0
"""The vault: keeps the memory checkpoints of this node's workers and moves them where they belong.

Workers ask for slots and write them; everything else about their bytes happens here, beside the
training. The master decides for the whole job (which version, whose turn, when it is committed);
the vault asks it, and carries out what it decides.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import assert_never

from holdfast.agent.relay import Upstream
from holdfast.agent.vault.arenas import Arenas
from holdfast.agent.vault.fence import Fence
from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory
from holdfast.agent.vault.series import SeriesKeeper
from holdfast.agent.vault.shelf import Shelf
from holdfast.checkpoint.arena import Arena
from holdfast.checkpoint.peer_server import PeerServer
from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.roots import user_dir
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import Storage
from holdfast.model.checkpoint import Series
from holdfast.model.errors import (
    FencedError,
    HoldfastError,
    RejectedError,
    StateError,
    TimedOutError,
)
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.runtime.observe import Level, Say
from holdfast.runtime.settings import disk_dir, memory_dir
from holdfast.runtime.tls import new_identity
from holdfast.runtime.transport import Link

WAITING_SAID_S = 10.0
"""How often the user is told what an ending node waits for."""

WAIT_S_MAX = 14 * 24 * 3600.0
SETTLE_S = 600.0
"""How long a node that is done waits for what is on its way to storage."""


ON_DISK = "holdfast-slots"
"""What the user's directory for slots in the temporary folder is called."""


def _arena_of(token: bytes) -> Arena:
    """The memory of one agent of the job that has this token."""
    return Arena(memory_dir(), _job_of(token), secrets.token_hex(8))


def _disk_of(token: bytes) -> Arena:
    """The same on disk, for what finds no room in memory."""
    return Arena(disk_dir(), _job_of(token), secrets.token_hex(8), ON_DISK)


def _job_of(token: bytes) -> str:
    """The name of the job here. It is made of the token, which no other job has."""
    return f"job-{hashlib.sha256(token).hexdigest()[:16]}"


class Vault:
    """The checkpoints of one node."""

    def __init__(
        self,
        upstream: Upstream,
        say: Say,
        token: bytes,
        nproc: int,
        *,
        has_tls: bool = False,
        host: str = "",
        make_arena: Callable[[bytes], Arena] = _arena_of,
        make_disk: Callable[[bytes], Arena] | None = _disk_of,
        open_storage: Callable[[str], Storage] = open_storage,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_tls`: agents talk to each other over TLS only.

        Other agents reach this one at `host`; empty: there are none. `make_disk` is None where
        nothing may go through the disk. `monotonic` is the clock of the event loop, for threads.
        """
        self._means = Means(
            Arenas(
                lambda: make_arena(token),
                None if make_disk is None else lambda: make_disk(token),
                lambda: user_dir(disk_dir(), ON_DISK).exists(),
                say,
            ),
            open_storage,
            upstream,
            say,
            peer=lambda address: _client(address, token, has_tls=has_tls),
            fence=Fence(monotonic),
            job=_job_of(token),
        )
        self._memory = Memory(self._means)
        self._nproc = nproc
        self._series: dict[str, SeriesKeeper] = {}
        #: What each worker's connection waits for; dropped when it closes.
        self._held: dict[int, dict[asyncio.Task[None], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._identity = new_identity() if host and has_tls else None
        self._server = self._serve_peers(host, token) if host else None

    def _serve_peers(self, host: str, token: bytes) -> PeerServer | None:
        tls = None if self._identity is None else self._identity.tls
        try:
            return PeerServer(host, token, tls, Shelf(self._means, self._memory))
        except StateError as exc:
            self._means.say(f"other nodes cannot fetch checkpoints from here: {exc}", Level.WARNING)
            return None

    @property
    def peer_port(self) -> int:
        """Where other agents fetch and leave parts; 0 if nowhere."""
        return 0 if self._server is None else self._server.port

    @property
    def peer_certificate(self) -> str:
        """The fingerprint of the certificate that the vault shows there; empty without TLS."""
        return "" if self._identity is None else self._identity.fingerprint

    def tally(self) -> c.Tally | None:
        """What became of the checkpoints of this node, for the beats; None if there were none."""
        return self._means.tally.read()

    @property
    def written_bytes(self) -> int:
        """How much has reached storage from here: it rises for as long as something moves."""
        return self._means.tally.written_bytes

    # ---- the workers ----------------------------------------------------------------------------

    def handle(self, link: Link, frame: m.Frame) -> None:
        """Answer what a worker asked, now or later."""
        body = frame.body
        assert isinstance(body, c.VaultCall)
        tasks = self._held.setdefault(link.number, {})
        task = self._loop.create_task(self._serve(link, frame.call, body))
        tasks[task] = None

        def served(task: asyncio.Task[None]) -> None:
            tasks.pop(task, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                # The worker must not wait for ever because of a mistake of ours.
                link.answer(m.Refused("rejected", f"{error!r}: a bug in Holdfast"), frame.call)
                self._means.report(error, f"answering {type(body).__name__}")

        task.add_done_callback(served)

    def link_closed(self, link: Link) -> None:
        """A worker's connection is gone: stop working on its requests."""
        for task in self._held.pop(link.number, ()):
            task.cancel()

    async def _serve(self, link: Link, call: int, body: c.VaultCall) -> None:
        answer: m.AnyMessage
        try:
            answer = await self._answer(body)
        except FencedError as exc:
            answer = m.Refused("stale", str(exc))
        except TimedOutError as exc:
            answer = m.Refused("timeout", str(exc))
        except (HoldfastError, OSError) as exc:
            answer = m.Refused("rejected", str(exc))
        link.answer(answer, call)

    async def _answer(self, body: c.VaultCall) -> m.AnyMessage:
        if isinstance(body, c.SeriesOpen):
            self._keeper_for(body.series).open(body)
            return m.Done()
        keeper = self._keeper(body.directory)
        match body:
            case c.SlotReserve():
                return keeper.reserve(body.part, body.size)
            case c.SlotAsk():
                return await keeper.grant(body)
            case c.SlotSealed():
                keeper.sealed(body)
            case c.SaveFailed():
                self._means.tally.failed(body.step, body.why)
            case c.RestoreAsk():
                return await keeper.restore(body)
            case c.PartsOpen():
                return await keeper.open_parts(body)
            case c.PartsClose():
                keeper.close_parts(body)
            case c.PersistWait():
                return await self._settled(keeper, body.timeout_s)
            case c.StepsRemove():
                await keeper.depot.remove(body.steps)
            case _:
                assert_never(body)
        return m.Done()

    def _keeper_for(self, series: Series) -> SeriesKeeper:
        keeper = self._series.get(series.directory)
        if keeper is None:
            keeper = SeriesKeeper(self._means, self._memory, series, self._nproc)
            self._series[series.directory] = keeper
        return keeper

    def _keeper(self, directory: str) -> SeriesKeeper:
        keeper = self._series.get(directory)
        if keeper is None:
            raise RejectedError(f"no worker of this node has opened {directory} yet")
        return keeper

    async def _settled(self, keeper: SeriesKeeper, timeout_s: float) -> c.PersistState:
        if not 0 <= timeout_s <= WAIT_S_MAX:  # This refuses NaN too.
            raise RejectedError(f"nothing can be waited for {timeout_s:g} s")
        try:
            async with asyncio.timeout(timeout_s):
                return await keeper.persister.all_settled()
        except TimeoutError:
            raise TimedOutError(
                f"what is on its way to {keeper.series.directory} is not there "
                f"within {timeout_s:g} s"
            ) from None

    # ---- the master -----------------------------------------------------------------------------

    def joined(self, node_id: int) -> None:
        """The master knows this node under this number."""
        self._means.node_id = node_id

    def leased(self, until: float) -> None:
        """The master vouches for this node until then (loop time)."""
        self._means.fence.leased(until)

    def given_up(self) -> None:
        """The master has replaced this node, or tells it to leave: its earlier orders are void."""
        self._means.fence.given_up()

    def pushed(self, body: c.CheckpointPush) -> None:
        """Do what the master wants; the vault of a new agent may not know the directory yet."""
        match body:
            case c.InventoryWanted():
                holdings = self._memory.holdings(body.directory)
                keeper = self._series.get(body.directory)
                writing = () if keeper is None else keeper.persister.writing
                taken = c.InventoryTaken(body.directory, body.number, holdings, writing)
                self._means.spawn(self._tell(taken), "the inventory was not taken")
            case c.PersistOrder():
                # A node without workers of the series may hold parts of it all the same.
                self._keeper_for(Series(body.directory)).persister.ordered(body)
            case c.CommitOrder():
                keeper = self._series.get(body.directory)
                if keeper is not None:
                    keeper.persister.commit(body)
                else:
                    why = "the node that was asked to commit knows nothing of the directory"
                    done = c.CommitDone(body.directory, body.version, body.attempt, why)
                    self._means.spawn(self._tell(done), "a commit was not reported")

    async def _tell(self, body: c.InventoryTaken | c.CommitDone) -> None:
        await self._means.ask(body, m.Done)

    # ---- rounds and ends ------------------------------------------------------------------------

    def begin_round(self, round: int, group_rank: int) -> None:
        """All workers of the previous round are gone; those of this one are about to start."""
        self._means.group_rank = group_rank
        self._memory.writers_are_gone()
        for keeper in self._series.values():
            keeper.begin_round(round)
            self._means.spawn(keeper.verify_newest(), "the memory could not be verified")

    def newest_of(self, rank: int) -> tuple[str, ...]:
        """The slots with the newest parts that this rank may load, as far as is known before it
        asks."""
        return tuple(path for keeper in self._series.values() for path in keeper.newest_of(rank))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way to storage."""
        return all(keeper.persister.is_idle for keeper in self._series.values())

    async def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until nothing is on its way to storage, and tell the user now and then what still
        is."""
        until = self._loop.time() + timeout_s
        while not self.is_idle and self._loop.time() < until:
            busy = [k for k in self._series.values() if not k.persister.is_idle]
            try:
                async with asyncio.timeout(min(WAITING_SAID_S, timeout_s)):
                    await busy[0].persister.settled()
            except TimeoutError:
                self._means.say(
                    f"waiting for the checkpoint on its way to {busy[0].series.directory}"
                )

    @property
    def has_unsaved(self) -> bool:
        """Whether something would be lost if this node's memory went now."""
        return not self.is_idle or bool(self._unsaved())

    def _unsaved(self) -> list[SeriesKeeper]:
        return [
            keeper
            for keeper in self._series.values()
            if keeper.series.breakpoint and keeper.newest_held() > keeper.persister.committed
        ]

    async def flush(self, timeout_s: float) -> None:
        """Let what is on its way to storage get there before this node leaves, and bring there the
        newest complete version of every series that has a breakpoint save."""
        unsaved = self._unsaved()
        others = [keeper for keeper in self._series.values() if keeper not in unsaved]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(
                    *(self._flush_one(keeper) for keeper in unsaved),
                    *(keeper.persister.settled() for keeper in others),
                )
        except TimeoutError:
            self._means.say(
                f"not every checkpoint reached storage within {timeout_s:g} s", Level.ERROR
            )

    async def _flush_one(self, keeper: SeriesKeeper) -> None:
        try:
            state = await keeper.persister.flush()
        except HoldfastError as exc:
            self._means.say(f"nothing more goes to {keeper.series.directory}: {exc}", Level.ERROR)
            return
        if state.problem:
            self._means.say(f"{keeper.series.directory}: {state.problem}", Level.WARNING)

    def left(self) -> None:
        """This node leaves the job: it commits and removes nothing more."""
        for keeper in self._series.values():
            keeper.depot.close()

    async def close(self) -> None:
        """End: what is neither on storage nor on other nodes by now is lost."""
        self.left()
        for tasks in self._held.values():
            for task in tasks:
                task.cancel()
        if self._server is not None:
            await self._means.urgently(self._server.close)
        await self._means.close()


def _client(address: str, token: bytes, *, has_tls: bool) -> PeerClient:
    """A client for another agent, from the address that the master gave."""
    place, _, certificate = address.partition("#")
    if has_tls and not certificate:
        raise RejectedError(f"{place} has no certificate, but the agents of this job use TLS")
    return PeerClient(place, token, certificate or None)
