# SPDX-License-Identifier: Apache-2.0
"""Jobs that are stopped from outside: nothing that was saved is lost, and the same command goes on.

SLURM sends SIGTERM twice within milliseconds to every process of a job; systemd sends it to every
process, too. The workers (scripts/vaulted.py) save to memory at every step and to storage never.
"""

import asyncio
import json
import os
import shutil
import signal
from contextlib import suppress

import psutil
import pytest

from holdfast.cli import asking
from holdfast.model.errors import RetryableError
from holdfast.protocol import messages as m
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Jobs
from tests.waiting import until

STEPS = str(SCRIPTS / "steps.py")
VAULTED = str(SCRIPTS / "vaulted.py")
STUBBORN = str(SCRIPTS / "stubborn.py")
BOUNDED_S = 90.0
"""Far below what a lease and a grace of these tests take, far above what a stop does take."""

ALONE = ("--nproc-per-node", "2")
LOCAL = ("--local-nodes", "2", "--nproc-per-node", "1")
YOUNGEST = "everyone, the youngest first"
SHAPES = [pytest.param(ALONE, id="alone"), pytest.param(LOCAL, id="local nodes")]


def environment(jobs: Jobs) -> dict[str, str]:
    memory = jobs.folder / "memory"
    memory.mkdir(exist_ok=True)
    return {
        "VAULT_DIRECTORY": str(jobs.folder / "checkpoints"),
        "HOLDFAST_MEMORY_DIR": str(memory),
    }


def start(jobs: Jobs, *options: str) -> Command:
    state = str(jobs.folder / "state")
    lease = ("--grace", "600", "--lease", "600")
    return jobs.run("--state", state, *lease, *options, VAULTED, **environment(jobs))


def newest_saved(jobs: Jobs) -> int:
    """The newest step that every rank has saved, all of them in memory only."""
    last = {event.rank: event.step for event in jobs.events("saved")}
    return min(last.values()) if len(last) == 2 else 0


def send_twice(processes: list[psutil.Process], number: signal.Signals) -> None:
    for _ in range(2):
        for process in processes:
            with suppress(psutil.Error):
                process.send_signal(number)


def expect_to_go_on(jobs: Jobs, job: Command, after: int) -> None:
    """The same command goes on from storage with a step that is not older than `after`."""
    shutil.rmtree(jobs.folder / "memory")
    was = len(jobs.events("restored"))
    environment(jobs)
    again = jobs.run(*job.argv[4:], **environment(jobs))
    restored = jobs.wait_for("restored", count=was + 2)[was:]
    assert {event.step for event in restored} in ({after}, {after + 1})
    jobs.wait_for("saved", lambda event: event.step > after + 2)
    jobs.finish()
    again.succeeds()
    assert again.count("the job goes on; the last time it was stopped") == 1
    jobs.expect_nothing_left()


@pytest.mark.parametrize(
    ("options", "whom"),
    [
        pytest.param(ALONE, "the launcher", id="alone-the launcher"),
        pytest.param(ALONE, "everyone", id="alone-everyone", marks=pytest.mark.soak),
        pytest.param(ALONE, YOUNGEST, id=f"alone-{YOUNGEST}"),
        pytest.param(LOCAL, "the launcher", id="local nodes-the launcher"),
        pytest.param(LOCAL, "everyone", id="local nodes-everyone"),
        pytest.param(LOCAL, YOUNGEST, id=f"local nodes-{YOUNGEST}", marks=pytest.mark.soak),
    ],
)
def test_two_sigterms_are_one_stop_that_saves_everything(
    jobs: Jobs, options: tuple[str, ...], whom: str
) -> None:
    job = start(jobs, *options)
    jobs.wait_for("saved", lambda event: event.step >= 3, count=2)
    processes = jobs.living() if whom != "the launcher" else [psutil.Process(job.pid)]
    processes.sort(key=lambda process: process.pid, reverse="youngest" in whom)
    send_twice(processes, signal.SIGTERM)
    assert job.wait(BOUNDED_S) == 143
    assert "the job failed" not in job.text
    assert "Traceback" not in job.text
    jobs.expect_nothing_left(BOUNDED_S)
    expect_to_go_on(jobs, job, newest_saved(jobs))


def test_nodes_and_their_master_are_stopped_together(jobs: Jobs) -> None:
    """As SLURM does: one job of three commands, and all processes get SIGTERM twice."""
    env, words = environment(jobs), ("--nnodes", "2", "--grace", "600", VAULTED)
    master = jobs.master("--lease", "600")
    nodes = [jobs.node(master, *words, name=name, **env) for name in "ab"]
    jobs.wait_for("saved", lambda event: event.step >= 3, count=2)
    send_twice(jobs.living(), signal.SIGTERM)
    assert [node.wait(BOUNDED_S) for node in nodes] == [143, 143]
    assert master.wait(BOUNDED_S) == 143
    newest = newest_saved(jobs)
    shutil.rmtree(jobs.folder / "memory")
    env = environment(jobs)
    master = jobs.master("--lease", "600")
    nodes = [jobs.node(master, *words, name=name, **env) for name in "ab"]
    restored = jobs.wait_for("restored", count=2)
    assert {event.step for event in restored} in ({newest}, {newest + 1})
    jobs.finish()
    for command in (*nodes, master):
        command.succeeds()


