# SPDX-License-Identifier: Apache-2.0
"""How much an optimizer will add to the state once it has made its first step."""

from collections.abc import Mapping
from typing import Any

import torch

_STATES_PER_PARAMETER = {"Adagrad": 1, "RMSprop": 1, "Adadelta": 2, "Rprop": 2, "LBFGS": 0}
"""Tensors per parameter of optimizers that keep neither momentum nor, like Adam, two moments."""


def optimizer_bytes_to_come(optimizer: object) -> int:
    """Bytes of optimizer state that do not exist yet; an estimate, to reserve memory."""
    if isinstance(optimizer, Mapping):
        return sum(optimizer_bytes_to_come(item) for item in optimizer.values())
    if isinstance(optimizer, list | tuple):
        return sum(optimizer_bytes_to_come(item) for item in optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return 0
    return sum(
        parameter.nbytes * _states_each(optimizer, group) + 4096
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    )


def _states_each(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    kind = type(optimizer).__name__
    if kind == "SGD":
        return 1 if group.get("momentum") else 0
    return _STATES_PER_PARAMETER.get(kind, 3 if group.get("amsgrad") else 2)
