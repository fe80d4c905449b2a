# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without agents: under plain python and under torchrun a vault of its own serves."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from holdfast.client.standalone import join_standalone
from holdfast.model.errors import UsageError
from holdfast.runtime.settings import worker_place
from tests.integration.jobs import SCRIPTS, Command, Jobs

VAULTED = str(SCRIPTS / "vaulted.py")
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def python(jobs: Jobs, *words: str, **env: str) -> Command:
    """Start a plain Python program, without any command of Holdfast."""
    memory = jobs.folder / "memory"
    memory.mkdir(exist_ok=True)
    here = {
        "VAULT_DIRECTORY": str(jobs.folder / "checkpoints"),
        "HOLDFAST_MEMORY_DIR": str(memory),
        **env,
    }
    command = Command([sys.executable, *words], jobs.environment(**here), jobs.folder)
    jobs.commands.append(command)
    return command


def vault_of(jobs: Jobs) -> psutil.Process:
    """There for good once something is saved; what else runs may end at any moment."""
    for process in jobs.living():
        with suppress(psutil.Error):
            if "holdfast.agent.standalone" in process.cmdline():
                return process
    raise AssertionError("no vault runs")


def expect_all_clean(jobs: Jobs) -> None:
    """No process, no shared memory and no meeting place is left."""
    jobs.expect_nothing_left()
    assert not list((jobs.folder / "memory").iterdir())
    assert not list(jobs.folder.glob("holdfast-*"))


def committed(jobs: Jobs) -> list[Path]:
    return sorted((jobs.folder / "checkpoints").glob("step-*/manifest.json"))


def test_a_plain_program_saves_and_goes_on_from_storage(jobs: Jobs) -> None:
    first = python(jobs, VAULTED, **ALONE, STEPS="4")
    first.succeeds()
    assert "`holdfast run` covers both" in first.text
    expect_all_clean(jobs)
    # Nothing was saved to storage by the program: its newest step went there when it ended.
    assert [path.parent.name for path in committed(jobs)] == ["step-0000000004"]
    python(jobs, VAULTED, **ALONE, STEPS="6").succeeds()
    assert [event.step for event in jobs.events("restored")] == [4]
    expect_all_clean(jobs)


def test_a_killed_program_loses_no_complete_step(jobs: Jobs) -> None:
    program = python(jobs, VAULTED, **ALONE)
    jobs.wait_for("saved", lambda event: event.step >= 5)
    program.kill()
    saved = max(event.step for event in jobs.events("saved"))
    expect_all_clean(jobs)
    python(jobs, VAULTED, **ALONE, STEPS=str(saved + 2)).succeeds()
    assert jobs.events("restored")[0].step in (saved, saved + 1)
    expect_all_clean(jobs)


def test_workers_that_torchrun_starts_again_go_on_from_memory(jobs: Jobs) -> None:
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    job = python(jobs, *words, "--max-restarts", "1", VAULTED, FAULTS="kill step 1", STEPS="6")
    job.succeeds()
    again = jobs.events("restored")
    assert [event.step for event in again] == [4, 4]
    assert {event.what for event in jobs.events() if event.what.startswith("from")} == {
        "from memory"
    }
    expect_all_clean(jobs)
    assert committed(jobs)[-1].parent.name == "step-0000000006"


def test_the_end_of_the_vault_is_an_error_and_no_hang(jobs: Jobs) -> None:
    """The prior art's saver could die in silence, and saves then went nowhere."""
    program = python(jobs, VAULTED, **ALONE)
    jobs.wait_for("saved", lambda event: event.step >= 2)
    os.kill(vault_of(jobs).pid, signal.SIGKILL)
    assert program.wait() != 0
    assert "vault.sock is gone" in program.text


def test_several_nodes_need_agents() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    with pytest.raises(UsageError, match=r"checkpoints of 2 nodes need .* `holdfast run`"):
        join_standalone(worker_place(env))
