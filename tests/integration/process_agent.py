# SPDX-License-Identifier: Apache-2.0
"""A bare agent for the tests of `holdfast.agent.processes`: no master, orders come as JSON lines.

It runs as its own process because it adopts orphans and takes SIGCHLD, and so that it can be
killed. `Agent` is the test's end; `main` is the program.
"""

import asyncio
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import uvloop

from holdfast.agent.children import leave_alone
from holdfast.agent.processes import Processes, RunMode, WorkerOrder
from holdfast.runtime.observe import Details, Level
from holdfast.worker.progress import Progress, ProgressCell
from tests.waiting import until

TIMEOUT_S = 120.0
ROOT = Path(__file__).parents[2]
BIG = 1 << 20

Event = dict[str, Any]


class Agent:
    """Starts the program and speaks with it."""

    def __init__(
        self,
        folder: Path,
        *,
        spares: bool = True,
        loop: str = "uvloop",
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*prefix, sys.executable, __file__, loop, str(int(spares)), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd=folder,
        )
        self.pid = self._process.pid
        self._events: queue.Queue[Event] = queue.Queue()
        self._seen: list[Event] = []
        self._starts = 0
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(TIMEOUT_S)
        finally:
            self._process.kill()

    def send(self, do: str, **arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
        self._process.stdin.flush()

    def start(
        self,
        *argv: str,
        mode: str = "script",
        local_rank: int = 0,
        env: dict[str, str] | None = None,
        progress: str = "",
    ) -> Event:
        """Start a worker; the answer has its pid and how it was started."""
        self._starts += 1
        out = self.folder / f"out-{self._starts}"
        self.send(
            "start",
            local_rank=local_rank,
            argv=argv,
            mode=mode,
            env=env or {},
            progress=progress,
            out=str(out),
        )
        return self.wait("started", out=str(out)) | {"path": out}

    def run(self, *argv: str, **options: Any) -> tuple[Event, Event]:
        """Start a worker and wait for its end."""
        started = self.start(*argv, **options)
        return started, self.wait("exit", pid=started["pid"])

    def wait(self, kind: str, timeout_s: float = TIMEOUT_S, **fields: object) -> Event:
        """The next event of this kind with these fields; each event is given out once."""
        wanted = {"kind": kind} | fields
        deadline = time.monotonic() + timeout_s
        for event in self._seen:
            if wanted.items() <= event.items():
                self._seen.remove(event)
                return event
        while True:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            if wanted.items() <= event.items():
                return event
            assert event["kind"] != "end", f"the agent has ended; expected {wanted}"
            self._seen.append(event)

    def so_far(self, kind: str) -> list[Event]:
        """Events of a kind that nobody has waited for, up to now."""
        self.send("ping")
        self.wait("pong")
        return [event for event in self._seen if event["kind"] == kind]

    def wait_for_spare(self, state: str) -> None:
        """Until spares are in this state, and have imported all that was learned from workers."""

        def is_so() -> bool:
            self.send("spare_state")
            spare = self.wait("spare")
            return spare["state"] == state and (spare["knows_all"] or state.startswith("off"))

        until(is_so, TIMEOUT_S, f"spare state {state}")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(TIMEOUT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))
        self._events.put({"kind": "end"})


def state(pid: int) -> str:
    """As the kernel calls it: "T" is stopped; empty when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    return state(pid) not in ("", "Z")


def age_s(pid: int) -> float:
    started_ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")


def read_progress(path: str) -> Progress:
    cell = ProgressCell.open(path)
    try:
        return cell.read()
    finally:
        cell.close()


def emit(kind: str, **fields: object) -> None:
    print(json.dumps({"kind": kind} | fields), flush=True)


def say(sentence: str | Details, level: Level = Level.INFO, /) -> None:
    """What people see, and what is in a log file only."""
    emit("say" if level >= Level.INFO else "detail", text=str(sentence))


class Program:
    """The agent's side."""

    def __init__(self, *, spares: bool, folder: str) -> None:
        self._processes = Processes(
            on_exit=lambda ended: emit("exit", **dataclasses.asdict(ended)),
            on_stopped=lambda rank, number: emit("stopped", local_rank=rank, signal=number),
            on_continued=lambda rank: emit("continued", local_rank=rank),
            say=say,
            spares=spares,
            base_env=os.environ,
            excluded_roots=(folder,),
            on_warm=self._warm,
        )
        self._taught: tuple[str, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    async def obey(self, order: Event) -> None:
        match order.pop("do"):
            case "start":
                self._tasks.add(asyncio.create_task(self._start(**order)))
            case "signal_all":
                self._processes.signal_all(order["signal"])
            case "keep_lease":
                until_s = asyncio.get_running_loop().time() + order["seconds"]
                for _ in range(order.get("times", 1)):
                    self._processes.keep_lease(until_s)
            case "other_children":
                sleep = ("sleep", "1000")
                inside, outside = (
                    subprocess.Popen(sleep, start_new_session=own) for own in (False, True)
                )
                leave_alone(outside.pid)
                emit("others", pids=[inside.pid, outside.pid])
            case "kill_now":
                self._processes.kill_now()
            case "stop":
                began = time.monotonic()
                await self._processes.stop(order["grace_s"])
                emit("all_stopped", took_s=time.monotonic() - began)
            case "spare_state":
                knows_all = self._taught == self._processes.learned
                emit("spare", state=self._processes.spare_state, knows_all=knows_all)
            case "ping":
                emit("pong")

    def _warm(self) -> None:
        self._taught = self._processes.learned
        emit("warm")

    async def close(self) -> None:
        await self._processes.close()

    async def _start(self, *, out: str, env: dict[str, str], mode: str, **rest: Any) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        stdout, stderr = os.open(out, flags), os.open(f"{out}.err", flags)
        if rest["progress"]:
            ProgressCell.create(rest["progress"]).close()
        began = time.monotonic()
        try:
            rest["argv"] = tuple(rest["argv"])
            whole = {**os.environ, **env}
            order = WorkerOrder(mode=RunMode(mode), env=whole, stdout=stdout, stderr=stderr, **rest)
            worker = await self._processes.start(order)
        finally:
            os.close(stdout)
            os.close(stderr)
        emit("started", pid=worker.pid, how=worker.how, out=out, began=began)


async def serve(*, spares: bool, folder: str) -> None:
    program = Program(spares=spares, folder=folder)
    orders = asyncio.StreamReader(limit=BIG)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    emit("up")
    while line := await orders.readline():
        await program.obey(json.loads(line))
    await program.close()


def main() -> None:
    loop, spares, folder = sys.argv[1:]
    make_loop = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(serve(spares=spares == "1", folder=folder))


if __name__ == "__main__":
    main()
