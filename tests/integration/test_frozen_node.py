# SPDX-License-Identifier: Apache-2.0
"""A machine that is paused in the middle of a commit, and goes on when it was replaced."""

import signal
from contextlib import suppress
from pathlib import Path

import psutil

from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.verify import directory_problems, verify_checkpoint
from holdfast.model.checkpoint import Version
from tests.integration.faults import Switches
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs, MasterCommand
from tests.waiting import until

VAULTED = str(SCRIPTS / "vaulted.py")
WORDS = ("--nnodes", "1", "--node-rank", "0", "--no-spares", VAULTED)


def start(jobs: Jobs, master: MasterCommand, name: str, **env: str) -> Command:
    """A node whose memory goes with it, and that brings every second step to storage."""
    memory = jobs.folder / f"memory-{name}"
    memory.mkdir()
    return jobs.node(
        master,
        *WORDS,
        name=name,
        VAULT_DIRECTORY=str(jobs.folder / "checkpoints"),
        VAULT_EVERY="2",
        VAULT_SLOTS="3",
        HOLDFAST_MEMORY_DIR=str(memory),
        **env,
    )


def processes_of(jobs: Jobs, name: str) -> list[psutil.Process]:
    found = []
    for process in jobs.living():
        with suppress(psutil.NoSuchProcess):
            if process.environ().get("STEPS_NODE") == name:
                found.append(process)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".holdfast" not in path.parts
    }


def test_a_node_that_wakes_up_after_its_replacement_changes_no_checkpoint(jobs: Jobs) -> None:
    """It finished its commit, and removed the newer state that its replacement had committed."""
    directory = jobs.folder / "checkpoints"
    master = jobs.master("--http", "off", "--beat", "0.5", "--silence", "8", "--lease", "10")
    switches = Switches(jobs.folder)
    old = start(jobs, master, "old", HOLD="3", **switches.env)
    master.wait_line("step 2 is committed")
    jobs.wait_for("step", lambda event: event.step == 3)
    # The commit comes as far as the rename that gives the checkpoint its name.
    switches.hold(directory / "step-0000000004")
    jobs.go()
    until(switches.is_held, LIMIT_S, "the rename of a commit")
    frozen = processes_of(jobs, "old")
    for process in frozen:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGSTOP)

    start(jobs, master, "new", STAY="5")
    master.wait_line("step 4 is committed")
    (newest, older) = list_committed(open_storage(str(directory)))
    assert (newest.version.step, older.version.step) == (4, 2)
    assert newest.version.lineage > older.version.lineage
    before = contents(directory)

    switches.hold(None)
    for process in frozen:
        with suppress(psutil.NoSuchProcess):  # The agent, awake, may have ended it.
            process.send_signal(signal.SIGCONT)
    assert old.wait() != 0
    assert contents(directory) == before
    assert verify_checkpoint(open_storage(str(directory)), newest).is_whole
    assert directory_problems(open_storage(str(directory))) == []

    # What was committed is what the next one goes on from.
    jobs.kill_all(node="new")
    start(jobs, master, "third", STAY="5")
    (restored,) = jobs.wait_for("restored", lambda event: event.node == "third")
    assert restored.step == 4
    versions = [one.version for one in list_committed(open_storage(str(directory)))]
    assert versions == [newest.version, Version(older.version.lineage, 2)]
