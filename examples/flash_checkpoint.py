# SPDX-License-Identifier: Apache-2.0
"""A training that saves every step to memory and every hundredth to storage.

    holdfast run --nproc-per-node 2 examples/flash_checkpoint.py /tmp/saves

Kill a worker (kill -9) while it runs: the training goes on from the step before. Interrupt it with
Ctrl-C and start it again: it goes on from storage. It also runs under torchrun and plain python.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.torch import Checkpointer, EverySteps, KeepLast

STEPS = int(os.environ.get("STEPS", "1000"))


def main(directory: str) -> None:
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    if is_distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    with Checkpointer(
        directory, storage=EverySteps(100), keep=KeepLast(3), overlap=True
    ) as checkpointer:
        loaded = checkpointer.load(model, optimizer, extra={"schedule": schedule})
        first = 0 if loaded is None else loaded + 1
        if not is_distributed or dist.get_rank() == 0:
            print(f"starting with step {first}", flush=True)
        for step in range(first, STEPS):
            inputs = torch.randn(32, 256)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            checkpointer.save(step, model, optimizer, extra={"schedule": schedule})
        newest = checkpointer.wait()
        if not is_distributed or dist.get_rank() == 0:
            print(f"loss {loss.item():.4f}; step {newest} is the newest on storage", flush=True)
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
