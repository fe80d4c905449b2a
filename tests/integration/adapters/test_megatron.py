# SPDX-License-Identifier: Apache-2.0
"""Megatron's layout with layers of megatron-core, four ranks: tensor 2 by pipeline 2."""

from pathlib import Path

import pytest
import torch

from holdfast.torch.adapters.megatron import model_file, optimizer_file, optimizer_shard_file
from tests.integration.adapters.launching import LAUNCH_S, launch_and_restart, needs
from tests.integration.jobs import Jobs


def test_the_names_are_those_of_megatron() -> None:
    assert model_file(0) == "mp_rank_00/model_optim_rng.pt"
    assert model_file(1, 2) == "mp_rank_01_002/model_optim_rng.pt"
    assert model_file(1, 2, 3) == "mp_rank_01_002_003/model_optim_rng.pt"
    assert optimizer_file(1, 0) == "mp_rank_01_000/distrib_optim.pt"
    assert optimizer_shard_file(7) == "rank_00007/distrib_optim.pt"


@needs("megatron.core")
@pytest.mark.timeout(480)
def test_every_place_of_tensor_and_pipeline_is_saved_and_a_kill_changes_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The prior art worked out from ranks who saves what, and never saved pipeline stage 1; it
    never restored from memory; and its tracker moved before the checkpoint was there.
    """
    words = ("--nproc-per-node", "4")
    job = launch_and_restart(jobs, "megatron_training.py", tmp_path, *words, nodes=1)
    job.succeeds(LAUNCH_S)

    def noted(name: str) -> list[str]:
        return [(tmp_path / f"{name}.rank{rank}").read_text() for rank in range(4)]

    assert noted("began.life0") == ["0"] * 4
    assert noted("began.life1") == ["2"] * 4
    assert noted("reached") == noted("undisturbed")
    assert len(set(noted("reached"))) == 4
    directory = tmp_path / "run"
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "5"
    for place in noted("place"):
        path = directory / "iter_0000005" / place
        state = torch.load(path, map_location="cpu", weights_only=False)
        assert state["iteration"] == 5
        assert state["model"]["up.weight"].shape == (8, 8)
    assert sorted(noted("place")) == sorted(
        model_file(tensor, pipeline) for tensor in (0, 1) for pipeline in (0, 1)
    )
