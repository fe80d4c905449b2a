# SPDX-License-Identifier: Apache-2.0
"""One rank that saves $MIB mebibytes at every step, every fifth to storage, until it is to finish.

Nothing but the saves tells of its steps. With $STUCK it stops for ever after step 13 of round 1.
"""

import os

import torch
from steplog import FOLDER, ROUND, STEP_S, fault, is_to_finish, leave, note, pause

from holdfast.torch import Checkpointer, EverySteps, KeepLast

weights = torch.zeros(int(os.environ["MIB"]) * 1024 * 1024, dtype=torch.uint8)
is_stuck = ROUND == 1 and "STUCK" in os.environ

with Checkpointer(FOLDER / "saves", storage=EverySteps(5), keep=KeepLast(2)) as checkpointer:
    loaded = checkpointer.load({"w": weights})
    step = 0 if loaded is None else loaded
    note("loaded", -1 if loaded is None else loaded)
    assert torch.all(weights == step % 256), "these are weights of another step"
    while not (is_to_finish() and step % 5 == 0):
        step += 1
        weights.fill_(step % 256)
        saved = checkpointer.save(step, {"w": weights})
        note("taken" if saved.taken else "failed", step)
        note("step", step)
        if step % 5 == 0:
            assert checkpointer.wait(120.0) == step
        if step == 13:
            fault("after-13")
            while is_stuck:
                pause()
        pause(STEP_S)
note("end", step)
leave()
