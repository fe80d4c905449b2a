# SPDX-License-Identifier: Apache-2.0
"""Trains with ZeRO 1, 3 and 2, is killed twice, goes on, and compares with a run that was not.

In the first life the stages 1 and 3 come to step 3; rank 1 dies in the save of step 3 of stage 2.
The second life ends the stages 1 and 3; in stage 2 it is killed as a whole while a step is written.
The third life goes on with that. Whatever was loaded and reached is noted in files.
"""

import glob
import os
import sys
import tempfile

import deepspeed
import torch

from holdfast.model.errors import UsageError
from holdfast.torch import STORAGE
from holdfast.torch.adapters.deepspeed import DeepSpeedCheckpointer
from tests.integration.adapters.scripts import training

FOLDER = sys.argv[1]
# DeepSpeed would compile this operator for a minute; gloo does the same work here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
LAST = {1: 5, 2: 60, 3: 5}
"""By stage. The second life of stage 2 goes on until somebody kills it while it writes."""


def engine_of(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(stage)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train_step(engine: deepspeed.DeepSpeedEngine) -> None:
    numbers = torch.Generator().manual_seed(engine.global_steps * 10 + training.RANK)
    engine.backward(engine(torch.randn(2, 8, generator=numbers)).square().sum())
    engine.step()


def state_of(engine: deepspeed.DeepSpeedEngine) -> str:
    """By what DeepSpeed itself would write on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        engine.save_checkpoint(folder, tag="x")
        files = sorted(glob.glob(f"{folder}/x/*"))
        own = [torch.load(path, map_location="cpu", weights_only=False) for path in files]
    keys = ("module", "optimizer_state_dict", "global_steps")
    return training.digest([{key: state.get(key) for key in keys} for state in own])


def run(stage: int) -> None:
    directory = os.path.join(FOLDER, f"zero{stage}")
    if training.LIFE == 0:
        engine = engine_of(stage)
        for _ in range(LAST[stage]):
            train_step(engine)
        training.note(FOLDER, f"undisturbed{stage}", state_of(engine))
    engine = engine_of(stage)
    checkpointer = DeepSpeedCheckpointer(engine, directory)
    theirs = engine.checkpoint_engine
    found = checkpointer.load()
    training.note(FOLDER, f"loaded{stage}.life{training.LIFE}", repr(found))
    while engine.global_steps < (LAST[stage] if training.LIFE else 3):
        train_step(engine)
        step = engine.global_steps
        if stage == 2 and training.RANK == 1 and (training.LIFE, step) == (0, 3):
            training.hold(FOLDER)
            training.die_in_the_next_save()
        is_stored = step == LAST[stage] or (stage, training.LIFE) == (2, 1)
        checkpointer.save(client_state={"seen": step}, to=STORAGE if is_stored else None)
    assert engine.checkpoint_engine is theirs
    if training.LIFE:
        training.note(FOLDER, f"reached{stage}", state_of(engine))
        assert checkpointer.wait(120) == LAST[stage]
        without_us = engine_of(stage)
        path, client_state = without_us.load_checkpoint(directory)
        assert client_state["seen"] == LAST[stage]
        training.note(FOLDER, f"plain{stage}", f"{os.path.basename(os.path.dirname(path))}")
        training.note(FOLDER, f"reread{stage}", state_of(without_us))
        fail_to_save(checkpointer, engine)
    checkpointer.close()


def fail_to_save(checkpointer: DeepSpeedCheckpointer, engine: deepspeed.DeepSpeedEngine) -> None:
    """What cannot be saved is refused on the ranks that have it, and leaves nothing behind."""
    theirs = engine.checkpoint_engine
    try:
        checkpointer.save(engine.global_steps + 1, client_state={"hook": lambda: None})
    except UsageError:
        training.note(FOLDER, f"refused{engine.zero_optimization_stage()}", "yes")
    assert engine.checkpoint_engine is theirs


for zero_stage in (1, 3, 2) if training.LIFE < 2 else (2,):
    run(zero_stage)
training.leave()
