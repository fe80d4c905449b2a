# SPDX-License-Identifier: Apache-2.0
"""Ranks that step together and report it. When the test says so, in round 1, the rank $STUCK
sleeps inside a step: for ever, or for $PAUSE seconds."""

import os

from steplog import (
    FOLDER,
    RANK,
    ROUND,
    STEP_S,
    is_to_finish,
    meet,
    note,
    pause,
    restored_step,
    save,
)

from holdfast.client import report_step

stuck = ROUND == 1 and str(RANK) == os.environ["STUCK"]
step = restored_step()
while True:
    step += 1
    pause(STEP_S)
    if stuck and (FOLDER / "go").exists():
        stuck = False
        note("stuck", step)
        pause(float(os.environ.get("PAUSE", "1e6")))
    texts = meet(f"step-{step}", "last" if is_to_finish() else "")
    report_step(step)
    note("step", step)
    save(step)
    if texts[0]:
        break
note("end", step)
