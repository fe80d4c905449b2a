# SPDX-License-Identifier: Apache-2.0
"""Being ready before one is needed: newcomers that warm up first, stores that serve one round."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from holdfast.client import AgentClient
from holdfast.protocol import messages as m
from holdfast.runtime.token import read_token
from tests.integration.jobs import SCRIPTS, Jobs, MasterCommand
from tests.waiting import until

TALK = str(SCRIPTS / "talk.py")
TRAIN = str(SCRIPTS / "train.py")
ELASTIC = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1")
SLOW_IMPORT_S = 4.0


def steps_with(module: str) -> str:
    """scripts/steps.py, with one more import in front."""
    return (
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\nimport {module}\n"
        + (SCRIPTS / "steps.py").read_text()
    )


def knows_modules(master: MasterCommand) -> bool:
    client = AgentClient(f"tcp:{master.address}", read_token(master.token_file), scope=0)
    answer = client.call(m.KvCheck(0, ("holdfast/modules",)), 10.0)
    return isinstance(answer, m.Number) and answer.number == 1


def store_servers(jobs: Jobs) -> set[int]:
    found = set()
    for process in jobs.living():
        try:
            if "holdfast.torch.store_server" in process.cmdline():
                found.add(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_newcomer_imports_before_the_world_stops_for_it(jobs: Jobs, tmp_path: Path) -> None:
    """An import of four seconds on the new node costs the others no four seconds."""
    # Outside the working directory: code there is the user's own, and never preloaded.
    (tmp_path / "slow_module.py").write_text(f"import time\ntime.sleep({SLOW_IMPORT_S})\n")
    script = jobs.write("own/steps.py", steps_with("slow_module"))
    path = f"{jobs.environment()['PYTHONPATH']}:{tmp_path}"
    master = jobs.master()
    first = jobs.node(master, *ELASTIC, script, name="a", PYTHONPATH=path)
    jobs.wait_world(1)
    until(lambda: knows_modules(master), 60.0, "what the workers import is known to the job")
    late = jobs.node(master, *ELASTIC, script, name="b", PYTHONPATH=path)
    second = jobs.wait_world(2)
    alone = [event for event in jobs.steps() if event.world == 1]
    pause_s = min(event.t for event in second) - max(event.t for event in alone)
    assert pause_s < SLOW_IMPORT_S
    jobs.finish()
    first.succeeds()
    late.succeeds()


def test_every_round_has_a_store_of_its_own_that_is_there_first(jobs: Jobs) -> None:
    """Keys of a dead round cannot be read, and no worker has to wait for rank 0 to listen."""
    job = jobs.run("--nproc-per-node", "2", TRAIN)
    seen: set[int] = set()
    world = jobs.wait_world(2)
    for ready in range(2):
        job.wait_line("ready for a fast restart", after=ready)
        fresh = store_servers(jobs) - seen
        assert fresh
        os.kill(world[1].pid, signal.SIGKILL)
        world = jobs.wait_world(2, after=world)
        assert fresh <= store_servers(jobs), "the store of the present round was ended"
        seen |= fresh
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_a_dead_store_server_is_not_used(jobs: Jobs) -> None:
    """Killed before its round began: rank 0 serves instead, and nobody waits for the dead one."""
    job = jobs.run("--nproc-per-node", "2", TRAIN)
    world = jobs.wait_world(2)
    job.wait_line("ready for a fast restart")
    for pid in store_servers(jobs):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not store_servers(jobs), 30.0, "its end")
    os.kill(world[1].pid, signal.SIGKILL)
    jobs.wait_world(2, after=world)
    jobs.finish()
    job.succeeds()


@pytest.fixture
def unread(jobs: Jobs) -> Iterator[subprocess.Popen[bytes]]:
    """A job that prints 20 MB to a console that nobody reads, with little patience for silence."""
    master = jobs.master("--beat", "0.5", "--silence", "5", "--lease", "10")
    where = ("--master", master.address, "--token-file", str(master.token_file))
    with subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "run", *where, TALK],
        env=jobs.environment(LINES_TO_PRINT="200000"),
        cwd=jobs.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        yield process
        process.kill()


def test_a_console_that_nobody_reads_does_not_cost_the_node(
    jobs: Jobs, unread: subprocess.Popen[bytes]
) -> None:
    master = jobs.commands[0]
    master.wait_line("all workers run")
    with pytest.raises(AssertionError, match="no line"):
        master.wait_line("is lost", timeout_s=8.0)
    assert unread.stdout is not None
    shown = unread.stdout.read().splitlines()
    assert unread.wait(60) == 0
    assert len(shown) == 200_001
    assert master.count("all workers run") == 1
