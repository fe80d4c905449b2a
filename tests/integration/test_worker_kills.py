# SPDX-License-Identifier: Apache-2.0
"""Workers that die, stop or fail at every point of their life: the job goes on, and finishes.

The faults come from inside the workers, by real signals to themselves, because only there the
point is exact: at an import, in init_process_group, in a collective, after the last step.
"""

import json
import os
import signal

import psutil
import pytest

from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs, wait_gone
from tests.waiting import until

STEPS = str(SCRIPTS / "steps.py")
TRAIN = str(SCRIPTS / "train.py")
LAST_STEP = 5

HOW_IT_IS_TOLD = {
    "kill": "was ended by SIGKILL",
    "segv": "was ended by SIGSEGV",
    "stop": "was stopped by a signal and did not continue",
    "exit": "exited with code 1",
}


def expect_all_steps(jobs: Jobs, *, world: int, rounds: int) -> None:
    """No step is missing, the last round went to the end, and each round counted one restart."""
    events = jobs.events()
    assert {event.world for event in events} == {world}
    assert {(event.round, event.restarts) for event in events} == {
        (number, number - 1) for number in range(1, rounds + 1)
    }
    # The others may be ended between a step and their note of it; rank 0 saves only what it noted.
    made = {event.step for event in events if event.what == "step" and event.rank == 0}
    assert made == set(range(1, LAST_STEP + 1))
    ended = [event for event in events if event.what == "end" and event.round == rounds]
    assert {event.rank: event.step for event in ended} == dict.fromkeys(range(world), LAST_STEP)
    rounds_of_pids = {(event.round, event.pid) for event in events}
    assert len(rounds_of_pids) == len({pid for _, pid in rounds_of_pids})


@pytest.mark.parametrize("how", ["kill", "segv", "stop", "exit"])
def test_the_job_survives_a_worker(jobs: Jobs, how: str) -> None:
    """One after the other: at its import, in a step, and after its last one."""
    faults = ";".join(f"{how} {place} 1" for place in ("import", "step", "exit"))
    job = jobs.run("--nproc-per-node", "2", STEPS, STEPS="5", FAULTS=faults)
    job.succeeds()
    assert [event.round for event in jobs.events("fault")] == [1, 2, 3]
    expect_all_steps(jobs, world=2, rounds=4)
    for number in (1, 2, 3):
        job.wait_line(rf"round {number} is over: rank 1 on node .*{HOW_IT_IS_TOLD[how]}")
    jobs.expect_nothing_left()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_torch_goes_on_after_a_fault_in_init_and_in_a_collective(jobs: Jobs, how: str) -> None:
    """Rank 0 fails as well as rank 1: it is the one that hosts the store of the process group.

    To the others a rank is dead, with its connections closed, or silent; there is no third way.
    """
    faults = f"{how} group 1;{how} step 0"
    job = jobs.run("--nproc-per-node", "2", "--no-spares", TRAIN, STEPS="5", FAULTS=faults)
    job.succeeds(240)
    assert [event.rank for event in jobs.events("fault")] == [1, 0]
    expect_all_steps(jobs, world=2, rounds=3)
    jobs.expect_nothing_left()


def test_who_follows_a_job_is_told_of_a_killed_worker_in_lines_for_programs(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "2", STEPS)
    before = jobs.wait_world(2)
    follower = jobs.start("status", "--follow", "--json")
    follower.wait_line('"world"')  # What is so at first. From then on what happens.
    os.kill(before[1].pid, signal.SIGKILL)
    jobs.wait_world(2, after=before)
    jobs.finish()
    for command in (job, follower):
        command.succeeds()
    stories = [json.loads(line) for line in follower.out[1:]]
    (broken,) = [story for story in stories if story["kind"] == "WorldBroken"]
    assert (broken["round"], broken["incident"]) == (1, 1)


def test_torch_goes_on_after_a_kill_at_import_and_at_exit(jobs: Jobs) -> None:
    faults = "kill import 0;kill exit 0"
    job = jobs.run("--nproc-per-node", "2", "--no-spares", TRAIN, STEPS="5", FAULTS=faults)
    job.succeeds(240)
    expect_all_steps(jobs, world=2, rounds=3)


def test_restarts_after_errors_are_counted(jobs: Jobs) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    job = jobs.run(*options, STEPS, STEPS="5", FAULTS="exit step 1;exit step 0")
    assert job.wait() == 1
    assert {event.round for event in jobs.events()} == {1, 2}
    job.wait_line(r"holdfast: the job failed: rank 0 .* exited with code 1; it failed 2 times")
    jobs.expect_nothing_left()


