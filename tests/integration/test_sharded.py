# SPDX-License-Identifier: Apache-2.0
"""Sharded states with real process groups on the CPU: saved, re-sharded, read without Holdfast."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.jobs import SCRIPTS, Jobs, lose_memory_of, wait_gone

TRAIN = str(SCRIPTS / "fsdp_train.py")
RUN_S = 240.0
ELASTIC = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1", "--nproc-per-node", "2")

pytestmark = pytest.mark.timeout(480)


def run(script: str, *arguments: str) -> list[str]:
    """Run a script of ranks to its good end; returns the lines that it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout.splitlines()


# ---- files alone --------------------------------------------------------------------------------


LOADS = {
    "fsdp2": ["fsdp2:4", "fsdp2:3", "plain:1"],
    "fsdp1": ["fsdp1:4", "fsdp2:3"],
    "hsdp": ["hsdp:4", "hsdp:2"],
    "columns": ["columns:4", "fsdp1:2"],
}
"""By what four ranks save, who loads it: the same ranks first."""


def test_a_state_is_loaded_bit_for_bit_at_any_world_size(tmp_path: Path) -> None:
    """Prior art: FSDP1 alone, and only at the world size and sharding that saved.

    `dcp.load` and torch's own tool read the same files, without Holdfast.
    """
    actions = [
        action
        for kind, loads in LOADS.items()
        for action in (f"save:{kind}:4", *(f"load:{load}" for load in loads))
    ]
    printed = run("fsdp_folder.py", str(tmp_path), *actions)
    for kind in LOADS:
        opened = printed[printed.index(f"load:{kind}:4") + 1]
        # Rank 3 needs its own part, and for a large replicated buffer those that store it: 0 and 1.
        assert opened == "opened rank-00000 rank-00001 rank-00003", kind
    pairs = [[str(tmp_path / kind), str(tmp_path / kind / "reference.pt")] for kind in LOADS]
    run("fsdp_dcp.py", "fsdp2:2", *itertools.chain(*pairs))
    expect_one_file(tmp_path / "fsdp2")


def expect_one_file(folder: Path) -> None:
    """The tool of torch makes one file of the checkpoint, with the same content."""
    dcp_to_torch_save(folder, folder / "one.pt")
    reference = torch.load(folder / "reference.pt", weights_only=True)
    one = torch.load(folder / "one.pt", weights_only=True)
    assert one["optimizer"]["param_groups"] == reference["optimizer"]["param_groups"]
    assert one["model"].keys() == reference["model"].keys()
    for name, tensor in reference["model"].items():
        assert torch.equal(one["model"][name], tensor)


def test_saving_before_the_first_step_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    """torch's own way to collect a fresh optimizer's state makes a step, and that step counts."""
    run("fsdp_folder.py", str(tmp_path), "fresh:fsdp2:2", "fresh:fsdp1:2")


# ---- the whole way: memory, agents, storage -----------------------------------------------------


def losses(jobs: Jobs) -> dict[int, set[str]]:
    """By step, every loss that was seen for it."""
    found: dict[int, set[str]] = {}
    for line in (jobs.folder / "losses").read_text().splitlines():
        step, _round, _world, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def kill_and_resume(jobs: Jobs, *, round: int, step: int, lost_max: int) -> None:
    killed = jobs.wait_for("step", lambda e: (e.round, e.rank) == (round, 1) and e.step >= step)[-1]
    os.kill(killed.pid, signal.SIGKILL)
    again = jobs.wait_for("loaded", lambda event: event.round > round, count=2)
    assert len({event.step for event in again}) == 1, "the ranks loaded different steps"
    assert again[0].step >= killed.step - lost_max


def test_killed_workers_resume_from_memory_with_the_same_losses(jobs: Jobs) -> None:
    """Prior art: a kill while an FSDP shard was copied could leave a torn state under its step.

    The first round's copies block training, the next round's overlap it.
    """
    options = {"KIND": "fsdp2", "STEPS": "60", "STORAGE_EVERY": "100", "OVERLAP": "from round 2"}
    job = jobs.run("--nproc-per-node", "2", TRAIN, HOLD="10", **options)
    jobs.go_when_warm(job)
    kill_and_resume(jobs, round=1, step=20, lost_max=1)
    kill_and_resume(jobs, round=2, step=40, lost_max=2)
    job.succeeds()
    seen = losses(jobs)
    assert sorted(seen) == list(range(1, 61))
    assert all(len(found) == 1 for found in seen.values())
    saved = jobs.folder / "saves" / "step-0000000060"
    run("fsdp_dcp.py", "fsdp2:3", str(saved), str(jobs.folder / "reference.pt"))
    jobs.expect_nothing_left()


def test_dcp_save_and_load_go_through_memory(jobs: Jobs) -> None:
    script = str(SCRIPTS / "fsdp_through_dcp.py")
    jobs.run("--nproc-per-node", "2", "--no-spares", script).succeeds()
    assert len(jobs.events("end")) == 2
    saved = jobs.folder / "saves" / "step-0000000003"
    run("fsdp_dcp.py", "fsdp2:3", str(saved), str(jobs.folder / "reference.pt"))


def test_worlds_of_other_sizes_go_on_from_storage(jobs: Jobs) -> None:
    """The second world first compares what it loaded with what the first one ended with."""
    jobs.run("--nproc-per-node", "2", "--no-spares", TRAIN, KIND="fsdp2", STEPS="4").succeeds()
    jobs.run("--nproc-per-node", "3", "--no-spares", TRAIN, KIND="fsdp1", STEPS="6").succeeds()
    equal = [(event.step, event.world) for event in jobs.events("equal")]
    assert equal == [(4, 3)] * 3


def test_a_world_that_lost_a_node_re_shards_from_the_copies_of_its_peer(jobs: Jobs) -> None:
    """Nothing but memory can be used: no step has gone to storage, and the lost node's is gone."""
    master = jobs.master()
    options = {"KIND": "fsdp2", "STEPS": "60", "STORAGE_EVERY": "1000", "REPLICAS": "1"}
    first = jobs.node(master, *ELASTIC, TRAIN, name="a", **options)
    second = jobs.node(master, *ELASTIC, TRAIN, name="b", **options)
    lost = jobs.wait_for(
        "step", lambda event: event.world == 4 and event.node == "b" and event.step >= 10
    )[-1]
    assert not list((jobs.folder / "saves").glob("step-*"))
    lose_memory_of(lost.agent)
    wait_gone([lost.pid])
    second.wait()
    first.succeeds(RUN_S)
    after = [event for event in jobs.events("loaded") if event.round > lost.round]
    assert {event.world for event in after} == {2}
    assert len({event.step for event in after}) == 1
    assert after[0].step >= lost.step - 3
