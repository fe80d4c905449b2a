# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint with torch alone: `dcp.load` at these world sizes. Holdfast is not imported.

fsdp_dcp.py FOLDER REFERENCE KIND:WORLD_SIZE...
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from fsdp_models import build, differences, full_state, run_ranks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def check(kind: str, folder: Path, reference: Path, rank: int) -> None:
    model, optimizer = build(kind, seed=3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    expected = torch.load(reference, weights_only=True)
    expected.pop("step", None)
    found = differences(expected, full_state(model, optimizer))
    assert not found, found
    assert not [name for name in sys.modules if name.split(".")[0] == "holdfast"]


if __name__ == "__main__":
    folder, reference = Path(sys.argv[1]), Path(sys.argv[2])
    for argument in sys.argv[3:]:
        kind, world_size = argument.split(":")
        work = functools.partial(check, kind, folder, reference)
        run_ranks(int(world_size), reference.parent, work)
