# SPDX-License-Identifier: Apache-2.0
"""A training whose global batch, data order and learning rates do not depend on its world.

    holdfast run --nproc-per-node 4 examples/elastic.py /tmp/elastic

Kill a worker, or interrupt it and start it again with another --nproc-per-node: the losses go on as
if nothing had happened, and every sample of every epoch is trained once. docs/elastic.md says how.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from holdfast.torch import (
    Checkpointer,
    ElasticDataLoader,
    ElasticDistributedSampler,
    ElasticTrainer,
    EverySteps,
)

SAMPLES = int(os.environ.get("SAMPLES", "10000"))
EPOCHS = int(os.environ.get("EPOCHS", "5"))


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 32)
    dataset = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    layers = [torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    sampler = ElasticDistributedSampler(dataset, seed=1)
    loader = ElasticDataLoader(dataset, batch_size=16, sampler=sampler)
    trainer = ElasticTrainer(model, optimizer, loader, global_batch=256)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, EPOCHS * trainer.steps_per_epoch
    )
    extra = {"schedule": schedule}

    with Checkpointer(directory, storage=EverySteps(20)) as checkpointer:
        checkpointer.load(model, optimizer, extra=extra, data=trainer)
        while trainer.epoch < EPOCHS:
            for batches in trainer.steps():
                for features, targets in batches:
                    loss = functional.mse_loss(model(features), targets)
                    trainer.backward(loss)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                checkpointer.save(trainer.step, model, optimizer, extra=extra, data=trainer)
                if dist.get_rank() == 0 and trainer.step % 20 == 0:
                    print(f"step {trainer.step}: loss {loss.item():.4f}", flush=True)
    if dist.get_rank() == 0:
        print(f"done after {trainer.step} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
