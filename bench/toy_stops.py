# SPDX-License-Identifier: Apache-2.0
"""A training that saves to memory at every step, and notes each step that is saved.

Usage: toy_stops.py DIRECTORY MEGABYTES
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from holdfast.torch import Checkpointer

STEP_S = 0.05


def main() -> None:
    directory, megabytes = sys.argv[1], int(sys.argv[2])
    model = torch.nn.Linear(1024, megabytes * 2**20 // 4096, bias=False)
    note, temporary = Path(f"{directory}.step"), Path(f"{directory}.step.tmp")
    checkpointer = Checkpointer(directory)
    step = checkpointer.load(model=model) or 0
    while True:
        step += 1
        with torch.no_grad():
            model.weight[step % len(model.weight)] = step
        if checkpointer.save(step, model=model).taken:
            temporary.write_text(str(step))
            temporary.replace(note)
        time.sleep(STEP_S)


main()
