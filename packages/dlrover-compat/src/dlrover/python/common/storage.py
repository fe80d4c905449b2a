# SPDX-License-Identifier: Apache-2.0
"""Deletion strategies. Holdfast itself writes the files: to a path or an fsspec URL."""

from dataclasses import dataclass

from dlrover import _refused
from holdfast.torch import KeepEvery, KeepLast

__getattr__ = _refused.missing(__name__)


class CheckpointDeletionStrategy:
    """Base of the two below. Holdfast's Checkpointer takes a rule of your own as a function."""

    def keep(self) -> KeepLast | KeepEvery:
        """The same rule in Holdfast's form."""
        _refused.refuse(
            f"{__name__}.CheckpointDeletionStrategy subclass {type(self).__name__}",
            "holdfast.torch.Checkpointer(keep=function) takes a rule of your own",
        )


@dataclass(frozen=True)
class KeepLatestStepStrategy(CheckpointDeletionStrategy):
    """Keep the newest `max_to_keep` steps."""

    max_to_keep: int
    checkpoint_dir: str = ""

    def keep(self) -> KeepLast:
        return KeepLast(max(1, self.max_to_keep))


@dataclass(frozen=True)
class KeepStepIntervalStrategy(CheckpointDeletionStrategy):
    """Keep the steps that are multiples of `keep_interval`, and the newest."""

    keep_interval: int
    checkpoint_dir: str = ""

    def keep(self) -> KeepEvery:
        return KeepEvery(self.keep_interval)
