# SPDX-License-Identifier: Apache-2.0
"""The swarm finds bugs: each patch in mutants/ plants one in the cores, and some seed must fail.

A patch that no longer applies belongs to code that has changed: make it anew, or choose another.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

MUTANTS = sorted((Path(__file__).parent / "mutants").glob("*.patch"))
SOURCE = Path(holdfast.__file__).parent
NEEDED = ("client", "core", "model", "ports", "protocol", "runtime", "sim", "worker")
SEEDS = "0..400"
LIMIT_S = 300.0


def test_there_are_mutants() -> None:
    assert len(MUTANTS) >= 8


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda path: path.stem)
def test_the_swarm_finds_it(mutant: Path, tmp_path: Path) -> None:
    package = tmp_path / "src" / "holdfast"
    package.mkdir(parents=True)
    shutil.copy(SOURCE / "__init__.py", package)
    for part in NEEDED:
        # With what Python has compiled: of that it believes all but the files that are patched.
        unfinished = shutil.ignore_patterns("*.pyc.*")
        shutil.copytree(SOURCE / part, package / part, ignore=unfinished)
    patch = ["patch", "-p1", "--batch", "--silent", "--input", str(mutant)]
    applied = subprocess.run(patch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, f"the patch does not apply any more:\n{applied.stdout}"
    command = [sys.executable, "-m", "holdfast.sim.swarm", "--first", "--seeds", SEEDS]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONHASHSEED": "0"}
    swarm = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert "after" in swarm.stdout, f"nobody noticed:\n{swarm.stdout}{swarm.stderr}"
    print(swarm.stdout, end="")
