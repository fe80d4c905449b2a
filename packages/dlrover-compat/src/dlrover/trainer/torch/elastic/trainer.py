# SPDX-License-Identifier: Apache-2.0
"""The trainer without a fixed global batch; Holdfast's own trainer can keep one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlrover import _refused

__getattr__ = _refused.missing(__name__)


class ElasticTrainer(_refused.Named):
    """Counts steps. Holdfast sees the steps of a torch optimizer, so nothing is wrapped."""

    def __init__(self, model: torch.nn.Module, dataloader: object = None) -> None:
        self.model, self.dataloader = model, dataloader
        self.num_steps = 0

    def prepare(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> Any:
        """The optimizer, and the scheduler if there is one, unchanged."""
        return optimizer if lr_scheduler is None else (optimizer, lr_scheduler)

    @contextmanager
    def step(self, fix_total_batch_size: bool = False) -> Iterator[None]:
        """One step of the training."""
        if fix_total_batch_size:
            _refused.refuse(
                f"{__name__}.ElasticTrainer.step(fix_total_batch_size=True)",
                "holdfast.torch.ElasticTrainer keeps the global batch, in a loop of another shape",
            )
        yield
        self.num_steps += 1

    def reset(self) -> None:
        """Count from 0 again."""
        self.num_steps = 0
