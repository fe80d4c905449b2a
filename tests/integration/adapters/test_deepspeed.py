# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed, real, two ranks: killed in a save and in training, and still bit for bit the same."""

from pathlib import Path

import pytest

from holdfast.model.errors import UsageError
from tests.integration.adapters.launching import launch, needs

pytestmark = [needs("deepspeed"), pytest.mark.timeout(300)]


def test_zero_1_2_and_3_resume_from_memory_and_end_as_if_nothing_had_happened(
    tmp_path: Path,
) -> None:
    """Also: the files are DeepSpeed's own, `latest` moves on commit only, and a tag is a name.

    The prior art replaced torch.save and torch.load for the whole process, and compared tags as
    numbers, which "global_step5" is not.
    """
    launch("deepspeed_training.py", tmp_path)
    for stage, resumed in ((1, 3), (2, 2), (3, 3)):
        for rank in (0, 1):

            def noted(name: str, stage: int = stage, rank: int = rank) -> str:
                return (tmp_path / f"{name}{stage}.rank{rank}").read_text()

            assert (tmp_path / f"loaded{stage}.life0.rank{rank}").read_text() == "None"
            loaded = (tmp_path / f"loaded{stage}.life1.rank{rank}").read_text()
            assert loaded.startswith(f"Restored(step={resumed}, client_state=")
            assert f"'seen': {resumed}" in loaded
            assert noted("reached") == noted("undisturbed")
            assert noted("plain") == "global_step5"
            assert noted("reread") == noted("undisturbed")
        directory = tmp_path / f"zero{stage}"
        assert (directory / "latest").read_text() == "global_step5"
        names = {path.name for path in (directory / "global_step5").iterdir()}
        shards = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)}
        models = (
            {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)}
            if stage == 3
            else {"mp_rank_00_model_states.pt"}
        )
        assert names == shards | models | {"manifest.json"}
        assert (tmp_path / f"refused{stage}.rank0").read_text() == "yes"


def test_a_tag_that_is_the_same_for_every_step_is_refused(tmp_path: Path) -> None:
    from holdfast.torch.adapters.deepspeed import DeepSpeedCheckpointer

    with pytest.raises(UsageError, match="'best' is the same for every step"):
        DeepSpeedCheckpointer(None, tmp_path, tag="best")
