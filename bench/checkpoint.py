# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint costs: torch.save, dcp, the prior art and Holdfast, beside the raw limits.

Each method saves the same GPT-like state with Adam in a process of its own, and measures the raw
two-threaded memcpy of the same bytes beside every save: ratios compare neighbours in time. The
prior art runs if --prior-art names a Python that has it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import (
    CONSOLE,
    ROOT,
    Bar,
    Spread,
    describe_machine,
    finish,
    kill_marked,
    print_machine,
    print_table,
    standard_parser,
)
from holdfast.checkpoint.peers import PeerClient
from holdfast.checkpoint.slots import Slot
from holdfast.model.checkpoint import rank_part
from holdfast.protocol.checkpoints import PartGet
from toy_peer import TOKEN, VERSION

PEERS = ("torch.save", "dcp.save", "dcp.async_save thread", "dcp.async_save process")
PRIOR_ART = "prior art, memory"
LIMIT_S = 1200.0
RESTORES = 5
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""The training must not get new memory at every step: its noise is larger than what we measure."""


def start_clean() -> None:
    """Write out and forget what the method before left in the page cache, where that is allowed.

    Otherwise the next one pays for it: its memory must first be taken from there.
    """
    os.sync()
    with contextlib.suppress(PermissionError):
        Path("/proc/sys/vm/drop_caches").write_text("1")


def run_peer(name: str, size: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """One peer in its own process; None if it failed, with its last words on the screen."""
    start_clean()
    python = args.prior_art if name == PRIOR_ART else sys.executable
    mark = f"HOLDFAST_BENCH={secrets.token_hex(8)}"
    env = {**os.environ, "OMP_NUM_THREADS": "2", **dict([mark.split("=")])}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        report, words = Path(folder) / "report.json", Path(folder) / "words"
        argv = [python, str(ROOT / "bench/toy_saves.py"), name, "--size", size]
        argv += ["--runs", str(args.runs), "--dir", folder, "--report", str(report)]
        with words.open("w") as output:
            subprocess.run(argv, stdout=output, stderr=output, timeout=LIMIT_S, env=env)
        kill_marked(mark)  # Some savers outlive their process, and leave their memory behind.
        Path("/dev/shm/ckpt_shm_0").unlink(missing_ok=True)
        if not report.exists():
            CONSOLE.print(f"{name} failed: {words.read_text()[-1000:]}")
            return None
        return dict(json.loads(report.read_text()))


def run_holdfast(size: str, args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """A job of one worker that saves, is killed and restores; its figures by name."""
    start_clean()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        report = Path(folder) / "report.jsonl"
        argv = [sys.executable, "-m", "holdfast.cli", "run", "--standalone"]
        argv += ["--nproc-per-node", "1", "--max-restarts", str(RESTORES)]
        argv += [str(ROOT / "bench/toy_flash.py"), "--size", size, "--runs", str(args.runs)]
        argv += ["--restores", str(RESTORES), "--blocks", str(args.blocks)]
        argv += ["--persists", str(args.persists)]
        argv += ["--dir", f"{folder}/saves", "--report", str(report)]
        argv += ["--warm-s", str(args.warm_s), "--idle-s", str(args.idle_s)]
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=os.environ | KEEP_MEMORY,
        )
        if done.returncode != 0:
            raise SystemExit(
                f"the Holdfast job failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        figures: dict[str, list[list[float]]] = {}
        for line in report.read_text().splitlines():
            entry = json.loads(line)
            figures.setdefault(entry["name"], []).append(entry["values"])
    if len(figures.get("persist", ())) < args.persists:
        raise SystemExit(f"the worker ended before all was measured:\n{done.stdout[-3000:]}")
    return figures


def ratio(pairs: Iterable[list[float]], over: int = 1) -> float:
    """The median of the quotients of neighbours."""
    return statistics.median(pair[0] / pair[over] for pair in pairs)


def measure_peer(mib: int, runs: int) -> tuple[Bar, dict[str, Any]]:
    """A part fetched from another process's byte service, verified, beside plain TCP."""
    size = mib * 2**20
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm"))
    peer = subprocess.Popen(
        [sys.executable, str(ROOT / "bench/toy_peer.py"), str(folder / "theirs"), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdout is not None
    assert peer.stdin is not None
    address, port = peer.stdout.readline().split()
    slot = Slot.create(folder / "ours", size)
    ctypes.memset(slot.address, 0, size)  # The memory of an agent is faulted in before its use.
    get = PartGet("/bench", VERSION, rank_part(0))
    client = PeerClient(address, TOKEN, None)
    ours, plain = [], []
    try:
        for _ in range(runs):
            slot.begin(VERSION)
            began = time.perf_counter()
            client.fetch(get, client.look(get, 60.0), slot, 120.0)
            ours.append(size / (time.perf_counter() - began))
            plain.append(plain_tcp_bytes_per_s(int(port), slot.data[:size]))
    finally:
        peer.stdin.close()
        peer.wait(10)
        slot.close()
        shutil.rmtree(folder)
    rows = [("Holdfast, digests checked", *_cell(one / 1e9 for one in ours))]
    rows.append(("plain TCP, one connection", *_cell(one / 1e9 for one in plain)))
    print_table(f"A part of {mib} MiB from a peer", ("GB/s", "median (least-most)", "runs"), rows)
    share = statistics.median(one / other for one, other in zip(ours, plain, strict=True))
    bar = Bar("peer fetch / plain loopback TCP", share, 0.6, at_least=True)
    return bar, {"holdfast": ours, "tcp": plain}


def plain_tcp_bytes_per_s(port: int, target: memoryview) -> float:
    """From another process into memory that is faulted in."""
    received, began = 0, time.perf_counter()
    with target, socket.create_connection(("127.0.0.1", port)) as peer:
        while received < len(target):
            count = peer.recv_into(target[received : received + 4 * 2**20])
            if count == 0:
                raise ConnectionError("the sender hung up")
            received += count
    return received / (time.perf_counter() - began)


def holdfast_rows(figures: dict[str, list[list[float]]]) -> list[tuple[str, str, str]]:
    blocking = figures["blocking"]
    raw_s = statistics.median(pair[1] for pair in blocking)
    added_s, error_s = added_to_a_step(figures, "save")
    copy_s, copy_error_s = added_to_a_step(figures, "copy")
    waits_s = _median_update_s(figures["step save"]) - _median_update_s(figures["step alone"])
    persist, dd, fio, *_ = zip(*figures["persist"], strict=True)
    return [
        ("first save, blocking s", *_cell(pair[0] for pair in figures["first"])),
        ("raw memcpy right before it, s", *_cell(pair[1] for pair in figures["first"])),
        ("later saves, blocking s", *_cell(pair[0] for pair in blocking)),
        ("raw memcpy of the same bytes, s", *_cell(pair[1] for pair in blocking)),
        ("overlap: the call, s", *_cell(one[0] for one in figures["overlap call"])),
        ("training step alone, s", *_cell(sum(step) for step in figures["step alone"])),
        ("training step beside a save, s", *_cell(sum(step) for step in figures["step save"])),
        ("a save adds to a step, s", f"{added_s:.3f} +- {error_s:.3f}", "1"),
        ("a bare memcpy by one thread adds, s", f"{copy_s:.3f} +- {copy_error_s:.3f}", "1"),
        ("a save adds, % of raw memcpy", f"{100 * added_s / raw_s:.1f}", "1"),
        ("the update waits for the copy, s", f"{waits_s:.3f}", "1"),
        ("persist, GB/s", *_cell(speed / 1e9 for speed in persist)),
        ("dd with O_DIRECT on the same disk, GB/s", *_cell(speed / 1e9 for speed in dd)),
        ("fio with O_DIRECT on the same disk, GB/s", *_cell(speed / 1e9 for speed in fio)),
        ("restore in a restarted worker, s", *_cell(one[0] for one in figures["restore"])),
        ("raw memcpy back, s", *_cell(one[1] for one in figures["restore"])),
        ("agent while idle, % of a core", *_cell(100 * one[0] for one in figures["idle"])),
    ]


def added_to_a_step(figures: dict[str, list[list[float]]], kind: str) -> tuple[float, float]:
    """Seconds that a save, or a bare copy, adds to a step, and the standard error of that.

    The speed of this machine changes from second to second by more than that. So each forward pass
    is compared with itself: its blocks are alike, and the last ones run when the copy is over. What
    is left is compared with the same of passes alone, which took turns. (Medians of each block with
    and without, or of its share of the pass, had larger errors.)
    """
    beside, alone = figures[f"forward {kind}"], figures["forward alone"]
    chance = random.Random(1)

    def drawn() -> float:
        one, other = chance.choices(beside, k=len(beside)), chance.choices(alone, k=len(alone))
        return _slower_at_first(one) - _slower_at_first(other)

    error_s = statistics.stdev(drawn() for _ in range(200))
    return _slower_at_first(beside) - _slower_at_first(alone), error_s


def _slower_at_first(passes: list[list[float]]) -> float:
    """How much longer the first three fifths of the blocks take than as many of the last ones."""
    first = 3 * len(passes[0]) // 5
    return statistics.median(
        sum(blocks[:first]) - first * statistics.fmean(blocks[first:]) for blocks in passes
    )


def _median_update_s(steps: list[list[float]]) -> float:
    return statistics.median(step[-1] for step in steps)


def _cell(values: Iterable[float]) -> tuple[str, str]:
    spread = Spread.of(values)
    return (str(spread), str(spread.count)) if spread is not None else ("-", "0")


def bars_of(size: str, figures: dict[str, list[list[float]]]) -> list[Bar]:
    blocking = figures["blocking"]
    raw_s = statistics.median(pair[1] for pair in blocking)
    later_s = statistics.median(pair[0] for pair in blocking)
    call_s = statistics.median(one[0] for one in figures["overlap call"])
    added_s, _ = added_to_a_step(figures, "save")
    persist, dd, fio, *_ = map(statistics.median, zip(*figures["persist"], strict=True))
    return [
        Bar(f"{size}: blocking / raw memcpy", ratio(blocking), 1.1, at_least=False),
        Bar(f"{size}: first save / later", figures["first"][0][0] / later_s, 1.25, at_least=False),
        Bar(f"{size}: overlap call, ms", 1e3 * call_s, 20, at_least=False),
        Bar(f"{size}: overlap, added / raw memcpy", added_s / raw_s, 0.1, at_least=False),
        Bar(
            f"{size}: persist / the better of dd and fio",
            persist / max(dd, fio),
            0.85,
            at_least=True,
        ),
        Bar(f"{size}: restore / memcpy", ratio(figures["restore"]), 1.2, at_least=False),
        Bar(f"{size}: agent idle, % of a core", 100 * figures["idle"][0][0], 1, at_least=False),
    ]


def measure_size(size: str, args: argparse.Namespace) -> tuple[list[Bar], dict[str, Any]]:
    """Everything for one size of state."""
    peers = [] if args.alone else list(PEERS) + ([PRIOR_ART] if args.prior_art else [])
    found = {name: run_peer(name, size, args) for name in peers}
    figures = run_holdfast(size, args)
    rows: list[tuple[str, ...]] = []
    for name, saves in found.items():
        if saves is None:
            rows.append((name, "failed", "-", "-", "-"))
            continue
        blocked, total = saves["blocked"], saves["total"]
        later = statistics.median(b / r for b, r in zip(blocked[1:], saves["raw"][1:], strict=True))
        first = f"{blocked[0]:.3g}"
        rows.append(
            (name, first, str(Spread.of(blocked[1:])), f"{later:.2f}", str(Spread.of(total[1:])))
        )
    blocking = figures["blocking"]
    saved = [
        blocked_s + size_bytes / speed for speed, _, _, blocked_s, size_bytes in figures["persist"]
    ]
    rows.append(
        (
            "Holdfast",
            f"{figures['first'][0][0]:.3g}",
            str(Spread.of(pair[0] for pair in blocking)),
            f"{ratio(blocking):.2f}",
            str(Spread.of(saved)),
        )
    )
    columns = (
        "saving " + size,
        "first, blocking s",
        "later, blocking s",
        "/ raw memcpy",
        "on disk, synced, s",
    )
    print_table(f"Saves of {size}", columns, rows)
    print_table(
        f"Holdfast, {size}", ("figure", "median (least-most)", "runs"), holdfast_rows(figures)
    )
    return bars_of(size, figures), {"peers": found, "holdfast": figures}


def main() -> int:
    parser = standard_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, default=ROOT / "bench/results", help="on this disk")
    parser.add_argument("--sizes", nargs="+", default=["2g", "4g"], choices=["tiny", "2g", "4g"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="Holdfast only, none of the others")
    parser.add_argument("--prior-art", metavar="PYTHON", help="a Python that has dlrover")
    args = parser.parse_args()
    args.warm_s, args.idle_s, args.blocks = 20.0, 10.0, 1000
    if args.quick:
        args.sizes, args.runs, args.warm_s, args.idle_s, args.blocks = ["tiny"], 2, 3.0, 2.0, 40
    # A disk that others use too stands still now and then: more of these than of the rest.
    args.persists = 2 * args.runs + 1
    args.dir.mkdir(exist_ok=True)
    machine = describe_machine()
    print_machine(machine)
    bars: list[Bar] = []
    document: dict[str, Any] = {"machine": machine, "sizes": {}}
    for size in args.sizes:
        new_bars, document["sizes"][size] = measure_size(size, args)
        bars += new_bars
    bar, document["peer"] = measure_peer(256 if args.quick else 1024, args.runs)
    bars.append(bar)
    return finish(bars, document, args)


if __name__ == "__main__":
    sys.exit(main())
