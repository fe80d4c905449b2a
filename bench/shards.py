# SPDX-License-Identifier: Apache-2.0
"""What data in shards costs: dispatch beside the prior art, the sampler, the iterator, 1e9 samples.

Dispatch: a real `holdfast master` process with its journal. Every client has a connection of its
own and speaks the real protocol: it takes one shard (or eight) and says with the next request that
it has read it; the answer leaves when both are on disk. The prior art runs if --prior-art names a
Python that has it: its local master and its own client, in processes of their own, in turn with
ours. Clients and masters share this machine: the CPU time of the master stands beside the rates.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from common import (
    POLL_S,
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
from control_plane import live_master
from holdfast.model import dataset as nouns
from holdfast.torch import ElasticDataLoader, ElasticDistributedSampler
from toy_reader import LIMIT_S, Reader

CLIENTS = (1, 8, 64)
SHARD = 1000
MANY = 8
SHARD_SIZES = (1000, 20_000)
ITERATED = 300_000
BILLION = 1_000_000_000
BATCH = 64
STEP = f"with a loader of batches of {BATCH}, us per step"

RATIO_MIN = 10.0
PER_S_MIN = 6000.0
"""The bar where the prior art is not run, which does about 600 a second on such a machine."""


# ---- our master ----------------------------------------------------------------------------------


async def take_shards(clients: int, want: int, seconds: float) -> tuple[float, float]:
    """Shards taken and acknowledged per second, and microseconds of the master's CPU for each."""
    dataset = nouns.Dataset("bench", size=BILLION, shard_size=SHARD, shuffle=nouns.BY_SHARD)
    readers = [Reader(number, clients, dataset) for number in range(1, clients + 1)]
    with live_master() as master:
        try:
            for reader in readers:
                await reader.join(master.address, master.token)
            cpu_before, began = master.cpu_s(), time.monotonic()
            reads = [reader.read(began + seconds, want) for reader in readers]
            async with asyncio.timeout(seconds + LIMIT_S):
                shards = sum(await asyncio.gather(*reads))
            took_s, cpu_s = time.monotonic() - began, master.cpu_s() - cpu_before
        finally:
            for reader in readers:
                reader.leave()
    return shards / took_s, 1e6 * cpu_s / shards


async def take_first() -> tuple[float, float]:
    """A new dataset of 1e9 samples: seconds to its first shard, and how the master grew, in MB."""
    dataset = nouns.Dataset("billion", size=BILLION, shard_size=SHARD, shuffle=nouns.BY_SAMPLE)
    with live_master() as master:
        reader = Reader(1, 1, dataset)
        bytes_before, began = master.own_bytes(), time.monotonic()
        try:
            await reader.join(master.address, master.token)
            await reader.first()
            took_s = time.monotonic() - began
            return took_s, (master.own_bytes() - bytes_before) / 1e6
        finally:
            reader.leave()


# ---- the prior art -------------------------------------------------------------------------------


