# SPDX-License-Identifier: Apache-2.0
"""A real master process, and an agent without workers, for tests of what people see."""

import asyncio
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, connect
from tests.waiting import until

START_S = 120.0
PRESSED_S = 0.3
"""Until the next Ctrl-C."""
Pushed = TypeVar("Pushed")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Home:
    """One test's folder: the user's runtime folder and the state of masters are below it."""

    folder: Path

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "holdfast.cli", *words]

    def environment(self) -> dict[str, str]:
        # The tests' own TMPDIR must stay free of our folders: conftest.py takes them for leftovers.
        path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        return {**os.environ, "XDG_RUNTIME_DIR": str(self.folder), "PYTHONPATH": path}

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*words),
            env={**self.environment(), **environment},
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    async def run_beside(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end while the agents of the test go on."""
        return await asyncio.to_thread(self.run, *words)

    def state(self, job: str) -> Path:
        return self.folder / "states" / job


@dataclass(frozen=True)
class Master:
    """A master that serves."""

    home: Home
    job: str
    address: str
    process: subprocess.Popen[str]

    @property
    def token(self) -> bytes:
        return read_token(self.home.state(self.job) / "token")

    @property
    def http(self) -> str:
        """The address of its HTTP side, as its note says it."""
        (note,) = self.home.folder.glob(f"holdfast-*/jobs/{self.job}.*.json")
        address: str = json.loads(note.read_text())["http"]
        return f"http://{address}"


@contextmanager
def running_master(home: Home, job: str = "t", *options: str) -> Iterator[Master]:
    """A master that has announced its address; stopped, or killed if it does not stop.

    It is stopped as a person without patience does it: to one Ctrl-C it would answer with a wait
    for the agents of the test, which have gone without a farewell (test_farewell.py).
    """
    words = ("master", "--job", job, "--listen", "127.0.0.1:0", "--state", str(home.state(job)))
    # Hollow agents do not beat, and commands may take long on a busy machine.
    patience = ("--silence", "600", "--lease", "600")
    home.state(job).parent.mkdir(exist_ok=True)
    with (
        (home.folder / f"{job}.log").open("w") as log,
        subprocess.Popen(
            home.command(*words, *patience, *options),
            env=home.environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        try:
            line = _first_line(process)
            yield Master(home, job, line.rpartition(" ")[2].strip(), process)
        finally:
            try:
                until(lambda: _interrupted(process), START_S, "the end of the master")
            finally:
                process.kill()


def _interrupted(process: subprocess.Popen[str]) -> bool:
    """Press Ctrl-C; whether it has ended then."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PRESSED_S)
    return process.poll() is not None


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_S), "the master said nothing"
    line = process.stdout.readline()
    assert "listening on" in line, f"the master ended with {process.wait(START_S)}"
    return line


RULES = m.JobRules(
    min_nodes=1, max_nodes=1, node_unit=1, last_call_s=1.0, join_timeout_s=60.0, max_restarts=3
)


class HollowAgent:
    """Speaks the agent's protocol and runs nothing."""

    def __init__(self) -> None:
        self._calls: dict[int, asyncio.Future[m.AnyMessage]] = {}
        self._pushed: asyncio.Queue[m.AnyMessage] = asyncio.Queue()
        self._link: Link | None = None

    @classmethod
    async def connected(cls, master: Master) -> "HollowAgent":
        agent = cls()
        agent.use(await connect(master.address, agent, master.token))
        return agent

    @classmethod
    async def attached(cls, master: Master, host: str = "node-a") -> "HollowAgent":
        agent = await cls.connected(master)
        attach = m.Attach(agent_key=host, rules=RULES, nproc=2, host=host, store_port=1)
        answer = await agent.ask(attach)
        assert isinstance(answer, m.Attached), answer
        return agent

    def use(self, link: Link) -> None:
        self._link = link

    def opened(self, link: Link) -> None:
        """Only servers are told."""

    def received(self, link: Link, frame: m.Frame) -> None:
        if frame.call:
            self._calls.pop(frame.call).set_result(frame.body)
        else:
            self._pushed.put_nowait(frame.body)

    def closed(self, link: Link) -> None:
        for call in self._calls.values():
            call.set_exception(ConnectionError("the master hung up"))

    async def ask(self, body: m.AnyMessage) -> m.AnyMessage:
        assert self._link is not None
        number = time.monotonic_ns()
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        self._link.send(body, number)
        return await asyncio.wait_for(answer, START_S)

    async def world(self) -> m.RunWorld:
        """The next world this agent is told to run."""
        return await self.pushed(m.RunWorld)

    async def pushed(self, kind: type[Pushed]) -> Pushed:
        """The next push of this kind; what came before it is forgotten."""
        while True:
            pushed = await asyncio.wait_for(self._pushed.get(), START_S)
            if isinstance(pushed, kind):
                return pushed

    async def work(self, world: m.RunWorld, *, last_step: int) -> None:
        """Claim that the workers started and finished three steps, and that the master knows it."""
        started = m.WorkersStarted(round=world.round, store_port=1, how="zygote", took_s=0.01)
        assert await self.ask(started) == m.Done()
        beat = m.Beat(
            round=world.round,
            steps=3,
            step=last_step,
            first_step_ago_s=0.0,
            last_step_ago_s=0.0,
            cpu=1.0,
            memory=1,
        )
        assert self._link is not None
        self._link.send(beat)
        await self.ask(m.KvCount(scope=0))

    async def fail(self, world: m.RunWorld) -> None:
        """Claim that rank 1 was killed."""
        failure = m.FailureInfo(
            rank=1,
            local_rank=1,
            pid=1,
            exit_code=None,
            signal=9,
            reason="killed",
            message="was killed by SIGKILL",
            last_step_ago_s=0.01,
        )
        assert await self.ask(m.WorkersFailed(world.round, (failure,))) == m.Done()

    async def finish(self, world: m.RunWorld) -> None:
        """Claim that every worker exited with code 0."""
        assert await self.ask(m.WorkersDone(world.round)) == m.Done()

    def hang_up(self) -> None:
        if self._link is not None:
            self._link.close()


async def recovered_once(master: Master) -> HollowAgent:
    """An agent whose job was interrupted once and steps again."""
    agent = await HollowAgent.attached(master)
    world = await agent.world()
    await agent.work(world, last_step=2)
    await agent.fail(world)
    await agent.work(await agent.world(), last_step=4)
    return agent
