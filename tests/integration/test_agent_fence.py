# SPDX-License-Identifier: Apache-2.0
"""What closes the fence of a real agent's real vault, while a commit of it stands still.

The lease is over because the master's answers do not come, or because it cannot be reached; the
master has given the agent up, and says so at once or when the agent is back; the agent leaves. When
the fence has closed the commit goes on, or what removes old steps after it. Nothing on storage may
change then, but for the one thing that checkpoint/commit.py says: the tracker follows a checkpoint
that has its name.
"""

import asyncio
import contextlib
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.agent import agent as agent_module
from holdfast.agent.agent import Agent, AgentEnd, AgentPorts, AgentSettings
from holdfast.agent.group import Program
from holdfast.agent.processes import RunMode
from holdfast.agent.vault import storage as storage_module
from holdfast.agent.vault.vault import Vault
from holdfast.checkpoint.manifest import MANIFEST, list_committed
from holdfast.checkpoint.posix import PosixStorage
from holdfast.core.node.environment import Launch
from holdfast.model.checkpoint import Series, Version, rank_part
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.runtime.token import make_token
from holdfast.runtime.transport import Link, Server, listen
from tests.hearing import Heard
from tests.integration.patient_master import PatientMaster
from tests.integration.vault_node import SHAPE, Node, two_workers
from tests.storages import make_state, order_for, save
from tests.waiting import until

LIMIT_S = 120.0
LEASE_S = 600.0
BEAT_S = 0.5
RULES = m.JobRules(
    min_nodes=1, max_nodes=1, node_unit=1, last_call_s=1.0, join_timeout_s=60.0, max_restarts=3
)
RUN = m.RunWorld(1, 1, 0, 1, 0, 2, "127.0.0.1", 1, False, 0, "a test", False)
ATTEMPT = "t3"
OLD, MINE = (Version(0, 1), Version(0, 2)), Version(0, 3)
TRACKER = "latest"
Scene = Callable[[], Coroutine[None, None, None]]


