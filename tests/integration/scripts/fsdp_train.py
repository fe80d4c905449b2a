# SPDX-License-Identifier: Apache-2.0
"""Trains a sharded model with a flash checkpoint at every step; notes every loss exactly.

KIND says how it is sharded, STEPS how far it goes. What a rank draws depends on the step alone, so
that a world of another size goes on with the same data.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from fsdp_models import WIDTH, build, differences, full_state
from steplog import FOLDER, RANK, ROUND, WORLD, hold, leave, note

from holdfast.client import report_step
from holdfast.torch import STORAGE, Checkpointer, EverySteps


def compare_with_the_last_run(loaded: dict[str, Any], step: int) -> None:
    """If an earlier run ended with this step: what was loaded must be what it ended with."""
    if (FOLDER / "reference.pt").exists():
        reference = torch.load(FOLDER / "reference.pt", weights_only=True)
        if reference.pop("step") == step:
            found = differences(reference, loaded)
            assert not found, found
            note("equal", step)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = build(os.environ["KIND"], seed=1)
    last = int(os.environ["STEPS"])
    checkpointer = Checkpointer(
        FOLDER / "saves",
        storage=EverySteps(int(os.environ.get("STORAGE_EVERY", "10"))),
        replicas=int(os.environ.get("REPLICAS", "0")),
        overlap=os.environ.get("OVERLAP") == "from round 2" and ROUND >= 2,
    )
    step = checkpointer.load(model=model, optimizer=optimizer)
    note("loaded", -1 if step is None else step)
    if step is not None:
        assert checkpointer.extra["step"] == step
        compare_with_the_last_run(full_state(model, optimizer), step)
    step = step or 0
    while step < last:
        step += 1
        torch.manual_seed(step)
        loss = model(torch.randn(8, WIDTH)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Before the save: what is saved is not done again, and must be in the curve.
        if RANK == 0:
            with (FOLDER / "losses").open("a") as file:
                file.write(f"{step} {ROUND} {WORLD} {loss.item().hex()}\n")
        saved = checkpointer.save(
            step,
            model=model,
            optimizer=optimizer,
            extra={"step": step},
            to=STORAGE if step == last else None,
        )
        assert saved.taken, saved.why
        report_step(step)
        note("step", step)
        hold(step)
    reference = full_state(model, optimizer)
    if RANK == 0:
        torch.save({**reference, "step": step}, FOLDER / "reference.pt")
    assert checkpointer.wait(120.0) == last
    checkpointer.close()
    dist.destroy_process_group()
    note("end", step)


main()
leave()
