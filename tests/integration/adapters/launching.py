# SPDX-License-Identifier: Apache-2.0
"""Runs a training script under `holdfast run`, which restarts it when a rank dies."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).resolve().parents[3]
LAUNCH_S = 240
"""A training is over in half a minute; a busy machine needs several times that."""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips without these libraries, and says how to get them."""
    missing = [name for name in modules if importlib.util.find_spec(name.split(".")[0]) is None]
    why = f"needs {', '.join(missing)}: pip install -e '.[test-adapters]'"
    return pytest.mark.skipif(bool(missing), reason=why)


def launch(script: str, folder: Path, *arguments: str, ranks: int = 2, restarts: int = 1) -> str:
    """Run a script of tests/integration/adapters/scripts to its end; what it said."""
    command = [sys.executable, "-m", "holdfast.cli", "run", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), str(SCRIPTS / script), str(folder), *arguments]
    with tempfile.TemporaryDirectory(prefix="a-") as private:
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TMPDIR": private,
            "XDG_RUNTIME_DIR": private,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TRANSFORMERS_OFFLINE": "1",
        }
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=LAUNCH_S, check=False
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    return said
