# SPDX-License-Identifier: Apache-2.0
"""How large a job one master carries: joins, replacements, beats, memory, durable sets.

A real `holdfast master` process is driven by hollow agents (see hollow.py) over loopback TCP, each
on its own connection. Clients and master share this machine: wall times include both, so the
CPU time of the master stands beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from common import (
    CONSOLE,
    ROOT,
    Bar,
    Spread,
    describe_machine,
    finish,
    print_machine,
    print_table,
    running,
    standard_parser,
)
from holdfast.runtime.token import read_token
from hollow import Fleet, KvLoad

BEAT_S = 10.0
SILENCE_S = 60.0
LIMIT_S = 120.0
RECONNECT_GRACE_S = 0.3
ANNOUNCEMENT = "holdfast master listening on "

SESSIONS = 256
LINKS = 4

# Measured earlier on a machine of this kind (baselines.md, section 7).
QUOTED = (
    ("dlrover 0.6.1 local master, heartbeats/s, 64 gRPC clients", "941-1079"),
    ("dlrover 0.6.1 local master, shard get + report/s, 64 gRPC clients", "577-660"),
    ("dlrover 0.6.1 local master, kv set/s (memory only), 64 gRPC clients", "1227"),
    ("c10d rendezvous, first join of 128 agents, s", "4.6-4.9"),
    ("c10d rendezvous, re-join of 128 agents, s", "19.0-19.5"),
)


class LiveMaster:
    """A master process under measurement."""

    def __init__(self, folder: Path) -> None:
        state = folder / "state"
        argv = [sys.executable, "-m", "holdfast.cli", "master", "--job", "bench", "--http", "off"]
        argv += ["--state", str(state), "--beat", f"{BEAT_S:g}", "--silence", f"{SILENCE_S:g}"]
        # Its note for `holdfast status` stays in its own folder.
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_RUNTIME_DIR": str(folder),
        }
        with open(folder / "log", "wb") as log:
            self._child = subprocess.Popen(
                argv, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._process = psutil.Process(self._child.pid)
        assert self._child.stdout is not None
        line = self._child.stdout.readline().strip()
        if not line.startswith(ANNOUNCEMENT):
            self.end()
            raise RuntimeError(f"the master did not start: {(folder / 'log').read_text()}")
        self.address = line.removeprefix(ANNOUNCEMENT)
        self.token = read_token(state / "token")

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def own_bytes(self) -> int:
        """Memory that would be free without it: what it shares with others does not count."""
        return int(self._process.memory_full_info().uss)

    def end(self) -> None:
        # Killed, because one that is asked to stop first takes leave of thousands of agents.
        self._child.kill()
        self._child.communicate()


def live_master() -> AbstractContextManager[LiveMaster]:
    return running(LiveMaster)


@dataclass(slots=True)
class Scale:
    """What one size showed; one list entry per repetition."""

    agents: int
    join_s: list[float] = field(default_factory=list)
    join_cpu_s: list[float] = field(default_factory=list)
    replace_s: list[float] = field(default_factory=list)
    replace_cpu_s: list[float] = field(default_factory=list)
    beats_cpu_percent: list[float] = field(default_factory=list)
    beats_per_s: list[float] = field(default_factory=list)
    bytes_per_agent: list[float] = field(default_factory=list)
    streams_lost: int = 0


async def measure_scale(scale: Scale, replacements: int, window_s: float) -> None:
    """One fresh master: everybody joins, some are replaced, then only beats."""
    with live_master() as master:
        bytes_before, cpu_before = master.own_bytes(), master.cpu_s()
        fleet = Fleet(master.address, master.token, scale.agents)
        try:
            scale.join_s.append(await fleet.cold_join(LIMIT_S))
            scale.join_cpu_s.append(master.cpu_s() - cpu_before)
            for _ in range(replacements):
                await fleet.all_started(LIMIT_S)
                cpu_before = master.cpu_s()
                scale.replace_s.append(await fleet.replace_one(LIMIT_S))
                scale.replace_cpu_s.append(master.cpu_s() - cpu_before)
            await fleet.all_started(LIMIT_S)
            beats_before, cpu_before = fleet.beats_answered, master.cpu_s()
            began_at = time.monotonic()
            await asyncio.sleep(window_s)
            took_s = time.monotonic() - began_at
            scale.beats_cpu_percent.append(100 * (master.cpu_s() - cpu_before) / took_s)
            scale.beats_per_s.append((fleet.beats_answered - beats_before) / took_s)
            grown = master.own_bytes() - bytes_before
            scale.bytes_per_agent.append(grown / scale.agents)
            # One per replacement is ours.
            scale.streams_lost += fleet.streams_lost - replacements
        finally:
            await fleet.close()


@dataclass(slots=True)
class KvResult:
    """Durable sets; one list entry per repetition."""

    sets_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    cpu_us_per_set: list[float] = field(default_factory=list)


async def measure_kv(result: KvResult, window_s: float) -> None:
    with live_master() as master:
        load = KvLoad(master.address, master.token, sessions=SESSIONS, links=LINKS)
        cpu_before = master.cpu_s()
        latencies = sorted(await load.run(window_s))
        cpu_s = master.cpu_s() - cpu_before
    result.sets_per_s.append(len(latencies) / window_s)
    result.p50_ms.append(1000 * latencies[len(latencies) // 2])
    result.p99_ms.append(1000 * latencies[len(latencies) * 99 // 100])
    result.cpu_us_per_set.append(1e6 * cpu_s / len(latencies))


def measure_c10d(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """torch's own rendezvous, on the same machine in the same run."""
    found = []
    for size in sizes:
        argv = [sys.executable, str(ROOT / "bench" / "toy_c10d.py"), str(size)]
        with subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                said, _ = child.communicate(timeout=LIMIT_S)
                found.append(json.loads(said.splitlines()[-1]))
            except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
                CONSOLE.print(f"c10d rendezvous of {size} agents did not finish: {error}")
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    return found


