# SPDX-License-Identifier: Apache-2.0
"""A job without torch: ranks step together through files, save, and go on from what was saved.

$STEPS ends it after so many steps; without it `Jobs.finish` does.
"""

import os

from steplog import (
    RANK,
    STEP_S,
    WORLD,
    fault,
    is_to_finish,
    meet,
    note,
    pause,
    restored_step,
    save,
    wait_for_the_end_of_others,
)

FAULTY_STEP = 3

note("main")
fault("import")
meet("group")
note("group")
last = int(os.environ.get("STEPS", "0"))
step = restored_step()
while not last or step < last:
    step += 1
    pause(STEP_S)
    if step == FAULTY_STEP:
        fault("step")
    texts = meet(f"step-{step}", "last" if is_to_finish() else "")
    note("step", step)
    save(step)
    if texts[0]:
        break
note("end", step)
if RANK == WORLD - 1 and "exit" in os.environ.get("FAULTS", ""):
    # The last rank fails when the others have already succeeded.
    wait_for_the_end_of_others()
    fault("exit")
