# SPDX-License-Identifier: Apache-2.0
"""A worker that measures Holdfast's checkpoints from inside a real job; JSON lines to a file.

Its first life saves in every way, then kills itself with SIGKILL; the others measure what a
restarted worker waits for. Every figure has the raw copy of the same bytes, measured beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.torch import MEMORY, STORAGE, Checkpointer, Tier
from toy_gpt import RawCopy, build, forward_pass, tensors_of, train_step

COPY_EVERY = 4
"""The bare copy is there for comparison only, so not at every turn."""
QUIET_S = 1.0
"""What the agent does after a save must not compete with the raw copy."""


class Report:
    """Appends what was measured; a killed life's lines stay."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, name: str, *values: float) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, "values": values}) + "\n")


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Life:
    """One life of the worker."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._report = Report(options.report)
        self._model, self._optimizer = build(options.size)
        self._raw = RawCopy(tensors_of(self._model, self._optimizer))
        self._checkpointer = Checkpointer(options.dir, slots=3)
        self._step = 0

    def first(self) -> None:
        """Save to memory, with overlap, to storage; then die."""
        assert self._load() is None
        self._warm_up()
        raw_s = self._raw.save()
        self._report.add("first", self._save(MEMORY), raw_s)
        for _ in range(self._options.runs):
            time.sleep(QUIET_S)
            raw_s = self._raw.save()
            self._report.add("blocking", self._save(MEMORY), raw_s)
        self._overlap()
        self._idle()
        for _ in range(self._options.persists):
            self._persist()
        self._save(MEMORY)
        os.kill(os.getpid(), signal.SIGKILL)

    def later(self, *, is_last: bool) -> None:
        """Load from memory into tensors that exist, as a restarted worker does."""
        began = time.perf_counter()
        step = self._load()
        took_s = time.perf_counter() - began
        assert step is not None
        time.sleep(QUIET_S)
        self._report.add("restore", took_s, self._raw.load())
        if not is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        self._checkpointer.close()

    def _load(self) -> int | None:
        return self._checkpointer.load(model=self._model, optimizer=self._optimizer)

    def _save(self, tier: Tier, *, overlap: bool = False) -> float:
        self._step += 1
        return timed(
            lambda: self._checkpointer.save(
                self._step,
                model=self._model,
                optimizer=self._optimizer,
                to=tier,
                overlap=overlap,
            )
        )

    def _warm_up(self) -> None:
        """Train while the memory is made ready: a job's first step comes before its first save."""
        began = time.perf_counter()
        while time.perf_counter() - began < self._options.warm_s:
            train_step(self._model, self._optimizer)

    def _overlap(self) -> None:
        """Steps of one thread, alone and beside a save; then many times the part that matters.

        A save is over long before the forward pass is.
        """
        for _ in range(self._options.runs):
            self._report.add("step alone", *train_step(self._model, self._optimizer))
            self._report.add("overlap call", self._save(MEMORY, overlap=True))
            self._report.add("step save", *train_step(self._model, self._optimizer))
        for turn in range(self._options.blocks // len(self._model.blocks)):
            kinds = ["alone", "save"] if turn % 2 else ["save", "alone"]
            if turn % COPY_EVERY == 0:
                kinds.append("copy")
            for kind in kinds:
                copy: threading.Thread | None = None
                if kind == "save":
                    self._report.add("overlap call", self._save(MEMORY, overlap=True))
                elif kind == "copy":
                    copy = self._raw.start_save()
                self._report.add(f"forward {kind}", *forward_pass(self._model))
                if copy is not None:
                    copy.join()
                self._optimizer.step()  # A training without steps would be taken for a hang.

    def _idle(self) -> None:
        """The agent's CPU time over some quiet seconds."""
        agent = os.getppid()
        before = _cpu_s(agent)
        time.sleep(self._options.idle_s)
        self._report.add("idle", (_cpu_s(agent) - before) / self._options.idle_s)

    def _persist(self) -> None:
        """From memory to storage, committed and synced; then dd and fio on the same disk."""
        folder, size = self._options.dir, self._raw.bytes
        self._optimizer.step()  # A training without steps would be taken for a hang.
        for written in folder.glob("step-*"):
            shutil.rmtree(written)
        _let_disk_settle()
        blocked_s = self._save(STORAGE)
        committed_s = timed(lambda: self._checkpointer.wait())
        _let_disk_settle()
        dd = _dd_bytes_per_s(folder, size)
        _let_disk_settle()
        fio = _fio_bytes_per_s(folder, size)
        self._report.add("persist", size / committed_s, dd, fio, blocked_s, size)


def _let_disk_settle() -> None:
    """Nobody pays for what the one before left to be written or freed."""
    os.sync()
    time.sleep(QUIET_S)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _dd_bytes_per_s(folder: Path, size: int) -> float:
    source, target = Path("/dev/shm/holdfast-bench-dd"), folder / "dd.tmp"
    count = size // 2**24
    try:
        if not source.exists():
            source.write_bytes(os.urandom(2**24) * 4)
        command = f"for i in $(seq {count // 4}); do cat {source}; done | dd of={target} bs=16M"
        command += " iflag=fullblock oflag=direct conv=fsync status=none"
        took_s = timed(lambda: subprocess.run(["bash", "-c", command], check=True))
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
    return count // 4 * 4 * 2**24 / took_s


def _fio_bytes_per_s(folder: Path, size: int) -> float:
    """0 when fio is not installed."""
    target = folder / "fio.tmp"
    command = [
        "fio", "--name=w", f"--filename={target}", "--rw=write", "--bs=16M", "--direct=1",
        f"--size={size // 2**24 * 2**24}", "--ioengine=libaio", "--iodepth=4", "--end_fsync=1",
        "--output-format=json", "--buffer_compress_percentage=0", "--refill_buffers=0",
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    except FileNotFoundError:
        return 0.0
    finally:
        target.unlink(missing_ok=True)
    return float(json.loads(done.stdout)["jobs"][0]["write"]["bw_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--restores", type=int, required=True)
    parser.add_argument("--persists", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--warm-s", type=float, required=True)
    parser.add_argument("--idle-s", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    life = Life(options)
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if restarts == 0:
        life.first()
    else:
        life.later(is_last=restarts == options.restores)


if __name__ == "__main__":
    main()