def test_kills_from_outside_do_not_use_up_the_budget_for_errors(jobs: Jobs) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1")
    faults = "kill step 1;exit step 1;kill step 0;kill step 1"
    jobs.run(*options, STEPS, STEPS="5", FAULTS=faults).succeeds()
    expect_all_steps(jobs, world=2, rounds=5)


@pytest.mark.parametrize("how", ["kill", "exit", "raise"])
def test_no_restart_is_made_when_none_is_allowed(jobs: Jobs, how: str) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "0")
    job = jobs.run(*options, STEPS, STEPS="5", FAULTS=f"{how} step 1")
    assert job.wait() == 1
    assert {event.round for event in jobs.events()} == {1}
    jobs.expect_nothing_left()


@pytest.mark.parametrize("shape", ["--nproc-per-node", "--local-nodes"])
def test_the_first_traceback_is_what_the_user_sees_last(jobs: Jobs, shape: str) -> None:
    faults = "raise step 1;raise step 0"
    job = jobs.run(shape, "2", "--max-restarts", "1", STEPS, STEPS="5", FAULTS=faults)
    assert job.wait() == 1
    failure = max(n for n, line in enumerate(job.err) if line.startswith("The first failure: rank"))
    last_words = job.err[failure:]
    assert last_words[0].startswith("The first failure: rank 0 on node rank 0")
    assert last_words[1] == "Traceback (most recent call last):"
    assert f'  File "{STEPS}"' in last_words[2]
    error = last_words.index("RuntimeError: the loss of rank 0 is not a number")
    # Only our own words on what became of the job and where its output is come after it.
    assert all(" holdfast: " in line for line in last_words[error + 1 :])
    assert len(last_words) - error <= 3


def test_a_script_that_fails_at_once_is_started_again_after_a_pause(jobs: Jobs) -> None:
    script = jobs.write("fails.py", "raise SystemExit(3)\n")
    job = jobs.run("--max-restarts", "2", "--no-spares", script)
    assert job.wait() == 1
    assert job.count("round [234] starts in ") == 1
    job.wait_line("round 3 starts in 1 s: the workers failed before their first step 2 times in")
    jobs.expect_nothing_left()


def test_a_syntax_error_is_shown_like_any_other(jobs: Jobs) -> None:
    script = jobs.write("broken.py", "print('never'\n")
    job = jobs.run("--max-restarts", "0", script)
    assert job.wait() == 1
    assert any("SyntaxError" in line for line in job.err[-3:])
    assert "never" not in job.out


def test_a_grandchild_is_gone_after_a_kill(jobs: Jobs) -> None:
    """One that stayed in the process group of the worker, and one that left it."""
    job = jobs.run("--nproc-per-node", "2", str(SCRIPTS / "family.py"))
    first = jobs.wait_for("step", lambda event: event.rank == 1 and event.step == 3)[0]
    grandchildren = {int(event.step) for event in jobs.events("grandchild")}
    assert len(grandchildren) == 4
    os.kill(first.pid, signal.SIGKILL)
    wait_gone(grandchildren)
    jobs.wait_world(2, after=[first])
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def spares_of(jobs: Jobs) -> list[int]:
    """Processes that were pre-started and are nobody's worker yet."""
    found = []
    for process in jobs.living():
        try:
            if "spare" in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def test_a_restarted_worker_comes_from_a_warm_spare(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "2", STEPS)
    first = jobs.wait_world(2)
    # The zygote, and a fork of it: there is none before it is ready.
    until(lambda: len(spares_of(jobs)) >= 2, LIMIT_S)
    os.kill(first[1].pid, signal.SIGKILL)
    jobs.wait_world(2, after=first)
    jobs.finish()
    job.succeeds()
    job.wait_line(r"round 2: all workers run \(zygote start\)")
    jobs.expect_nothing_left()


def test_without_spares_workers_start_cold(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "2", "--no-spares", STEPS)
    # Long after spares would have been made.
    first = jobs.wait_for("step", lambda event: event.rank == 1 and event.step == 120)
    assert not spares_of(jobs)
    os.kill(first[0].pid, signal.SIGKILL)
    jobs.wait_world(2, after=first)
    jobs.finish()
    job.succeeds()
    job.wait_line(r"round 2: all workers run \(cold start\)")


def test_a_worker_that_is_continued_in_time_is_left_alone(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "2", STEPS)
    first = jobs.wait_world(2)
    os.kill(first[1].pid, signal.SIGSTOP)
    until(lambda: psutil.Process(first[1].pid).status() == psutil.STATUS_STOPPED, LIMIT_S)
    os.kill(first[1].pid, signal.SIGCONT)
    jobs.wait_for(
        "step", lambda event: event.pid == first[1].pid and event.step > first[1].step + 2
    )
    jobs.finish()
    job.succeeds()
    assert {event.round for event in jobs.events()} == {1}
