# SPDX-License-Identifier: Apache-2.0
"""The promise as a whole: whatever is killed, the loss curve is that of an undisturbed run.

Two nodes train with a memory checkpoint at every step. Curves are compared bit for bit; a step may
be done again, but then it gives the same loss again.
"""

import fcntl
import os
import signal

import pytest

from tests.integration.jobs import (
    SCRIPTS,
    Command,
    Event,
    Jobs,
    lose_memory_of,
    playground,
    wait_gone,
)
from tests.integration.soak import KILLS, SEED, Soak

FLASH = str(SCRIPTS / "flash.py")
STEPS = 60

# The one that comes first waits for the undisturbed run as well.
pytestmark = pytest.mark.timeout(480)


def lines_of(jobs: Jobs) -> str:
    """All losses so far, without a line that is being written."""
    text = (jobs.folder / "losses").read_text()
    return text[: text.rfind("\n") + 1]


def curve(lines: str) -> dict[int, set[str]]:
    """By step, every loss that was ever seen for it."""
    found: dict[int, set[str]] = {}
    for line in lines.splitlines():
        step, _round, _world, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def repeated(jobs: Jobs) -> int:
    """The most steps that rank 0 did again after any one interruption."""
    most, before = 0, 0
    for step, *_ in (line.split() for line in lines_of(jobs).splitlines()):
        most, before = max(most, before - int(step) + 1), int(step)
    return most


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, set[str]]:
    """With one worker on each node. The first worker of pytest-xdist that needs it makes it for
    all of them."""
    with (tmp_path_factory.getbasetemp().parent / "undisturbed").open("a+") as shared:
        fcntl.flock(shared, fcntl.LOCK_EX)
        shared.seek(0)
        lines = shared.read()
        if not lines:
            lines = lines_without_kills(STEPS, workers=1)
            shared.write(lines)
    return curve(lines)


def lines_without_kills(steps: int, workers: int) -> str:
    with playground() as jobs:
        start(jobs, "--no-spares", steps=steps, workers=workers).succeeds(timeout_s=60 + steps)
        lines = lines_of(jobs)
    assert [int(line.split()[0]) for line in lines.splitlines()] == list(range(1, steps + 1))
    return lines


def start(jobs: Jobs, *words: str, steps: int = STEPS, workers: int = 1, **more: str) -> Command:
    shape = ("--local-nodes", "2", "--nproc-per-node", str(workers), "--max-restarts", "1000")
    return jobs.run(*shape, *words, FLASH, STEPS=str(steps), **more)


def start_warm(jobs: Jobs, *, steps: int = STEPS, workers: int = 1, **more: str) -> Command:
    job = start(jobs, steps=steps, workers=workers, HOLD="5", **more)
    jobs.go_when_warm(job, nodes=2)
    return job


def at_step(jobs: Jobs, step: int, *, after: int = 0) -> Event:
    """Waits until rank 1 has done a step in a later round; answers with the newest one of it."""
    return jobs.wait_for(
        "step", lambda event: event.step >= step and event.rank == 1 and event.round > after
    )[-1]


@pytest.mark.parametrize("safety", ["REPLICAS", "PARITY"])
def test_a_killed_worker_and_then_a_lost_node(
    jobs: Jobs, undisturbed: dict[int, set[str]], safety: str
) -> None:
    """The worker's state is in its node's memory; that of the lost node comes from its peers."""
    job = start_warm(jobs, **{safety: "1" if safety == "REPLICAS" else "2"})
    killed = at_step(jobs, 13)
    os.kill(killed.pid, signal.SIGKILL)
    lost = at_step(jobs, 33, after=killed.round)
    assert repeated(jobs) <= 1
    lose_memory_of(lost.agent)
    wait_gone([lost.pid])
    job.succeeds()
    assert curve(lines_of(jobs)) == undisturbed
    # The safe step, two that wait to be copied, and one that has no slot yet.
    assert repeated(jobs) <= 3
    loaded = [event.step for event in jobs.events("loaded") if event.round > lost.round]
    assert set(loaded) != {30}, "storage was used where the peers had a newer step"
    assert min(loaded) >= lost.step - 2
    jobs.expect_nothing_left()


def test_a_killed_worker_and_then_everything_while_copies_overlap_training(
    jobs: Jobs, undisturbed: dict[int, set[str]]
) -> None:
    job = start_warm(jobs, OVERLAP="1", STAY="36")
    killed = at_step(jobs, 13)
    os.kill(killed.pid, signal.SIGKILL)
    at_step(jobs, 33, after=killed.round)
    job.wait_line(r"step 30 .*(safe|committed)")
    jobs.kill_all()
    job.wait()
    assert repeated(jobs) <= 2
    before = len(jobs.events("loaded"))
    # A new job: whatever the dead one left in memory is not its own.
    start(jobs, "--no-spares", OVERLAP="1").succeeds()
    assert [event.step for event in jobs.events("loaded")[before:]] == [30, 30]
    assert curve(lines_of(jobs)) == undisturbed


@pytest.mark.timeout(480 + 60 * KILLS)
def test_random_kills_of_everything(jobs: Jobs, undisturbed: dict[int, set[str]]) -> None:
    """Whoever dies, at whatever moment: no step is lost for good, none is done differently."""
    # The seed varies more than the kills.
    workers, overlap = 1 + (SEED & 1), (SEED & 2) >> 1
    # With its state in a folder the same command goes on with the job after everything was killed.
    words = ("--job", "soak", "--state", str(jobs.folder / "state"))

    env = {"REPLICAS": "1", "OVERLAP": str(overlap), "HOLD": "5"}

    def begin() -> Command:
        return start(jobs, *words, steps=1_000_000, workers=workers, **env)

    soak = Soak(jobs, begin, world=2 * workers, unsealed=overlap)
    soak.strike_all()
    jobs.finish()
    soak.job.succeeds()
    jobs.expect_nothing_left()
    print(soak.told())
    found = curve(lines_of(jobs))
    steps = max(found)
    if workers > 1 or steps > STEPS:
        undisturbed = curve(lines_without_kills(steps, workers))
    assert found == {step: undisturbed[step] for step in range(1, steps + 1)}
