# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, real, two ranks: killed in a save, resumed from memory."""

import json
from pathlib import Path

import pytest

from tests.integration.adapters.launching import launch, needs

pytestmark = [needs("transformers", "accelerate"), pytest.mark.timeout(300)]


def test_a_killed_training_ends_as_one_that_was_not_and_its_files_are_the_trainers_own(
    tmp_path: Path,
) -> None:
    """What the prior art's trainer got wrong: it saved no weights under plain DDP, lost the random
    states of other ranks, had ranks that save nothing remove the directory, knew no safetensors,
    and restored from storage only.
    """
    launch("transformers_training.py", tmp_path)

    def noted(name: str) -> list[str]:
        return [(tmp_path / f"{name}.rank{rank}").read_text() for rank in (0, 1)]

    assert noted("began.life0") == ["0", "0"]
    assert noted("began.life1") == ["3", "3"], "step 3 is in memory only, step 4 is torn"
    assert noted("reached") == noted("undisturbed")
    assert noted("committed") == ["8", "8"]
    assert noted("began.plain") == ["6", "6"]
    assert noted("plain") == noted("undisturbed")

    directory = tmp_path / "flash"
    assert {path.name for path in directory.glob("checkpoint-*")} == {
        "checkpoint-6",
        "checkpoint-8",
    }
    names = {path.name for path in (directory / "checkpoint-8").iterdir()}
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
    state = json.loads((directory / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["global_step"] == 8

    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory / "checkpoint-8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
