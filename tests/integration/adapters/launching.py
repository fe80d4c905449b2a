# SPDX-License-Identifier: Apache-2.0
"""Runs a training script under `holdfast run`, which restarts it when a rank dies."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.integration.jobs import ROOT, Command, Jobs
from tests.waiting import until

SCRIPTS = Path(__file__).parent / "scripts"
NEW_JOB = ("--local-nodes", "2", "--no-spares")
LAUNCH_S = 240
"""A training is over in half a minute; a busy machine needs several times that."""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips without these libraries, and says how to get them."""
    missing = [name for name in modules if importlib.util.find_spec(name.split(".")[0]) is None]
    why = f"needs {', '.join(missing)}: pip install -e '.[test-adapters]'"
    return pytest.mark.skipif(bool(missing), reason=why)


def launch(jobs: Jobs, script: str, folder: Path, *words: str, **env: str) -> Command:
    """Start a script of tests/integration/adapters/scripts."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    cpu = {"DS_ACCELERATOR": "cpu", "TRANSFORMERS_OFFLINE": "1"}
    more = {"PYTHONPATH": paths, **cpu, **env}
    return jobs.run("--max-restarts", "1", *words, str(SCRIPTS / script), str(folder), **more)


def launch_and_restart(jobs: Jobs, script: str, folder: Path, *words: str, nodes: int) -> Command:
    """Start a script, and let it come to its first death once a restart is cheap."""
    job = launch(jobs, script, folder, *words)
    job.wait_line("ready for a fast restart", after=nodes - 1, timeout_s=LAUNCH_S)
    (folder / "go").touch()
    return job


def kill_everything_in_a_write(
    jobs: Jobs, job: Command, directory: Path, began: Sequence[Path]
) -> str:
    """Kill all processes of a job while one of many checkpoints is written; returns the newest one
    that is whole. The agents are what writes: they are held still to see that it is the moment.

    `began`: files by which all ranks say that they are so far that they may be killed.
    """
    latest = directory / "latest"

    def so_far() -> bool:
        assert job.is_running(), job.text
        return all(path.exists() for path in (latest, *began))

    until(so_far, LAUNCH_S, "the life that is to be killed")
    agents = jobs.agents()

    def half_written() -> bool:
        return any(path.is_file() for path in directory.glob(".holdfast/*/**/*"))

    def caught() -> bool:
        assert job.is_running(), job.text
        if not half_written():
            return False
        for agent in agents:
            agent.suspend()
        until(lambda: {agent.status() for agent in agents} == {psutil.STATUS_STOPPED}, LAUNCH_S)
        if half_written():
            return True
        for agent in agents:
            agent.resume()
        return False

    assert len(agents) == 2
    until(caught, LAUNCH_S, "a checkpoint that is being written")
    jobs.kill_all()
    job.wait()
    return latest.read_text()
