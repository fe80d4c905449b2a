# SPDX-License-Identifier: Apache-2.0
"""The demo's script must survive a kill with an unbroken loss curve: without that the demo lies."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast import demo
from holdfast.agent.network import ReservedPort
from tests.waiting import until

SCRIPT = Path(demo.__file__).with_name("train.py")
LIMIT_S = 240.0
STEPS = 16
SAVE_EVERY = 5


@contextmanager
def running(folder: Path, world: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The script's ranks with torchrun's environment, started by hand: no launcher needed."""
    port = ReservedPort()
    argv = [sys.executable, str(SCRIPT), f"--steps={STEPS}", f"--dir={folder}"]
    ranks = []
    try:
        for rank in range(world):
            env = {
                **os.environ,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port.number),
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
            }
            ranks.append(subprocess.Popen([*argv, f"--save-every={SAVE_EVERY}"], env=env))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        port.close()


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    # Without a line that is being written.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def finish(folder: Path, world: int) -> None:
    with running(folder, world) as ranks:
        assert [process.wait(LIMIT_S) for process in ranks] == [0] * world


def test_a_killed_run_resumes_in_a_smaller_world_with_the_same_losses(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    finish(whole, world=1)
    with running(broken, world=2):
        until(
            lambda: any(line["step"] > SAVE_EVERY for line in metrics(broken)),
            LIMIT_S,
            "a step after the first save",
        )
    lost = max(line["step"] for line in metrics(broken))
    assert lost < STEPS, "the kill came too late to show anything"
    finish(broken, world=1)

    expected = {line["step"]: line["loss"] for line in metrics(whole)}
    resumed = [line for line in metrics(broken) if line["world"] == 1]
    saved = lost - lost % SAVE_EVERY
    # The saver outlives the ranks and brings the last step in memory to storage; the new run may
    # come before that, and the kill between a step and its checkpoint.
    assert saved + 1 - SAVE_EVERY <= resumed[0]["step"] <= lost + 1
    assert resumed[-1]["step"] == STEPS
    for line in metrics(broken):
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=0.01), line
    assert expected[STEPS] < expected[1] - 0.5
