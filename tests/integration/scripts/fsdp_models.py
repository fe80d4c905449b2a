# SPDX-License-Identifier: Apache-2.0
"""Sharded models on the CPU for the tests of sharded checkpoints; knows nothing of Holdfast.

`run_ranks` forks one process per rank, so that torch is imported once for all of them.
"""

import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

# Optimizers and FSDP import it on their first use: after the fork that would be once in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard

WIDTH = 33
"""Not a multiple of any world size: the shards are uneven."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.zeros(1000, WIDTH))
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.norm(self.down(torch.relu(self.up(x))))
        return y


def build(kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model sharded in one of the ways that torch knows, and its optimizer."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(Block(), Block())
    for number, block in enumerate(model):
        block.table.fill_(seed + number)
    if kind == "fsdp1":
        blocks = [FullyShardedDataParallel(block, device_id=CPU, **FSDP1) for block in model]
        model = FullyShardedDataParallel(nn.Sequential(*blocks), device_id=CPU, **FSDP1)
    elif kind != "plain":
        options: dict[str, Any] = {}
        if kind == "hsdp":
            shape = (2, dist.get_world_size() // 2)
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard"))
        if kind == "columns":
            # torch wants even columns; only some of the matrices have them.
            options["shard_placement_fn"] = lambda p: Shard(int(p.ndim > 1 and p.shape[1] > 100))
        for block in model:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed, foreach=False)
    return model, optimizer


CPU = torch.device("cpu")
FSDP1: dict[str, Any] = {
    "use_orig_params": True,
    "sharding_strategy": ShardingStrategy.FULL_SHARD,
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state, gathered on every rank."""
    options = StateDictOptions(full_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """The places where two states are not the same bit for bit."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = sorted({*first, *second}, key=str)
        return [
            found
            for key in keys
            for found in differences(first.get(key), second.get(key), f"{where}.{key}")
        ]
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [where]
    if isinstance(first, list) and isinstance(second, list):
        pairs = zip(first, second, strict=True)
        return [f for n, (a, b) in enumerate(pairs) for f in differences(a, b, f"{where}.{n}")]
    return [] if first == second and type(first) is type(second) else [where]


def run_ranks(world_size: int, folder: Path, work: Callable[[int], None]) -> None:
    """Run `work(rank)` in as many processes, as one process group; exit with 1 if any fails."""
    torch.set_num_threads(1)
    store = Path(tempfile.mkdtemp(dir=folder)) / "store"
    context = multiprocessing.get_context("fork")

    def rank_main(rank: int) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=240),
        )
        work(rank)
        dist.destroy_process_group()

    ranks = [context.Process(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(1)
