# SPDX-License-Identifier: Apache-2.0
"""Real ranks on gloo train with ElasticTrainer, and compare with one process alone.

elastic_ranks.py FOLDER KIND:WORLD_SIZE...      KIND is ddp, uneven (ddp with other batch sizes on
every rank) or fsdp2.
"""

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_job import GLOBAL_BATCH, SEED, dataset, loss_of, model, optimizer_of, trained_alone
from fsdp_models import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from holdfast.torch import ElasticDataLoader, ElasticDistributedSampler, ElasticTrainer

LENGTH = 16 * 6 + 2
"""The last global batch has fewer samples than there are ranks."""
EPOCHS = 2


def work(kind: str, expected: dict[str, torch.Tensor], rank: int) -> None:
    exchanged = 0

    def averaged(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal exchanged
        exchanged += 1
        buffer = bucket.buffer() / dist.get_world_size()
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])

    trained = model()
    if kind == "fsdp2":
        trained = fully_shard(trained)
    else:
        trained = DistributedDataParallel(trained)
        trained.register_comm_hook(None, averaged)
    optimizer, schedule = optimizer_of(trained)
    data = dataset(LENGTH)
    sampler = ElasticDistributedSampler(data, seed=SEED)
    assert (sampler.num_replicas, sampler.rank) == (dist.get_world_size(), rank)
    batch_size = 1 + rank if kind == "uneven" else 2
    loader = ElasticDataLoader(data, batch_size, sampler=sampler)
    trainer = ElasticTrainer(trained, optimizer, loader, global_batch=GLOBAL_BATCH)
    passes = 0
    while trainer.epoch < EPOCHS:
        for batches in trainer.steps():
            for _, inputs, targets in batches:
                trainer.backward(loss_of(trained(inputs), targets))
                passes += 1
            nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            optimizer.step()
            schedule.step()
    assert trainer.step == EPOCHS * trainer.steps_per_epoch == 14
    assert passes > trainer.step, "nothing was accumulated"
    assert kind == "fsdp2" or exchanged == trainer.step, "gradients go over the wire once a step"
    options = StateDictOptions(full_state_dict=True)
    for name, tensor in get_model_state_dict(trained, options=options).items():
        if rank == 0 or kind != "fsdp2":
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-11)


def main(folder: Path, *runs: str) -> None:
    expected = trained_alone(LENGTH, EPOCHS)
    for run in runs:
        kind, size = run.split(":")
        run_ranks(int(size), folder, functools.partial(work, kind, expected))
        print("same", run, flush=True)


main(Path(sys.argv[1]), *sys.argv[2:])
