# SPDX-License-Identifier: Apache-2.0
"""What all models of a simulation share."""

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from holdfast.sim.checkers import Checkers
from holdfast.sim.clock import Clock
from holdfast.sim.collective import Collective
from holdfast.sim.desk import Desk
from holdfast.sim.history import History
from holdfast.sim.network import Network
from holdfast.sim.platform import Platform
from holdfast.sim.scenario import Scenario
from holdfast.sim.storage import Storage

if TYPE_CHECKING:
    from holdfast.sim.node import Agent


@dataclass(slots=True)
class Stage:
    """One run of one scenario."""

    scenario: Scenario
    clock: Clock
    history: History
    checkers: Checkers
    network: Network
    platform: Platform
    storage: Storage
    desk: Desk
    #: The living agents, by the node id that the master gave them.
    agents: dict[int, "Agent"] = field(default_factory=dict)
    #: By generation: where the ranks of a world meet.
    collectives: dict[int, Collective] = field(default_factory=dict)

    def rng(self, name: str) -> Random:
        """A separate source for each model: draws of one model do not shift those of another."""
        return Random(f"{self.scenario.seed} {name}")

    def collective(self, generation: int, world_size: int) -> Collective:
        found = self.collectives.get(generation)
        if found is None:
            found = self.collectives[generation] = Collective(
                self.clock, world_size, is_loud=self.scenario.is_loud
            )
        return found
