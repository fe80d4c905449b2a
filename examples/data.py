# SPDX-License-Identifier: Apache-2.0
"""Workers share a dataset; kill any of them, and still every sample counts once in the model.

holdfast run --nproc-per-node 2 examples/data.py /tmp/data-example

The "model" is the sum of all samples it has seen, so the end can be checked.
"""

import os
import sys

import torch
from torch import distributed

from holdfast.client.data import DataShards
from holdfast.torch import Checkpointer
from holdfast.torch.data.datasets import in_step

SIZE = 20_000
EPOCHS = 2


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    else:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)

    checkpointer = Checkpointer(sys.argv[1])
    shards = DataShards(
        "numbers",
        size=SIZE,
        shard_size=500,
        epochs=EPOCHS,
        shuffle="samples",
        checkpointer=checkpointer,
    )
    step = checkpointer.load(model=model, data=shards) or 0
    for epoch in shards.epochs():
        for batch in in_step(shards.batches(50, wait=False)):
            # Who has no batch in this step adds nothing, but takes part.
            seen = torch.tensor(0.0 if batch is None else float(batch.sum()), dtype=torch.float64)
            distributed.all_reduce(seen)
            with torch.no_grad():
                model.weight += seen
            step += 1
            checkpointer.save(step, model=model, data=shards)
        print(f"rank {rank}: epoch {epoch} is over after {step} steps", flush=True)

    if rank == 0:
        expected = EPOCHS * SIZE * (SIZE - 1) // 2
        print(f"the sum of all samples is {int(model.weight.item())}, it should be {expected}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
