# SPDX-License-Identifier: Apache-2.0
"""Copies between real vaults, with the real ledger between them, over connections that break.

Prior art: when one node's replica fails, the others hang in a collective until it times out.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.agent.relay import Relay
from holdfast.agent.vault.vault import Vault
from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.slots import Slot, SlotMeta, lay_out
from holdfast.client.connection import AgentClient
from holdfast.client.vault import VaultClient
from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.checkpoints import Checkpoints
from holdfast.core.kernel import Event
from holdfast.model.checkpoint import Series, Shape, Version, rank_part
from holdfast.model.errors import RetryableError
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.world import Member, World
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.runtime.settings import WorkerPlace
from holdfast.runtime.transport import listen
from tests.hearing import Heard
from tests.integration.peer_nodes import Fault, Proxy

DIR = "/checkpoints"
TOKEN = b"0123456789abcdef"
SIZE = 300_000
LIMIT_S = 60.0
"""For everything that must happen. A node that was not told of a failed copy waited for 60 s."""

CUT = Fault("cut", 100_000, upload=True)
DEAD = (CUT,) * 4
"""So often a copy is tried: after that the peer is as good as dead."""


@dataclass
class Exchange:
    """The ledger, and the way to it of every node."""

    ledger: Checkpoints = field(default_factory=Checkpoints)
    facts: list[Event] = field(default_factory=list)
    taken: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """By node: what it said that it holds."""
    late: list[Event] | None = None
    """Requests that wait for the master to be back; None while it is there."""
    _answers: dict[int, Callable[[m.AnyMessage], None]] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _calls: int = 0

    def feed(self, event: Event) -> None:
        loop = asyncio.get_running_loop()
        outcome = self.ledger.handle(event, loop.time())
        self.facts += outcome.facts
        for command in outcome.commands:
            if isinstance(command, cmd.Reply) and command.call in self._answers:
                loop.call_soon(self._answers.pop(command.call), command.body)
        self._changed.set()
        self._changed = asyncio.Event()

    def call_of(self, node: int, body: m.AnyMessage, answered: Callable[..., None]) -> int:
        assert isinstance(body, c.CheckpointCall)
        self._calls += 1
        self._answers[self._calls] = answered
        if isinstance(body, c.InventoryTaken):
            self.taken[node] = tuple(
                f"{held.part} of step {held.version.step}" for held in body.holdings
            )
        event = ev.CheckpointRequested(NodeId(node), 1, self._calls, body)
        if self.late is not None:
            self.late.append(event)
        else:
            asyncio.get_running_loop().call_soon(self.feed, event)
        return self._calls

    def master_is_back(self) -> None:
        late, self.late = self.late or [], None
        for event in late:
            self.feed(event)

    def forget(self, number: int) -> None:
        self._answers.pop(number, None)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_so():
                await self._changed.wait()

    @property
    def safe(self) -> int:
        (view,) = self.ledger.view()
        step = view["safe"]
        assert isinstance(step, int)
        return step

    def told(self) -> list[str]:
        return [fact.why for fact in self.facts if isinstance(fact, ev.CopyFailed)]


@dataclass(frozen=True)
class Upstream:
    """The stream to the master, as one vault sees it."""

    exchange: Exchange
    node: int

    def call(
        self,
        body: m.AnyMessage,
        answered: Callable[[m.AnyMessage], None],
        session: str = "",
        seq: int = 0,
    ) -> int:
        return self.exchange.call_of(self.node, body, answered)

    def forget(self, number: int) -> None:
        self.exchange.forget(number)


@dataclass
class Node:
    """One node: its vault, and its only worker."""

    number: int
    vault: Vault
    worker: VaultClient
    said: list[str]
    shape: Shape
    lineage: int = -1

    def begin(self) -> None:
        self.worker.open_series(Series(DIR, slots=3, replicas=1, breakpoint=False))
        self.lineage = self.worker.restore(fresh=True).lineage

    def save(self, step: int) -> None:
        part, version = rank_part(self.number), Version(self.lineage, step)
        files, length = lay_out([("state", SIZE)])
        grant = self.worker.slot(part, step, length)
        with Slot.open(grant.path, writable=True) as slot:
            slot.begin(version)
            slot.data[:SIZE] = bytes([step]) * SIZE
            slot.seal(SlotMeta(DIR, part, version, self.shape, files))
        self.worker.sealed(part, version, self.shape, grant.path, persist=False)


@dataclass
class Nodes:
    """The nodes of one world."""

    exchange: Exchange
    all: list[Node]

    async def save(self, step: int) -> None:
        await asyncio.gather(*(asyncio.to_thread(node.save, step) for node in self.all))

    async def held_by(self, number: int) -> tuple[str, ...]:
        """What this node has in its memory."""
        self.exchange.taken.clear()
        self.all[number].vault.pushed(c.InventoryWanted(DIR, 1))
        await self.exchange.until(lambda: number in self.exchange.taken)
        return self.exchange.taken[number]


@asynccontextmanager
async def world(
    folder: Path, *addresses: Callable[[str], str], has_tls: bool = False
) -> AsyncIterator[Nodes]:
    """One node for each function, which says where others reach the node's byte service."""
    exchange, size, nodes = Exchange(), len(addresses), []
    exchange.feed(ev.MasterStarted("test"))
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for number, reach in enumerate(addresses):
            said = Heard()
            upstream = Upstream(exchange, number)
            vault = Vault(upstream, said, TOKEN, 1, has_tls=has_tls, host="127.0.0.1")
            stack.push_async_callback(vault.close)
            vault.joined(number)
            socket = f"unix:{folder}/{number}.sock"
            server = await listen(socket, Relay(upstream, vault), TOKEN)
            stack.push_async_callback(server.close)
            place = WorkerPlace(
                local_rank=0,
                rank=number,
                world_size=size,
                local_world_size=1,
                group_world_size=size,
                meeting_point="",
                launcher=0,
                round=1,
            )
            worker = VaultClient(AgentClient(socket, TOKEN, scope=1), place, is_standalone=False)
            stack.push_async_callback(asyncio.to_thread, worker.close)
            nodes.append(Node(number, vault, worker, said, Shape(size, shared=False)))
            members.append(_member(number, vault, reach(f"127.0.0.1:{vault.peer_port}")))
        agreed = World(round=Round(1), generation=Generation(1), members=tuple(members))
        exchange.feed(ev.WorldFormed(agreed, "a test", planned=False))
        for node in nodes:
            node.vault.begin_round(1, node.number)
        await asyncio.gather(*(asyncio.to_thread(node.begin) for node in nodes))
        yield Nodes(exchange, nodes)


