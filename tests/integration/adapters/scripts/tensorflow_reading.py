# SPDX-License-Identifier: Apache-2.0
"""Workers that read through tf.data; their model counts how often it has seen each sample.

With FOLLOWS=model the position of the data is saved with the model, at every step.
"""

import json
import os
import signal

import tensorflow as tf

from holdfast.client.data import DataShards
from holdfast.tensorflow.data import ShardedDataset
from tests.integration.scripts.steplog import FOLDER, RANK, fault, leave, meet, note

READ = os.open(FOLDER / "read.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
SIZE = int(os.environ["SIZE"])
BATCHES_BEFORE_THE_FAULT = 10


def main() -> None:
    seen = tf.Variable(tf.zeros([SIZE], tf.int32))
    checkpointer = None
    if os.environ["FOLLOWS"] == "model":
        from holdfast.torch import Checkpointer

        checkpointer = Checkpointer(FOLDER / "saves")
    shards = DataShards(
        "train", size=SIZE, shard_size=40, shuffle="samples", checkpointer=checkpointer
    )
    step = 0
    if checkpointer is not None and (loaded := checkpointer.load()) is not None:
        step = loaded
        seen.assign(checkpointer.extra["seen"])
    note("begin", step)
    dataset = ShardedDataset(
        shards, int, batch_size=16, output_signature=tf.TensorSpec([], tf.int32)
    )
    for batches, (epoch, batch) in enumerate(
        ((epoch, batch) for epoch in shards.epochs() for batch in dataset), start=1
    ):
        seen.assign(tf.tensor_scatter_nd_add(seen, batch[:, None], tf.ones_like(batch)))
        said = {"rank": RANK, "epoch": epoch, "samples": batch.numpy().tolist()}
        os.write(READ, (json.dumps(said) + "\n").encode())
        step += 1
        if checkpointer is not None:
            checkpointer.save(step, extra={"seen": seen.numpy()})
        if batches == BATCHES_BEFORE_THE_FAULT:
            meet("all ranks have read")
            fault("read")
    if checkpointer is not None:
        (FOLDER / "seen").write_text(json.dumps(seen.numpy().tolist()))
    note("end", step)


# Whatever goes wrong, it does not outlive its test.
signal.alarm(200)
main()
leave()
