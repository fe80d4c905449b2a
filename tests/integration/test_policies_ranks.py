# SPDX-License-Identifier: Apache-2.0
"""Rules about time on a real group of two ranks: both decide alike, whatever their clocks say."""

import json
import subprocess
import sys
from pathlib import Path

LIMIT_S = 240.0

RANK = """
import json
import sys

import torch.distributed as dist

from holdfast.torch.checkpoint.policies import Auto, EveryMinutes, Schedule

rank, folder, rates = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
for rate in rates:
    now = 1e6 * rank
    schedules = {
        "memory": Schedule(EveryMinutes(1), 2, lambda: now),
        "storage": Schedule(Auto(), 2, lambda: now),
    }
    due = {name: [] for name in schedules}
    for step in range(400):
        now += 1.0 if rank == 0 else rate
        for name, schedule in schedules.items():
            # Only rank 0 knows what a save costs; after a while it costs more.
            schedule.cost_s = 0.0 if rank else 0.1 if step < 200 else 1.0
            if schedule.is_due(step):
                due[name].append(step)
    print(json.dumps(due))
dist.destroy_process_group()
"""


def test_ranks_whose_clocks_differ_save_the_same_steps(tmp_path: Path) -> None:
    """If every rank looked at its own clock, a step that one of them saves and the other does not
    would never be complete. The clock of rank 1 is far off and slow, fast, or goes backwards."""
    rates = [0.01, 7.0, -1.0]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), json.dumps(rates)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        first, second = (rank.communicate(timeout=LIMIT_S)[0].splitlines() for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(LIMIT_S)
    assert first == second
    assert len(first) == len(rates)
    for due in map(json.loads, first):
        assert due["memory"] == [70, 130, 190, 250, 310, 370]
        assert due["storage"] == [141, 272]