class PriorMaster:
    """The prior art's local master, and runs of its own client against it."""

    def __init__(self, python: str, folder: Path) -> None:
        self._python, self._folder = python, folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._address = f"127.0.0.1:{port}"
        words = ["--platform", "local", "--port", str(port), "--node_num", "1"]
        argv = [python, "-m", "dlrover.python.master.main", *words, "--job_name", "bench"]
        with open(folder / "master.log", "wb") as log:
            self._child = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        self._process = psutil.Process(self._child.pid)
        self._wait_until_it_listens(port)

    def _wait_until_it_listens(self, port: int) -> None:
        end = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
                return
            except OSError:
                if time.monotonic() > end or self._child.poll() is not None:
                    self.end()
                    log = (self._folder / "master.log").read_text()[-2000:]
                    raise RuntimeError(f"the prior art's master did not start: {log}") from None
            time.sleep(POLL_S)

    def drive(self, name: str, size: int, clients: int, seconds: float) -> dict[str, float]:
        """What its client says, with the CPU and the growth of the master."""
        script = str(ROOT / "bench" / "toy_prior_shards.py")
        words = [self._address, name, str(size), str(clients), str(seconds)]
        cpu_before, bytes_before = self._cpu_s(), self._own_bytes()
        ended = subprocess.run(
            [self._python, script, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=seconds + LIMIT_S,
            check=True,
        )
        said: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
        said["master_cpu_s"] = self._cpu_s() - cpu_before
        said["grown_mb"] = (self._own_bytes() - bytes_before) / 1e6
        return said

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _own_bytes(self) -> int:
        return int(self._process.memory_full_info().uss)

    def end(self) -> None:
        self._child.kill()
        self._child.wait()


def prior_master(python: str) -> AbstractContextManager[PriorMaster]:
    return running(lambda folder: PriorMaster(python, folder))


# ---- (a) dispatch and (d) a billion samples ------------------------------------------------------


@dataclass(slots=True)
class Dispatch:
    """Shards per second and CPU of the master for each; one list entry per repetition."""

    clients: int
    per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
    many_per_s: list[float] = field(default_factory=list)
    many_cpu_us: list[float] = field(default_factory=list)
    prior_per_s: list[float] = field(default_factory=list)
    prior_cpu_us: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        if not self.prior_per_s:
            return None
        return statistics.median(self.per_s) / statistics.median(self.prior_per_s)


@dataclass(slots=True)
class Billion:
    """A dataset of 1e9 samples, from nothing to its first shard; one entry per repetition."""

    first_s: list[float] = field(default_factory=list)
    grown_mb: list[float] = field(default_factory=list)
    prior_first_s: list[float] = field(default_factory=list)
    prior_grown_mb: list[float] = field(default_factory=list)


def measure_ours(found: Dispatch, seconds: float) -> None:
    per_s, cpu_us = uvloop.run(take_shards(found.clients, 1, seconds))
    found.per_s.append(per_s)
    found.cpu_us.append(cpu_us)
    per_s, cpu_us = uvloop.run(take_shards(found.clients, MANY, seconds))
    found.many_per_s.append(per_s)
    found.many_cpu_us.append(cpu_us)


def measure_prior(
    dispatches: Sequence[Dispatch], billion: Billion, python: str, seconds: float
) -> None:
    with prior_master(python) as master:
        for found in dispatches:
            said = master.drive(f"bench-{found.clients}", BILLION, found.clients, seconds)
            found.prior_per_s.append(said["shards"] / said["took_s"])
            found.prior_cpu_us.append(1e6 * said["master_cpu_s"] / said["shards"])
        said = master.drive("billion", BILLION, 1, 0.0)
        billion.prior_first_s.append(said["first_s"])
        billion.prior_grown_mb.append(said["grown_mb"])


def measure_billion(found: Billion) -> None:
    first_s, grown_mb = uvloop.run(take_first())
    found.first_s.append(first_s)
    found.grown_mb.append(grown_mb)


# ---- (b) the sampler -----------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """A dataset that costs nothing."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        return index


def us_for_each(make: Callable[[], Iterator[Any]], repeats: int) -> list[float]:
    """Microseconds for each of what it yields, once for every repetition."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        count = sum(1 for _ in make())
        found.append(1e6 * (time.perf_counter() - began) / count)
    return found


def measure_sampler(size: int, world: int, repeats: int) -> dict[str, list[float]]:
    """Ours and torch's: the sampler alone for each sample, and a loader for each step."""
    numbers = Numbers(size)

    def ours() -> ElasticDistributedSampler:
        return ElasticDistributedSampler(size, num_replicas=world, rank=0)

    def torchs() -> DistributedSampler[int]:
        return DistributedSampler(numbers, num_replicas=world, rank=0)

    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "sample": lambda: iter(ours()),
        "sample, torch": lambda: iter(torchs()),
        "step": lambda: iter(ElasticDataLoader(numbers, BATCH, sampler=ours(), collate_fn=len)),
        "step, torch": lambda: iter(DataLoader(numbers, BATCH, sampler=torchs(), collate_fn=len)),
    }
    return {way: us_for_each(make, repeats) for way, make in ways.items()}


# ---- (c) the iterator ----------------------------------------------------------------------------


