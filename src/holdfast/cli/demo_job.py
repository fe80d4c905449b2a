# SPDX-License-Identifier: Apache-2.0
"""The job of the demo: started as a user would, watched as a user could, ended without a trace."""

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from holdfast import demo
from holdfast.cli.demo_curve import StepFile, StepLine
from holdfast.master import notes
from holdfast.master.view import JobView
from holdfast.model.errors import HoldfastError, UsageError
from holdfast.protocol import messages as m
from holdfast.runtime.settings import environment, runtime_root
from holdfast.runtime.token import read_token
from holdfast.runtime.transport import Link, connect
from holdfast.worker.linux import die_with_parent

NODES = 2
SAVE_EVERY = 20
OBSERVE_S = 0.25
RETRY_S = 0.05
STOP_S = 8.0
DYING_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """The folders that the job writes to."""

    private: Path
    """Temporary files of all its processes; removed at the end."""
    results: Path
    """Metrics, checkpoint and logs."""

    @property
    def metrics(self) -> Path:
        return self.results / "metrics.jsonl"

    @property
    def launcher_log(self) -> Path:
        return self.results / "launcher.log"

    @property
    def enough(self) -> Path:
        """The script trains on until this file exists."""
        return self.private / "enough"


def script() -> str:
    """The path of the training script, found without importing it; UsageError without torch."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("the demo trains with PyTorch: install holdfast[torch] first")
    return str(Path(demo.__file__).with_name("train.py"))


class DemoJob:
    """`holdfast run` on two local nodes, and what can be observed of it from outside."""

    def __init__(self, name: str, folders: Folders, steps: int) -> None:
        self.name = name
        self.folders = folders
        self.lines: list[StepLine] = []
        self._steps = StepFile(folders.metrics)
        self._command = [
            *(sys.executable, "-m", "holdfast.cli", "run", "--job", name),
            *("--local-nodes", str(NODES), "--nnodes", f"1:{NODES}", "--nproc-per-node", "1"),
            *("--redirects", "3", "--log-dir", str(folders.results / "logs")),
            *(script(), "--dir", str(folders.results), "--metrics", str(folders.metrics)),
            *("--save-every", str(SAVE_EVERY), "--steps", str(steps)),
            *("--until", str(folders.enough)),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.folders.launcher_log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folders.private,
                env=_environment(self.folders.private),
                # A Ctrl-C is for the demo, which then ends the job in order.
                start_new_session=True,
                # If the demo ends in any way, the launcher ends too, and that ends the rest.
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the launcher; None while it runs."""
        return None if self._process is None else self._process.returncode

    def read_steps(self) -> None:
        """Bring `lines` up to date."""
        self.lines += self._steps.new_lines()

    def workers(self) -> dict[int, int]:
        """The process of each rank in the newest round that has finished a step."""
        newest = max((line.round for line in self.lines), default=0)
        return {line.rank: line.pid for line in self.lines if line.round == newest}

    def master_pid(self) -> int:
        return notes.find(self.name).pid

    def agent_of(self, worker_pid: int) -> int:
        """The agent, which is the parent of its workers."""
        return int(psutil.Process(worker_pid).ppid())

    def is_warm(self) -> bool:
        """Whether every node has its zygote and has forked from it: its next worker is quick."""
        try:
            agents = {self.agent_of(pid) for pid in self.workers().values()}
            return len(agents) == NODES and all(_prepared(agent) > 1 for agent in agents)
        except psutil.Error:
            return False

    async def stop(self) -> None:
        """End the launcher and every process of the job that is left."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        # The lifeline ends the rest; a process that does not notice within a moment is killed.
        private = str(self.folders.private)
        _, alive = await asyncio.to_thread(psutil.wait_procs, list(_processes(private)), DYING_S)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, alive, DYING_S)

    def last_words(self) -> str:
        """The end of the launcher's output."""
        with contextlib.suppress(OSError):
            return "\n".join(self.folders.launcher_log.read_text().splitlines()[-8:])
        return ""


def kill(pid: int) -> float:
    """SIGKILL; returns the moment."""
    now = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    return now


def _environment(private: Path) -> dict[str, str]:
    """No setting for other jobs may change this one, and all its temporary files are the demo's."""
    own = {"TMPDIR": str(private), "XDG_RUNTIME_DIR": str(runtime_root().parent)}
    foreign = ("PET_", "HOLDFAST_MASTER", "HOLDFAST_TOKEN_FILE")
    return {k: v for k, v in environment().items() if not k.startswith(foreign)} | own


def _prepared(agent: int) -> int:
    """How many children of an agent are its zygote, a spare or the store of the next round."""
    commands = [child.cmdline() for child in psutil.Process(agent).children()]
    return sum(not {"spare", "holdfast.torch.elastic.store_server"}.isdisjoint(c) for c in commands)


def _processes(private: str) -> Iterator[psutil.Process]:
    """Every process that has the private folder for its temporary files."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == private:
                yield process


class Watch:
    """Follows the job's masters, one after another, and keeps the newest state."""

    def __init__(self, job: str, on_story: Callable[[m.Story], None]) -> None:
        self.view: JobView | None = None
        self.answered_at = 0.0
        self._job = job
        self._on_story = on_story
        self._lost = asyncio.Event()

    @property
    def generation(self) -> int:
        """The generation of the master that answered last; every new master has a higher one."""
        return self.view.world.generation if self.view is not None else 0

    async def run(self) -> None:
        """Follow until cancelled. A master that is away is asked again soon."""
        while True:
            with contextlib.suppress(HoldfastError):
                await self._follow(notes.find(self._job))
            await asyncio.sleep(RETRY_S)

    async def _follow(self, note: notes.Note) -> None:
        self._lost.clear()
        link = await connect(note.address, self, read_token(Path(note.token_file)))
        try:
            while not self._lost.is_set():
                link.send(m.Observe(follow=True), 1)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), OBSERVE_S)
        finally:
            link.abort()

    def opened(self, link: Link) -> None:
        """Never called: only servers hear of new links."""

    def received(self, link: Link, frame: m.Frame) -> None:
        match frame.body:
            case m.Observed(state=state):
                self.view = msgspec.json.decode(state, type=JobView)
                self.answered_at = time.monotonic()
            case m.Story():
                self._on_story(frame.body)
                if frame.body.kind == "JobFinished":
                    # The very last state; the master is gone a moment later.
                    link.send(m.Observe(follow=True), 1)

    def closed(self, link: Link) -> None:
        self._lost.set()
