# SPDX-License-Identifier: Apache-2.0
"""Jobs that are stopped from outside: nothing that was saved is lost, and the same command goes on.

SLURM sends SIGTERM twice within milliseconds to every process of a job; systemd sends it to every
process, too. The workers (scripts/vaulted.py) save to memory at every step and to storage never.
"""

import shutil
import signal
from contextlib import suppress

import psutil
import pytest

from tests.integration.jobs import SCRIPTS, Command, Jobs

STEPS = str(SCRIPTS / "steps.py")
VAULTED = str(SCRIPTS / "vaulted.py")
STUBBORN = str(SCRIPTS / "stubborn.py")
BOUNDED_S = 90.0
"""Far below what a lease and a grace of these tests take, far above what a stop does take."""

ALONE = ("--nproc-per-node", "2")
LOCAL = ("--local-nodes", "2", "--nproc-per-node", "1")
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


@pytest.mark.parametrize("whom", ["the launcher", "everyone", "everyone, the youngest first"])
@pytest.mark.parametrize("options", SHAPES)
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
