# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, real, two nodes: killed in a save and in a write, and resumed."""

import json
from pathlib import Path

import pytest

from tests.integration.adapters.launching import (
    LAUNCH_S,
    NEW_JOB,
    kill_everything_in_a_write,
    launch,
    launch_and_restart,
    needs,
)
from tests.integration.jobs import Jobs

pytestmark = [needs("transformers", "accelerate"), pytest.mark.timeout(480)]


def test_a_killed_training_ends_as_one_that_was_not_and_its_files_are_the_trainers_own(
    jobs: Jobs, tmp_path: Path
) -> None:
    """What the prior art's trainer got wrong: it saved no weights under plain DDP, lost the random
    states of other ranks, had ranks that save nothing remove the directory, knew no safetensors,
    and restored from storage only.
    """
    script = "transformers_training.py"
    job = launch_and_restart(jobs, script, tmp_path, "--local-nodes", "2", nodes=2)
    began = [tmp_path / f"began.life1.rank{rank}" for rank in (0, 1)]
    whole = kill_everything_in_a_write(jobs, job, tmp_path / "flash", began)
    launch(jobs, script, tmp_path, *NEW_JOB, THIRD_LIFE="1").succeeds(LAUNCH_S)

    def noted(name: str) -> list[str]:
        return [(tmp_path / f"{name}.rank{rank}").read_text() for rank in (0, 1)]

    assert noted("began.life0") == ["0", "0"]
    assert noted("began.life1") == ["3", "3"], "step 3 is in memory only, step 4 is torn"
    assert noted("began.life2") == [whole.removeprefix("checkpoint-")] * 2
    assert noted("reached") == noted("undisturbed")
    assert noted("committed") == ["40", "40"]
    assert noted("began.plain") == ["38", "38"]
    assert noted("plain") == noted("undisturbed")

    directory = tmp_path / "flash"
    assert {path.name for path in directory.glob("checkpoint-*")} == {
        "checkpoint-38",
        "checkpoint-40",
    }
    names = {path.name for path in (directory / "checkpoint-40").iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "optimizer.pt",
        "rng_state_0.pth",
        "rng_state_1.pth",
        "scheduler.pt",
        "trainer_state.json",
        "training_args.bin",
    }
    state = json.loads((directory / "checkpoint-40" / "trainer_state.json").read_text())
    assert state["global_step"] == 40

    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory / "checkpoint-40")
    assert model.lm_head.weight is model.model.embed_tokens.weight
