# SPDX-License-Identifier: Apache-2.0
"""What the scripts and the tests of elastic training share: data, model, and one process alone."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.torch import ElasticDistributedSampler

GLOBAL_BATCH = 16
SEED = 4


def dataset(length: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(3)
    inputs = torch.randn(length, 6, dtype=torch.float64, generator=numbers)
    targets = torch.randn(length, 1, dtype=torch.float64, generator=numbers)
    return TensorDataset(torch.arange(length), inputs, targets)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def optimizer_of(trained: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.02)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def loss_of(predicted: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(predicted, targets)


def trained_alone(length: int, epochs: int) -> dict[str, torch.Tensor]:
    """The weights after a training with each global batch as a whole, in one process."""
    alone = model()
    optimizer, schedule = optimizer_of(alone)
    _, inputs, targets = dataset(length).tensors
    sampler = ElasticDistributedSampler(length, num_replicas=1, rank=0, seed=SEED)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, length, GLOBAL_BATCH):
            rows = order[start : start + GLOBAL_BATCH]
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(alone(inputs[rows]), targets[rows]))
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    return alone.state_dict()
