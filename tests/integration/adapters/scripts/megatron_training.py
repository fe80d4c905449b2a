# SPDX-License-Identifier: Apache-2.0
"""Trains layers of megatron-core, cut in two by tensor and by pipeline; rank 2 dies in a save.

Four ranks: tensor 2, pipeline 2. Each rank owns the file of its own place and says so. The ranks of
pipeline stage 1 are those whose files the prior art never saved.
"""

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from holdfast.torch import STORAGE
from holdfast.torch.adapters.megatron import MegatronCheckpointer, model_file
from tests.integration.adapters.scripts import training

FOLDER = sys.argv[1]
LAST = 5


class Stage(torch.nn.Module):
    """One stage of the pipeline: a linear layer by columns, one by rows."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        init = torch.nn.init.xavier_uniform_
        self.up = ColumnParallelLinear(8, 16, config=config, init_method=init, gather_output=False)
        self.down = RowParallelLinear(
            16,
            8,
            config=config,
            init_method=init,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)[0]))[0]
        return out


class Training:
    def __init__(self) -> None:
        torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
        )
        self.model = Stage(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.iteration = 0

    def step(self) -> None:
        """Each stage for itself: what flows between stages is not what is tested here."""
        numbers = torch.Generator().manual_seed(self.iteration)
        self.model(torch.randn(4, 8, generator=numbers)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1

    def state(self) -> dict[str, Any]:
        return {
            "args": argparse.Namespace(hidden_size=8),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng_state": [torch.get_rng_state()],
        }

    def load(self, state: dict[str, Any]) -> None:
        assert state["args"].hidden_size == 8
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng_state"][0])
        self.iteration = state["iteration"]


def main() -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, 2, create_gloo_process_groups=False)
    place = model_file(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    if training.LIFE == 0:
        undisturbed = Training()
        for _ in range(LAST):
            undisturbed.step()
        training.note(FOLDER, "undisturbed", training.digest(undisturbed.state()))
    run = Training()
    checkpointer = MegatronCheckpointer(os.path.join(FOLDER, "run"))
    found = checkpointer.load({place: training.RANK}, allow_pickle=True)
    if found is not None:
        run.load(found.files[place])
    training.note(FOLDER, f"began.life{training.LIFE}", str(run.iteration))
    while run.iteration < LAST:
        run.step()
        if training.LIFE == 0 and training.RANK == 2 and run.iteration == 3:
            training.hold(FOLDER)
            training.die_in_the_next_save()
        is_last = run.iteration == LAST
        checkpointer.save(run.iteration, {place: run.state()}, to=STORAGE if is_last else None)
        # As in a real pipeline, no rank runs ahead of the others.
        dist.barrier()
    training.note(FOLDER, "reached", training.digest(run.state()))
    training.note(FOLDER, "place", place)
    assert checkpointer.wait(120) == LAST
    checkpointer.close()


if __name__ == "__main__":
    main()
    training.leave()
