# SPDX-License-Identifier: Apache-2.0
"""Driver mode: the real master and agents, as they are, on an event loop in virtual time."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.core.kernel import Tick
from holdfast.core.node import events as ev
from holdfast.core.node.workers import Workers
from holdfast.protocol import messages as m
from holdfast.sim.driver_swarm import problem_of
from holdfast.sim.drivers import FAULTS, run, scenario_of
from holdfast.sim.loop import Process, VirtualLoop
from holdfast.sim.scenario import Fault, Scenario
from holdfast.sim.swarm import load, main

SEEDS = 40
GROUPS = 4
FOUND = sorted((Path(__file__).parent / "found_drivers").glob("*.json"))
MUTANTS = sorted((Path(__file__).parent / "driver_mutants").glob("*.patch"))
SOURCE = Path(holdfast.__file__).parent
LIMIT_S = 240.0

PROGRAM = """
from holdfast.sim.drivers import run, scenario_of
print([run(scenario_of(seed)).digest for seed in range(6)])
"""

SEARCH = """
from holdfast.sim.drivers import run, scenario_of
for seed in range(100):
    if problem := run(scenario_of(seed)).problem:
        print(f"seed {seed}: {problem}")
        break
"""


@pytest.mark.parametrize("group", range(GROUPS))
def test_nothing_that_must_never_happen_happens(group: int) -> None:
    rounds = counted = 0
    for seed in range(group, SEEDS, GROUPS):
        result = run(scenario_of(seed))
        assert not result.problem, f"seed {seed}: {result.problem}"
        rounds += result.rounds
        counted += result.counted
    assert rounds > SEEDS // GROUPS, "without trouble nothing is proved"
    assert counted > 100


def test_every_kind_of_fault_is_in_the_fixed_seeds() -> None:
    seen = {fault.kind for seed in range(SEEDS) for fault in scenario_of(seed).faults}
    assert seen == set(FAULTS)


def test_training_goes_on_while_the_master_is_away() -> None:
    away = Fault(6.0, "kill_master", 1, 5.0)
    result = run(Scenario(seed=1, nodes=2, min_nodes=2, lease_s=20.0, faults=(away,)))
    assert not result.problem
    assert result.rounds == 1
    steps = [float(line.split()[0]) for line in result.lines if " steps " in line]
    assert sum(6.5 < at < 10.5 for at in steps) >= 6


def test_a_seed_is_the_same_run_whatever_the_hash_seed() -> None:
    said = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", PROGRAM]
        ran = subprocess.run(command, env=env, capture_output=True, timeout=LIMIT_S, check=True)
        said.add(ran.stdout)
    assert len(said) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda path: path.stem)
def test_a_bug_in_a_driver_is_found(mutant: Path, tmp_path: Path) -> None:
    """Core mode, which models the drivers, cannot see these."""
    package = tmp_path / "src" / "holdfast"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__", "torch"))
    patch = ["patch", "-p1", "--batch", "--silent", "--input", str(mutant)]
    applied = subprocess.run(patch, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert applied.returncode == 0, f"the patch does not apply any more:\n{applied.stdout}"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", SEARCH]
    search = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert search.stdout.startswith("seed"), f"nobody noticed:\n{search.stdout}{search.stderr}"
    print(search.stdout, end="")


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_was_once_found_stays_fixed(path: Path) -> None:
    """Seed 72: a node hung up while the disk was slow and came back at once. The late bind of the
    dead link made it absent for ever, and the next world never formed."""
    assert run(load(path)).problem == ""


def test_the_swarm_of_drivers_says_what_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0..2", "--first"], scenario_of, problem_of) == 0
    assert "2 seeds, none failed" in capsys.readouterr().out


def test_workers_that_start_after_the_end_of_the_lease_are_held() -> None:
    """The signal that holds the workers reached only those that ran already."""
    workers = Workers(1)
    workers.handle(ev.LeaseRenewed(5.0), 0.0)
    workers.handle(ev.WorldReceived(m.RunWorld(1, 1, 0, 1, 0, 1, "", 0, False, 0, "", False)), 1.0)
    assert ev.HoldWorkers() in workers.handle(Tick(), 6.0).commands
    started = ev.StartFinished(1, frozenset({0}), "cold", 6.0, "")
    assert ev.HoldWorkers() in workers.handle(started, 7.0).commands


# ---- the loop ------------------------------------------------------------------------------------


def pause(loop: VirtualLoop, seconds: float) -> asyncio.Future[None]:
    """Over after so much virtual time."""
    over: asyncio.Future[None] = loop.create_future()
    loop.call_later(seconds, over.set_result, None)
    return over


def test_time_jumps_and_equal_times_keep_their_order() -> None:
    loop = VirtualLoop(lambda: 1.0)
    said: list[object] = []

    async def main() -> None:
        for number in range(20):
            loop.call_at(1000.0, said.append, number)
        await pause(loop, 5000.0)
        said.append(await loop.run_in_executor(None, lambda: "worked"))
        said.append(loop.time())

    loop.run(main())
    assert said == [*range(20), "worked", pytest.approx(5002.0)]


def test_a_dead_process_does_nothing_more() -> None:
    loop = VirtualLoop(lambda: 1.0)
    said: list[str] = []

    async def live() -> None:
        loop.call_later(3.0, said.append, "timer")
        await pause(loop, 1.0)
        said.append("alive")
        await loop.run_in_executor(None, said.append, "thread")

    async def main() -> None:
        process = Process("somewhere")
        process.run(lambda: loop.create_task(live()))
        await pause(loop, 1.5)
        process.end()
        await pause(loop, 10.0)

    loop.run(main())
    assert said == ["alive"]


def test_everybody_waiting_for_somebody_is_an_error_and_no_hang() -> None:
    loop = VirtualLoop(lambda: 1.0)

    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing is planned any more"):
        loop.run(main())
