# SPDX-License-Identifier: Apache-2.0
"""Many seeds with the real master and agents, as swarm.py plays them with the cores.

    python -m holdfast.sim.driver_swarm --seeds 0..100 --out found

What it finds lands in tests/sim/found_drivers.
"""

import sys

from holdfast.sim.driver_scenario import scenario_of
from holdfast.sim.drivers import run
from holdfast.sim.scenario import Scenario
from holdfast.sim.swarm import main, or_error


def problem_of(scenario: Scenario) -> str:
    """What must never happen and does with the real drivers; an error inside is as bad."""
    return or_error(lambda: run(scenario).problem)


if __name__ == "__main__":
    sys.exit(main(None, scenario_of, problem_of, lambda scenario: run(scenario).digest))
