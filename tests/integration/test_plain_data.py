# SPDX-License-Identifier: Apache-2.0
"""DataShards in plain Python: the example, killed in the middle of a save and started again."""

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.jobs import ROOT

EXAMPLE = ROOT / "examples/plain_data.py"
LIMIT_S = 240.0

KILLED_IN_A_SAVE = """
import os, runpy, signal, sys

saves = 0
replace = os.replace

def replace_or_die(*paths):
    global saves
    saves += 1
    if saves == 300:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = replace_or_die
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def test_a_killed_process_goes_on_and_counts_every_sample_once(tmp_path: Path) -> None:
    """It dies after a step and before that is saved: the next life makes that step again."""
    killed = run("-c", KILLED_IN_A_SAVE, str(EXAMPLE), str(tmp_path))
    assert killed.returncode == -9, killed.stderr
    again = run(str(EXAMPLE), str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert "going on in epoch 0" in again.stdout
    assert "the sum of all samples is 399980000, it should be 399980000" in again.stdout
