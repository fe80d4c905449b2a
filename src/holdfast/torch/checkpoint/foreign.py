# SPDX-License-Identifier: Apache-2.0
"""Reads what DLRover's DdpCheckpointer has saved, for a training that moves to Holdfast."""

from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.foreign import DLROVER_TRACKER, find_dlrover
from holdfast.checkpoint.storage import open_storage
from holdfast.model.checkpoint import Series
from holdfast.model.errors import UsageError
from holdfast.torch.checkpoint import opaque, state

_WRAPPER = "module."
_WAY_OUT = "load it by what wrote it, or choose another directory to begin at 0"


def read_dlrover(
    directory: str, rank: int, wanted: int | None
) -> tuple[int, dict[str, Any]] | None:
    """The newest step or the wanted one, and what this rank had saved; None if there is none.

    UsageError if it exists and cannot be read: the training must not silently begin at step 0.
    """
    step = find_dlrover(open_storage(directory), wanted, str(wanted))
    if step is None:
        return None
    what = f"{directory} has step {step} of DLRover"
    folder = Path(directory, str(step))
    paths = [folder / f"rank_{number}.pt" for number in (rank, 0)]
    found = next((path for path in paths if path.is_file()), None)
    if "://" in directory or found is None:
        raise UsageError(f"{what}, but no {paths[-1]}: {_WAY_OUT}")
    try:
        saved = torch.load(found, map_location="cpu", weights_only=True, mmap=True)
    except opaque.NOT_LOADED as exc:
        raise UsageError(
            f"{what}, but {found} can only be read by running what stands in it, or is damaged: "
            f"{_WAY_OUT}"
        ) from exc
    if not isinstance(saved, dict):
        raise UsageError(f"{what}, but {found} is not a dict: {_WAY_OUT}")
    return step, saved


def refuse_dlrover(series: Series, wanted: int | None) -> None:
    """UsageError if a framework wants to load here, and there is only a checkpoint of DLRover: the
    framework would find nothing and begin at step 0."""
    if series.tracker == DLROVER_TRACKER:
        return  # The series has DLRover's layout: the caller reads DLRover's checkpoints too.
    name = "" if wanted is None else series.name(wanted)
    step = find_dlrover(open_storage(series.directory), wanted, name)
    if step is not None:
        raise UsageError(
            f"{series.directory} has step {step} of DLRover and no checkpoint of Holdfast that "
            f"could be loaded instead: {_WAY_OUT}"
        )


def without_wrapper(saved: Any, live: object) -> Any:
    """A state dict with the names of the bare model: names saved from DDP begin with "module."."""
    bare = state.unwrapped(live)
    if not isinstance(saved, dict) or not isinstance(bare, torch.nn.Module):
        return saved
    if not saved or not all(str(name).startswith(_WRAPPER) for name in saved):
        return saved
    if any(name.startswith(_WRAPPER) for name in bare.state_dict()):
        return saved
    return {str(name).removeprefix(_WRAPPER): value for name, value in saved.items()}
