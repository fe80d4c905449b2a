# SPDX-License-Identifier: Apache-2.0
"""The adapter for PyTorch. Importing it makes torch know `init_method="holdfast://"`."""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.torch.store import HoldfastStore

if TYPE_CHECKING:
    from holdfast.torch.checkpointer import MEMORY, STORAGE, Checkpointer, Saved, Tier
    from holdfast.torch.policies import Auto, EveryMinutes, EverySteps, KeepEvery, KeepLast

__all__ = [
    "Checkpointer",
    "Saved",
    "Tier",
    "MEMORY",
    "STORAGE",
    "EverySteps",
    "EveryMinutes",
    "Auto",
    "KeepLast",
    "KeepEvery",
    "HoldfastStore",
]

_MODULES = {
    **dict.fromkeys(("Checkpointer", "Saved", "Tier", "MEMORY", "STORAGE"), "checkpointer"),
    **dict.fromkeys(("EverySteps", "EveryMinutes", "Auto", "KeepLast", "KeepEvery"), "policies"),
}


def __getattr__(name: str) -> Any:
    """Import when first used: the store's server is in this package too, and needs none of it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
