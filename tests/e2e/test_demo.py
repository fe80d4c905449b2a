# SPDX-License-Identifier: Apache-2.0
"""The demo is the first thing people see: it must end well, say what was true and leave nothing."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import until

DEMO = [sys.executable, "-m", "holdfast.cli", "demo", "--plain"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """For the temporary files of the demo: a short path, because sockets will be in it."""
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        yield Path(name)


def environment(folder: Path) -> dict[str, str]:
    """Temporary files of the demo go where the test sees what is left of them."""
    return {**os.environ, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}


def processes_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR", "").startswith(f"{folder}/"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_nothing_left(folder: Path) -> None:
    until(lambda: not processes_in(folder), 120, "the end of every process of the demo")
    assert [path.name for path in folder.glob("holdfast-demo-*")] == []
    assert list(folder.glob("holdfast-*/jobs/*")) == []


@pytest.mark.timeout(480)
def test_the_job_survives_three_kills_with_an_unbroken_curve(folder: Path, tmp_path: Path) -> None:
    outcome, kept = tmp_path / "outcome.json", tmp_path / "kept"
    # The usual limit is for a machine of one's own; here other tests need the cores too.
    options = ["--steps", "30", "--limit", "360", "--json", str(outcome), "--keep", str(kept)]
    done = subprocess.run(
        [*DEMO, *options],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    report: dict[str, Any] = json.loads(outcome.read_text())

    assert report["failure"] == ""
    assert report["unbroken"]
    assert [step for step, _ in report["curve"]] == list(range(1, report["steps"] + 1))
    assert report["loss_last"] < report["loss_first"]
    killed = [row for row in report["interruptions"] if row["killed"]]
    assert [row["killed"] for row in killed] == ["worker", "node", "master"]
    # A master's death stops no step: the next one may end within the same millisecond.
    assert all(row["next_step_s"] is not None and row["next_step_s"] >= 0 for row in killed)
    assert report["master"]["workers_restarted"] == 0
    assert 0 < report["goodput"] < 1
    assert "The job survived all three kills" in done.stdout
    assert (kept / "checkpoints" / "latest").exists()
    assert_nothing_left(folder)


def test_a_stopped_demo_leaves_nothing(folder: Path) -> None:
    demo = subprocess.Popen(DEMO, env=environment(folder), stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    with demo.stdout:
        try:
            first = demo.stdout.readline()
            assert "node rank" in first, first
            demo.send_signal(signal.SIGINT)
            assert demo.wait(120) == 128 + signal.SIGINT
        finally:
            demo.kill()
            demo.wait()
        assert "nothing is left" in demo.stdout.read()
    assert_nothing_left(folder)


def test_a_job_that_is_too_slow_is_ended_with_a_sentence(folder: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--limit", "1"],
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "The demo failed: after 1 s it had only come to this: starting two nodes" in done.stdout
    assert_nothing_left(folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--steps", "0"], "must be a whole number above 0"),
        (["--limit", "soon"], "must be a whole number above 0"),
        (["--json", "/nowhere/outcome.json"], "its folder does not exist"),
        (["--keep", "/"], "is not empty"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(options: list[str], sentence: str) -> None:
    done = subprocess.run([*DEMO, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert sentence in done.stderr
