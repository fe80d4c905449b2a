# SPDX-License-Identifier: Apache-2.0
"""A training with a fixed global batch and a checkpoint at every step, in worlds of any size.

Each rank writes down which samples it trained in which step, before the step is saved. At the end
rank 0 writes the weights.
"""

import json
import os

import torch
import torch.distributed as dist
from elastic_job import GLOBAL_BATCH, SEED, dataset, loss_of, model, optimizer_of
from steplog import FOLDER, RANK, ROUND, STEP_S, hold, leave, note, pause
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.torch import (
    Checkpointer,
    ElasticDataLoader,
    ElasticDistributedSampler,
    ElasticTrainer,
)

LENGTH, EPOCHS = int(os.environ["LENGTH"]), int(os.environ["EPOCHS"])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = DistributedDataParallel(model())
    optimizer, schedule = optimizer_of(trained)
    data = dataset(LENGTH)
    loader = ElasticDataLoader(
        data, 2, sampler=ElasticDistributedSampler(data, seed=SEED), num_workers=1
    )
    trainer = ElasticTrainer(trained, optimizer, loader, global_batch=GLOBAL_BATCH)
    with (
        (FOLDER / f"samples-{ROUND}-{RANK}").open("a") as samples,
        Checkpointer(FOLDER / "saves") as checkpointer,
    ):
        loaded = checkpointer.load(trained, optimizer, extra={"schedule": schedule}, data=trainer)
        note("loaded", -1 if loaded is None else loaded)
        while trainer.epoch < EPOCHS:
            epoch = trainer.epoch
            for batches in trainer.steps():
                for numbers, inputs, targets in batches:
                    # Before others have these gradients: a step that any rank saves is told by all.
                    line = {"step": trainer.step + 1, "epoch": epoch, "rows": numbers.tolist()}
                    print(json.dumps(line), file=samples, flush=True)
                    trainer.backward(loss_of(trained(inputs), targets))
                nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                checkpointer.save(
                    trainer.step, trained, optimizer, extra={"schedule": schedule}, data=trainer
                )
                note("step", trainer.step)
                hold(trainer.step)
                pause(STEP_S)
    if RANK == 0:
        torch.save(trained.module.state_dict(), FOLDER / "weights.pt")
    dist.barrier()
    note("end", trainer.step)


main()
leave()
