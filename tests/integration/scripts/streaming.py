# SPDX-License-Identifier: Apache-2.0
"""Ranks that train on a stream in step with each other, and save at every step.

Every rank writes down what it has read before it saves: see reading.py.
"""

import json
import os

import torch
import torch.distributed as dist
from steplog import FOLDER, RANK, ROUND, leave, note

from holdfast.client.data import Record, StreamShards
from holdfast.client.data.nats_reader import NatsReader
from holdfast.torch import Checkpointer, EverySteps
from holdfast.torch.data.datasets import in_step

PARTITIONS = ["p", "q"]
SIZE = int(os.environ["SIZE"])


def write(**line: object) -> None:
    """One line of the history. One write: O_APPEND keeps the lines of all ranks whole."""
    text = json.dumps({"rank": RANK, "round": ROUND, **line}) + "\n"
    file = os.open(FOLDER / "history", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(file, text.encode())
    os.close(file)


def sample(record: Record) -> int:
    """The number of a record in the whole stream; its bytes must be those of its offset."""
    assert record.data == f"{record.partition} {record.offset}".encode()
    return PARTITIONS.index(record.partition) * SIZE + record.offset - 1


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 1)
    checkpointer = Checkpointer(FOLDER / "saves", storage=EverySteps(20), replicas=1)
    stream = StreamShards(
        "stream",
        NatsReader(os.environ["BROKER"], PARTITIONS),
        end=dict.fromkeys(PARTITIONS, SIZE + 1),
        shard_size=int(os.environ["SHARD"]),
        checkpointer=checkpointer,
    )
    loaded = checkpointer.load(model=model)
    step = loaded or 0
    write(loaded=step, saved_in=0 if loaded is None else checkpointer.extra["round"])
    for batch in in_step(stream.read(10, wait=False)):
        step += 1
        write(step=step, epoch=0, samples=[sample(record) for record in batch or ()])
        checkpointer.save(step, model=model, extra={"round": ROUND})
        note("step", step)
    checkpointer.wait(120.0)
    note("end", step)
    dist.barrier()


main()
leave()
