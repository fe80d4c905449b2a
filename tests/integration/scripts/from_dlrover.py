# SPDX-License-Identifier: Apache-2.0
"""A training script as it is written for DLRover: every name is of the package `dlrover`.

It is killed in its first round, after step 5, and must go on there.
"""

import os
import signal

import torch
import torch.distributed as dist
from dlrover.python.common.storage import KeepLatestStepStrategy
from dlrover.python.elastic_agent.sharding.client import IndexShardingClient
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.fsdp import FsdpShardCheckpointer
from steplog import FOLDER, RANK, ROUND, note
from torch.utils.data import TensorDataset


def refused(call, *arguments, **options) -> None:
    try:
        call(*arguments, **options)
    except NotImplementedError as error:
        said = str(error)
    else:
        said = "nothing"
    assert "docs/from-dlrover.md#" in said, f"{call}: {said}"


def small_surfaces() -> None:
    """Those that need no kill to be tried."""
    data = TensorDataset(torch.arange(40))
    sampler = ElasticDistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    state = sampler.state_dict(2, 4)
    assert state["position"] == 16
    other = ElasticDistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    other.load_state_dict(state)
    assert next(iter(other)) == 16
    other.load_state_dict({"completed_num": 20, "epoch": 0})
    assert next(iter(other)) == 20
    loader = ElasticDataLoader(data, 8, sampler=other)
    assert next(iter(loader))[0].tolist() == list(range(20, 28))
    loader.update_batch_size(4)
    assert loader.get_batch_size() == 4
    refused(ElasticDataLoader, data, config_file="x")
    refused(loader.load_config)
    trainer = ElasticTrainer(torch.nn.Linear(1, 1))
    with trainer.step():
        pass
    assert trainer.num_steps == 1
    refused(trainer.step(fix_total_batch_size=True).__enter__)


def read_shards() -> None:
    """Each rank reads its share; the shares of all ranks are the whole, once per epoch."""
    client = IndexShardingClient("train", 4, 2, 50, num_minibatches_per_shard=2)
    refused(client.get_shard_checkpoint)
    numbers = []
    while True:
        try:
            numbers.append(client.fetch_sample_index())
        except StopIteration:
            break
        if len(numbers) % 4 == 0:
            client.report_batch_done(4)
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, numbers)
    read = [number for numbers in everything for number in numbers]
    assert sorted(read) == sorted([*range(50), *range(50)])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    saves = str(FOLDER / "saves")
    checkpointer = DdpCheckpointer(saves, deletion_strategy=KeepLatestStepStrategy(2, saves))
    second = FsdpShardCheckpointer(str(FOLDER / "second"))
    state = checkpointer.load_checkpoint()
    first = state.get("step", 0)
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    note("loaded", first)
    for step in range(first + 1, 9):
        optimizer.zero_grad()
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        kind = StorageType.DISK if step % 4 == 0 else StorageType.MEMORY
        assert checkpointer.save_checkpoint(step, state, storage_type=kind)
        note("step", step)
        dist.barrier()
        if ROUND == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    refused(checkpointer.save_checkpoint, 9, {"arguments": object()})
    assert checkpointer.wait_latest_checkpoint() == 8
    second.save_checkpoint(1, model, optimizer, extra_sd={"epoch": 7})
    second.wait_latest_checkpoint()
    bare = torch.nn.Linear(4, 4)
    assert second.load_checkpoint(bare, None) == {"epoch": 7, "step": 1}
    assert torch.equal(bare.weight, model.weight)
    small_surfaces()
    read_shards()
    note("done", 8)
    if RANK == 0:
        torch.save(model.state_dict(), FOLDER / "model.pt")
    dist.barrier()
    checkpointer.close()
    second.close()


main()
