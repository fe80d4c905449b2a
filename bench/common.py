# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: options, the machine's description, tables, bars, child processes.

A number without its machine and its spread cannot be compared: both are printed with every table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CONSOLE = Console(highlight=False, markup=False, width=130)
POLL_S = 0.02


def standard_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="a short run: a smoke test, no figure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser


@dataclass(frozen=True, slots=True)
class Spread:
    """A median that never appears without the range it came from."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        known = sorted(values)
        if not known:
            return None
        return cls(statistics.median(known), known[0], known[-1], len(known))

    def __str__(self) -> str:
        if self.count == 1:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({self.low:.3g}-{self.high:.3g})"


@dataclass(frozen=True, slots=True)
class Bar:
    """A promise about one measured number; `measured` is None when there was nothing to measure."""

    name: str
    measured: float | None
    limit: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        if self.measured is None:
            return f"{self.name}: not measured (bar {sign} {self.limit:g})"
        verdict = "met" if self.is_met else "MISSED"
        return f"{self.name}: {self.measured:.3g} (bar {sign} {self.limit:g}) {verdict}"


def describe_machine() -> dict[str, str | int | float]:
    """The facts that a reader needs to compare the figures with another machine's."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": os.cpu_count() or 0,
        "cpu": models[0] if models else platform.machine(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def print_machine(machine: Mapping[str, object]) -> None:
    CONSOLE.print("machine: " + ", ".join(f"{name} {value}" for name, value in machine.items()))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left", show_lines=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)


def finish(bars: Sequence[Bar], document: Mapping[str, Any], args: argparse.Namespace) -> int:
    """Print the bars, write the JSON file, and answer with the exit code."""
    for bar in bars:
        CONSOLE.print(str(bar))
    if args.json is not None:
        verdicts = [{**asdict(bar), "met": bar.is_met} for bar in bars]
        text = json.dumps({**document, "bars": verdicts}, indent=1)
        args.json.write_text(text + "\n")
    return int(args.check and not all(bar.is_met for bar in bars))


def wait_for(what: str, is_done: Callable[[], bool], timeout_s: float) -> None:
    """Block until `is_done`; a TimeoutError says what did not happen."""
    end = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


class StampedProcess:
    """A child in its own session, whose output lines carry the time at which they arrived."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self._process = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            self.lines.append((time.monotonic(), raw.decode(errors="replace").rstrip()))

    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; below 0: by a signal."""
        return self._process.poll()

    def kill(self) -> float:
        """SIGKILL, and the time just before it."""
        at = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        return at

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to the whole session's group after `grace_s`."""
        if self.is_running():
            self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()

    def tail(self, count: int) -> str:
        return "\n".join(text for _, text in self.lines[-count:])


def kill_marked(marker: str, timeout_s: float = 10.0) -> int:
    """SIGKILL every process whose environment holds `marker`; answers how many there were.

    Launchers put workers into sessions of their own, so a group kill does not reach them all.
    """
    seen: set[int] = set()

    def none_left() -> bool:
        marked = [pid for pid in psutil.pids() if pid != os.getpid() and _has_mark(pid, marker)]
        for pid in marked:
            seen.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return not marked

    wait_for(f"end of the processes marked {marker}", none_left, timeout_s)
    return len(seen)


def _has_mark(pid: int, marker: str) -> bool:
    try:
        return marker.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


class Server(Protocol):
    """A process under measurement."""

    def end(self) -> None: ...


Started = TypeVar("Started", bound=Server)


@contextmanager
def running(start: Callable[[Path], Started]) -> Iterator[Started]:
    """A server with a folder of its own; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        server = start(Path(folder))
        try:
            yield server
        finally:
            server.end()
