# SPDX-License-Identifier: Apache-2.0
"""The rendezvous of torch's elastic agents alone: N light processes, one c10d store.

Prints one JSON object: seconds until all have joined a first time and, all at once, a second time.
torch is imported once and the processes are forked, so that only the rendezvous is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.synchronize import Barrier

import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    create_handler,
)

TIMEOUT_S = 120.0


def main() -> int:
    count = int(sys.argv[1])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count + 1)
    agents = [
        context.Process(target=agent, args=(index, count, port, barrier), daemon=True)
        for index in range(count)
    ]
    for process in agents:
        process.start()
    barrier.wait(TIMEOUT_S)
    took_s = []
    for _ in range(2):
        began_at = time.monotonic()
        barrier.wait(TIMEOUT_S)
        barrier.wait(TIMEOUT_S)
        took_s.append(time.monotonic() - began_at)
    # The store's owner last: the others would complain about its loss.
    for process in reversed(agents):
        process.kill()
        process.join()
    print(json.dumps({"agents": count, "join_s": took_s[0], "rejoin_s": took_s[1]}))
    return 0


def agent(index: int, count: int, port: int, barrier: Barrier) -> None:
    """Join twice, as torchrun's agents do at the start and after a failure."""
    handler = make_handler(index, count, port)
    barrier.wait(TIMEOUT_S)
    for _ in range(2):
        barrier.wait(TIMEOUT_S)
        handler.next_rendezvous()
        barrier.wait(TIMEOUT_S)
    time.sleep(TIMEOUT_S)


def make_handler(index: int, count: int, port: int) -> DynamicRendezvousHandler:
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"127.0.0.1:{port}",
        run_id="bench",
        min_nodes=count,
        max_nodes=count,
        local_addr="127.0.0.1",
        is_host=str(index == 0),
        read_timeout=str(timedelta(seconds=TIMEOUT_S).seconds),
    )
    backend, store = c10d.create_backend(parameters)
    return create_handler(store, backend, parameters)


if __name__ == "__main__":
    sys.exit(main())
