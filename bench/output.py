# SPDX-License-Identifier: Apache-2.0
"""How fast the output of workers gets through, and how much memory the launcher takes for it.

Four workers of one node print as fast as they can: lines, and a progress bar that never ends. The
benchmark reads the launcher's output from a pipe and throws it away. torchrun shows its workers'
output without touching it, except with --tee, where it copies files to the console as Holdfast
does. `--before SRC` measures another version of Holdfast in the same run: SRC is the `src` folder
of its checkout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
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


def run_once(launcher: tuple[str, ...], source: Path | None, megabytes: int, kind: str) -> Run:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if source is not None:
        env["PYTHONPATH"] = str(source)
    with tempfile.TemporaryDirectory(prefix="holdfast-output-") as folder:
        argv = [*launcher, str(TOY), str(megabytes // WORKERS), kind]
        env["TMPDIR"] = folder
        began = time.monotonic()
        process = subprocess.Popen(
            argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        most, ended = [0.0], threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, most, ended))
        watcher.start()
        assert process.stdout is not None
        shown = 0
        while data := os.read(process.stdout.fileno(), 1 << 20):
            shown += len(data)
        code = process.wait(LIMIT_S)
        took_s = time.monotonic() - began
        ended.set()
        watcher.join()
        process.stdout.close()
    if code != 0:
        raise RuntimeError(f"{argv} ended with {code}")
    return Run(took_s, shown, most[0])


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
    args = parser.parse_args()
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
    runs: dict[tuple[str, str], list[Run]] = {}
    for number in range(count):
        for kind in ("lines", "bars"):
            for name, (launcher, source) in cells.items():
                run = run_once(launcher, source, megabytes, kind)
                runs.setdefault((kind, name), []).append(run)
                print(f"{kind}, {name}, run {number + 1}: {run}", flush=True)
    rows = []
    for (kind, name), those in runs.items():
        took, memory = Spread.of(r.took_s for r in those), Spread.of(r.memory_mb for r in those)
        shown = Spread.of(r.shown_bytes / 1e6 for r in those)
        rows.append((kind, name, str(took), str(memory), str(shown)))
    head = ("what", "launcher", "seconds, start and end included", "launcher, MB", "shown, MB")
    print_table(f"{megabytes} MB printed by {WORKERS} workers", head, rows)
    bars = []
    if args.before is not None:
        before, after = runs["lines", "holdfast before"], runs["lines", "holdfast"]
        for what, field, limit in (("seconds", "took_s", 1.05), ("memory", "memory_mb", 1.05)):
            a, b = (Spread.of(getattr(r, field) for r in those) for those in (after, before))
            ratio = None if a is None or b is None else a.median / b.median
            bars.append(Bar(f"{what}, as a share of the version before", ratio, limit, False))
    return finish(bars, {"machine": machine, "megabytes": megabytes, "rows": rows}, args)


if __name__ == "__main__":
    sys.exit(main())
