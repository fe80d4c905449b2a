# SPDX-License-Identifier: Apache-2.0
"""Workers that read through a DataLoader with worker processes of its own, and note each batch."""

import json
import os
import signal

import torch
from steplog import FOLDER, RANK, ROUND, fault, leave, note

from holdfast.client.data import DataShards
from holdfast.torch.data.datasets import ShardedIterableDataset, ShardedLoader, ShardedMapDataset

READ = os.open(FOLDER / "read.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
HOW = os.environ["HOW"]
OPTIONS = {
    "batch_size": 16,
    # A spawned process imports torch anew, in every epoch.
    "num_workers": 1 if os.environ["START"] == "spawn" else 2,
    "multiprocessing_context": os.environ["START"],
}


class Numbers:
    """A dataset whose records are their numbers."""

    def __getitem__(self, index: int) -> int:
        return index


def number(line: bytes) -> int:
    return int(line)


def make_loader() -> ShardedLoader:
    size = int(os.environ["SIZE"])
    if HOW == "map":
        shards = DataShards("train", size=size, shard_size=40, shuffle="samples", epochs=2)
        return ShardedLoader(ShardedMapDataset(Numbers(), shards), **OPTIONS)
    shards = DataShards("train", files=[FOLDER / "numbers"], shard_size=200, epochs=2)
    return ShardedLoader(ShardedIterableDataset(shards, number), **OPTIONS)


def main() -> None:
    loader = make_loader()
    batches = 0
    for epoch in loader.shards.epochs():
        for batch in loader:
            assert isinstance(batch, torch.Tensor)
            said = {"rank": RANK, "round": ROUND, "epoch": epoch, "samples": batch.tolist()}
            os.write(READ, (json.dumps(said) + "\n").encode())
            batches += 1
            if batches == 5:
                fault("read")
            if batches == 8 and HOW == "left":
                break  # What the worker processes have read ahead must go back.
        note("epoch", epoch)
    note("end", batches)


if __name__ == "__main__":
    # A process that is spawned imports this file again.
    signal.alarm(100)
    main()
    leave()
