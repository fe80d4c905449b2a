# SPDX-License-Identifier: Apache-2.0
"""Stops from outside: is the newest step that was saved, to memory only, on storage afterwards?

A job of one node saves at every step. At a random moment it gets SIGTERM twice within 20 ms, as
SLURM sends it at a time limit: in turn its launcher alone, and every process of the job. The job
must end with 143, and the newest step must be on storage and whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from common import (
    ROOT,
    Bar,
    Spread,
    StampedProcess,
    describe_machine,
    finish,
    kill_marked,
    print_machine,
    print_table,
    standard_parser,
    wait_for,
)

HOLDFAST = (sys.executable, "-m", "holdfast.cli")
START_S, END_S = 300.0, 400.0
STEPS_MIN = 4
"""So that every slot has been written to."""


@dataclass(frozen=True, slots=True)
class Stop:
    """What one stop left."""

    whom: str
    saved: int
    """The newest step whose save returned."""
    stored: int
    exit_code: int | None
    is_whole: bool
    took_s: float

    @property
    def is_good(self) -> bool:
        return self.stored >= self.saved and self.exit_code == 143 and self.is_whole


def stop_once(whom: str, megabytes: int, chance: random.Random) -> Stop:
    """Start a job, stop it, look."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-stops-"))
    mark = f"HOLDFAST_BENCH_STOPS={folder}"
    directory, note = folder / "saves", folder / "saves.step"
    env = {**os.environ, "HOLDFAST_BENCH_STOPS": str(folder), "TMPDIR": str(folder)}
    script = (str(ROOT / "bench" / "toy_stops.py"), str(directory), str(megabytes))
    argv = (*HOLDFAST, "run", *script)
    try:
        job = StampedProcess(argv, env, folder)
        wait_for(
            "the first steps",
            lambda: not job.is_running() or (note.exists() and int(note.read_text()) >= STEPS_MIN),
            START_S,
        )
        if not job.is_running():
            raise RuntimeError(f"the job ended by itself:\n{job.tail(20)}")
        time.sleep(chance.uniform(0.0, 1.0))
        processes = [psutil.Process(job.pid)] if whom == "launcher" else _of_job(folder)
        began = time.monotonic()
        for pause_s in (chance.uniform(0.0, 0.02), 0.0):
            for process in processes:
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)
            time.sleep(pause_s)
        wait_for("the end of the job", lambda: not job.is_running(), END_S)
        took_s = time.monotonic() - began
        saved, stored = int(note.read_text()), _newest(directory)
        stop = Stop(whom, saved, stored, job.exit_code, _is_whole(directory, env), took_s)
        if not stop.is_good:
            print(job.tail(30), flush=True)
        return stop
    finally:
        kill_marked(mark)
        shutil.rmtree(folder, ignore_errors=True)


def _of_job(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOLDFAST_BENCH_STOPS") == str(folder):
                found.append(process)
    return found


def _newest(directory: Path) -> int:
    return max((int(path.name.split("-")[1]) for path in directory.glob("step-*")), default=-1)


def _is_whole(directory: Path, env: Mapping[str, str]) -> bool:
    command = [*HOLDFAST, "ckpt", "verify", str(directory)]
    return subprocess.run(command, env=dict(env), capture_output=True, check=False).returncode == 0


def main() -> int:
    parser = standard_parser(__doc__ or "")
    parser.add_argument("--stops", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--mb", type=int, default=2048, help="megabytes of state (default 2048)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    args = parser.parse_args()
    count, megabytes = (2, 16) if args.quick else (args.stops, args.mb)
    machine = describe_machine()
    print_machine(machine)
    chance, stops = random.Random(args.seed), list[Stop]()
    for number in range(count):
        stops.append(stop_once("everyone" if number % 2 else "launcher", megabytes, chance))
        print(f"{number + 1} of {count}: {stops[-1]}", flush=True)
    rows = []
    for whom in ("launcher", "everyone"):
        those = [stop for stop in stops if stop.whom == whom]
        good = sum(stop.is_good for stop in those)
        took = Spread.of(stop.took_s for stop in those)
        rows.append((whom, f"{good} of {len(those)}", str(took or "-")))
    title = f"SIGTERM twice, {megabytes} MB of state in memory"
    print_table(title, ("to", "newest step on storage", "seconds to the end"), rows)
    bars = [Bar("stops that lost nothing", sum(s.is_good for s in stops), len(stops), True)]
    return finish(bars, {"machine": machine, "megabytes": megabytes, "rows": rows}, args)


if __name__ == "__main__":
    sys.exit(main())
