# SPDX-License-Identifier: Apache-2.0
"""The states of the random number generators that a training uses, taken and put back."""

import random
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The states of torch, Python and numpy, and of the accelerator if it is in use."""
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    cuda: Any = torch.cuda  # Without types in torch.
    if cuda.is_available() and cuda.is_initialized():
        state["cuda"] = cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Go on with the numbers that would have come next."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
