# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of FSDP models, and of all others that holdfast.torch.Checkpointer supports.

On storage they have Holdfast's form (docs/sharded.md), which serves worlds of every size.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch

from dlrover import _refused
from dlrover.python.common.storage import CheckpointDeletionStrategy
from dlrover.trainer.torch.flash_checkpoint.checkpointer import Checkpointer, StorageType, tier

__getattr__ = _refused.missing(__name__)


class FsdpShardCheckpointer(Checkpointer):
    """Saves model and optimizer from where they are; each rank saves its share."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        comm_backend: str = "",
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        save_timeout: float = 600,
        replica_count: int = 0,
    ) -> None:
        super().__init__(
            checkpoint_dir, comm_backend, deletion_strategy, save_timeout, replica_count, {}
        )

    def save_checkpoint(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra_sd: Mapping[str, Any] | None = None,
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> bool:
        """Save to memory, and in the background to storage. Every rank calls it."""
        to = tier(storage_type)
        self._note_path(path)
        return self._ended(
            self.flash.save(step, model, optimizer, extra=dict(extra_sd or {}), to=to)
        )

    def load_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resume_path: str = "",
    ) -> dict[str, Any]:
        """Load the newest state in place; returns other saved values and the step. {}: none."""
        if resume_path:
            _refused.refuse(
                f"{__name__}: resume_path={resume_path!r}",
                "a directory belongs to one checkpointer; make one for the directory above it",
            )
        step = self.flash.load(model, optimizer)
        return {} if step is None else {**(self.flash.extra or {}), "step": step}


class FsdpFullCheckpointer(FsdpShardCheckpointer):
    """The same: a checkpoint on storage serves any number of ranks without gathering."""
