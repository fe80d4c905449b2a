# SPDX-License-Identifier: Apache-2.0
"""Whether a state is spread over ranks.

torch's sharding takes about a second to import, and a training without it must not pay for that. A
class that was never imported has no instances: so this module looks it up and never imports it.
"""

import sys
from collections.abc import Iterable, Mapping

from torch.nn import Module
from torch.optim import Optimizer

KIND = "sharded"
"""The kind in the index of a sharded checkpoint."""


def is_sharded(model: object, optimizer: object) -> bool:
    """Whether any tensor in these is spread over ranks."""
    return any(_is_sharded(one) for given in (model, optimizer) for one in _each(given))


def _is_sharded(one: object) -> bool:
    if isinstance(one, Module):
        return any(_is_dtensor(p) for p in one.parameters()) or is_fsdp1(one)
    if isinstance(one, Optimizer):
        return any(_is_dtensor(p) for group in one.param_groups for p in group["params"])
    if isinstance(one, Mapping):
        return any(_is_sharded(value) for value in one.values())
    return _is_dtensor(one) or is_old_shard(one)


def is_fsdp1(module: Module) -> bool:
    """FSDP1 keeps parameters as slices of flat tensors: its state is always a copy."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(
        isinstance(one, fsdp.FullyShardedDataParallel) for one in module.modules()
    )


def is_old_shard(value: object) -> bool:
    """FSDP1's ShardedTensor, which is no Tensor and has no public name."""
    return hasattr(value, "local_shards") and hasattr(value, "sharding_spec")


def _is_dtensor(value: object) -> bool:
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and isinstance(value, tensor.DTensor)


def _each(given: object) -> Iterable[object]:
    return given if isinstance(given, list | tuple) else (given,)
