# SPDX-License-Identifier: Apache-2.0
"""Ranks in step that read lines through loader processes of their own, and save at every step.

Every rank writes down what it has read before it saves: see reading.py.
"""

import json
import os
import signal

import torch
import torch.distributed as dist
from steplog import FOLDER, RANK, ROUND, fault, leave, note

from holdfast.client.data import DataShards
from holdfast.torch import Checkpointer
from holdfast.torch.data.datasets import ShardedIterableDataset, ShardedLoader, in_step


def write(**line: object) -> None:
    """One line of the history. One write: O_APPEND keeps the lines of all ranks whole."""
    text = json.dumps({"rank": RANK, "round": ROUND, **line}) + "\n"
    file = os.open(FOLDER / "history", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, text.encode())
    os.close(file)


def number(line: bytes) -> int:
    return int(line)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    checkpointer = Checkpointer(FOLDER / "saves")
    shards = DataShards(
        "train", files=[FOLDER / "numbers"], shard_size=500, epochs=2, checkpointer=checkpointer
    )
    loaded = checkpointer.load(model=model)
    step = loaded or 0
    write(loaded=step, saved_in=0 if loaded is None else checkpointer.extra["round"])
    loader = ShardedLoader(
        ShardedIterableDataset(shards, number),
        batch_size=16,
        wait=False,
        # A spawned process imports torch anew, in every pass.
        num_workers=1 if os.environ["START"] == "spawn" else 2,
        multiprocessing_context=os.environ["START"],
    )
    for epoch in shards.epochs():
        for batch in in_step(loader):
            step += 1
            samples = [] if batch is None else batch.tolist()
            write(step=step, epoch=epoch, samples=samples)
            checkpointer.save(step, model=model, extra={"round": ROUND})
            if step % 20 == 10:
                fault("read")
    note("end", step)
    dist.barrier()


if __name__ == "__main__":
    # A process that is spawned imports this file again.
    signal.alarm(300)
    main()
    leave()
