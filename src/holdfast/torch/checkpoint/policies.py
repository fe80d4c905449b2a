# SPDX-License-Identifier: Apache-2.0
"""When a checkpoint is due, and which ones are kept.

Every rank must decide the same at the same step, or the parts of a checkpoint would never be
complete. With rules about steps that is always so. With rules about time rank 0 alone chooses a
step and tells it to the others; all ranks know at which step it will choose the next.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from holdfast.model.errors import UsageError

FIRST_STEPS = 10
"""After this many saves the time of a step is known well enough to plan with."""

FAILURES_PER_S_AT_LEAST = 1 / 86_400
"""One failure a day, for a job that has not failed yet."""


@dataclass(frozen=True, slots=True)
class EverySteps:
    """Due at steps that are multiples of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"EverySteps needs a number from 1 on, not {self.steps}")


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """Due about every `minutes` minutes, at the same step on every rank."""

    minutes: float

    def __post_init__(self) -> None:
        if not 0 < self.minutes < math.inf:
            raise UsageError(f"EveryMinutes needs a positive number, not {self.minutes}")


@dataclass(frozen=True, slots=True)
class Auto:
    """Due at the interval that loses least time, from the cost of a save and the failure rate.

    Young's rule: the square root of twice the cost of a save times the mean time between failures.
    """

    minutes_min: float = 1.0
    minutes_max: float = 60.0

    def interval_s(self, cost_s: float, failures_per_s: float) -> float:
        """The best interval, within bounds: a save must be over long before the next begins."""
        rate = max(failures_per_s, FAILURES_PER_S_AT_LEAST)
        best_s = math.sqrt(2 * cost_s / rate)
        return min(max(best_s, 60 * self.minutes_min, 2 * cost_s), 60 * self.minutes_max)


Every = EverySteps | EveryMinutes | Auto


@dataclass(frozen=True, slots=True)
class KeepLast:
    """Keep the newest `count` checkpoints on storage."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"KeepLast needs a number from 1 on, not {self.count}")


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep the steps that are multiples of `steps`, and the newest `last`."""

    steps: int
    last: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.last < 1:
            raise UsageError("KeepEvery needs numbers from 1 on")


Keep = KeepLast | KeepEvery | Callable[[Sequence[int]], Sequence[int]]
"""A callable gets the committed steps, oldest first, and returns those that may go."""


class Schedule:
    """Says for one rank when its rule is due. All ranks ask it about the same steps, in order."""

    def __init__(
        self,
        every: Every | None,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._world_size = world_size
        self._clock = clock
        self._asked = 0
        self._started_at = 0.0
        self._started_step = 0
        self._next_step: int | None = None
        self.cost_s = 0.0
        """How long the last save took to reach storage; measured on rank 0."""
        self.failures_per_s = 0.0

    @property
    def needs_cost(self) -> bool:
        """Whether the rule depends on `cost_s`."""
        return isinstance(self._every, Auto)

    def is_due(self, step: int) -> bool:
        """Whether this step is to be saved."""
        if self._every is None:
            return False
        if isinstance(self._every, EverySteps):
            return step % self._every.steps == 0
        self._asked += 1
        if self._asked == 1:
            self._started_at, self._started_step = self._clock(), step
        if self._next_step is None:
            if self._asked > FIRST_STEPS:
                self._plan(step)
            return False
        if step < self._next_step:
            return False
        self._plan(step)
        return True

    def _plan(self, step: int) -> None:
        """Agree on the next step that is due. Every rank calls this at the same step."""
        now = self._clock()
        steps = max(1, step - self._started_step)
        step_s = max(1e-6, (now - self._started_at) / steps)
        self._started_at, self._started_step = now, step
        self._next_step = step + self._said_by_rank_0(max(1, round(self._interval_s() / step_s)))

    def _interval_s(self) -> float:
        if isinstance(self._every, EveryMinutes):
            return 60 * self._every.minutes
        assert isinstance(self._every, Auto)
        return self._every.interval_s(self.cost_s, self.failures_per_s)

    def _said_by_rank_0(self, steps: int) -> int:
        if self._world_size == 1:
            return steps
        if not dist.is_initialized():
            raise UsageError(
                f"checkpoints by time with {self._world_size} ranks need torch.distributed: "
                "call init_process_group first, or use EverySteps"
            )
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        said = torch.tensor([steps], dtype=torch.int64, device=device)
        dist.broadcast(said, src=0)
        return int(said)
