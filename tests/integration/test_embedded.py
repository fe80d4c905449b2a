# SPDX-License-Identifier: Apache-2.0
"""The launcher's master while its state is out of reach: what is said of it, and how it ends."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from holdfast.cli.console import Console
from holdfast.cli.embedded import EXIT_STATE_SHUT, EmbeddedMaster
from holdfast.runtime.observe import Level
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs
from tests.waiting import until

VAULTED = str(SCRIPTS / "vaulted.py")
FIRST = "starting it again until it can use its state"
LATER = "the master still cannot use its state"


class State:
    """A state directory that can be put out of reach, for one reason or another, in one move."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.path = folder / "place" / "state"
        (folder / "right").mkdir()
        (folder / "taken").mkdir()
        (folder / "taken" / "state").touch()
        (folder / "locked" / "state" / "lock").mkdir(parents=True)
        self.give_back()

    def _lead_to(self, name: str) -> None:
        link = self._folder / "next"
        link.symlink_to(name)
        link.rename(self._folder / "place")

    def take_away(self) -> None:
        """Each new master finds a file in its place."""
        self._lead_to("taken")

    def change(self) -> None:
        """And now a folder without a lock that it could take."""
        self._lead_to("locked")

    def give_back(self) -> None:
        self._lead_to("right")


class Told:
    """What the launcher says, and when."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __call__(self, text: object, level: Level = Level.INFO, /) -> None:
        self.lines.append(str(text))
        self._changed.set()

    async def wait(self, text: str, count: int = 1) -> None:
        async with asyncio.timeout(LIMIT_S):
            while sum(text in line for line in self.lines) < count:
                self._changed.clear()
                await self._changed.wait()


@contextmanager
def silent_console() -> Iterator[Console]:
    console = Console()
    try:
        yield console
    finally:
        console.close()


def wait_for_master(folder: Path) -> None:
    until(lambda: list(folder.glob("holdfast-*/jobs/*.json")), LIMIT_S, "a master's note")


def test_a_launcher_that_ends_between_two_tries_starts_no_other_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    state = State(tmp_path)

    async def play(console: Console) -> None:
        told = Told()
        master = EmbeddedMaster(["--job", "test"], state.path, console, told)
        running = asyncio.create_task(master.run())
        await asyncio.to_thread(wait_for_master, tmp_path)
        state.take_away()
        os.kill(master.pid, signal.SIGKILL)
        await told.wait(FIRST)
        state.change()
        await told.wait(LATER)  # Why it cannot now: then it pauses.
        last = master.pid
        await master.stop()
        async with asyncio.timeout(LIMIT_S):
            assert await running == EXIT_STATE_SHUT
        assert master.pid == last
        assert not psutil.pid_exists(last)
        assert [line.count("is not a folder") for line in told.lines] == [0, 1, 0]

    with silent_console() as console:
        asyncio.run(play(console))


def start(jobs: Jobs, state: State, *options: str, **more: str) -> Command:
    memory = jobs.folder / "memory"
    memory.mkdir()
    env = {
        "VAULT_DIRECTORY": str(jobs.folder / "checkpoints"),
        "HOLDFAST_MEMORY_DIR": str(memory),
        **more,
    }
    patient = ("--state", str(state.path), "--lease", "600")
    return jobs.run(*patient, *options, "--nproc-per-node", "1", VAULTED, **env)


def lose_master(jobs: Jobs, state: State) -> None:
    (master,) = jobs.running("master")
    state.take_away()
    master.kill()


def test_a_job_goes_on_without_a_note_of_its_master(jobs: Jobs) -> None:
    state, runtime = State(jobs.folder), jobs.folder / "file"
    runtime.touch()
    job = start(jobs, state, XDG_RUNTIME_DIR=str(runtime))
    for number in range(2):
        job.wait_line("the note for `holdfast status` cannot be left", after=number)
        jobs.wait_for("saved", count=number + 1)
        if number == 0:
            (master,) = jobs.running("master")
            master.kill()
    job.wait_line("came back")
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_each_outage_is_said(jobs: Jobs) -> None:
    """Also one that begins soon after the state was back."""
    state = State(jobs.folder)
    job = start(jobs, state)
    for number in range(2):
        jobs.wait_for("saved", count=3 * number + 1)
        lose_master(jobs, state)
        job.wait_line(FIRST, after=number)
        state.give_back()
        job.wait_line("came back", after=number)
    jobs.finish()
    job.succeeds()
    assert job.count(FIRST) == 2
    jobs.expect_nothing_left()


def test_a_stop_while_the_state_is_away_waits_for_it(jobs: Jobs) -> None:
    """For the grace: what is in memory gets to storage, if it comes back by then."""
    state = State(jobs.folder)
    job = start(jobs, state, "--grace", "600")
    jobs.wait_for("saved", count=3)
    lose_master(jobs, state)
    job.wait_line(FIRST)
    job.send(signal.SIGTERM)
    state.change()
    job.wait_line(LATER)
    state.give_back()
    assert job.wait() == 128 + signal.SIGTERM
    assert list((jobs.folder / "checkpoints").glob("step-*/manifest.json"))
    jobs.expect_nothing_left()


def test_a_job_that_is_stopped_without_its_state_says_so_by_its_exit_code(jobs: Jobs) -> None:
    state = State(jobs.folder)
    job = start(jobs, state, "--grace", "1")
    jobs.wait_for("saved", count=3)
    lose_master(jobs, state)
    job.wait_line(FIRST)
    job.send(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert job.count("what was only in memory is lost") == 1
    jobs.expect_nothing_left()
