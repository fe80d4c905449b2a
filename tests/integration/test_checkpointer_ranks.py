# SPDX-License-Identifier: Apache-2.0
"""Several ranks with one model: every rank loads the same step, also in a world of another size."""

import subprocess
import sys

import pytest

from tests.integration.jobs import SCRIPTS, Jobs

SCRIPT = str(SCRIPTS / "checkpointed.py")
LIMIT_S = 240.0
"""For a whole job: importing torch takes long on a busy machine."""


def environment(jobs: Jobs, steps: int, **more: str) -> dict[str, str]:
    memory = jobs.folder / "memory"
    memory.mkdir(exist_ok=True)
    return {"STEPS": str(steps), "HOLDFAST_MEMORY_DIR": str(memory), **more}


def loaded(jobs: Jobs, *, last: int) -> dict[int, int]:
    """By rank, what the newest so many loads gave."""
    return {event.rank: event.step for event in jobs.events("loaded")[-last:]}


@pytest.mark.parametrize("overlap", ["0", "1"])
def test_a_killed_rank_and_all_others_go_on_from_one_step(jobs: Jobs, overlap: str) -> None:
    """The prior art's ranks could each load another step: one from memory, one from storage."""
    env = environment(jobs, 5, OVERLAP=overlap, FAULTS="kill save 1")
    # The kill comes long before a spare is warm: it would only import torch for nothing.
    words = ("--nproc-per-node", "2", "--max-restarts", "1", "--no-spares", SCRIPT)
    jobs.run(*words, **env).succeeds(LIMIT_S)
    again = loaded(jobs, last=2)
    assert len(again) == 2
    assert len(set(again.values())) == 1
    # A copy that overlaps training may still be on its way when the next step is killed.
    assert set(again.values()) <= ({1, 2, 3} if overlap == "1" else {2, 3})


def test_a_world_of_another_size_gets_the_shared_state(jobs: Jobs) -> None:
    """More ranks than before take another's extra, and say so; fewer leave some unread."""

    def run(ranks: int, last_step: int) -> None:
        words = ("--nproc-per-node", str(ranks), "--no-spares", SCRIPT)
        jobs.run(*words, **environment(jobs, last_step)).succeeds(LIMIT_S)

    run(2, last_step=2)
    run(3, last_step=3)
    assert loaded(jobs, last=3) == {0: 2, 1: 2, 2: 2}
    kinds = [e.what for e in jobs.events() if e.rank == 2 and e.what.startswith("extra of")]
    assert kinds in (["extra of 0"], ["extra of 1"])
    run(1, last_step=4)
    assert loaded(jobs, last=1) == {0: 3}


def test_under_torchrun_the_ranks_share_one_saver(jobs: Jobs) -> None:
    """Without an agent: the saver outlives a worker that torchrun starts again."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, "--max-restarts", "1", SCRIPT],
        env=jobs.environment(**environment(jobs, 5, FAULTS="kill save 1")),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "survive a crash of the training process only while its launcher lives" in done.stderr
    assert set(loaded(jobs, last=2).values()) <= {2, 3}
    jobs.expect_nothing_left()
