# SPDX-License-Identifier: Apache-2.0
"""The adapter for PyTorch. Importing it makes torch know `init_method="holdfast://"`."""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.torch.elastic.store import HoldfastStore

if TYPE_CHECKING:
    from holdfast.torch.checkpoint.checkpointer import MEMORY, STORAGE, Checkpointer, Saved, Tier
    from holdfast.torch.checkpoint.policies import (
        Auto,
        EveryMinutes,
        EverySteps,
        KeepEvery,
        KeepLast,
    )
    from holdfast.torch.data.datasets import (
        ShardedIterableDataset,
        ShardedLoader,
        ShardedMapDataset,
        in_step,
    )
    from holdfast.torch.data.loader import ElasticDataLoader
    from holdfast.torch.data.sampler import ElasticDistributedSampler
    from holdfast.torch.elastic.trainer import ElasticTrainer

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
    "ElasticDistributedSampler",
    "ElasticDataLoader",
    "ElasticTrainer",
    "ShardedMapDataset",
    "ShardedIterableDataset",
    "ShardedLoader",
    "in_step",
    "HoldfastStore",
]

_MODULES = {
    **dict.fromkeys(
        ("Checkpointer", "Saved", "Tier", "MEMORY", "STORAGE"), "checkpoint.checkpointer"
    ),
    **dict.fromkeys(
        ("EverySteps", "EveryMinutes", "Auto", "KeepLast", "KeepEvery"), "checkpoint.policies"
    ),
    "ElasticDistributedSampler": "data.sampler",
    "ElasticDataLoader": "data.loader",
    "ElasticTrainer": "elastic.trainer",
    **dict.fromkeys(
        ("ShardedMapDataset", "ShardedIterableDataset", "ShardedLoader", "in_step"), "data"
    ),
}


def __getattr__(name: str) -> Any:
    """Import on first use: the store's server is in this package too, and needs none of these."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
