# SPDX-License-Identifier: Apache-2.0
"""The job that every launcher is measured on: an ordinary torchrun script, gloo DDP on the CPU.

It knows nothing of any launcher. It appends one JSON line per event to the file $TOY_LOG; the times
are CLOCK_MONOTONIC, one clock for all processes of a machine, so the lines of all ranks and the
moment of a kill compare directly. $TOY_NODE names the launcher that started it; $TOY_STEPS ends it.
"""

import json
import os
import time

LOG = os.open(os.environ["TOY_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
STEP_S = 0.02


def note(what: str, step: int = 0) -> None:
    """One event as one write: O_APPEND keeps lines of several ranks whole."""
    line = {
        "t": time.monotonic(),
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "round": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "node": os.environ.get("TOY_NODE", "0"),
        "pid": os.getpid(),
        "what": what,
        "step": step,
    }
    os.write(LOG, (json.dumps(line) + "\n").encode())


note("main")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

note("imported")


def main() -> None:
    dist.init_process_group("gloo")
    note("group")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1, int(os.environ.get("TOY_STEPS", "1000000000")) + 1):
        batch = torch.randn(32, 64)
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(STEP_S)
        note("step", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
