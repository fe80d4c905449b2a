# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed, real, two nodes: killed in a save and in a write, and still bit for bit the same."""

from pathlib import Path

import pytest

from holdfast.model.errors import UsageError
from tests.integration.adapters.launching import (
    LAUNCH_S,
    NEW_JOB,
    kill_everything_in_a_write,
    launch,
    launch_and_restart,
    needs,
)
from tests.integration.jobs import Jobs

pytestmark = [needs("deepspeed"), pytest.mark.timeout(480)]


def test_zero_1_2_and_3_resume_from_memory_and_end_as_if_nothing_had_happened(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Also: the files are DeepSpeed's own, `latest` moves on commit only, and a tag is a name.

    The prior art replaced torch.save and torch.load for the whole process, and compared tags as
    numbers, which "global_step5" is not.
    """
    script = "deepspeed_training.py"
    job = launch_and_restart(jobs, script, tmp_path, "--local-nodes", "2", nodes=2)
    began = [tmp_path / f"loaded2.life1.rank{rank}" for rank in (0, 1)]
    whole = kill_everything_in_a_write(jobs, job, tmp_path / "zero2", began)
    launch(jobs, script, tmp_path, *NEW_JOB, THIRD_LIFE="1").succeeds(LAUNCH_S)
    for rank in (0, 1):
        loaded = (tmp_path / f"loaded2.life2.rank{rank}").read_text()
        assert loaded.startswith(f"Restored(step={whole.removeprefix('global_step')}, ")
    for stage, resumed, last in ((1, 3, 5), (2, 2, 60), (3, 3, 5)):
        for rank in (0, 1):

            def noted(name: str, stage: int = stage, rank: int = rank) -> str:
                return (tmp_path / f"{name}{stage}.rank{rank}").read_text()

            assert (tmp_path / f"loaded{stage}.life0.rank{rank}").read_text() == "None"
            loaded = (tmp_path / f"loaded{stage}.life1.rank{rank}").read_text()
            assert loaded.startswith(f"Restored(step={resumed}, client_state=")
            assert f"'seen': {resumed}" in loaded
            assert noted("reached") == noted("undisturbed")
            assert noted("plain") == f"global_step{last}"
            assert noted("reread") == noted("undisturbed")
        directory = tmp_path / f"zero{stage}"
        assert (directory / "latest").read_text() == f"global_step{last}"
        names = {path.name for path in (directory / f"global_step{last}").iterdir()}
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
