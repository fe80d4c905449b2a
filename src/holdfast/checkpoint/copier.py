# SPDX-License-Identifier: Apache-2.0
"""Copies memory with several threads.

The tasks of a job are cut into turns of about 16 MiB: few enough for Python to hand out, small
enough for the threads to end together. A thread that waits for a job helps with it: instead of only
blocking it can copy.

Where the C extension (`_streaming.c`) is installed, as from a wheel, the bytes go past the caches,
and their CRC-32C is known at the end (filling.py).
"""

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from holdfast.model.errors import TimedOutError

log = logging.getLogger(__name__)

TURN_BYTES = 16 * 1024 * 1024
STREAMING = "holdfast.checkpoint._streaming"
"""The C extension, which may not be there."""

CopyBytes = Callable[[int, int, int], object]
"""Called with the address of the target, the address of the source, and the length; the two do not
overlap.

It releases Python's lock meanwhile.
"""


class CopyWithCrc(Protocol):
    """The same copy. It continues the CRC-32C of the bytes before these, and returns the CRC-32C of
    all.

    `pace` limits it to about this many bytes a second, evenly down to the single line of a cache.
    """

    def __call__(
        self, target: int, source: int, length: int, crc: int = 0, pace: float = 0.0, /
    ) -> int: ...


class Pace:
    """How fast a thread copies: slowly beside others that need the memory, until a thread waits."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        """0: as fast as it can."""
        self.bytes_per_s = bytes_per_s

    def hurry(self) -> None:
        """As fast as it can from now on."""
        self.bytes_per_s = 0.0


def streaming_copy(extension: str = STREAMING) -> CopyWithCrc | None:
    """The extension's copy; None if it was not built, or this machine lacks what it takes."""
    try:
        copy: CopyWithCrc = import_module(extension).copy
    except ImportError as exc:
        log.debug("states are copied through the caches, as there is no %s: %s", extension, exc)
        return None
    return copy


COPY_WITH_CRC = streaming_copy()

# For every length: from 32 KiB on it copied memory that is not in the caches faster, and shorter
# copies hardly count.
_copy_bytes: CopyBytes = COPY_WITH_CRC or ctypes.memmove


@dataclass(frozen=True, slots=True)
class Copy:
    """A run of bytes from one address to another; both stay valid until the job is over."""

    source_address: int
    target_address: int
    length: int


Task = Copy | Callable[[], None]
"""What is not a run of bytes (a strided tensor) copies itself when called."""

_Turn = list[tuple[int, int, int]] | Callable[[], None]
"""Either (target, source, length) of some copies, or one callable."""


class CopyJob:
    """Tasks under way; the threads that work on them take them up in order."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._turns = _cut(tasks)
        self._change = threading.Condition()
        self._taken = 0
        self._done = 0
        self._is_stopped = False
        self._futures: list[Future[None]] = []

    def attach(self, pool: ThreadPoolExecutor, threads: int) -> None:
        """Let this many threads of the pool work on the job."""
        self._futures += [pool.submit(self.work) for _ in range(min(threads, len(self._turns)))]

    def work(self, deadline: float | None = None) -> None:
        """Copy in this thread until nothing is left to take up."""
        while deadline is None or time.monotonic() < deadline:
            with self._change:
                if self._is_stopped or self._taken >= len(self._turns):
                    return
                number = self._taken
                self._taken += 1
            is_done = False
            try:
                _perform(self._turns[number])
                is_done = True
            finally:
                self._report(is_done)

    def wait(self, timeout_s: float) -> None:
        """Help until all is done. Raises what a task raised; TimedOutError if it takes longer.

        After either, some copies may be missing, but none is under way once `stop` has returned.
        """
        deadline = time.monotonic() + timeout_s
        self.work(deadline)
        with self._change:
            self._change.wait_for(
                lambda: self._done == len(self._turns) or self._is_stopped,
                max(0.0, deadline - time.monotonic()),
            )
            done, is_stopped = self._done, self._is_stopped
        if done == len(self._turns):
            return
        if is_stopped:
            self._raise_what_happened(max(0.0, deadline - time.monotonic()))
        raise TimedOutError(
            f"a copy of memory was not done within {timeout_s:g} s: "
            f"{done} of {len(self._turns)} turns are"
        )

    def stop(self, timeout_s: float) -> None:
        """Begin nothing more, and wait for what is under way (at most a turn of each thread)."""
        with self._change:
            self._is_stopped = True
            self._change.notify_all()
        if wait_for_futures(self._futures, timeout_s).not_done:
            raise TimedOutError(f"a copy of memory did not stop within {timeout_s:g} s")

    def _report(self, is_done: bool) -> None:
        with self._change:
            if is_done:
                self._done += 1
            else:
                self._is_stopped = True
            self._change.notify_all()

    def _raise_what_happened(self, timeout_s: float) -> None:
        for future in wait_for_futures(self._futures, timeout_s).done:
            future.result()
        raise TimedOutError("a copy of memory was stopped before it was done")


def _cut(tasks: Sequence[Task]) -> list[_Turn]:
    turns: list[_Turn] = []
    gathered: list[tuple[int, int, int]] = []
    room = 0
    for task in tasks:
        if not isinstance(task, Copy):
            turns.append(task)
            room = 0
            continue
        source, target, left = task.source_address, task.target_address, task.length
        while left > 0:
            if room == 0:
                gathered, room = [], TURN_BYTES
                turns.append(gathered)
            size = min(left, room)
            gathered.append((target, source, size))
            source, target, left, room = source + size, target + size, left - size, room - size
    return turns


def _perform(turn: _Turn) -> None:
    if callable(turn):
        turn()
        return
    for target, source, length in turn:
        _copy_bytes(target, source, length)


class Copier:
    """The threads that copy: made at the first use, and made again in a forked child."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # By process: a forked child inherits this object, but not the threads. No lock either,
        # as it could be held by one of them.
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def run(self, tasks: Sequence[Task], timeout_s: float) -> None:
        """Copy everything now, with all threads and the caller's."""
        job = CopyJob(tasks)
        if self._threads > 1:
            # A pool that loses a race for the place has started no thread yet.
            pool = self._pools.setdefault(
                os.getpid(), ThreadPoolExecutor(self._threads - 1, "copy")
            )
            job.attach(pool, self._threads - 1)
        try:
            job.wait(timeout_s)
        finally:
            job.stop(timeout_s)

    def close(self) -> None:
        """End the threads once their jobs are over."""
        pool = self._pools.pop(os.getpid(), None)
        if pool is not None:
            pool.shutdown()
        self._pools = {}
