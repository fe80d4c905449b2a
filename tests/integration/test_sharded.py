# SPDX-License-Identifier: Apache-2.0
"""Sharded states with real process groups on the CPU: saved, re-sharded, read without Holdfast."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.jobs import SCRIPTS, Jobs, wait_gone

TRAIN = str(SCRIPTS / "fsdp_train.py")
LIMIT_S = 110.0
ELASTIC = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1", "--nproc-per-node", "2")


def run(script: str, *arguments: str) -> list[str]:
    """Run a script of ranks to its good end; returns the lines that it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout.splitlines()


# ---- files alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "loads"),
    [
        ("fsdp2", ["fsdp2:3", "plain:1"]),
        ("fsdp1", ["fsdp2:3"]),
        ("hsdp", ["hsdp:2"]),
        ("columns", ["fsdp1:2"]),
    ],
)
def test_a_state_is_loaded_bit_for_bit_at_any_world_size(
    tmp_path: Path, kind: str, loads: list[str]
) -> None:
    """Prior art: FSDP1 alone, and only at the world size and sharding that saved.

    `dcp.load` reads the same files, without Holdfast, in other world sizes too.
    """
    same, *_ = run_folder(
        tmp_path, f"save:{kind}:4", f"load:{kind}:4", *map("load:{}".format, loads)
    )
    # Rank 3 needs its own part, and for a large replicated buffer those that store it: 0 and 1.
    assert same == "opened rank-00000 rank-00001 rank-00003"
    run("fsdp_dcp.py", str(tmp_path), str(tmp_path / "reference.pt"), "fsdp2:2")


def run_folder(folder: Path, *arguments: str) -> list[str]:
    printed = run("fsdp_folder.py", str(folder), *arguments)
    return [line for line in printed if line.startswith("opened")]


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_saving_before_the_first_step_leaves_the_optimizer_alone(tmp_path: Path, kind: str) -> None:
    """torch's own way to collect a fresh optimizer's state makes a step, and that step counts."""
    run_folder(tmp_path, f"fresh:{kind}:2")


def test_the_checkpoint_becomes_one_file_with_the_tool_of_torch(tmp_path: Path) -> None:
    run_folder(tmp_path, "save:fsdp2:2")
    dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    reference = torch.load(tmp_path / "reference.pt", weights_only=True)
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    assert one["optimizer"]["param_groups"] == reference["optimizer"]["param_groups"]
    assert one["model"].keys() == reference["model"].keys()
    for name, tensor in reference["model"].items():
        assert torch.equal(one["model"][name], tensor)


# ---- the whole way: memory, agents, storage -----------------------------------------------------


def losses(jobs: Jobs) -> dict[int, set[str]]:
    """By step, every loss that was seen for it."""
    found: dict[int, set[str]] = {}
    for line in (jobs.folder / "losses").read_text().splitlines():
        step, _round, _world, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.parametrize("overlap", ["", "1"], ids=["blocking", "overlapping"])
def test_a_killed_worker_resumes_from_memory_with_the_same_losses(jobs: Jobs, overlap: str) -> None:
    """Prior art: a kill while an FSDP shard was copied could leave a torn state under its step."""
    options = {"KIND": "fsdp2", "STEPS": "40", "STORAGE_EVERY": "100", "OVERLAP": overlap}
    job = jobs.run("--nproc-per-node", "2", TRAIN, **options)
    killed = jobs.wait_for("step", lambda event: event.step >= 20 and event.rank == 1)[-1]
    os.kill(killed.pid, signal.SIGKILL)
    job.succeeds()
    loaded = {event.step for event in jobs.events("loaded") if event.round > killed.round}
    assert len(loaded) == 1, "the ranks loaded different steps"
    assert min(loaded) >= killed.step - (2 if overlap else 1)
    seen = losses(jobs)
    assert sorted(seen) == list(range(1, 41))
    assert all(len(found) == 1 for found in seen.values())
    saved = jobs.folder / "saves" / "step-0000000040"
    run("fsdp_dcp.py", str(saved), str(jobs.folder / "reference.pt"), "fsdp2:3")
    jobs.expect_nothing_left()


def test_dcp_save_and_load_go_through_memory(jobs: Jobs) -> None:
    jobs.run("--nproc-per-node", "2", str(SCRIPTS / "fsdp_through_dcp.py")).succeeds()
    assert len(jobs.events("end")) == 2
    saved = jobs.folder / "saves" / "step-0000000003"
    run("fsdp_dcp.py", str(saved), str(jobs.folder / "reference.pt"), "fsdp2:3")


def test_worlds_of_other_sizes_go_on_from_storage(jobs: Jobs) -> None:
    """The second world first compares what it loaded with what the first one ended with."""
    jobs.run("--nproc-per-node", "2", TRAIN, KIND="fsdp2", STEPS="4").succeeds()
    jobs.run("--nproc-per-node", "3", TRAIN, KIND="fsdp1", STEPS="6").succeeds()
    equal = [(event.step, event.world) for event in jobs.events("equal")]
    assert equal == [(4, 3)] * 3


def wipe_memory_of(agent: int) -> None:
    """Kill an agent and remove its shared memory, as the loss of its host does."""
    opened = [Path(os.readlink(fd)) for fd in Path(f"/proc/{agent}/fd").iterdir()]
    roots = {path.parent for path in opened if path.name == "lock" and "/holdfast-" in str(path)}
    assert roots, f"agent {agent} holds no checkpoint memory"
    os.kill(agent, signal.SIGKILL)
    for root in roots:
        shutil.rmtree(root)


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
    wipe_memory_of(lost.agent)
    wait_gone([lost.pid])
    second.wait()
    first.succeeds(LIMIT_S)
    after = [event for event in jobs.events("loaded") if event.round > lost.round]
    assert {event.world for event in after} == {2}
    assert len({event.step for event in after}) == 1
    assert after[0].step >= lost.step - 3
