# SPDX-License-Identifier: Apache-2.0
"""Ranks that read a dataset in step with each other, and save at every step.

Every rank writes down what it has read before it saves, so the samples that a model has seen can be
told afterwards: those of the lives that led to it.
"""

import json
import os

import torch
import torch.distributed as dist
from steplog import FOLDER, RANK, ROUND, leave, note

from holdfast.client.data import DataShards
from holdfast.client.data.reading import Reader
from holdfast.torch import Checkpointer, EverySteps

BATCH = 100


def write(**line: object) -> None:
    """One line of the history. One write: O_APPEND keeps the lines of all ranks whole."""
    text = json.dumps({"rank": RANK, "round": ROUND, **line}) + "\n"
    file = os.open(FOLDER / "history", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, text.encode())
    os.close(file)


def how_many(count: int) -> int:
    """The sum over all ranks."""
    total = torch.tensor(count)
    dist.all_reduce(total)
    return int(total)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    checkpointer = Checkpointer(
        FOLDER / "saves",
        storage=EverySteps(100),
        replicas=int(os.environ["REPLICAS"]),
        overlap=os.environ.get("OVERLAP") == "1",
    )
    shards = DataShards(
        "train",
        size=int(os.environ["SIZE"]),
        shard_size=1000,
        epochs=2,
        shuffle="samples",
        checkpointer=checkpointer,
    )
    loaded = checkpointer.load(model=model)
    step = loaded or 0
    write(loaded=step, saved_in=0 if loaded is None else checkpointer.extra["round"])
    for epoch in shards.epochs():
        reader = Reader(shards.holdings, epoch, waits=False)
        while True:
            samples, claims = reader.draw(BATCH)
            spans = [(part.given, upto) for part, upto in claims]
            assert shards.holdings.deliver(claims)
            if how_many(len(samples)) == 0:
                break
            step += 1
            write(step=step, epoch=epoch, samples=samples.tolist(), spans=spans)
            checkpointer.save(step, model=model, extra={"round": ROUND})
            shards.holdings.finish(claims)
            note("step", step)
        assert not shards.holdings.has_more(epoch)
    checkpointer.wait(120.0)
    note("end", step)
    dist.barrier()


main()
leave()
