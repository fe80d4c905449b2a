# SPDX-License-Identifier: Apache-2.0
"""Play many seeds with the real master and agents, as swarm.py does with the cores.

    python -m holdfast.sim.driver_swarm --seeds 0..100 --out found

Scenarios that fail are kept in tests/sim/found_drivers.
"""

import sys

from holdfast.sim.driver_scenario import scenario_of
from holdfast.sim.drivers import run
from holdfast.sim.scenario import Scenario
from holdfast.sim.swarm import main, or_error


def problem_of(scenario: Scenario) -> str:
    """The violation of an invariant with the real drivers; an internal error counts as one."""
    return or_error(lambda: run(scenario).problem)


if __name__ == "__main__":
    sys.exit(main(None, scenario_of, problem_of, lambda scenario: run(scenario).digest))
