# SPDX-License-Identifier: Apache-2.0
"""The toy DDP job under a launcher: its processes, its event log, and a clean end of everything.

Apart from recovery.py, so that what is measured and how a job is driven can be read one at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from common import ROOT, StampedProcess, kill_marked, wait_for

TOY = ROOT / "bench" / "toy_ddp.py"
TORCHRUN, TORCHRUN_DEFAULT, HOLDFAST = "torchrun", "torchrun-default", "holdfast"

START_LIMIT_S = 60.0
STOP_GRACE_S = 10.0
WARM_STEPS = 30
WARM_S = 6.0
EARLY_STEPS = 40
EARLY_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job's shape and what is killed in it."""

    key: str
    title: str
    nnodes: str
    node_count: int
    procs_per_node: int
    kills: str
    returns: bool = False
    least_ratio: float = 0.0
    spares: int = 0
    """Nodes that are there from the start and wait for a place."""
    is_early: bool = False
    """Whether the kill comes before preparations can be expected."""

    @property
    def world(self) -> int:
        return self.node_count * self.procs_per_node


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the toy's log."""

    t: float
    rank: int
    world: int
    round: int
    node: str
    pid: int
    what: str
    step: int


class Job:
    """One toy job under one launcher on this machine; close() removes all that it leaves behind."""

    def __init__(self, launcher: str, scenario: Scenario) -> None:
        self.launcher = launcher
        self.scenario = scenario
        self.scratch = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        self._log = self.scratch / "toy.jsonl"
        self._log.touch()
        self._log_read = 0
        self._events: list[Event] = []
        self.nodes: list[StampedProcess] = []
        self.master: StampedProcess | None = None
        self._address = ""

    def start(self) -> None:
        if self.launcher == HOLDFAST and self.scenario.node_count > 1:
            self.start_master("127.0.0.1:0")
        elif self.launcher != HOLDFAST:
            self._address = f"127.0.0.1:{_free_port()}"
        self.start_node(0)
        if self.launcher != HOLDFAST:
            # Whoever binds first hosts torchrun's store, and a job does not outlive its store's
            # node: it must be the node that no scenario kills.
            port = int(self._address.rpartition(":")[2])
            is_listening = partial(_is_listening, self.nodes[0].pid, port)
            wait_for("torchrun's store", is_listening, START_LIMIT_S)
        for index in range(1, self.scenario.node_count + self.scenario.spares):
            self.start_node(index)

    def start_master(self, listen: str) -> None:
        argv = ["master", "--job", "bench", "--listen", listen, "--state", str(self.scratch)]
        master = self._spawn([sys.executable, "-m", "holdfast.cli", *argv], "master")
        self.master = master

        def find_address() -> bool:
            for _, line in master.lines:
                if found := re.search(r"master listening on (\S+:\d+)", line):
                    self._address = found[1]
                    return True
            return not master.is_running()

        wait_for("the master's address", find_address, START_LIMIT_S)
        if not master.is_running():
            raise RuntimeError("the master ended: " + master.tail(5))

    def restart_master(self) -> None:
        self.start_master(self._address)

    def start_node(self, index: int) -> None:
        self.nodes.append(self._spawn(self._node_command(), str(index)))

    def _node_command(self) -> list[str]:
        shape = [
            f"--nnodes={self.scenario.nnodes}",
            f"--nproc-per-node={self.scenario.procs_per_node}",
            "--max-restarts=10",
        ]
        if self.launcher != HOLDFAST:
            c10d = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._address}"]
            peer = [*c10d, "--local-addr=127.0.0.1", str(TOY)]
            return [sys.executable, "-m", "torch.distributed.run", *shape, *peer]
        joined = ["--master", self._address, "--token-file", str(self.scratch / "token")]
        where = joined if self._address else []
        return [sys.executable, "-m", "holdfast.cli", "run", *shape, *where, str(TOY)]

    def _spawn(self, argv: Sequence[str], node: str) -> StampedProcess:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "LOGLEVEL": "INFO",
            "TOY_LOG": str(self._log),
            "TOY_NODE": node,
        }
        if self.launcher == TORCHRUN:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        return StampedProcess(argv, env, self.scratch)

    def events(self) -> list[Event]:
        """All events so far. Only new lines are parsed: the bench must not load the job's cores."""
        with self._log.open("rb") as log:
            log.seek(self._log_read)
            new = log.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._log_read += len(complete)
        self._events += [Event(**json.loads(line)) for line in complete.splitlines()]
        return self._events

    def live_steps(self) -> dict[int, list[Event]]:
        """The steps of the processes that made the newest world, by pid."""
        steps: dict[int, list[Event]] = {}
        newest: dict[int, int] = {}
        for event in self.events():
            if event.what == "step":
                steps.setdefault(event.pid, []).append(event)
                newest[event.rank] = event.pid
        return {pid: steps[pid] for pid in newest.values()}

    def wait_warm(self, least_s: float = WARM_S) -> None:
        """Until all ranks have stepped for so long that a launcher has made its preparations."""

        def is_warm() -> bool:
            if not all(node.is_running() for node in self.nodes):
                raise RuntimeError(f"{self.launcher} ended early")
            if self.launcher == HOLDFAST and not all(map(_says_ready, self.nodes)):
                return False
            ranks = self.live_steps().values()
            return len(ranks) == self.scenario.world and all(
                len(steps) >= WARM_STEPS and steps[-1].t - steps[0].t >= least_s for steps in ranks
            )

        wait_for(f"{WARM_STEPS} steps of {self.launcher}", is_warm, START_LIMIT_S + least_s)

    def wait_early(self) -> None:
        """Until one second after all ranks have made their 40th step, and not longer."""

        def is_due() -> bool:
            ranks = [steps for steps in self.live_steps().values() if len(steps) >= EARLY_STEPS]
            if len(ranks) < self.scenario.world:
                return False
            last = max(steps[EARLY_STEPS - 1].t for steps in ranks)
            return time.monotonic() >= last + EARLY_S

        wait_for(f"{EARLY_STEPS} steps of {self.launcher}", is_due, START_LIMIT_S)

    def lines(self) -> list[tuple[float, str]]:
        parts = [*self.nodes, *([self.master] if self.master else [])]
        return sorted(line for part in parts for line in part.lines)

    def tail(self) -> str:
        parts = [*self.nodes, *([self.master] if self.master else [])]
        return "\n".join(part.tail(12) for part in parts)

    def close(self) -> None:
        for process in [*self.nodes, *([self.master] if self.master else [])]:
            process.stop(STOP_GRACE_S)
        kill_marked(f"TOY_LOG={self._log}")
        shutil.rmtree(self.scratch)


def _is_listening(pid: int, port: int) -> bool:
    sockets = psutil.Process(pid).net_connections(kind="tcp")
    return any(s.status == psutil.CONN_LISTEN and s.laddr.port == port for s in sockets)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _says_ready(node: StampedProcess) -> bool:
    """Holdfast says when its preparations are made; torchrun makes none."""
    return any("ready for a fast " in text for _, text in node.lines)
