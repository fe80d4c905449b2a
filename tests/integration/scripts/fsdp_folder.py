# SPDX-License-Identifier: Apache-2.0
"""Saves a sharded state into a folder and loads it again: no agent, no shared memory, only files.

fsdp_folder.py FOLDER ACTION:KIND:WORLD_SIZE...

save   into FOLDER/KIND, with what the state was (reference.pt)
load   what was saved last, and compares
fresh  saves before the first optimizer step, and loads that again
"""

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import build, differences, full_state, run_ranks, train

from holdfast.checkpoint.copier import Copier, Task
from holdfast.model.checkpoint import Shape, rank_part
from holdfast.torch.checkpoint.images import fill
from holdfast.torch.checkpoint.sharded import Sharded


class FolderPart:
    def __init__(self, folder: Path, names: list[str]) -> None:
        self._folder, self._names = folder, names

    def names(self) -> list[str]:
        return self._names

    def file(self, name: str) -> memoryview:
        assert name in self._names
        return memoryview((self._folder / name).read_bytes())


class FolderParts:
    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder = folder
        self._table: dict[str, list[str]] = json.loads((folder / "parts.json").read_text())
        self.shape = Shape(world_size=len(self._table), shared=False)
        self.rank, self.world_size = rank, world_size
        self.opened: set[str] = set()

    def open(self, names: Sequence[str]) -> Mapping[str, FolderPart]:
        self.opened.update(names)
        return {name: FolderPart(self._folder, self._table[name]) for name in names}

    def take(self, tasks: Sequence[Task]) -> None:
        copier = Copier(threads=1)
        copier.run(tasks, 60.0)
        copier.close()


def own_state(rank: int) -> dict[str, Any]:
    return {"extra": {"rank": rank, "noise": torch.full((rank + 1,), 0.5)}, "data": None}


def write(folder: Path, rank: int, images: list[Any]) -> None:
    for image in images:
        target = bytearray(b"\xa5" * image.length)
        fill(image, memoryview(target))
        (folder / image.name).write_bytes(target)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, [image.name for image in images])
    if rank == 0:
        table = {rank_part(number): files for number, files in enumerate(names)}
        (folder / "parts.json").write_text(json.dumps(table))


def save(kind: str, folder: Path, rank: int) -> None:
    model, optimizer = build(kind, seed=1)
    sharded = Sharded(rank, dist.get_world_size())
    train(model, optimizer, 1)
    sharded.collect(model, optimizer, own_state(rank))
    # The layout is known now: later saves must follow the contents all the same.
    train(model, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.125
    write(folder, rank, sharded.collect(model, optimizer, own_state(rank)))
    reference = full_state(model, optimizer)
    if rank == 0:
        torch.save(reference, folder / "reference.pt")


def fresh(kind: str, folder: Path, rank: int) -> None:
    model, optimizer = build(kind, seed=1)
    sharded = Sharded(rank, dist.get_world_size())
    write(folder, rank, sharded.collect(model, optimizer, own_state(rank)))
    assert not optimizer.state, "saving made an optimizer state"
    loaded, other = build(kind, seed=2)
    train(loaded, other, 2)
    parts = FolderParts(folder, rank, dist.get_world_size())
    loading = sharded.loading(loaded, other)
    loading.prepare(parts)
    loading.take()
    assert other.state, "preparing a load dropped the optimizer's state"
    loading.fill()
    assert not other.state
    for one in ((model, optimizer), (loaded, other)):
        torch.manual_seed(7 + rank)
        train(*one, 2)
    assert not differences(full_state(model, optimizer), full_state(loaded, other))


def load(kind: str, folder: Path, rank: int) -> None:
    model, optimizer = build(kind, seed=2)
    world_size = dist.get_world_size()
    parts = FolderParts(folder, rank, world_size)
    loading = Sharded(rank, world_size).loading(model, optimizer)
    loading.prepare(parts)
    loading.take()
    assert not optimizer.state, "preparing a load changed the optimizer"
    own = loading.fill()
    reference = torch.load(folder / "reference.pt", weights_only=True)
    found = differences(reference, full_state(model, optimizer))
    assert not found, f"rank {rank}: {found}"
    source = rank % parts.shape.world_size
    assert own["extra"]["rank"] == source
    assert torch.equal(own["extra"]["noise"], torch.full((source + 1,), 0.5))
    train(model, optimizer, 1)
    if rank == world_size - 1:
        print("opened", *sorted(parts.opened), flush=True)


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        action, kind, world_size = argument.split(":")
        print(argument, flush=True)
        if action != "load":
            folder = Path(sys.argv[1], kind)
            folder.mkdir()
        work = {"save": save, "fresh": fresh, "load": load}[action]
        run_ranks(int(world_size), folder, functools.partial(work, kind, folder))