class Loop(asyncio.SelectorEventLoop):
    """Its clock can be put forward, and all timers with it: no test waits for a lease."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


class Standing:
    """A storage whose user stands still right after a call that the test names, once."""

    def __init__(self, storage: PosixStorage, stands_after: Callable[[str, str, str], bool]):
        self._storage = storage
        self._stands_after = stands_after
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        return partial(self._call, name, value) if callable(value) else value

    def _call(self, name: str, value: Callable[..., Any], *arguments: Any) -> Any:
        result = value(*arguments)
        one, other = (*(arg for arg in arguments if isinstance(arg, str)), "", "")[:2]
        if not self.is_there.is_set() and self._stands_after(name, one, other):
            self.is_there.set()
            assert self.goes_on.wait(LIMIT_S)
        return result


@dataclass(frozen=True)
class Point:
    """Where the node stands still."""

    stands_after: Callable[[str, str, str], bool]
    is_committed: bool
    may_change: tuple[str, ...] = ()


NAMES = [Series("").name(step) for step in (1, 2, 3)]
POINTS = {
    "it looks at its files": Point(
        lambda call, one, _: call == "files" and one.startswith(f".holdfast/{ATTEMPT}"), False
    ),
    "the manifest is there": Point(
        lambda call, one, _: call == "put" and one.endswith(MANIFEST), False
    ),
    "it has its name": Point(
        lambda call, _, other: call == "rename" and other == NAMES[2], True, (TRACKER,)
    ),
    "the tracker names it": Point(lambda call, one, _: call == "put" and one == TRACKER, True),
    "an old step is taken": Point(lambda call, one, _: call == "rename" and one == NAMES[0], True),
}


@dataclass
class Master:
    """The other end of a real stream. It answers beats, unless it is to be silent, and commits.

    It answers no report: an agent that ends waits for that.
    """

    body: PatientMaster = field(default_factory=PatientMaster)
    lease_s: float = LEASE_S
    refusal: m.Refused | None = None
    is_silent: bool = False
    beats: int = 0
    attached: list[m.Attach] = field(default_factory=list)
    _link: Link | None = None
    _server: Server | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, token: bytes) -> str:
        """Listen, for the first time or again at the same address."""
        address = "127.0.0.1:0" if self._server is None else self._server.address
        self._server = await listen(address, self, token)
        return self._server.address

    async def close(self) -> None:
        assert self._server is not None
        await self._server.close()

    def opened(self, link: Link) -> None:
        pass

    def closed(self, link: Link) -> None:
        pass

    def received(self, link: Link, frame: m.Frame) -> None:
        body = frame.body
        if isinstance(body, m.Attach):
            self._attach(link, frame.call, body)
        elif isinstance(body, m.Beat):
            self.beats += 1
            if not self.is_silent:
                link.answer(m.Done(), frame.call)
        elif frame.call:
            self.body.call(body, lambda answer: link.answer(answer, frame.call))
            if isinstance(body, c.CommitDone):
                self._settle(body)
        self._changed.set()
        self._changed = asyncio.Event()

    def _attach(self, link: Link, call: int, body: m.Attach) -> None:
        self.attached.append(body)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            link.answer(refusal, call)
            return
        self._link = link
        link.answer(
            m.Attached("job", 0, 0, body.incarnation + 1, 1, BEAT_S, self.lease_s, body.round), call
        )

    def _settle(self, done: c.CommitDone) -> None:
        self.body.answer(done, m.Done())
        report = self.body.said(c.PartsPersisted)[-1]
        self.body.answer(report, c.PersistState(done.version, done.problem))

    def push(self, body: m.AnyMessage) -> None:
        assert self._link is not None
        self._link.send(body)

    async def hears(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_so():
                await self._changed.wait()

    async def is_heard(self, directory: str) -> None:
        """The vault has what was pushed before this, and the master what was said before that."""
        count = len(self.body.said(c.InventoryTaken)) + 1
        self.push(c.InventoryWanted(directory, count))
        await self.body.hears(c.InventoryTaken, count)


@dataclass
class AgentNode:
    """An agent with two workers, ready to commit step 3 beside steps 1 and 2."""

    agent: Agent
    vault: Vault
    master: Master
    storage: Standing
    order: c.CommitOrder
    token: bytes
    said: list[str]
    loop: Loop
    end: asyncio.Task[AgentEnd]

    async def stands_still(self) -> None:
        """The commit is ordered and has come to its point."""
        self.master.push(self.order)
        assert await asyncio.to_thread(self.storage.is_there.wait, LIMIT_S)

    async def says(self, text: str) -> None:
        def is_said() -> bool:
            return any(text in line for line in self.said)

        await asyncio.to_thread(until, is_said, LIMIT_S)

    def content(self, without: tuple[str, ...] = ()) -> dict[str, bytes | None]:
        """Every file with its bytes, and every directory."""
        top = Path(self.order.directory)
        return {
            name: path.read_bytes() if path.is_file() else None
            for path in top.rglob("*")
            if (name := str(path.relative_to(top))) not in without
        }


def settings_of(folder: Path, address: str, token: bytes, grace_s: float) -> AgentSettings:
    launch = Launch(
        nproc=2,
        role="default",
        run_id="job",
        max_restarts=3,
        socket=f"unix:{folder}/agent.sock",
        token_file=str(folder / "token"),
        signals_to_handle="",
    )
    program = Program(
        argv=("sleep", "1000"),
        mode=RunMode.COMMAND,
        launch=launch,
        env=dict(os.environ),
        log_dir=folder / "logs",
        console=lambda local_rank, is_error: None,
    )
    return AgentSettings(
        master=address,
        token=token,
        tls=None,
        rules=RULES,
        program=program,
        host="127.0.0.1",
        node_rank=-1,
        node_id=-1,
        topology="",
        runtime_dir=folder,
        grace_s=grace_s,
        spares=False,
        excluded_roots=(),
        first_contact_s=LIMIT_S,
    )


@contextlib.asynccontextmanager
async def agent_node(
    folder: Path, point: Point, *, breakpoint: bool = True, grace_s: float = 0.0
) -> AsyncIterator[AgentNode]:
    directory, token = f"{folder}/checkpoints", make_token(folder / "token")
    series = Series(directory, slots=2, breakpoint=breakpoint, keep_last=1)
    plain = PosixStorage(directory)
    for old in OLD:
        save(plain, series, old, make_state(3), f"t{old.step}", folder)
    storage, said, master, vaults = Standing(plain, point.stands_after), Heard(), Master(), []
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)

    def make_vault(*arguments: Any, **options: Any) -> Vault:
        vaults.append(Vault(*arguments, open_storage=lambda _: storage, **options))
        return vaults[0]

    settings = settings_of(folder, await master.serve(token), token, grace_s)
    agent = Agent(settings, said, AgentPorts(make_vault=make_vault, monotonic=loop.time))
    end = loop.create_task(agent.run())
    try:
        await master.hears(lambda: master.attached)
        master.push(RUN)
        await master.body.hears(m.WorkersStarted, 1)
        socket = settings.program.launch.socket
        async with two_workers(socket, token, series) as workers:
            node = Node(vaults[0], master.body, workers, directory, said)
            for rank in (0, 1):
                await node.save(rank, MINE.step, None)
            parts = (rank_part(0), rank_part(1))
            master.push(c.PersistOrder(directory, MINE, SHAPE, ATTEMPT, parts, "a test"))
            (report,) = await master.body.hears(c.PartsPersisted, 1)
        order = order_for(series, MINE, ATTEMPT, report.files)
        yield AgentNode(agent, vaults[0], master, storage, order, token, said, loop, end)
    finally:
        storage.goes_on.set()
        agent.shut_down("the test is over", 0, at_once=True)
        for report in (*master.body.said(m.WorkersStarted), *master.body.said(m.Leave)):
            master.body.answer(report, m.Done())
        end.cancel()
        await asyncio.wait((end,))
        await master.close()


# ---- what closes the fence ----------------------------------------------------------------------


async def master_is_silent(node: AgentNode) -> None:
    """It hears the beats, but its answers do not come."""
    node.master.is_silent = True
    node.loop.ahead_s += LEASE_S + 1
    await node.says("has not answered for the whole lease")


async def master_is_away(node: AgentNode) -> None:
    await node.master.close()
    node.loop.ahead_s += LEASE_S + 1
    await node.says("has not answered for the whole lease")
    # It is back too late: the lease is over when it answers.
    node.master.lease_s = 0.0
    await node.master.serve(node.token)


async def master_says_fenced(node: AgentNode) -> None:
    node.master.push(m.Fenced("another has this place"))
    await node.master.is_heard(node.order.directory)


async def master_had_given_it_up(node: AgentNode) -> None:
    """It was cut off for less than a lease, and is refused when it comes back."""
    await node.master.close()
    node.master.refusal = m.Refused("stale", "the master declared this node lost")
    await node.master.serve(node.token)
    # As another agent: the first answer has been understood.
    await node.master.hears(lambda: node.master.attached[-1].ended_key)


async def agent_ends_at_once(node: AgentNode) -> None:
    node.agent.shut_down("SIGINT, twice", 130, at_once=True)
    await node.master.body.hears(m.Leave, 1)


async def grace_is_over(node: AgentNode) -> None:
    """It had time to bring to storage what was on its way there."""
    node.agent.shut_down("SIGTERM", 143)
    await node.master.body.hears(m.Leave, 1)


CAUSES: dict[str, tuple[Callable[[AgentNode], Awaitable[None]], str]] = {
    "the master is silent": (master_is_silent, "has not answered for the whole lease"),
    "the master is away": (master_is_away, "has not answered for the whole lease"),
    "the master says so": (master_says_fenced, "the master has given this node up"),
    "the master had given it up": (master_had_given_it_up, "the master has given this node up"),
    "the agent ends at once": (agent_ends_at_once, "the agent ends"),
    "its grace is over": (grace_is_over, "the agent ends"),
}

# ---- the tests ----------------------------------------------------------------------------------


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scene], None]:
    """Runs a scene in a process of its own: an agent takes SIGCHLD there, and adopts orphans."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(memory))
    # An agent that is told to end stays until the test has seen what it does then.
    monkeypatch.setattr(agent_module, "FAREWELL_S", LIMIT_S)
    # It gets no time to bring anything to storage but its grace, and that is none here.
    monkeypatch.setattr(agent_module, "FLUSH_S_MIN", 0.0)
    # The note of whose directory it is stays as it is.
    monkeypatch.setattr(storage_module, "RENEW_S", 100 * LEASE_S)

    def run(scene: Scene) -> None:
        child = multiprocessing.get_context("fork").Process(target=play, args=(scene,))
        child.start()
        try:
            child.join(2 * LIMIT_S)
            assert child.exitcode == 0, child.exitcode
        finally:
            child.kill()
            child.join()
            child.close()

    return run


