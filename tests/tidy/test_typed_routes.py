# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the map of the core do not pass `make lint`: all are planted, and mypy says each."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = "src/holdfast/core/job"


@dataclass(frozen=True)
class Planted:
    """A mistake in one file, and what mypy says there."""

    file: str
    old: str
    new: str
    says: str


MISTAKES = (
    # A route to a machine that does not handle the event.
    Planted(
        f"{CORE}/flow.py",
        "core.route(ev.WorldHurt, verdicts)",
        "core.route(ev.WorldHurt, liveness)",
        'Cannot infer value of type parameter "E" of "route"',
    ),
    # A case that is missing.
    Planted(
        f"{CORE}/health/verdicts.py",
        "            case ev.JobSuspended():\n                return self._pause()\n",
        "",
        'Argument 1 to "assert_never" has incompatible type "JobSuspended"',
    ),
    # Something else than a record among the records of a machine.
    Planted(
        f"{CORE}/rendezvous/rendezvous.py",
        "OWNS = (rec.GenerationSet, ",
        "OWNS = (ev.WorldHurt, ",
        'incompatible type "Rendezvous"',
    ),
)


def test_mypy_finds_each(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for planted in MISTAKES:
        file = tmp_path / planted.file
        text = file.read_text()
        assert text.count(planted.old) == 1, f"{planted} has no place any more: find it another"
        file.write_text(text.replace(planted.old, planted.new))
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml"]
    # No cache of ours: another run beside this one may write there.
    command = [*mypy, "--cache-dir", tmp_path / "cache", CORE]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    for planted in MISTAKES:
        assert planted.says in found.stdout, found.stdout + found.stderr