@pytest.mark.parametrize("options", SHAPES)
def test_workers_that_ignore_sigterm_cost_the_grace_and_no_step(
    jobs: Jobs, options: tuple[str, ...]
) -> None:
    script = jobs.write(
        "ignores.py",
        "import signal, sys\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "import vaulted\n",
    )
    state = ("--state", str(jobs.folder / "state"), "--grace", "1", "--lease", "600")
    job = jobs.run(*state, *options, script, **environment(jobs))
    jobs.wait_for("saved", lambda event: event.step >= 3, count=2)
    job.send(signal.SIGTERM)
    assert job.wait(BOUNDED_S) == 143
    jobs.expect_nothing_left(BOUNDED_S)
    expect_to_go_on(jobs, job, newest_saved(jobs))


@pytest.mark.parametrize("options", SHAPES)
def test_a_second_ctrl_c_ends_the_job_at_once(jobs: Jobs, options: tuple[str, ...]) -> None:
    job = jobs.run("--grace", "600", *options, STUBBORN)
    jobs.wait_world(2)
    job.interrupt()
    # Two that wait at once would be one. The workers ignore what they get after the first.
    job.wait_line("stopped by SIGINT; press Ctrl-C again")
    job.interrupt()
    assert job.wait(BOUNDED_S) == 130
    jobs.expect_nothing_left(BOUNDED_S)


