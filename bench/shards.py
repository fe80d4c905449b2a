# SPDX-License-Identifier: Apache-2.0
"""What data in shards costs: dispatch beside the prior art, the sampler, the iterator, 1e9 samples.

Dispatch: a real `holdfast master` process with its journal. Every client has a connection of its
own and speaks the real protocol: it takes one shard and says with the next request that it has
read it; the answer leaves when both are on disk. The prior art runs if --prior-art names a Python
that has it: its local master and its own client, in processes of their own, in turn with ours.
Clients and masters share this machine, so the CPU time of the master stands beside the rates.
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
from contextlib import contextmanager
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
    standard_parser,
)
from control_plane import LiveMaster, live_master
from holdfast.model import dataset as nouns
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.runtime.transport import Link, connect
from holdfast.torch import ElasticDataLoader, ElasticDistributedSampler
from hollow import rules_for

CLIENTS = (1, 8, 64)
SHARD = 1000
SHARD_SIZES = (1000, 20_000)
BILLION = 1_000_000_000
BATCH = 64
LIMIT_S = 60.0
STEP = f"with a loader of batches of {BATCH}, us per step"

RATIO_MIN = 10.0
PER_S_MIN = 6000.0
"""The bar where the prior art is not run, which does about 600 a second on such a machine."""


# ---- clients of the master's ledger --------------------------------------------------------------


class Client:
    """One reader on its own connection: takes a shard, then the next one with its report."""

    def __init__(self, number: int, clients: int, dataset: nouns.Dataset) -> None:
        self.shards = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number, self._clients, self._dataset = number, clients, dataset
        self._link: Link | None = None
        self._answer: asyncio.Future[m.AnyMessage] | None = None
        self._seq = 0
        self._stops_at = 0.0

    async def join(self, address: str, token: bytes) -> None:
        """Connect, and become a node of the job: only nodes may have leases."""
        self._link = await connect(address, self, token)
        await self._ask(
            m.Attach(
                agent_key=f"reader-{self._number}",
                rules=rules_for(self._clients),
                nproc=1,
                host=f"10.0.0.{self._number}",
                store_port=29500,
            )
        )
        await self._ask(d.DatasetOpen(0, self._dataset))

    async def first(self) -> None:
        """Take the first shard."""
        await self._ask(d.ShardsTake(0, self._dataset.name, 0, 0, want=1), "reader", 1)

    def start(self, stops_at: float) -> None:
        self._stops_at = stops_at
        self._take(())

    def leave(self) -> None:
        self.done.cancel()
        if self._link is not None:
            self._link.close()

    async def _ask(self, body: m.AnyMessage, session: str = "", seq: int = 0) -> None:
        assert self._link is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._link.send(body, 1, session, seq)
        answer = await asyncio.wait_for(self._answer, LIMIT_S)
        if isinstance(answer, m.Refused):
            raise RuntimeError(answer.message)

    def _take(self, consumed: tuple[d.Consumed, ...]) -> None:
        assert self._link is not None
        self._seq += 1
        want = 1 if time.monotonic() < self._stops_at else 0
        take = d.ShardsTake(0, self._dataset.name, 0, 0, want, consumed)
        self._link.send(take, 1, f"reader-{self._number}", self._seq)

    # ---- what the link tells --------------------------------------------------------------------

    def opened(self, link: Link) -> None:
        raise AssertionError("only servers are told of opened links")

    def received(self, link: Link, frame: m.Frame) -> None:
        if not frame.call:
            return  # A world of which these readers are no part.
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(frame.body)
        elif not isinstance(frame.body, d.ShardsTaken):
            self._fail(f"a reader was answered with {frame.body}")
        elif frame.body.leases:
            self.shards += 1
            (lease,) = frame.body.leases
            self._take((d.Consumed(lease.number, lease.piece.end),))
        elif not self.done.done():
            self.done.set_result(None)

    def closed(self, link: Link) -> None:
        self._fail("the master hung up")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(why))


async def take_shards(master: LiveMaster, clients: int, seconds: float) -> tuple[float, float]:
    """Shards taken and acknowledged per second, and microseconds of the master's CPU for each."""
    dataset = nouns.Dataset("bench", size=BILLION, shard_size=SHARD, shuffle=nouns.BY_SHARD)
    readers = [Client(number, clients, dataset) for number in range(1, clients + 1)]
    try:
        for reader in readers:
            await reader.join(master.address, master.token)
        cpu_before, began = master.cpu_s(), time.monotonic()
        for reader in readers:
            reader.start(began + seconds)
        async with asyncio.timeout(seconds + LIMIT_S):
            await asyncio.gather(*(reader.done for reader in readers))
        took_s, cpu_s = time.monotonic() - began, master.cpu_s() - cpu_before
    finally:
        for reader in readers:
            reader.leave()
    shards = sum(reader.shards for reader in readers)
    return shards / took_s, 1e6 * cpu_s / shards


async def take_first() -> tuple[float, float]:
    """A new dataset of 1e9 samples: seconds to its first shard, and how the master grew, in MB."""
    dataset = nouns.Dataset("billion", size=BILLION, shard_size=SHARD, shuffle=nouns.BY_SAMPLE)
    with live_master() as master:
        reader = Client(1, 1, dataset)
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


