# SPDX-License-Identifier: Apache-2.0
"""Workers that share a dataset and write down what they read; $FAULTS may end one of them."""

import json
import os

from steplog import FOLDER, RANK, ROUND, fault, hold, note, pause

from holdfast.client.data import DataShards

READ = os.open(FOLDER / "read.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def main() -> None:
    shards = DataShards(
        "train",
        size=int(os.environ["SIZE"]),
        shard_size=50,
        epochs=int(os.environ.get("EPOCHS", "1")),
        shuffle="samples",
        report_every_s=0.05,
    )
    batches = 0
    for epoch in shards.epochs():
        for batch in shards.batches(32):
            said = {"rank": RANK, "round": ROUND, "epoch": epoch, "samples": batch.tolist()}
            os.write(READ, (json.dumps(said) + "\n").encode())
            batches += 1
            if batches == 10:
                note("reads")
                hold(10)
                fault("read")
            pause(0.001)
        note("epoch", epoch)
    note("end", batches)


main()
