# SPDX-License-Identifier: Apache-2.0
"""Seeds that no run had before, besides the fixed ones: fixed seeds do not find what is new.

A seed that fails here has found something, whatever was changed: what it does is decided by the
seed alone. The message says how to play it again and to make it small.
"""

from collections.abc import Callable
from random import SystemRandom

import pytest

from holdfast.sim import driver_swarm, swarm
from holdfast.sim.driver_scenario import scenario_of
from holdfast.sim.scenario import Scenario, from_seed
from holdfast.sim.swarm import Finds

GROUPS = 4
CORE_SEEDS, DRIVER_SEEDS = 240, 240


def play(
    module: str, scenario_of: Callable[[int], Scenario], finds: Finds, seeds: list[int]
) -> list[str]:
    """What failed, and how to see it again. One that never ends is the last that was printed."""
    failed = []
    for seed in seeds:
        again = f"python -m holdfast.sim.{module} --seeds {seed}..{seed + 1}"
        print(f"playing {again}", flush=True)
        if problem := finds(scenario_of(seed)):
            failed.append(f"{problem}: {again}")
    return failed


def fresh(count: int) -> list[int]:
    """Beyond all seeds that people count up to."""
    chance = SystemRandom()
    return [chance.randrange(10**9, 10**12) for _ in range(count)]


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_cores(group: int) -> None:
    seeds = fresh(CORE_SEEDS // GROUPS)
    assert play("swarm", from_seed, swarm.problem_of, seeds) == []


@pytest.mark.parametrize("group", range(GROUPS))
def test_the_drivers(group: int) -> None:
    seeds = fresh(DRIVER_SEEDS // GROUPS)
    assert play("driver_swarm", scenario_of, driver_swarm.problem_of, seeds) == []


def test_a_seed_that_fails_is_printed() -> None:
    (said,) = play("swarm", from_seed, lambda scenario: "x" * (scenario.seed == 7), [6, 7])
    assert said == "x: python -m holdfast.sim.swarm --seeds 7..8"
