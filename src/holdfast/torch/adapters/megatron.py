# SPDX-License-Identifier: Apache-2.0
"""Flash checkpoints in Megatron's layouts: `iter_0000100/mp_rank_00_001/model_optim_rng.pt`.

The caller declares on every rank which rank saves which file. The module never derives it from
ranks or sizes: with tensor, pipeline, data and expert parallelism at once only the training script
knows. The functions below make the names; Megatron's own code collects the states.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.model.checkpoint import rank_part
from holdfast.model.errors import StateError
from holdfast.torch import Checkpointer, Saved, Tier
from holdfast.torch.checkpoint.zip_image import memory_file


def model_file(tensor: int, pipeline: int | None = None, expert: int | None = None) -> str:
    """The file of a place in the model; `pipeline`, `expert` only if the model is split so."""
    return f"{_place(tensor, pipeline, expert)}/model_optim_rng.pt"


def optimizer_file(tensor: int, pipeline: int | None = None, expert: int | None = None) -> str:
    """The file of the distributed optimizer of such a place, gathered on one rank."""
    return f"{_place(tensor, pipeline, expert)}/distrib_optim.pt"


def optimizer_shard_file(rank: int) -> str:
    """The file of one rank's own shard of the distributed optimizer, gathered nowhere."""
    return f"rank_{rank:05d}/distrib_optim.pt"


def _place(tensor: int, pipeline: int | None, expert: int | None) -> str:
    name = f"mp_rank_{tensor:02d}"
    if pipeline is not None:
        name += f"_{pipeline:03d}"
    if expert is not None:
        name += f"_{expert:03d}"
    return name


@dataclass(frozen=True, slots=True)
class Restored:
    """The states of an iteration by file name, as `save` received them."""

    iteration: int
    files: dict[str, Any]


class MegatronCheckpointer:
    """Saves and loads iterations. All ranks call the same methods in the same order.

    The settings are those of holdfast.torch.Checkpointer.
    """

    def __init__(self, directory: str | os.PathLike[str], **settings: Any) -> None:
        self._files = Checkpointer(
            directory,
            pattern="iter_{step:07d}",
            tracker="latest_checkpointed_iteration.txt",
            tracker_text="{step}",
            **settings,
        )

    def save(self, iteration: int, owned: Mapping[str, object], to: Tier | None = None) -> Saved:
        """Save an iteration: `owned` are the files that this rank owns, possibly none."""
        return self._files.save_files(iteration, owned, to=to)

    def load(
        self,
        owners: Mapping[str, int],
        iteration: int | None = None,
        *,
        allow_pickle: bool = False,
    ) -> Restored | None:
        """Load the files that this rank needs; `owners` says which rank saved each of them.

        Megatron's states contain objects that only pickle can read (its arguments): set
        `allow_pickle=True` if you trust the author of the directory. None: there is no checkpoint.
        """
        parts = tuple(sorted({rank_part(rank) for rank in owners.values()}))
        found = self._files.load_files(iteration, parts=parts)
        if found is None:
            return None
        with found:
            missing = sorted(set(owners) - set(found.names()))
            if missing:
                raise StateError(
                    f"iteration {found.step} has no {', '.join(missing)} in the parts of the ranks "
                    f"{sorted(set(owners.values()))}: was it saved with another parallel layout?"
                )
            states = {
                name: torch.load(
                    memory_file(found.file(name)),
                    map_location="cpu",
                    weights_only=not allow_pickle,
                )
                for name in owners
            }
            return Restored(found.step, states)

    def wait(self, timeout_s: float = 600.0) -> int | None:
        """Wait until all saves to storage are done; returns the newest committed iteration."""
        return self._files.wait(timeout_s)

    def close(self) -> None:
        self._files.close()