def allow_connections(count: int) -> None:
    """Each side of a connection needs a descriptor; the master inherits our limit."""
    wanted = count + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        sys.exit(f"{count} agents need {wanted} open files, and the hard limit is {hard}")
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    low, high = (
        int(part) for part in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    )
    if high - low < count:
        sys.exit(f"{count} agents need as many local ports, and there are {high - low}")


def shown(values: Sequence[float]) -> str:
    """Median and range; large numbers in full."""
    spread = Spread.of(values)
    if spread is None or spread.median < 100:
        return str(spread or "-")
    return f"{spread.median:,.0f} ({spread.low:,.0f}-{spread.high:,.0f})"


def print_scales(scales: Sequence[Scale]) -> None:
    rows = [
        ("cold join: first connect to last world received, s", "join_s"),
        ("  CPU of the master for it, s", "join_cpu_s"),
        (f"replace one (includes {RECONNECT_GRACE_S:g} s of grace), s", "replace_s"),
        ("  CPU of the master for it, s", "replace_cpu_s"),
        (f"steady beats every {BEAT_S:g} s: CPU of the master, % of a core", "beats_cpu_percent"),
        ("  beats answered per second", "beats_per_s"),
        ("memory of the master per agent, bytes", "bytes_per_agent"),
    ]
    print_table(
        "one master, hollow agents: median (least-most)",
        ["", *(f"{scale.agents} agents" for scale in scales)],
        [[title, *(shown(getattr(scale, name)) for scale in scales)] for title, name in rows],
    )
    for scale in scales:
        if scale.streams_lost:
            CONSOLE.print(f"{scale.streams_lost} streams broke at {scale.agents} agents")


def print_kv(result: KvResult) -> None:
    print_table(
        f"journaled key-value sets: {SESSIONS} sessions, each waits for its answer, {LINKS} links",
        ["", "median (least-most)"],
        [
            ["sets per second", shown(result.sets_per_s)],
            ["p50, ms", shown(result.p50_ms)],
            ["p99, ms", shown(result.p99_ms)],
            ["CPU of the master per set, us", shown(result.cpu_us_per_set)],
        ],
    )


def print_peers(c10d: Sequence[dict[str, Any]]) -> None:
    measured = [
        (f"c10d rendezvous, {what} of {row['agents']} agents, s", f"{row[name]:.2f}", "measured")
        for row in c10d
        for what, name in (("first join", "join_s"), ("re-join", "rejoin_s"))
    ]
    quoted = [(title, value, "not run here") for title, value in QUOTED]
    print_table("peers", ["", "value", ""], [*measured, *quoted])


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def bars_of(largest: Scale, kv: KvResult) -> list[Bar]:
    """Medians: the spread in the table tells how busy the machine was with other work."""
    size = largest.agents
    return [
        Bar(f"cold join of {size}, s", _median(largest.join_s), 4, False),
        Bar(f"replace one of {size}, s", _median(largest.replace_s), 1, False),
        Bar(f"beats of {size}, % of a core", _median(largest.beats_cpu_percent), 15, False),
        Bar("memory per agent, KB", max(largest.bytes_per_agent) / 1024, 32, False),
        Bar("journaled sets per second", _median(kv.sets_per_s), 10_000, True),
    ]


async def measure(
    args: argparse.Namespace, sizes: Sequence[int], window_s: float
) -> tuple[list[Scale], KvResult]:
    scales, kv = [Scale(size) for size in sizes], KvResult()
    for _ in range(args.repeats):
        for scale in scales:
            await measure_scale(scale, args.replacements, window_s)
        await measure_kv(kv, min(window_s, 10.0))
    return scales, kv


def main() -> int:
    parser = standard_parser(__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", help="sizes (default 1000 10000)")
    parser.add_argument("--repeats", type=int, help="masters per size (default 3)")
    parser.add_argument("--replacements", type=int, default=3, help="per master (default 3)")
    args = parser.parse_args()
    sizes = args.agents or ([1000] if args.quick else [1000, 10_000])
    args.repeats = args.repeats or (1 if args.quick else 3)
    allow_connections(max(sizes))
    # Real agents do not share one heap: searching it for cycles is no part of what is measured.
    gc.disable()
    machine = describe_machine()
    print_machine(machine)
    scales, kv = uvloop.run(measure(args, sizes, 10.0 if args.quick else 30.0))
    c10d = measure_c10d([8] if args.quick else [8, 32, 64])
    print_scales(scales)
    print_kv(kv)
    print_peers(c10d)
    CONSOLE.print(
        f"load of the machine: {machine['load_1min']} before, {os.getloadavg()[0]:.2f} after"
    )
    document = {
        "machine": machine,
        "scales": [asdict(scale) for scale in scales],
        "kv": asdict(kv),
        "c10d": c10d,
        "quoted": [{"what": what, "value": value} for what, value in QUOTED],
    }
    return finish(bars_of(scales[-1], kv), document, args)


if __name__ == "__main__":
    sys.exit(main())
