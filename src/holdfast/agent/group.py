# SPDX-License-Identifier: Apache-2.0
"""The workers of one round as seen from outside: their files, their output, their progress."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from holdfast.agent import terminal
from holdfast.agent.output import Stream, Write
from holdfast.agent.processes import Processes, RunMode, Worker, WorkerOrder
from holdfast.agent.repeats import Repeats
from holdfast.agent.terminal import Terminal
from holdfast.core.node.environment import Launch, worker_environment
from holdfast.model.node import FAILED_WITH
from holdfast.protocol import messages as m
from holdfast.runtime.observe import Level, Say
from holdfast.worker.progress import ProgressCell

ERROR_BYTES_MAX = 64 * 1024
"""How much of a worker's error file is passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the workers run, and where their output goes."""

    argv: tuple[str, ...]
    mode: RunMode
    launch: Launch
    env: Mapping[str, str]
    log_dir: Path
    console: Callable[[int, bool], Write | None]
    """Where a local rank's output (True: standard error) is shown, if it is."""
    terminal_rank: int = -1
    """The rank that has the terminal of this command to itself."""


class Group:
    """The workers of one round."""

    def __init__(
        self,
        program: Program,
        run: m.RunWorld,
        processes: Processes,
        monotonic: Callable[[], float],
        memory_of: Callable[[int], tuple[str, ...]],
        say: Say,
    ) -> None:
        """`monotonic` is the clock of the progress cells; `memory_of` names the files that a rank
        may load."""
        self._say = say
        self.run = run
        self._monotonic = monotonic
        self._memory_of = memory_of
        self._program = program
        self._processes = processes
        self._cells: dict[int, ProgressCell] = {}
        self._is_said = False
        self._streams: dict[int, tuple[Stream, Stream]] = {}
        self._workers: dict[int, Worker] = {}
        self._terminal: Terminal | None = None
        self._repeats = Repeats()

    async def start(self) -> tuple[frozenset[int], str, str]:
        """Start all workers. Returns the local ranks that run, how they were started, and the
        problem, if there was one."""
        ranks = range(self._program.launch.nproc)
        results = await asyncio.gather(
            *(self._start_one(local_rank) for local_rank in ranks), return_exceptions=True
        )
        problem = ""
        for local_rank, result in zip(ranks, results, strict=True):
            if isinstance(result, Worker):
                self._workers[local_rank] = result
            elif isinstance(result, OSError):
                problem = f"could not be started: {result}"
            elif isinstance(result, BaseException):
                raise result
        return frozenset(self._workers), _how(self._workers.values()), problem

    def environment(self, local_rank: int) -> dict[str, str]:
        """The whole environment of one worker."""
        cell = self._cells.get(local_rank)
        return worker_environment(
            self._program.env,
            self._program.launch,
            self.run,
            local_rank,
            error_file=str(self._error_file(local_rank)),
            progress=cell.path if cell is not None else "",
        )

    async def _start_one(self, local_rank: int) -> Worker:
        program, folder = self._program, self._folder(local_rank)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            if self.run.rank_offset + local_rank != program.terminal_rank:
                self._has_no_files(exc)
        cell = ProgressCell.create(str(folder / "progress"))
        self._cells[local_rank] = cell
        with contextlib.ExitStack() as given:
            stdin, stdout, stderr = self._open_streams(local_rank, given)
            order = WorkerOrder(
                local_rank=local_rank,
                argv=program.argv,
                mode=program.mode,
                env=self.environment(local_rank),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                progress=cell.path,
                memory=self._memory_of(self.run.rank_offset + local_rank),
            )
            return await self._processes.start(order)

    def _open_streams(
        self, local_rank: int, given: contextlib.ExitStack
    ) -> tuple[int | None, int, int]:
        """Input, output and errors of a worker. Descriptors that only the worker needs are closed
        with `given`."""
        program, folder = self._program, self._folder(local_rank)
        rank = self.run.rank_offset + local_rank
        if rank == program.terminal_rank:
            self._terminal = Terminal()
            return terminal.STREAMS
        out, err = (
            Stream(
                folder / name,
                program.console(local_rank, error),
                f"[rank{rank}] ",
                (rank, error),
                self._repeats if error and program.launch.nproc > 1 else None,
                self._has_no_files,
            )
            for name, error in (("stdout.log", False), ("stderr.log", True))
        )
        self._streams[local_rank] = (out, err)
        given.callback(out.handed_over)
        given.callback(err.handed_over)
        return None, out.worker_end, err.worker_end

    def _has_no_files(self, problem: OSError) -> None:
        """Training goes on without files, for example when the log folder's disk is full."""
        if not self._is_said:
            self._is_said = True
            why = problem.strerror or problem
            self._say(
                f"what the workers print is not kept: {problem.filename} cannot be written ({why})",
                Level.WARNING,
            )

    def ended(self, local_rank: int) -> tuple[str, str]:
        """A worker is gone: take its last output; returns what its error file says."""
        for stream in self._streams.pop(local_rank, ()):
            stream.close()
        console = self._program.console(local_rank, True)
        if not self._streams and console is not None:
            for line in self._repeats.tell():
                console(f"{line}\n".encode())
        if self._terminal and self.run.rank_offset + local_rank == self._program.terminal_rank:
            self._terminal.restore()
        return read_error(self._error_file(local_rank))

    def close(self) -> None:
        """Let go of files and mappings; the workers are gone."""
        for local_rank in list(self._streams):
            self.ended(local_rank)
        for cell in self._cells.values():
            cell.close()
        self._cells.clear()

    def last_step_ago_s(self) -> float:
        """How long ago the last step of any worker finished; -1 if none did."""
        times = [cell.read().last_step_at for cell in self._cells.values()]
        newest = max(times, default=0.0)
        return self._monotonic() - newest if newest > 0 else -1.0

    def beat(self, cpu: float, memory: int) -> m.Beat:
        """What the master is told of the group."""
        readings = [cell.read() for cell in self._cells.values()]
        now = self._monotonic()
        # A script without an optimizer may still report its steps, or save them.
        steps = min((max(one.steps, one.reports, one.saves) for one in readings), default=0)
        reported = max((reading.reported_step for reading in readings), default=-1)
        # A group has made a step when its slowest member has.
        first = [reading.first_step_at for reading in readings]
        has_stepped = bool(first) and min(first) > 0
        return m.Beat(
            round=self.run.round,
            steps=max(steps, 1) if has_stepped else 0,
            step=reported,
            first_step_ago_s=now - max(first) if has_stepped else -1.0,
            last_step_ago_s=self.last_step_ago_s(),
            cpu=cpu,
            memory=memory,
            saved_step=max((reading.saved_step for reading in readings), default=-1),
            total_steps=max((reading.total_steps for reading in readings), default=0),
        )

    def _folder(self, local_rank: int) -> Path:
        rank = self.run.rank_offset + local_rank
        return self._program.log_dir / f"round_{self.run.round}" / f"rank_{rank}"

    def _error_file(self, local_rank: int) -> Path:
        return self._folder(local_rank) / "error.json"


def _how(workers: Iterable[Worker]) -> str:
    """How they were started; where they differ, how many in which way."""
    counts = Counter(worker.how for worker in workers)
    if len(counts) <= 1:
        return next(iter(counts), "cold")
    return " and ".join(f"{count} {how}" for how, count in sorted(counts.items()))


def read_error(path: Path) -> tuple[str, str]:
    """Message and traceback from an error file as torch elastic writes it; empty if there is none.

    The file is written by the user's process, so nothing about it is taken for granted.
    """
    try:
        with open(path, "rb") as file:
            data = msgspec.json.decode(file.read(ERROR_BYTES_MAX))
    except (OSError, msgspec.DecodeError):
        return "", ""
    body: Any = data.get("message", data) if isinstance(data, dict) else data
    if not isinstance(body, dict):
        return str(body), ""
    extra = body.get("extraInfo")
    trace = extra.get("py_callstack", "") if isinstance(extra, dict) else ""
    message = str(body.get("message", ""))
    return f"{FAILED_WITH}{message}" if message else "", str(trace)
