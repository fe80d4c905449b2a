# SPDX-License-Identifier: Apache-2.0
"""How fast the output of workers gets through, and how much memory the launcher takes for it.

Four workers of one node print as fast as they can: lines, and a progress bar that never ends. The
benchmark reads the launcher's output from a pipe or, as a terminal window does, from a pseudo
terminal, and throws it away. torchrun shows its workers' output without touching it, except with
--tee, where it copies files to the console as Holdfast does. `--before SRC` measures another
version of Holdfast in the same run: SRC is the `src` folder of its checkout. `--place` measures
only one of the two places.
"""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from common import (
    ROOT,
    Bar,
    Spread,
    describe_machine,
    finish,
    print_machine,
    print_table,
    standard_parser,
)

WORKERS = 4
TOY = ROOT / "bench" / "toy_lines.py"
PLACES = ("pipe", "terminal")
LIMIT_S = 300.0
WATCH_S = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """What one run took."""

    took_s: float
    """From the start of the launcher to its end."""
    shown_bytes: int
    memory_mb: float
    """The most that the launcher itself took."""


def run_once(
    launcher: tuple[str, ...], source: Path | None, megabytes: int, kind: str, place: str
) -> Run:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    if source is not None:
        env["PYTHONPATH"] = str(source)
    with tempfile.TemporaryDirectory(prefix="holdfast-output-") as folder:
        argv = [*launcher, str(TOY), str(megabytes // WORKERS), kind]
        env["TMPDIR"] = folder
        reader, writer = pty.openpty() if place == "terminal" else os.pipe()
        # Holdfast shows its status where standard error is a terminal.
        error = writer if place == "terminal" else None
        began = time.monotonic()
        process = subprocess.Popen(
            argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=writer, stderr=error
        )
        os.close(writer)
        most, ended = [0.0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, most, ended))
        watcher.start()
        shown = sum(map(len, _chunks(reader)))
        code = process.wait(LIMIT_S)
        took_s = time.monotonic() - began
        ended.set()
        watcher.join()
        os.close(reader)
    if code != 0:
        raise RuntimeError(f"{argv} ended with {code}")
    return Run(took_s, shown, most[0])


def _chunks(reader: int) -> Iterator[bytes]:
    try:
        while data := os.read(reader, 1 << 20):
            yield data
    except OSError:  # A terminal ends so when the last process has let go of it.
        return


def _watch(pid: int, most: list[float], ended: threading.Event) -> None:
    """The kernel remembers the most that a process took; it is gone with the process."""
    while not ended.wait(WATCH_S):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            return
        found = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        most[0] = max(most[0], *(int(kb) / 1000 for kb in found), 0.0)


def main() -> int:
    parser = standard_parser(__doc__ or "")
    parser.add_argument("--mb", type=int, default=100, help="megabytes in all (default 100)")
    parser.add_argument("--runs", type=int, default=5, help="per cell (default 5)")
    parser.add_argument("--before", type=Path, metavar="SRC", help="another version, side by side")
    parser.add_argument("--place", choices=PLACES, help="only there")
    args = parser.parse_args()
    places = PLACES if args.place is None else (args.place,)
    megabytes, count = (8, 1) if args.quick else (args.mb, args.runs)
    holdfast = (sys.executable, "-m", "holdfast.cli", "run", "--no-spares", "--nproc-per-node=4")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4")
    cells: dict[str, tuple[tuple[str, ...], Path | None]] = {"holdfast": (holdfast, ROOT / "src")}
    if args.before is not None:
        cells["holdfast before"] = (holdfast, args.before.resolve())
    cells["torchrun --tee 3"] = ((*torchrun, "--tee=3"), None)
    cells["torchrun"] = (torchrun, None)
    machine = describe_machine()
    print_machine(machine)
    runs: dict[tuple[str, str, str], list[Run]] = {}
    for number in range(count):
        for place, kind in product(places, ("lines", "bars")):
            for name, (launcher, source) in cells.items():
                run = run_once(launcher, source, megabytes, kind, place)
                runs.setdefault((place, kind, name), []).append(run)
                print(f"{place}, {kind}, {name}, run {number + 1}: {run}", flush=True)
    rows = []
    for (place, kind, name), those in runs.items():
        took, memory = Spread.of(r.took_s for r in those), Spread.of(r.memory_mb for r in those)
        shown = Spread.of(r.shown_bytes / 1e6 for r in those)
        rows.append((place, kind, name, str(took), str(memory), str(shown)))
    head = (
        "where",
        "what",
        "launcher",
        "seconds, start and end included",
        "launcher, MB",
        "shown, MB",
    )
    print_table(f"{megabytes} MB printed by {WORKERS} workers", head, rows)
    bars = []
    if args.before is not None:
        for place in places:
            before, after = (
                runs[place, "lines", "holdfast before"],
                runs[place, "lines", "holdfast"],
            )
            for what, field, limit in (("seconds", "took_s", 1.05), ("memory", "memory_mb", 1.05)):
                a, b = (Spread.of(getattr(r, field) for r in those) for those in (after, before))
                ratio = None if a is None or b is None else a.median / b.median
                title = f"{what} on a {place}, as a share of the version before"
                bars.append(Bar(title, ratio, limit, False))
    return finish(bars, {"machine": machine, "megabytes": megabytes, "rows": rows}, args)


if __name__ == "__main__":
    sys.exit(main())