@pytest.mark.parametrize("options", SHAPES)
def test_notices_end_nothing_and_reach_workers_that_ask(
    jobs: Jobs, options: tuple[str, ...]
) -> None:
    script = jobs.write(
        "asks.py",
        "import signal, sys\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from steplog import note\n"
        "signal.signal(signal.SIGUSR1, lambda *_: note('noticed'))\n"
        "import steps\n",
    )
    job = jobs.run(*options, script)
    before = jobs.wait_world(2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for process in jobs.living():
            with suppress(psutil.Error):
                process.send_signal(number)
    assert {event.rank for event in jobs.wait_for("noticed", count=2)} == {0, 1}
    seen = max(event.step for event in jobs.steps())
    jobs.wait_for("step", lambda event: event.step > seen + 3)
    jobs.finish()
    job.succeeds()
    assert {event.pid for event in jobs.steps()} == {event.pid for event in before}


def is_spare(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return "spare" in process.cmdline()
    return False


@pytest.mark.parametrize("options", SHAPES)
def test_notices_leave_spares_and_helpers_as_they_are(jobs: Jobs, options: tuple[str, ...]) -> None:
    """All that is not a worker: the zygotes and what they forked, guardians, servers of stores."""
    job = jobs.run(*options, str(SCRIPTS / "train.py"))
    world = jobs.wait_world(2)
    workers = {event.pid for event in world}
    for ready in range(len({event.agent for event in world})):
        job.wait_line("ready for a fast restart", after=ready)
    others = {process.pid: process for process in jobs.living() if process.pid not in workers}
    spares = [process for process in others.values() if is_spare(process)]
    assert len(spares) >= 2
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        for process in others.values():
            with suppress(psutil.NoSuchProcess):  # A helper that only forked another one.
                process.send_signal(number)
    os.kill(world[1].pid, signal.SIGKILL)
    jobs.wait_world(2, after=world)
    assert "(zygote start)" in job.wait_line("round 2: all workers run")
    jobs.finish()
    job.succeeds()
    assert "warm spare" not in job.text
    assert job.count("all workers run") == 2


@pytest.mark.parametrize("options", SHAPES)
def test_a_launcher_that_is_killed_alone_hands_its_job_over(
    jobs: Jobs, options: tuple[str, ...]
) -> None:
    job = start(jobs, *options)
    jobs.wait_for("saved", lambda event: event.step >= 3, count=2)
    job.kill()
    # At once: the master of the dead launcher may still live, and is waited for.
    was = len(jobs.events("restored"))
    again = jobs.run(*job.argv[4:], **environment(jobs))
    restored = jobs.wait_for("restored", count=was + 2)[was:]
    newest = newest_saved(jobs)
    assert len({event.step for event in restored}) == 1
    assert restored[0].step >= 3
    jobs.wait_for("saved", lambda event: event.step > newest + 2)
    jobs.finish()
    again.succeeds()
    jobs.expect_nothing_left()


@pytest.mark.parametrize("options", SHAPES)
def test_a_job_that_is_ended_by_the_command_is_saved_and_stays_ended(
    jobs: Jobs, options: tuple[str, ...]
) -> None:
    logs = jobs.folder / "logs"
    job = start(jobs, "--log-dir", str(logs), "--log-level", "debug", *options)
    jobs.wait_for("saved", lambda event: event.step >= 3, count=2)
    ending = jobs.start("stop", "--reason", "the loss\nwent \x1b[2Jup")
    ending.succeeds()
    assert job.wait() == 1
    why = "ended it with `holdfast stop`: the loss went  [2Jup"
    assert ending.out[-1] == "the job has ended"
    assert why in ending.text
    assert why in job.text
    jobs.expect_nothing_left()
    # All that was in memory is on storage.
    (checkpoints,) = jobs.folder.glob("checkpoints")
    steps = [int(path.name.rpartition("-")[2]) for path in checkpoints.glob("step-*")]
    assert max(steps) >= newest_saved(jobs)
    # The same command does not go on with it.
    again = jobs.run(*job.argv[4:], **environment(jobs))
    assert again.wait() == 1
    assert why in again.text
    # What each process said and did is in its log.
    names = ["launcher", "node-0", "node-1"] if options == LOCAL else ["agent"]
    (folder,) = logs.iterdir()
    said = {path.stem: path.read_text() for path in folder.glob("*.log")}
    assert sorted(said) == sorted([*names, "master"])
    assert "INFO master: round 1: " in said["master"]
    assert "DEBUG master: StopRequested" in said["master"]
    assert why in said["master"]
    workers = [name for name in names if name != "launcher"]
    assert all("DEBUG" in said[name] and "WorkersStarted" in said[name] for name in workers)
    assert "DEBUG" not in job.text


SLOW = f"""\
import signal, sys
sys.path.insert(0, {str(SCRIPTS)!r})
from steplog import FOLDER, note, pause


def save(*_):
    note("saving")
    while not (FOLDER / "go").exists():
        pause()
    note("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
import steps
"""
"""A worker that takes until `Jobs.go` to save."""


def test_the_command_outlives_a_master_that_is_killed_while_the_job_saves(jobs: Jobs) -> None:
    script = jobs.write("slow.py", SLOW)
    job = jobs.run("--grace", "600", "--lease", "600", *ALONE, script)
    jobs.wait_world(2)
    ending = jobs.start("stop")
    jobs.wait_for("saving", count=2)
    (master,) = jobs.running("master")
    master.kill()
    ending.wait_line("the master is gone before its last word; waiting for the next one")

    def agent_is_back() -> bool:
        status = jobs.start("status", "--json")
        return status.wait() == 0 and json.loads(status.text)["attached"] == 1

    until(agent_is_back, LIMIT_S)
    assert not jobs.events("saved")
    assert "the job has ended" not in ending.text
    jobs.go()
    ending.succeeds()
    assert len(jobs.events("saved")) == 2
    assert ending.out[-1] == "the job has ended"
    assert job.wait() == 1
    jobs.expect_nothing_left()


def test_the_command_says_that_an_agent_died_before_it_had_saved(jobs: Jobs) -> None:
    script = jobs.write("slow.py", SLOW)
    master = jobs.master("--lease", "600")
    node = jobs.node(master, "--nnodes", "1", "--grace", "600", script)
    jobs.wait_for("step")
    target = ("--master", master.address, "--token-file", str(master.token_file))
    ending = jobs.start("stop", *target)
    jobs.wait_for("saving")
    node.kill()
    assert ending.wait() == 1
    assert "some of what was in memory may not be on storage: " in ending.text
    assert "the job has ended" not in ending.text
    assert not jobs.events("saved")


def test_a_master_killed_before_it_heard_that_all_saved_is_told_by_the_next(jobs: Jobs) -> None:
    script = jobs.write("slow.py", SLOW)
    job = jobs.run("--grace", "600", "--lease", "600", *ALONE, script)
    jobs.wait_world(2)
    ending = jobs.start("stop")
    jobs.wait_for("saving", count=2)
    (master,) = jobs.running("master")
    # It hears nothing more, and is gone when the agent has nothing left to do.
    master.send_signal(signal.SIGSTOP)
    jobs.go()
    jobs.wait_for("saved", count=2)
    master.kill()
    ending.succeeds()
    assert ending.out[-1] == "the job has ended"
    assert job.wait() == 1
    jobs.expect_nothing_left()


def test_without_a_next_master_the_command_does_not_say_that_the_job_has_ended(jobs: Jobs) -> None:
    script = jobs.write("slow.py", SLOW)
    master = jobs.master("--lease", "600")
    jobs.node(master, "--nnodes", "1", "--grace", "600", script)
    jobs.wait_for("step")

    def tell(story: m.Story) -> None:
        if story.kind == "JobFinished":
            jobs.wait_for("saving")  # The agent has heard of it, too.
            master.kill()

    target = asking.Target(master.address, master.token_file, None)
    with pytest.raises(RetryableError, match=r"its master is gone; .* may still be saving"):
        asyncio.run(asking.end(target, 60.0, "", tell, back_s=1.0))
    assert not jobs.events("saved")
