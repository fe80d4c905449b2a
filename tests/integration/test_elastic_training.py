# SPDX-License-Identifier: Apache-2.0
"""Elastic training with real ranks: gradients that go over the wire, kills, and a smaller world."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.integration.jobs import ROOT, SCRIPTS, Jobs, wait_gone
from tests.integration.scripts.elastic_job import trained_alone

TRAIN = str(SCRIPTS / "elastic_train.py")
LIMIT_S = 240.0
LENGTH = 16 * 50 + 6
"""The last global batch is short, and still gives each of 2 or 3 ranks a sample in every pass."""
STEPS = 2 * 51
NODE = ("--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=1", "--nproc-per-node", "1")

pytestmark = pytest.mark.timeout(480)


def python(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    return done.stdout


def test_ranks_of_ddp_and_fsdp2_train_as_one_process_does(tmp_path: Path) -> None:
    """Prior art: ranks with fewer batches left the others waiting in a collective, the mean was not
    weighted, and the loss not scaled. Here gradients are exchanged once per step and right."""
    script = str(SCRIPTS / "elastic_ranks.py")
    runs = ["ddp:4", "ddp:3", "uneven:3", "fsdp2:3"]
    printed = python(script, str(tmp_path), *runs)
    assert [line for line in printed.splitlines() if line.startswith("same")] == [
        f"same {run}" for run in runs
    ]


def test_the_example_goes_on_in_a_larger_world(jobs: Jobs) -> None:
    """1000 samples in steps of 256 are 4 steps per epoch, whatever the world."""
    example, saves = str(ROOT / "examples" / "elastic.py"), str(jobs.folder / "saves")
    for ranks, epochs in ((1, 1), (2, 3)):
        words = ("--nproc-per-node", str(ranks), "--no-spares", example, saves)
        job = jobs.run(*words, SAMPLES="1000", EPOCHS=str(epochs))
        job.succeeds(LIMIT_S)
        job.wait_line(f"done after {4 * epochs} steps")


def lineage(jobs: Jobs) -> dict[int, tuple[int, list[int]]]:
    """Of each step of the model that came out: its epoch and the samples of all ranks.

    A step that was done again counts as the last round did it.
    """
    found: dict[int, tuple[int, int, list[int]]] = {}
    for path in jobs.folder.glob("samples-*"):
        round_ = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            told = json.loads(line)
            step, epoch = told["step"], told["epoch"]
            if step not in found or found[step][0] < round_:
                found[step] = (round_, epoch, [])
            if found[step][0] == round_:
                found[step][2].extend(told["rows"])
    return {step: (epoch, rows) for step, (_, epoch, rows) in found.items()}


def test_a_killed_worker_and_a_lost_node_cost_no_sample(jobs: Jobs) -> None:
    """Three ranks, one killed in the middle of an epoch, then two: every sample of both epochs is
    in the final model exactly once, and the model is that of one undisturbed process."""
    master = jobs.master()
    options = {"LENGTH": str(LENGTH), "EPOCHS": "2", "HOLD": "5"}
    nodes = {name: jobs.node(master, *NODE, TRAIN, name=name, **options) for name in "abc"}
    for node in nodes.values():
        node.wait_line("ready for a fast restart")
    jobs.go()
    killed = jobs.wait_for("step", lambda event: event.world == 3 and event.step >= 12)[-1]
    os.kill(killed.pid, signal.SIGKILL)
    lost = jobs.wait_for(
        "step",
        lambda event: event.world == 3 and event.round > killed.round and event.step >= 30,
    )[-1]
    os.kill(lost.agent, signal.SIGKILL)
    wait_gone([lost.pid])
    nodes.pop(lost.node).wait()
    for node in nodes.values():
        node.succeeds(LIMIT_S)

    ended = jobs.events("end")
    assert {(event.world, event.step) for event in ended} == {(2, STEPS)}
    steps = lineage(jobs)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for epoch in range(2):
        times = Counter(row for of, rows in steps.values() if of == epoch for row in rows)
        assert times == Counter(range(LENGTH))
    weights = torch.load(jobs.folder / "weights.pt", weights_only=True)
    for name, tensor in trained_alone(LENGTH, 2).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-8, atol=1e-10)
    jobs.expect_nothing_left()
