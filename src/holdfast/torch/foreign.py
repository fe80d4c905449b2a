# SPDX-License-Identifier: Apache-2.0
"""Reads what DLRover's DdpCheckpointer has saved, for a training that moves to Holdfast."""

from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.foreign import dlrover_step
from holdfast.checkpoint.storage import open_storage
from holdfast.model.errors import UsageError
from holdfast.torch import opaque, state

_WRAPPER = "module."


def read_dlrover(
    directory: str, rank: int, wanted: int | None
) -> tuple[int, dict[str, Any]] | None:
    """The newest step there, and what this rank had saved; None if there is none, or another.

    UsageError if it is there and cannot be read: a training must not begin at 0 for that.
    """
    step = dlrover_step(open_storage(directory))
    if step is None or wanted not in (None, step):
        return None
    what = f"{directory} has checkpoints of DLRover up to step {step}"
    way_out = "load it by what wrote it, or choose another directory to begin at 0"
    folder = Path(directory, str(step))
    paths = [folder / f"rank_{number}.pt" for number in (rank, 0)]
    found = next((path for path in paths if path.is_file()), None)
    if "://" in directory or found is None:
        raise UsageError(f"{what}, but no {paths[-1]}: {way_out}")
    try:
        saved = torch.load(found, map_location="cpu", weights_only=True, mmap=True)
    except opaque.NOT_LOADED as exc:
        raise UsageError(
            f"{what}, but {found} can only be read by running what stands in it, or is damaged: "
            f"{way_out}"
        ) from exc
    if not isinstance(saved, dict):
        raise UsageError(f"{what}, but {found} is not a dict: {way_out}")
    return step, saved


def without_wrapper(saved: Any, live: object) -> Any:
    """A state dict as the bare model has it: one that was saved from DDP has "module." before all
    its names."""
    bare = state.unwrapped(live)
    if not isinstance(saved, dict) or not isinstance(bare, torch.nn.Module):
        return saved
    if not saved or not all(str(name).startswith(_WRAPPER) for name in saved):
        return saved
    if any(name.startswith(_WRAPPER) for name in bare.state_dict()):
        return saved
    return {str(name).removeprefix(_WRAPPER): value for name, value in saved.items()}
