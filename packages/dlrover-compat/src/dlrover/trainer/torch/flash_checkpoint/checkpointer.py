# SPDX-License-Identifier: Apache-2.0
"""The common part of all checkpointers."""

import enum
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from dlrover import _refused
from dlrover.python.common.storage import CheckpointDeletionStrategy
from holdfast.torch import MEMORY, STORAGE, Saved, Tier
from holdfast.torch import Checkpointer as HoldfastCheckpointer

log = logging.getLogger(__name__)

__getattr__ = _refused.missing(__name__)


class StorageType(enum.Enum):
    """How far a save goes: to memory only, or to memory and then to storage."""

    MEMORY = 0
    DISK = 1


class Checkpointer(_refused.Named):
    """A directory of checkpoints, the base of every checkpointer here."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        comm_backend: str,
        deletion_strategy: CheckpointDeletionStrategy | None,
        save_timeout: float,
        replica_count: int,
        names: Mapping[str, Any],
    ) -> None:
        # `comm_backend` chose how ranks vote on a save; here the agents agree without the ranks.
        self.checkpoint_dir = os.fspath(checkpoint_dir)
        self.flash = HoldfastCheckpointer(
            checkpoint_dir,
            every=None,
            keep=None if deletion_strategy is None else deletion_strategy.keep(),
            # DLRover counts all nodes that have a state, Holdfast counts only the further ones.
            replicas=max(1, replica_count - 1) if replica_count > 0 else 0,
            slots=3,
            timeout_s=save_timeout,
            **names,
        )
        """Holdfast's own object, for features beyond this interface."""
        self._said: set[str] = set()

    def wait_latest_checkpoint(self, timeout: float = 1800) -> int | None:
        """Wait until the last save is on storage; raises if it failed or takes longer."""
        return self.flash.wait(timeout)

    def close(self) -> None:
        self.flash.close()

    def _note_path(self, path: str) -> None:
        if path and "path" not in self._said:
            self._said.add("path")
            log.warning(
                "the path %s has no effect: checkpoints go to %s, a directory for each step, and a "
                "load without a path finds the newest (%s#checkpoints)",
                path,
                self.checkpoint_dir,
                _refused.PAGE,
            )

    def _ended(self, saved: Saved) -> bool:
        if not saved.taken:
            log.warning("step %d was not saved: %s", saved.step, saved.why)
        return saved.taken


def tier(storage_type: Any) -> Tier:
    """The tier for a save of this type."""
    if storage_type not in (StorageType.MEMORY, StorageType.DISK):
        raise ValueError(f"the storage type must be MEMORY or DISK, not {storage_type!r}")
    return MEMORY if storage_type is StorageType.MEMORY else STORAGE


def check_plain(value: object, place: str) -> None:
    """Refuse what torch.load(weights_only=True) would refuse: a load runs no code from a file."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            check_plain(item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple | set):
        for number, item in enumerate(value):
            check_plain(item, f"{place}[{number}]")
    elif not isinstance(value, _PLAIN):
        _refused.refuse(
            f"dlrover.trainer.torch.flash_checkpoint: {place}, a {type(value).__name__},",
            "only tensors, numbers, text and containers of them can be loaded without running "
            "code from the file; save its state instead",
        )


_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype)