@contextmanager
def prior_master(python: str) -> Iterator[PriorMaster]:
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        master = PriorMaster(python, folder)
        try:
            yield master
        finally:
            master.end()
    finally:
        shutil.rmtree(folder)


# ---- (a) dispatch and (d) a billion samples ------------------------------------------------------


@dataclass(slots=True)
class Dispatch:
    """Shards per second and CPU of the master for each; one list entry per repetition."""

    clients: int
    per_s: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)
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
    with live_master() as master:
        per_s, cpu_us = uvloop.run(take_shards(master, found.clients, seconds))
    found.per_s.append(per_s)
    found.cpu_us.append(cpu_us)


def measure_prior(found: Dispatch, python: str, seconds: float) -> None:
    with prior_master(python) as master:
        said = master.drive("bench", BILLION, found.clients, seconds)
    found.prior_per_s.append(said["shards"] / said["took_s"])
    found.prior_cpu_us.append(1e6 * said["master_cpu_s"] / said["shards"])


def measure_billion(found: Billion, python: str | None) -> None:
    first_s, grown_mb = uvloop.run(take_first())
    found.first_s.append(first_s)
    found.grown_mb.append(grown_mb)
    if python:
        with prior_master(python) as master:
            said = master.drive("billion", BILLION, 1, 0.0)
        found.prior_first_s.append(said["first_s"])
        found.prior_grown_mb.append(said["grown_mb"])


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
        ("prior art, in memory only: shards per second", "prior_per_s"),
        ("  CPU of its master for each, us", "prior_cpu_us"),
    ]
    table = [[title, *(shown(getattr(one, name)) for one in dispatches)] for title, name in rows]
    ratios = ["-" if one.ratio is None else f"{one.ratio:.1f}x" for one in dispatches]
    print_table(
        "shards taken and acknowledged: median (least-most)",
        ["", *(f"{one.clients} clients" for one in dispatches)],
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
        [f"{title}, {world} ranks", shown(found[way]), shown(found[f"{way}, torch"])]
        for world, found in samplers.items()
        for way, title in (("sample", "sampler alone, us per sample"), ("step", STEP))
    ]
    print_table("ElasticDistributedSampler, shuffled", ["", "Holdfast", "torch"], rows)


def print_iterator(found: dict[str, dict[str, Any]]) -> None:
    titles = {"records": "for record in shards", "batches": "shards.batches(32)"}
    rows = []
    for way, title in titles.items():
        for size in SHARD_SIZES:
            for ledger, ways in found.items():
                one = ways[way][str(size)]
                what = f"{title}, shards of {size:,}, {ledger}"
                rows.append([what, f"{one['wall_us']:.2f}", f"{one['cpu_us']:.2f}"])
    print_table("DataShards, us per sample", ["", "wall", "CPU of the reader"], rows)


def bars_of(busiest: Dispatch, iterator: dict[str, dict[str, Any]], billion: Billion) -> list[Bar]:
    if busiest.ratio is None:
        name = f"shards per second, {busiest.clients} clients (prior art not run)"
        rate = Bar(name, statistics.median(busiest.per_s), PER_S_MIN, True)
    else:
        name = f"shards per second, {busiest.clients} clients, as a multiple of the prior art's"
        rate = Bar(name, busiest.ratio, RATIO_MIN, True)
    slowest = max(
        one["wall_us"]
        for ways in iterator.values()
        for sizes in ways.values()
        for one in sizes.values()
    )
    return [
        rate,
        Bar("iterator, slowest of the table, us per sample", slowest, 5, False),
        Bar("1e9 samples: first shard, s", statistics.median(billion.first_s), 1, False),
        Bar("1e9 samples: growth of the master, MB", max(billion.grown_mb), 50, False),
    ]


def main() -> int:
    parser = standard_parser(__doc__.splitlines()[0])
    parser.add_argument("--prior-art", metavar="PYTHON", help="a Python that has dlrover")
    args = parser.parse_args()
    repeats, seconds = (1, 0.5) if args.quick else (3, 2.0)
    samples = 200_000 if args.quick else 1_000_000
    machine = describe_machine()
    print_machine(machine)
    dispatches, billion = [Dispatch(clients) for clients in CLIENTS], Billion()
    for _ in range(repeats):
        for one in dispatches:
            measure_ours(one, seconds)
            if args.prior_art:
                measure_prior(one, args.prior_art, seconds)
        measure_billion(billion, args.prior_art)
    samplers = {world: measure_sampler(samples, world, repeats) for world in (1, 8)}
    iterator = {
        "its own ledger": measure_iterator(samples, under_master=False),
        "a master": measure_iterator(samples, under_master=True),
    }
    print_dispatch(dispatches)
    print_samplers(samplers)
    print_iterator(iterator)
    print_billion(billion)
    document = {
        "machine": machine,
        "dispatch": [asdict(one) for one in dispatches],
        "samplers": samplers,
        "iterator": iterator,
        "billion": asdict(billion),
    }
    return finish(bars_of(dispatches[-1], iterator, billion), document, args)


if __name__ == "__main__":
    sys.exit(main())
