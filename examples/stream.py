# SPDX-License-Identifier: Apache-2.0
"""Workers train on a stream while it is written; kill any of them, each record counts once.

nats-server -js &
python examples/stream.py write nats://127.0.0.1:4222
holdfast run --nproc-per-node 2 examples/stream.py train nats://127.0.0.1:4222 /tmp/stream-example

The "model" is the sum of all numbers in the stream, so the end can be checked.
"""

import asyncio
import sys

import nats
import torch
from torch import distributed

from holdfast.client.data import StreamShards
from holdfast.client.data.nats_reader import NatsReader
from holdfast.torch import Checkpointer
from holdfast.torch.data.datasets import in_step

PARTITIONS = ["numbers-0", "numbers-1"]
SIZE = 1000


async def write(url: str) -> None:
    client = await nats.connect(url)
    broker = client.jetstream()
    for partition in PARTITIONS:
        await broker.add_stream(name=partition, subjects=[partition])
        for number in range(SIZE):
            await broker.publish(partition, str(number).encode())
    await client.close()


def train(url: str, directory: str) -> None:
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)

    checkpointer = Checkpointer(directory)
    end = dict.fromkeys(PARTITIONS, SIZE + 1)  # Without it the training goes on for ever.
    reader = NatsReader(url, PARTITIONS)
    stream = StreamShards("numbers", reader, end=end, shard_size=100, checkpointer=checkpointer)
    step = checkpointer.load(model=model, data=stream) or 0
    for records in in_step(stream.read(20, wait=False)):
        # Who has no records in this step adds nothing, but takes part.
        seen = torch.tensor(sum(float(record.data) for record in records or ()))
        distributed.all_reduce(seen)
        with torch.no_grad():
            model.weight += seen
        step += 1
        checkpointer.save(step, model=model, data=stream)

    if distributed.get_rank() == 0:
        expected = len(PARTITIONS) * SIZE * (SIZE - 1) // 2
        print(f"the sum of all records is {int(model.weight.item())}, it should be {expected}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        asyncio.run(write(sys.argv[2]))
    else:
        train(sys.argv[2], sys.argv[3])
