# SPDX-License-Identifier: Apache-2.0
"""The prior art's own client against its own master: fetch a shard, report it, again and again.

Runs in an environment that has dlrover, and prints one line of JSON. Every client is a thread with
a connection of its own. It makes the two calls that `ShardingClient.fetch_shard` and
`report_batch_done` make of the master, and nothing else.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from dlrover.python.elastic_agent.master_client import build_master_client

BATCH = 100
BATCHES_PER_SHARD = 10


def register(client: Any, name: str, size: int) -> float:
    """Seconds until the dataset is known and its first shard is here."""
    began = time.perf_counter()
    client.report_dataset_shard_params(
        batch_size=BATCH,
        num_epochs=1,
        dataset_size=size,
        shuffle=True,
        num_minibatches_per_shard=BATCHES_PER_SHARD,
        dataset_name=name,
        storage_type="table",
    )
    done, task = client.get_task(name)
    if not done or task.shard.end - task.shard.start != BATCH * BATCHES_PER_SHARD:
        raise RuntimeError(f"the first shard of {name} is {task}")
    return time.perf_counter() - began


def drive(client: Any, name: str, stops_at: float, done: list[int]) -> None:
    count = 0
    while time.perf_counter() < stops_at:
        _, task = client.get_task(name)
        if task.task_id < 0:
            raise RuntimeError(f"{name} has no shard left")
        client.report_task_result(name, task.task_id, "")
        count += 1
    done.append(count)


def main() -> None:
    address, name, size, clients, seconds = sys.argv[1:]
    made = [build_master_client(address) for _ in range(int(clients))]
    first_s = register(made[0], name, int(size))
    done: list[int] = []
    began, cpu_before = time.perf_counter(), time.process_time()
    threads = [
        threading.Thread(target=drive, args=(client, name, began + float(seconds), done))
        for client in made
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    if len(done) != len(made):
        raise RuntimeError("a client has failed")
    print(json.dumps({"first_s": first_s, "shards": sum(done), "took_s": took_s, "cpu_s": cpu_s}))


main()
