# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints with torch alone, by `dcp.load`. Holdfast is not imported.

fsdp_dcp.py KIND:WORLD_SIZE FOLDER REFERENCE [FOLDER REFERENCE...]
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
    kind, world_size = sys.argv[1].split(":")
    for folder, reference in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        print(folder, flush=True)
        work = functools.partial(check, kind, Path(folder), Path(reference))
        run_ranks(int(world_size), Path(reference).parent, work)
