# SPDX-License-Identifier: Apache-2.0
"""A small job of torch: gloo, one all-reduce per step, whose result proves who took part."""

import os
import sys
from types import FrameType

from steplog import (
    RANK,
    STEP_S,
    WORLD,
    fault,
    is_to_finish,
    leave,
    note,
    pause,
    restored_step,
    save,
)

note("main")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

FAULTY_STEP = 3
INSIDE_INIT = "_new_process_group_helper"
"""Called by init_process_group once it has the store, before it has met the other ranks."""


def fault_inside(frame: FrameType, event: str, _argument: object) -> None:
    if event == "call" and frame.f_code.co_name == INSIDE_INIT:
        sys.setprofile(None)
        fault("group")


note("imported")
fault("import")
sys.setprofile(fault_inside)
dist.init_process_group("gloo")
sys.setprofile(None)
assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD)
note("group")
last = int(os.environ.get("STEPS", "0"))
step = restored_step()
while not last or step < last:
    step += 1
    pause(STEP_S)
    numbers = torch.full((1 << 20,), float(RANK + 1))
    numbers[0] = float(is_to_finish() and RANK == 0)
    work = dist.all_reduce(numbers, async_op=True)
    if step == FAULTY_STEP:
        fault("step")
    work.wait()
    assert numbers[1].item() == WORLD * (WORLD + 1) / 2
    note("step", step)
    save(step)
    if numbers[0].item():
        break
dist.destroy_process_group()
note("end", step)
fault("exit")
leave()
