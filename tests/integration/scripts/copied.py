# SPDX-License-Identifier: Apache-2.0
"""Ranks with states of their own, of which every third step is copied to the other node.

The first world stops after step 8 until it is ended; every later one does one step and waits.
"""

import signal

import torch
from steplog import FOLDER, RANK, is_to_finish, meet, note, pause

from holdfast.torch import Checkpointer

saves = FOLDER / "saves"
with Checkpointer(saves, shared=False, replicas=1, replicate_every=3) as checkpointer:
    loaded = checkpointer.load()
    note("loaded", -1 if loaded is None else loaded)
    if loaded is not None:
        assert checkpointer.extra["rank"] == RANK
        assert torch.equal(checkpointer.extra["state"], torch.full((1000,), loaded))
    for step in range(1, 9) if loaded is None else [loaded + 1]:
        meet(f"step-{step}")
        state = torch.full((1000,), step)
        assert checkpointer.save(step, extra={"rank": RANK, "state": state}).taken
        note("step", step)
    if loaded is None:
        signal.pause()
    while not is_to_finish():
        pause()
