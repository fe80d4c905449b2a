# SPDX-License-Identifier: Apache-2.0
"""torch's DataLoader on data that are dealt out by the job, and samplers for changing worlds."""

from holdfast.torch.data.datasets import (
    ShardedIterableDataset,
    ShardedLoader,
    ShardedMapDataset,
    in_step,
)

__all__ = ["ShardedIterableDataset", "ShardedLoader", "ShardedMapDataset", "in_step"]