def measure_iterator(samples: int, *, under_master: bool) -> dict[str, Any]:
    """What bench/toy_shards.py found, alone or as the worker of a job."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        script = str(ROOT / "bench" / "toy_shards.py")
        words = [script, str(folder / "found"), str(samples), *map(str, SHARD_SIZES)]
        launch = ["-m", "holdfast.cli", "run", "--nproc-per-node", "1", "--no-spares"]
        argv = [sys.executable, *(launch if under_master else []), *words]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "TMPDIR": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
        }
        subprocess.run(
            argv, env=environment, cwd=folder, capture_output=True, timeout=LIMIT_S, check=True
        )
        found: dict[str, Any] = json.loads((folder / "found").read_text())
        return found
    finally:
        shutil.rmtree(folder)


# ---- telling it ----------------------------------------------------------------------------------


def shown(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    if spread is None or spread.median < 100:
        return str(spread or "-")
    return f"{spread.median:,.0f} ({spread.low:,.0f}-{spread.high:,.0f})"


def print_dispatch(dispatches: Sequence[Dispatch]) -> None:
    rows = [
        ("Holdfast, journaled: shards per second", "per_s"),
        ("  CPU of the master for each, us", "cpu_us"),
        (f"Holdfast, journaled, {MANY} with a request: shards per s", "many_per_s"),
        ("  CPU of the master for each, us", "many_cpu_us"),
        ("prior art, in memory only: shards per second", "prior_per_s"),
        ("  CPU of its master for each, us", "prior_cpu_us"),
    ]
    table = [[title, *(shown(getattr(one, name)) for one in dispatches)] for title, name in rows]
    ratios = ["-" if one.ratio is None else f"{one.ratio:.1f}x" for one in dispatches]
    print_table(
        "shards taken and acknowledged: median (least-most)",
        ["", *(f"clients: {one.clients}" for one in dispatches)],
        [*table, ["ratio of the rates", *ratios]],
    )


def print_billion(found: Billion) -> None:
    print_table(
        "1e9 samples in shards of 1,000, shuffled (ours by sample, the prior art's by shard)",
        ["", "Holdfast", "prior art"],
        [
            [
                "registered and first shard here, s",
                shown(found.first_s),
                shown(found.prior_first_s),
            ],
            ["growth of the master, MB", shown(found.grown_mb), shown(found.prior_grown_mb)],
        ],
    )


def print_samplers(samplers: dict[int, dict[str, list[float]]]) -> None:
    rows = [
        [f"{title}, world of {world}", shown(found[way]), shown(found[f"{way}, torch"])]
        for world, found in samplers.items()
        for way, title in (("sample", "sampler alone, us per sample"), ("step", STEP))
    ]
    print_table("ElasticDistributedSampler, shuffled", ["", "Holdfast", "torch"], rows)


def cells_of(iterator: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU of each way to read, shard size and ledger; one list entry per repetition."""
    return {
        f"{title}, shards of {size:,}, {ledger}": {
            what: [run[way][str(size)][what] for run in runs] for what in ("wall_us", "cpu_us")
        }
        for way, title in (("records", "for record in shards"), ("batches", "shards.batches(32)"))
        for size in SHARD_SIZES
        for ledger, runs in iterator.items()
    }


def print_iterator(cells: dict[str, dict[str, list[float]]]) -> None:
    rows = [[name, shown(cell["wall_us"]), shown(cell["cpu_us"])] for name, cell in cells.items()]
    print_table(
        "DataShards read by a loop that does nothing, us per sample",
        ["", "wall", "CPU of the reader"],
        rows,
    )


def bars_of(
    busiest: Dispatch, cells: dict[str, dict[str, list[float]]], billion: Billion
) -> list[Bar]:
    if busiest.ratio is None:
        name = f"shards per second, {busiest.clients} clients (prior art not run)"
        rate = Bar(name, statistics.median(busiest.per_s), PER_S_MIN, True)
    else:
        name = f"shards per second, {busiest.clients} clients, as a multiple of the prior art's"
        rate = Bar(name, busiest.ratio, RATIO_MIN, True)
    wall_us, cpu_us = (
        max(statistics.median(cell[what]) for cell in cells.values())
        for what in ("wall_us", "cpu_us")
    )
    return [
        rate,
        Bar("iterator, slowest of the table, us per sample", wall_us, 5, False),
        Bar("iterator, most CPU of the table, us per sample", cpu_us, 5, False),
        Bar("1e9 samples: first shard, s", statistics.median(billion.first_s), 1, False),
        Bar("1e9 samples: growth of the master, MB", max(billion.grown_mb), 50, False),
    ]


def main() -> int:
    parser = standard_parser(__doc__.splitlines()[0])
    parser.add_argument("--prior-art", metavar="PYTHON", help="a Python that has dlrover")
    args = parser.parse_args()
    repeats, seconds = (1, 0.5) if args.quick else (3, 1.0)
    samples = 200_000 if args.quick else 1_000_000
    machine = describe_machine()
    print_machine(machine)
    dispatches, billion = [Dispatch(clients) for clients in CLIENTS], Billion()
    for _ in range(repeats):
        for one in dispatches:
            measure_ours(one, seconds)
        measure_billion(billion)
        if args.prior_art:
            measure_prior(dispatches, billion, args.prior_art, seconds)
    samplers = {world: measure_sampler(samples, world, repeats) for world in (1, 8)}
    iterator: dict[str, list[dict[str, Any]]] = {"its own ledger": [], "a master": []}
    for _ in range(repeats):
        for ledger, runs in iterator.items():
            runs.append(measure_iterator(ITERATED, under_master=ledger == "a master"))
    cells = cells_of(iterator)
    print_dispatch(dispatches)
    print_samplers(samplers)
    print_iterator(cells)
    print_billion(billion)
    document = {
        "machine": machine,
        "dispatch": [asdict(one) for one in dispatches],
        "samplers": samplers,
        "iterator": cells,
        "billion": asdict(billion),
    }
    return finish(bars_of(dispatches[-1], cells, billion), document, args)


if __name__ == "__main__":
    sys.exit(main())
