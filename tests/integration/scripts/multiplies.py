# SPDX-License-Identifier: Apache-2.0
"""A worker that starts processes until it may not, and leaves them all behind when it is killed."""

import os
import signal

from steplog import FOLDER, RANK, ROUND, is_to_finish, meet, note, pause, restored_step, save


def multiply() -> int:
    """Children that belong to nobody: each has a session of its own, and ignores SIGTERM."""
    made = 0
    while True:
        try:
            child = os.fork()
        except BlockingIOError:
            return made
        if child == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                signal.pause()
        made += 1


note("main")
step = restored_step()
while True:
    step += 1
    if "1" in meet(f"step-{step}", str(int(is_to_finish()))):
        break
    save(step)
    note("step", step)
    if RANK == 0 and ROUND == 1 and step == 5:
        (FOLDER / "children").write_text(str(multiply()))
        note("multiplied", step)
        os.kill(os.getpid(), signal.SIGKILL)
    pause(0.01)
note("end", step)
