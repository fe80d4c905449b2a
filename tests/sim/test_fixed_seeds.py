# SPDX-License-Identifier: Apache-2.0
"""A fixed set of seeds, in every run of the tests: whatever goes wrong, what must hold holds, and
the job comes to its end. `make soak` plays many more."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.core.job import records as rec
from holdfast.sim.checkers import Checkers, Violation
from holdfast.sim.clock import Clock
from holdfast.sim.history import History
from holdfast.sim.run import run
from holdfast.sim.scenario import CUT, KINDS, LIE, STILL, Fault, Scenario, from_seed
from holdfast.sim.swarm import load, save, shrink

SEEDS = 160
GROUPS = 8
FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))
LIMIT_S = 240.0


@pytest.mark.parametrize("group", range(GROUPS))
def test_nothing_that_must_never_happen_happens(group: int) -> None:
    rounds = restores = commits = cuts = 0
    for seed in range(group, SEEDS, GROUPS):
        result = run(from_seed(seed))
        assert not result.problem, f"seed {seed}: {result.problem}"
        rounds += result.rounds
        restores += result.restores
        commits += result.commits
        cuts += result.cuts
    seeds = SEEDS // GROUPS
    assert rounds > seeds, "without trouble nothing is proved"
    assert restores > seeds / 10
    assert commits > seeds
    assert cuts > 0, "nobody ever gave the tail of a piece away"


def test_jobs_fail_only_when_a_budget_is_used_up_and_some_do() -> None:
    poor = [s for s in map(from_seed, range(SEEDS)) if s.budget is not None]
    results = [run(scenario) for scenario in poor]
    assert not any(result.problem for result in results)
    ended = {result.has_failed for result in results}
    assert ended == {True, False}


def test_what_was_safe_on_other_nodes_is_restored() -> None:
    seeds = [s for s in map(from_seed, range(SEEDS)) if s.replicas and not s.samples]
    results = [run(scenario) for scenario in seeds]
    assert not any(result.problem for result in results)
    assert sum(result.safe_restores for result in results) > 3, "nothing was at stake"


def test_plans_are_done_once_and_nobody_computes_while_the_job_is_suspended() -> None:
    seeds = [s for s in map(from_seed, range(SEEDS)) if s.asks]
    results = [run(scenario) for scenario in seeds]
    assert not any(result.problem for result in results)
    assert sum(result.plans for result in results) > SEEDS / 10
    assert sum(result.suspended for result in results) > 3


@pytest.mark.parametrize("samples", [0, 200])
def test_a_disk_that_lies_ends_the_job_in_plain_words_and_nothing_is_done_twice(
    samples: int,
) -> None:
    """Without a check rounds were given twice, samples were twice in the model, and jobs hung."""
    faults = (Fault(10.0, "kill_worker"), Fault(16.0, LIE, 0, 0.5))
    jobs = [
        Scenario(seed=seed, nodes=2, min_nodes=2, samples=samples, faults=faults[first:])
        for seed in range(6)
        for first in (0, 1)
    ]
    results = [run(job) for job in jobs]
    assert [result.problem for result in results] == [""] * len(jobs)
    assert all(result.has_failed for result in results)
    for result in results:
        (end,) = (line for line in result.lines if "the job ends" in line)
        assert "ok=False the journal of the master is behind: the agent " in end


def test_some_seeds_have_a_disk_that_lies() -> None:
    seeds = [s for s in map(from_seed, range(SEEDS)) if any(f.kind == LIE for f in s.faults)]
    assert len(seeds) > 2
    assert any(run(scenario).has_failed for scenario in seeds)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_the_swarm_once_found_stays_fixed(path: Path) -> None:
    assert run(load(path)).problem == ""


def test_every_kind_of_fault_is_in_the_fixed_seeds() -> None:
    seen = {fault.kind for seed in range(SEEDS) for fault in from_seed(seed).faults}
    assert seen == {*KINDS, LIE, STILL, CUT}


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("nodes", [1, 3])
def test_a_master_that_is_cut_off_alone_costs_nothing(nodes: int, managed: bool) -> None:
    """For longer than a silence (6 s) and not for a lease (20 s): no worker is restarted, and the
    job takes as long as it does without."""
    calm = Scenario(seed=3, nodes=nodes, min_nodes=1, steps=40, managed=managed)
    cut = replace(calm, faults=(Fault(12.0, CUT, 0, 14.0),))
    for scenario in (calm, cut):
        result = run(scenario)
        assert (result.problem, result.rounds) == ("", 1)
        assert any("rank 0 steps 39" in line for line in result.lines)


def test_a_seed_is_the_same_run_whatever_the_hash_seed() -> None:
    program = (
        "from holdfast.sim.run import run\n"
        "from holdfast.sim.scenario import from_seed\n"
        "print([run(from_seed(seed)).digest for seed in range(10)])\n"
    )
    said = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, env=env, capture_output=True, timeout=LIMIT_S, check=True)
        said.add(ran.stdout)
    assert len(said) == 1


def test_restarts_that_no_fault_explains_are_noticed() -> None:
    clock = Clock()
    checkers = Checkers(Scenario(seed=0, nodes=1, min_nodes=1), History(clock))
    lost = rec.RestartCounted("lost")
    checkers.durable([lost, lost], [])
    with pytest.raises(Violation, match="3 restarts for 0 faults"):
        checkers.durable([lost], [])
    clock.now = 100.0
    checkers = Checkers(Scenario(seed=0, nodes=1, min_nodes=1), History(clock))
    with pytest.raises(Violation, match="after the last fault"):
        checkers.durable([lost], [])


def test_a_failing_scenario_is_made_smaller_and_kept_in_a_file(tmp_path: Path) -> None:
    scenario = next(s for s in map(from_seed, range(100)) if _is_rich(s))

    def finds(candidate: Scenario) -> str:
        return "found" if any(f.kind == "kill_master" for f in candidate.faults) else ""

    small = shrink(scenario, finds)
    assert [fault.kind for fault in small.faults] == ["kill_master"]
    assert small.nodes <= scenario.nodes
    path = save(small, tmp_path)
    assert load(path) == small
    assert msgspec.json.decode(path.read_bytes())["seed"] == scenario.seed


def _is_rich(scenario: Scenario) -> bool:
    kinds = [fault.kind for fault in scenario.faults]
    return "kill_master" in kinds and len(set(kinds)) > 2
