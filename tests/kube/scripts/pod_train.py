# SPDX-License-Identifier: Apache-2.0
"""A training in pods, with a fixed global batch and a checkpoint in memory at every step.

It goes on until the test asks it to finish. Each rank writes down which samples it trains in which
step, before its gradients get to the others: a step that any rank saves is written down by all. A
worker of the pod that the file "eat-POD" names eats its memory.
"""

import json
import os

import torch
import torch.distributed as dist
from elastic_job import GLOBAL_BATCH, SEED, dataset, loss_of, model, optimizer_of
from steplog import FOLDER, RANK, ROUND, is_to_finish, leave, note, pause
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from holdfast.torch import (
    Checkpointer,
    ElasticDataLoader,
    ElasticDistributedSampler,
    ElasticTrainer,
)

LENGTH = int(os.environ["LENGTH"])
EATS = FOLDER / f"eat-{os.environ['STEPS_NODE']}"
STEP_S = 0.1
PIECE = 16 * 2**20


def shall_go_on() -> bool:
    """What rank 0 knows, for all ranks alike."""
    answer = torch.tensor([int(not is_to_finish())])
    dist.broadcast(answer, src=0)
    return bool(answer.item())


def eat() -> None:
    kept = []
    while EATS.exists():
        kept.append(b"x" * PIECE)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trained = DistributedDataParallel(model())
    optimizer, schedule = optimizer_of(trained)
    data = dataset(LENGTH)
    loader = ElasticDataLoader(data, 16, sampler=ElasticDistributedSampler(data, seed=SEED))
    trainer = ElasticTrainer(trained, optimizer, loader, global_batch=GLOBAL_BATCH)
    with (
        (FOLDER / f"samples-{ROUND}-{RANK}").open("a") as samples,
        Checkpointer(FOLDER / "saves") as checkpointer,
    ):
        loaded = checkpointer.load(trained, optimizer, extra={"schedule": schedule}, data=trainer)
        note("loaded", -1 if loaded is None else loaded)
        while shall_go_on():
            for batches in trainer.steps():
                for numbers, inputs, targets in batches:
                    line = {"step": trainer.step + 1, "rows": numbers.tolist()}
                    print(json.dumps(line), file=samples, flush=True)
                    trainer.backward(loss_of(trained(inputs), targets))
                nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
                optimizer.step()
                checkpointer.save(
                    trainer.step, trained, optimizer, extra={"schedule": schedule}, data=trainer
                )
                note("step", trainer.step)
                pause(STEP_S)
                if EATS.exists():
                    eat()
                if not shall_go_on():
                    break
    note("end", trainer.step)


main()
leave()
