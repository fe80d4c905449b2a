# SPDX-License-Identifier: Apache-2.0
"""What a training script tells Holdfast and asks of it, as plain functions.

Keys and barriers belong to the round: a new world starts without those of the previous one.
"""

import functools
import os
import time

from holdfast.client.connection import AgentClient, current
from holdfast.model.errors import UsageError
from holdfast.protocol import messages as m
from holdfast.runtime.settings import worker_settings
from holdfast.worker.progress import ProgressCell

TIMEOUT_S = 300.0

STEP_S = 30.0
"""Saves that are further apart do not count as steps: it is the least patience with a silent
job."""

#: By progress cell: which step its program saved last, and when.
_saved: dict[str, tuple[int, float]] = {}


def report_step(step: int, total: int | None = None) -> None:
    """Say that `step` is finished. Costs no system call; does nothing outside Holdfast.

    With `total`, the number of the last step, people see how long the training still takes.
    """
    settings = worker_settings()
    if settings is not None and settings.progress:
        _cell(settings.progress).report(step, time.monotonic(), total)


def saving_step(step: int) -> None:
    """The program saves `step`, which it has finished: a Checkpointer says so.

    A save counts as a step if it follows the save of another step within STEP_S: a program that
    reports no other steps and saves once an hour must not be taken for hung in between.
    """
    settings = worker_settings()
    if settings is not None and settings.progress:
        now = time.monotonic()
        last, at = _saved.get(settings.progress, (step, now))
        _saved[settings.progress] = step, now
        is_step = step != last and now - at <= STEP_S
        _cell(settings.progress).saved(step, now, at if is_step else None)


def barrier(name: str, size: int, timeout_s: float = TIMEOUT_S) -> int:
    """Wait until `size` callers have arrived; returns how often this barrier has opened.

    The name can be used again at once. TimedOutError if they do not all come in time.
    """
    client = _required()
    # Drawn per call, so that threads of one process count apart; a repeated request keeps it.
    member = os.urandom(8).hex()
    request = m.Barrier(client.scope, name, member, size, timeout_s)
    return client.ask(request, m.Number, timeout_s).number


def kv_set(key: str, value: bytes) -> None:
    """Give `key` a value that every worker of the round can read."""
    client = _required()
    client.ask(m.KvSet(client.scope, key, value), m.Done, TIMEOUT_S)


def kv_get(key: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The value of `key`; waits until it has one. TimedOutError if that takes too long."""
    client = _required()
    answer = client.ask(m.KvGet(client.scope, (key,), timeout_s), m.Values, timeout_s)
    return answer.values[0]


def kv_add(key: str, amount: int) -> int:
    """Add to the number in `key` (0 if it is missing), exactly once; returns the sum."""
    client = _required()
    return client.ask(m.KvAdd(client.scope, key, amount), m.Number, TIMEOUT_S).number


@functools.lru_cache(maxsize=1)
def _cell(path: str) -> ProgressCell:
    return ProgressCell.open(path)


def _required() -> AgentClient:
    client = current()
    if client is None:
        raise UsageError("this process was not started by Holdfast: run it with `holdfast run`")
    return client