def _member(number: int, vault: Vault, address: str) -> Member:
    host, _, port = address.rpartition(":")
    return Member(
        node_id=NodeId(number),
        incarnation=Incarnation(1),
        node_rank=NodeRank(number),
        nproc=1,
        host=host,
        store_port=1,
        peer_port=int(port),
        peer_certificate=vault.peer_certificate,
    )


def as_it_is(address: str) -> str:
    return address


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Coroutine[None, None, None]], None]:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(memory))
    return asyncio.run


class Through:
    """Puts a proxy that fails before a node's byte service."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self.proxy: Proxy | None = None

    def __call__(self, address: str) -> str:
        self.proxy = Proxy(address, *self._faults)
        return self.proxy.address

    def __enter__(self) -> "Through":
        return self

    def __exit__(self, *_: object) -> None:
        if self.proxy is not None:
            self.proxy.__exit__()


Run = Callable[[Coroutine[None, None, None]], None]


def test_a_peer_that_dies_in_the_middle_of_a_copy_does_not_stall_the_next_step(
    tmp_path: Path, run: Run
) -> None:
    """The other node waits for step 1 in vain: it is told so at once, and step 2 is safe."""

    async def copy() -> None:
        with Through(*DEAD) as dying:
            async with world(tmp_path, as_it_is, dying) as nodes:
                exchange = nodes.exchange
                await nodes.save(1)
                await exchange.until(lambda: bool(exchange.told()))
                (told,) = exchange.told()
                assert told.startswith("node rank 0 could not copy step 1 to node rank 1: the peer")
                assert told.endswith("; training goes on without")
                await nodes.save(2)
                await exchange.until(lambda: exchange.safe == 2)
                assert any(isinstance(fact, ev.CopiesResumed) for fact in exchange.facts)

    run(copy())


def test_another_peer_takes_the_copies(tmp_path: Path, run: Run) -> None:
    async def copy() -> None:
        with Through(*[CUT] * 50) as dead:
            async with world(tmp_path, as_it_is, dead, as_it_is) as nodes:
                exchange = nodes.exchange
                for step in (1, 2, 3):
                    await nodes.save(step)
                    await exchange.until(lambda step=step: exchange.safe == step)
                (told,) = exchange.told()
                assert "node rank 0 could not copy step 1 to node rank 1, its copies go to" in told
                assert dead.proxy is not None
                # It is not tried again at every step.
                assert dead.proxy.connections == len(DEAD)
                assert "rank-00000 of step 3" in await nodes.held_by(2)

    run(copy())


def test_what_is_safe_is_kept_while_newer_copies_fail(tmp_path: Path, run: Run) -> None:
    """Else a node that is lost then could be restored from nothing."""

    async def copy() -> None:
        clean = Fault("cut", 10**12)
        with Through(clean, *[CUT] * 50) as dying:
            async with world(tmp_path, as_it_is, dying) as nodes:
                exchange = nodes.exchange
                await nodes.save(1)
                await exchange.until(lambda: exchange.safe == 1)
                for step in (2, 3, 4):
                    await nodes.save(step)
                    problem = f"could not copy step {step} "
                    await exchange.until(lambda problem=problem: problem in _problem(exchange))
                # Node 1 has left every version here; its newest safe one is not lost for them.
                held = [text for text in await nodes.held_by(0) if "rank-00001" in text]
                assert "rank-00001 of step 1" in held
                assert len(held) == 2
                assert "rank-00000 of step 1" in await nodes.held_by(0)
                assert "rank-00001 of step 1" in await nodes.held_by(1)

    run(copy())


def test_a_master_that_is_away_does_not_hold_the_saves_up(tmp_path: Path, run: Run) -> None:
    """The copies are made, but only the master can say that all of them are: what was safe and
    what is on its way are kept, and the training goes on with the slot that is left."""

    async def copy() -> None:
        async with world(tmp_path, as_it_is, as_it_is) as nodes:
            exchange = nodes.exchange
            await nodes.save(1)
            await exchange.until(lambda: exchange.safe == 1)
            exchange.late = []
            async with asyncio.timeout(LIMIT_S / 2):
                for step in range(2, 12):
                    await nodes.save(step)
            for node in nodes.all:
                assert node.said == [
                    "training goes on without waiting for copies on other nodes: "
                    "the master does not answer"
                ]
            exchange.master_is_back()
            await exchange.until(lambda: exchange.safe == 2)
            for number in (0, 1):
                held = [one for one in await nodes.held_by(number) if f"0{number} of" in one]
                assert held[0].endswith("step 11")
                assert f"rank-0000{number} of step 2" in held
            for step in (12, 13):
                await nodes.save(step)
            await exchange.until(lambda: exchange.safe == 13)

    run(copy())


def _problem(exchange: Exchange) -> str:
    (view,) = exchange.ledger.view()
    return str(view["copy_problem"])


def test_copies_under_tls(tmp_path: Path, run: Run) -> None:
    """Without TLS a stranger gets no answer, not even one with the token."""

    async def copy() -> None:
        async with world(tmp_path, as_it_is, as_it_is, has_tls=True) as nodes:
            await nodes.save(1)
            await nodes.exchange.until(lambda: nodes.exchange.safe == 1)
            port = nodes.all[0].vault.peer_port
            stranger = PeerClient(f"127.0.0.1:{port}", TOKEN, None, idle_s=0.2)
            get = c.PartGet(DIR, Version(nodes.all[0].lineage, 1), rank_part(0))
            with pytest.raises(RetryableError):
                await asyncio.to_thread(stranger.look, get, 2.0)

    run(copy())


def test_who_stands_in_for_a_peer_under_tls_gets_nothing(tmp_path: Path, run: Run) -> None:
    async def copy() -> None:
        async with world(tmp_path / "a", as_it_is, has_tls=True) as strangers:
            port = strangers.all[0].vault.peer_port
            reach = [as_it_is, lambda _: f"127.0.0.1:{port}"]
            async with world(tmp_path / "b", *reach, has_tls=True) as nodes:
                await nodes.save(1)
                await nodes.exchange.until(lambda: bool(nodes.exchange.told()))
                (told,) = nodes.exchange.told()
                assert "to node rank 1: " in told
                assert f"127.0.0.1:{port} shows another certificate than its agent told" in told

    for name in "ab":
        (tmp_path / name).mkdir()
    run(copy())
