# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load through a Checkpointer, and prove what they get. For DDP-like states.

The state of a step can be computed: the shared weights from the step, a rank's own from both.
"""

import os

import torch
from steplog import FOLDER, RANK, fault, leave, meet, note

from holdfast.torch import STORAGE, Checkpointer

LAST = int(os.environ["STEPS"])
OVERLAP = os.environ.get("OVERLAP") == "1"


def weights(step: int) -> torch.Tensor:
    return torch.arange(200_000, dtype=torch.float32) + 1000 * step


def main() -> None:
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(weights(0))})
    with Checkpointer(FOLDER / "saves", overlap=OVERLAP) as checkpointer:
        loaded = checkpointer.load(model=model)
        note("loaded", -1 if loaded is None else loaded)
        if loaded is not None:
            assert torch.equal(model["w"], weights(loaded)), "these are weights of another step"
            own = checkpointer.extra
            assert own["step"] == loaded
            note(f"extra of {own['rank']}", loaded)
            seed = torch.initial_seed() if own["rank"] != RANK else None
            assert seed is None or seed != own["seed"], "two ranks draw the same numbers"
        torch.manual_seed(100 + RANK)
        for step in range(1 if loaded is None else loaded + 1, LAST + 1):
            meet(f"step-{step}")
            with torch.no_grad():
                model["w"].copy_(weights(step))
            extra = {"step": step, "rank": RANK, "seed": 100 + RANK}
            to = STORAGE if step == LAST else None
            if step == 3:
                fault("save")
            assert checkpointer.save(step, model=model, extra=extra, to=to).taken
            note("step", step)
        meet("saved")
        assert checkpointer.wait(120.0) == LAST
    note("end", LAST)


main()
leave()