def play(scene: Scene) -> None:
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(scene())


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("at", POINTS)
def test_nothing_changes_on_storage_once_the_fence_has_closed(
    tmp_path: Path, apart: Callable[[Scene], None], at: str, cause: str
) -> None:
    point, (close_fence, why) = POINTS[at], CAUSES[cause]

    async def scene() -> None:
        async with agent_node(tmp_path, point) as node:
            await node.stands_still()
            await close_fence(node)
            before = node.content(point.may_change)
            node.storage.goes_on.set()
            (done,) = await node.master.body.hears(c.CommitDone, 1)
            assert (done.problem == "") == point.is_committed
            assert point.is_committed or why in done.problem
            await node.vault.settle(LIMIT_S)
            assert node.vault.is_idle
            assert node.content(point.may_change) == before

    apart(scene)


@pytest.mark.parametrize("breakpoint", [False, True])
def test_an_agent_that_is_told_to_go_finishes_its_commit_in_its_grace(
    tmp_path: Path, apart: Callable[[Scene], None], breakpoint: bool
) -> None:
    """Where nothing else goes to storage at the end, it left in the middle of its commit."""

    async def scene() -> None:
        point = POINTS["the manifest is there"]
        async with agent_node(tmp_path, point, breakpoint=breakpoint, grace_s=LIMIT_S) as node:
            await node.stands_still()
            node.agent.shut_down("SIGTERM", 143)
            await asyncio.to_thread(until, workers_are_gone, LIMIT_S)
            await node.master.is_heard(node.order.directory)
            assert not node.master.body.said(m.Leave)
            node.storage.goes_on.set()
            (done,) = await node.master.body.hears(c.CommitDone, 1)
            assert done.problem == ""
            if breakpoint:
                (ask,) = await node.master.body.hears(c.FlushAsk, 1)
                node.master.body.answer(ask, c.PersistState(MINE, ""))
            await node.master.body.hears(m.Leave, 1)
            committed = list_committed(PosixStorage(node.order.directory), Series(""))
            assert [one.version for one in committed] == [MINE]

    apart(scene)


def workers_are_gone() -> bool:
    try:
        return not [one for one in psutil.Process().children() if one.name() == "sleep"]
    except psutil.NoSuchProcess:
        return False  # It ended between two looks.


def test_an_agent_whose_lease_is_renewed_commits(
    tmp_path: Path, apart: Callable[[Scene], None]
) -> None:
    async def scene() -> None:
        async with agent_node(tmp_path, POINTS["the manifest is there"]) as node:
            await node.stands_still()
            for _ in range(2):
                node.loop.ahead_s += 0.75 * LEASE_S
                await node.master.is_heard(node.order.directory)
                beats = node.master.beats
                # Sent, and answered, after the clock was put forward.
                await node.master.hears(lambda beats=beats: node.master.beats > beats)
                await node.master.is_heard(node.order.directory)
            node.storage.goes_on.set()
            (done,) = await node.master.body.hears(c.CommitDone, 1)
            assert done.problem == ""
            await node.vault.settle(LIMIT_S)
            committed = list_committed(PosixStorage(node.order.directory), Series(""))
            assert [one.version for one in committed] == [MINE]

    apart(scene)
