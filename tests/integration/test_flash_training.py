# SPDX-License-Identifier: Apache-2.0
"""The promise as a whole: whatever is killed, the loss curve is that of an undisturbed run.

Two nodes with two workers each train with a memory checkpoint at every step. Curves are compared
bit for bit; a step may be done again, but then it gives the same loss again.
"""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPTS, Command, Event, Jobs, playground, wait_gone

FLASH = str(SCRIPTS / "flash.py")
STEPS = 60
KILLS = int(os.environ.get("HOLDFAST_SOAK_KILLS", "5"))
"""`make soak` asks for hundreds."""
SHAPE = ("--local-nodes", "2", "--nproc-per-node", "2")


def curve(jobs: Jobs) -> dict[int, set[str]]:
    """By step, every loss that was ever seen for it."""
    found: dict[int, set[str]] = {}
    for line in (jobs.folder / "losses").read_text().splitlines():
        step, _round, _world, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def repeated(jobs: Jobs) -> int:
    """The most steps that rank 0 did again after any one interruption."""
    lines = [line.split() for line in (jobs.folder / "losses").read_text().splitlines()]
    most, before = 0, 0
    for step, *_ in lines:
        most, before = max(most, before - int(step) + 1), int(step)
    return most


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, set[str]]:
    return curve_without_kills(STEPS)


def curve_without_kills(steps: int) -> dict[int, set[str]]:
    with playground() as jobs:
        start(jobs, steps).succeeds(timeout_s=60 + steps)
        found = curve(jobs)
    assert sorted(found) == list(range(1, steps + 1))
    assert all(len(losses) == 1 for losses in found.values())
    return found


def start(jobs: Jobs, steps: int = STEPS, **more: str) -> Command:
    return jobs.run(*SHAPE, "--max-restarts", "1000", FLASH, STEPS=str(steps), **more)


def at_step(jobs: Jobs, step: int) -> Event:
    """Waits until rank 3 has done a step; answers with the newest of that rank."""
    return jobs.wait_for("step", lambda event: event.step >= step and event.rank == 3)[-1]


def expect_same(jobs: Jobs, undisturbed: dict[int, set[str]], at_most_repeated: int) -> None:
    assert curve(jobs) == undisturbed
    assert repeated(jobs) <= at_most_repeated


def wipe_memory_of(agent: int) -> None:
    """What the loss of a host does to its memory: its agent's segments are gone."""
    held = [Path(os.readlink(fd)) for fd in Path(f"/proc/{agent}/fd").iterdir() if fd.exists()]
    roots = {path.parent for path in held if path.name == "lock" and "/holdfast-" in str(path)}
    assert roots, f"agent {agent} holds no checkpoint memory"
    os.kill(agent, signal.SIGKILL)
    for root in roots:
        shutil.rmtree(root)


def test_a_killed_worker(jobs: Jobs, undisturbed: dict[int, set[str]]) -> None:
    job = start(jobs)
    os.kill(at_step(jobs, 23).pid, signal.SIGKILL)
    job.succeeds()
    expect_same(jobs, undisturbed, at_most_repeated=1)
    jobs.expect_nothing_left()


def test_a_killed_worker_while_copies_overlap_training(
    jobs: Jobs, undisturbed: dict[int, set[str]]
) -> None:
    job = start(jobs, OVERLAP="1")
    os.kill(at_step(jobs, 23).pid, signal.SIGKILL)
    job.succeeds()
    expect_same(jobs, undisturbed, at_most_repeated=2)


@pytest.mark.parametrize("safety", ["REPLICAS", "PARITY"])
def test_a_lost_node_comes_back_from_its_peers(
    jobs: Jobs, undisturbed: dict[int, set[str]], safety: str
) -> None:
    job = start(jobs, **{safety: "1" if safety == "REPLICAS" else "2"})
    lost = at_step(jobs, 23)
    wipe_memory_of(lost.agent)
    wait_gone([lost.pid])
    job.succeeds()
    expect_same(jobs, undisturbed, at_most_repeated=2)
    loaded = [event.step for event in jobs.events("loaded") if event.round > lost.round]
    assert set(loaded) != {20}, "storage was used where the peers had a newer step"
    assert min(loaded) >= lost.step - 2


def test_everything_killed_and_started_again_from_storage(
    jobs: Jobs, undisturbed: dict[int, set[str]]
) -> None:
    job = start(jobs)
    at_step(jobs, 33)
    job.wait_line(r"step 30 .*(safe|committed)")
    for process in jobs.living():
        process.kill()
    job.wait()
    # A new job: whatever the dead one left in memory is not its own.
    again = start(jobs)
    again.succeeds()
    assert {event.step for event in jobs.events("loaded")} == {-1, 30}
    assert curve(jobs) == undisturbed


@pytest.mark.timeout(120 + 30 * KILLS)
def test_random_kills_of_workers_and_nodes(jobs: Jobs) -> None:
    """Whoever dies, at whatever moment: no step is lost for good, none is done differently."""
    dice = random.Random(KILLS)
    steps = 20 + 15 * KILLS
    expected = curve_without_kills(steps)
    job = start(jobs, steps, REPLICAS="1")
    world = jobs.wait_world(4)
    for _ in range(KILLS):
        step = max(event.step for event in world) + dice.randint(1, 10)
        jobs.wait_for("step", lambda event, step=step: event.step >= step)
        victim = dice.choice(world)
        if dice.random() < 0.3:
            wipe_memory_of(victim.agent)
        else:
            os.kill(victim.pid, signal.SIGKILL)
        world = jobs.wait_world(4, after=world)
    job.succeeds(timeout_s=60 + steps)
    assert curve(jobs) == expected
    jobs.expect_nothing_left()
