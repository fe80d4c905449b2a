# SPDX-License-Identifier: Apache-2.0
"""The lease holds without the agent: while it stands still, the guardian holds its workers still.

The steps in the log have one clock, so they can be compared.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs
from tests.integration.process_agent import TIMEOUT_S, Agent, age_s, state
from tests.waiting import until

QUICK = ("--http", "off", "--beat", "0.5", "--silence", "3", "--lease", "5")
STEPS = str(SCRIPTS / "steps.py")
OPTIONS = ("--nnodes", "1", "--no-spares", STEPS)


def steps_of(jobs: Jobs, node: str) -> list[float]:
    return [event.t for event in jobs.events("step") if event.node == node]


def steps_on(jobs: Jobs, node: str, more: int) -> None:
    """Wait until this node has made so many more steps."""
    made = len(steps_of(jobs, node))
    jobs.wait_for("step", lambda event: event.node == node, count=made + more)


def worker_of(jobs: Jobs, node: str) -> int:
    return [event.pid for event in jobs.events("step") if event.node == node][-1]


def test_workers_of_a_stopped_agent_are_held_before_another_world_computes(jobs: Jobs) -> None:
    """Two nodes that each could be the world: the second waits for the place of the first."""
    master = jobs.master(*QUICK)
    old = jobs.node(master, *OPTIONS, name="old")
    steps_on(jobs, "old", 5)
    new = jobs.node(master, *OPTIONS, name="new")
    worker = worker_of(jobs, "old")
    old.send(signal.SIGSTOP)
    steps_on(jobs, "new", 20)
    assert state(worker) == "T"
    assert steps_of(jobs, "old")[-1] < steps_of(jobs, "new")[0]

    # It is told that it was given up, ends its workers without letting them go on, and joins anew.
    old.send(signal.SIGCONT)
    old.wait_line("held still")
    until(lambda: state(worker) not in ("T", "S", "R"), LIMIT_S, "the end of the old worker")
    steps_on(jobs, "new", 5)
    assert steps_of(jobs, "old")[-1] < steps_of(jobs, "new")[0]
    jobs.finish()
    for command in (old, new, master):
        command.succeeds()
    jobs.expect_nothing_left()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_guardian_alone_holds_and_frees(tmp_path: Path, loop: str) -> None:
    with Agent(tmp_path, spares=False, loop=loop) as agent:
        agent.send("keep_lease", seconds=600.0)
        first = agent.start("sleep", "1000", mode="command")["pid"]
        agent.send("keep_lease", seconds=0.3)
        assert agent.so_far("exit") == []
        os.kill(agent.pid, signal.SIGSTOP)
        until(lambda: state(first) == "T", TIMEOUT_S, "the worker to be held")
        os.kill(agent.pid, signal.SIGCONT)
        second = agent.start("sleep", "1000", mode="command", local_rank=1)["pid"]
        until(lambda: state(second) == "T", TIMEOUT_S, "a worker that starts late to be held")
        agent.send("keep_lease", seconds=600.0)
        for pid in (first, second):
            until(lambda pid=pid: state(pid) == "S", TIMEOUT_S, "the worker to go on")


# It takes longer to save than the lease lasts.
SAVES = """
import signal, sys, threading

def save(*_):
    threading.Event().wait(1.0)
    print("saved", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
print("up", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("is_held", [False, True], ids=["the lease ends later", "it has ended"])
def test_workers_that_are_asked_to_end_get_their_grace_without_a_lease(
    tmp_path: Path, is_held: bool
) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    with Agent(tmp_path, spares=False) as agent:
        worker = agent.start("saves.py")
        out: Path = worker["path"]
        until(lambda: out.read_text() == "up\n", TIMEOUT_S, "the worker to be up")
        agent.send("keep_lease", seconds=0.3)
        if is_held:
            until(lambda: state(worker["pid"]) == "T", TIMEOUT_S, "the worker to be held")
        agent.send("stop", grace_s=600.0)
        until(lambda: out.read_text() == "up\nsaved\n", TIMEOUT_S, "the worker to save")
        assert agent.wait("exit")["code"] == 0


def test_a_guardian_that_was_stopped_hears_all_that_it_missed_before_it_acts(
    tmp_path: Path,
) -> None:
    with Agent(tmp_path, spares=False) as agent:
        worker = agent.start("sleep", "1000", mode="command")["pid"]
        agent.send("keep_lease", seconds=0.3)
        until(lambda: state(worker) == "T", TIMEOUT_S, "the worker to be held")
        (guardian,) = guardians_of(agent.pid)
        os.kill(guardian, signal.SIGSTOP)
        agent.send("keep_lease", seconds=600.0)
        agent.send("keep_lease", seconds=-1.0)
        agent.so_far("stopped")
        os.kill(guardian, signal.SIGCONT)
        agent.send("keep_lease", seconds=600.0)
        until(lambda: state(worker) == "S", TIMEOUT_S, "the worker to go on")


def test_a_guardian_that_stays_stopped_is_replaced_and_blocks_nobody(tmp_path: Path) -> None:
    with Agent(tmp_path, spares=False) as agent:
        worker = agent.start("sleep", "1000", mode="command")["pid"]
        (guardian,) = guardians_of(agent.pid)
        until(lambda: age_s(guardian) > 1.5, TIMEOUT_S, "the guardian to be old enough")
        os.kill(guardian, signal.SIGSTOP)
        agent.send("keep_lease", seconds=600.0, times=10_000)
        agent.so_far("say")
        until(lambda: guardians_of(agent.pid) not in ([], [guardian]), TIMEOUT_S, "a new guardian")
        agent.send("keep_lease", seconds=0.1)
        until(lambda: state(worker) == "T", TIMEOUT_S, "the worker to be held")


def guardians_of(agent: int) -> list[int]:
    pids = map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split())
    return [pid for pid in pids if "guardian.py" in command_of(pid)]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
