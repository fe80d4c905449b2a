# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of models that are whole on every rank, or that a script has split by itself.

On storage they have DLRover's form: DIR/STEP/rank_0.pt and dlrover_latest.txt.
"""

import os
from typing import Any

import torch

from dlrover import _refused
from dlrover.python.common.storage import CheckpointDeletionStrategy
from dlrover.trainer.torch.flash_checkpoint.checkpointer import (
    Checkpointer,
    StorageType,
    check_plain,
    tier,
)
from holdfast.checkpoint.foreign import DLROVER_TRACKER
from holdfast.runtime.settings import worker_place
from holdfast.torch.checkpoint.foreign import read_dlrover
from holdfast.torch.checkpoint.zip_image import memory_file

__getattr__ = _refused.missing(__name__)

_NAMES = {"pattern": "{step}", "tracker": DLROVER_TRACKER, "tracker_text": "{step}"}


class DdpCheckpointer(Checkpointer):
    """Saves one state dict per job, or with shard numbers above 1 one per rank."""

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        deletion_strategy: CheckpointDeletionStrategy | None = None,
        save_timeout: float = 600,
        replica_count: int = 0,
    ) -> None:
        super().__init__(
            checkpoint_dir, comm_backend, deletion_strategy, save_timeout, replica_count, _NAMES
        )
        self._rank = worker_place().rank
        self._is_cut = max(local_shard_num, global_shard_num) > 1

    def save_checkpoint(
        self,
        step: int,
        state_dict: dict[str, Any],
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> bool:
        """Save to memory, and in the background to storage. Every rank calls it."""
        to = tier(storage_type)
        self._note_path(path)
        check_plain(state_dict, "state_dict")
        if self._is_cut:
            saved = self.flash.save_files(step, {self._file: state_dict}, to=to)
        else:
            saved = self.flash.save_files(step, {}, shared={self._file: state_dict}, to=to)
        return self._ended(saved)

    def load_checkpoint(self, resume_path: str = "") -> dict[str, Any]:
        """The newest state that every rank can have, or that of a file; {} if there is none.

        Every rank calls it. The tensors are copies on the CPU.
        """
        if resume_path:
            return _read(resume_path)
        found = self.flash.load_files()
        if found is None:
            foreign = read_dlrover(self.flash.directory, self._rank, None)
            return {} if foreign is None else foreign[1]
        with found:
            return _read(memory_file(found.file(self._file)))

    @property
    def _file(self) -> str:
        return f"rank_{self._rank if self._is_cut else 0}.pt"


def _read(file: Any) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return state
