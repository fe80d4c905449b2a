# SPDX-License-Identifier: Apache-2.0
"""Saves with `dcp.save` and loads with `dcp.load`, both through the memory of the agent."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_models import build, differences, full_state, train
from steplog import FOLDER, RANK, leave, note
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from holdfast.torch import STORAGE, Checkpointer
from holdfast.torch.dcp import DcpReader, DcpWriter


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpointer = Checkpointer(FOLDER / "saves")
    assert DcpReader(checkpointer).step is None
    model, optimizer = build("fsdp2", seed=1)
    for step in (1, 2, 3):
        train(model, optimizer, 1)
        states = get_state_dict(model, optimizer)
        state = dict(zip(("model", "optimizer"), states, strict=True))
        to = STORAGE if step == 3 else None
        dcp.save(state, storage_writer=DcpWriter(checkpointer, step, to))
    reference = full_state(model, optimizer)
    other, its_optimizer = build("fsdp2", seed=2)
    states = get_state_dict(other, its_optimizer)
    state = dict(zip(("model", "optimizer"), states, strict=True))
    reader = DcpReader(checkpointer)
    assert reader.step == 3
    dcp.load(state, storage_reader=reader)
    set_state_dict(
        other,
        its_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    found = differences(reference, full_state(other, its_optimizer))
    assert not found, found
    if RANK == 0:
        torch.save(reference, FOLDER / "reference.pt")
    assert checkpointer.wait(120.0) == 3
    checkpointer.close()
    dist.destroy_process_group()
    note("end", 3)


main()
leave()
