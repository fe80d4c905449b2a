# SPDX-License-Identifier: Apache-2.0
"""A worker that reads a dataset and does nothing with it; JSON to a file.

Under `holdfast run` the shards come from the master, otherwise from a ledger in this process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from holdfast.client.data import DataShards

BATCH = 32

WAYS: dict[str, Callable[[DataShards], Iterator[Any]]] = {
    "records": lambda shards: iter(shards),
    "batches": lambda shards: shards.batches(BATCH),
}


def read(way: str, shard_size: int, samples: int) -> dict[str, float]:
    """Microseconds per sample: on the clock, and of this process's CPU."""
    name = f"{way} of {shard_size}"
    shards = DataShards(name, size=samples, shard_size=shard_size, shuffle="samples")
    for _ in shards.epochs():
        began, cpu_before = time.perf_counter(), time.process_time()
        handed_out = 0
        for one in WAYS[way](shards):
            handed_out += 1 if way == "records" else len(one)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
        if handed_out != samples:
            raise RuntimeError(f"{name}: {handed_out} samples instead of {samples}")
    return {"wall_us": 1e6 * wall_s / samples, "cpu_us": 1e6 * cpu_s / samples}


def main() -> None:
    target, samples, *sizes = sys.argv[1:]
    found = {way: {size: read(way, int(size), int(samples)) for size in sizes} for way in WAYS}
    Path(target).write_text(json.dumps(found))


main()
