# SPDX-License-Identifier: Apache-2.0
"""Ranks that read a dataset in step with each other, and save at every step.

What the model has seen is told in two ways that know nothing of each other. Every rank writes down
what it has read before it saves: the samples of the lives that led to the last step. And the model
itself counts every sample that any rank read, in a buffer that is saved and restored with it.
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


def read_by_all(samples: list[int]) -> torch.Tensor:
    """What all ranks have read in this step."""
    own = torch.full((BATCH,), -1)
    own[: len(samples)] = torch.tensor(samples, dtype=torch.long)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    everything = torch.cat(parts)
    return everything[everything >= 0]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, epochs = int(os.environ["SIZE"]), int(os.environ["EPOCHS"])
    model = torch.nn.Linear(4, 1)
    model.register_buffer("counts", torch.zeros(epochs, size, dtype=torch.uint8))
    checkpointer = Checkpointer(
        FOLDER / "saves",
        storage=EverySteps(100),
        replicas=int(os.environ["REPLICAS"]),
        overlap=os.environ.get("OVERLAP") == "1",
    )
    shards = DataShards(
        "train",
        size=size,
        shard_size=1000,
        epochs=epochs,
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
            everything = read_by_all(samples.tolist())
            if len(everything) == 0:
                break
            step += 1
            # A sample that two ranks read in one step must count twice.
            model.counts[epoch] += torch.bincount(everything, minlength=size).to(torch.uint8)
            write(step=step, epoch=epoch, samples=samples.tolist(), spans=spans)
            checkpointer.save(step, model=model, extra={"round": ROUND})
            shards.holdings.finish(claims)
            note("step", step)
        assert not shards.holdings.has_more(epoch)
    checkpointer.wait(120.0)
    write(counted=torch.bincount(model.counts.flatten().long()).tolist())
    note("end", step)
    dist.barrier()


main()
leave()
