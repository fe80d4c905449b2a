# SPDX-License-Identifier: Apache-2.0
"""What `scripts/same-behaviour` says of two trees, with a stand-in for the simulator's runs."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/same-behaviour"
LIMIT_S = 300.0


def compare(tmp_path: Path, plays: str, *commits: str) -> subprocess.CompletedProcess[str]:
    """Run it with this line of shell in place of Python; it leaves nothing behind."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{plays}\n")
    python.chmod(0o755)
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = subprocess.run(
        [SCRIPT, *commits],
        env={**os.environ, "PYTHON": str(python), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert not list(folder.iterdir())
    return done


@pytest.mark.parametrize(
    ("plays", "code", "words"),
    [
        ('echo "0 $2"', 0, "the same"),
        # No two processes have one number.
        ('echo "0 $$"', 1, "differs: core 0,drivers 0"),
        ('echo "0 $2"; [ "$2" = holdfast.sim.driver_swarm ]', 3, "a run broke off"),
        ('echo "0 $2"; [ "$2" = holdfast.sim.swarm ]', 3, "a run broke off"),
    ],
    ids=["same", "differ", "drivers break off", "cores break off"],
)
def test_its_exit_code_says_whether_they_decide_alike(
    tmp_path: Path, plays: str, code: int, words: str
) -> None:
    done = compare(tmp_path, plays, ".", ".")
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


def test_a_commit_that_is_not_there_is_not_the_same(tmp_path: Path) -> None:
    assert compare(tmp_path, 'echo "0 $2"', "no-such-commit").returncode == 2
