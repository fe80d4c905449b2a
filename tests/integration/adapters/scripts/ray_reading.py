# SPDX-License-Identifier: Apache-2.0
"""A worker that lets a Ray cluster read its shards, and writes down what it got."""

import json
import os
import signal

import ray
import ray.data

from holdfast.client.data import DataShards
from holdfast.platforms.ray.data import ray_batches
from tests.integration.scripts.steplog import FOLDER, RANK, fault, leave, note

READ = os.open(FOLDER / "read.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
BATCHES_BEFORE_THE_FAULT = 10


def main() -> None:
    ray.init(log_to_driver=False)  # The cluster that RAY_ADDRESS names.
    ray.data.DataContext.get_current().use_datasource_v2 = False
    listed = [(name, size) for name, size in json.loads(os.environ["LISTED"])]
    shards = DataShards("train", listed=listed, prefetch=0)
    batches = 0
    for _ in shards.epochs():
        for batch in ray_batches(shards, lambda part: ray.data.read_parquet(part.name), 16):
            said = {"rank": RANK, "numbers": batch["number"].tolist()}
            os.write(READ, (json.dumps(said) + "\n").encode())
            batches += 1
            if batches == BATCHES_BEFORE_THE_FAULT:
                fault("read")
    note("end", batches)
    ray.shutdown()


# Whatever goes wrong, it does not outlive its test.
signal.alarm(200)
main()
leave()
