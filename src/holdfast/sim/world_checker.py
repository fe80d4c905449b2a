# SPDX-License-Identifier: Apache-2.0
"""Invariants of worlds: one world per round, one holder of each place, and no world steps after a
newer one has."""

from collections.abc import Callable

from holdfast.model.world import World
from holdfast.protocol import messages as m


class WorldChecker:
    """Knows which node was told which world, and which worlds step."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        #: By round: its generation, and the holder of each place.
        self._worlds: dict[int, tuple[int, int, int]] = {}
        self._places: dict[tuple[int, int], tuple[str, int]] = {}
        #: The node that the master has given each place of each generation.
        self._given: set[tuple[int, int, int]] = set()
        #: The same, from before the master's disk lied.
        self._void: set[tuple[int, int, int]] = set()
        self._stepping = 0
        self._void_until = -1.0

    def agreed(self, world: World) -> None:
        """The master has written this world, and tells its members."""
        members = enumerate(world.members)
        self._given.update((world.generation, rank, member.node_id) for rank, member in members)

    def received(self, place: str, node_id: int, run: m.RunWorld) -> None:
        """A node begins a round."""
        if (run.generation, run.group_rank, node_id) in self._void:
            return
        world = (run.generation, run.group_size, run.world_size)
        if self._worlds.setdefault(run.round, world) != world:
            self._fail(f"round {run.round} has two worlds: {self._worlds[run.round]} and {world}")
        holder = self._places.setdefault((run.generation, run.group_rank), (place, node_id))
        if holder != (place, node_id):
            self._fail(
                f"place {run.group_rank} of generation {run.generation} is held by {holder} "
                f"and by {(place, node_id)}"
            )

    def stepped(self, place: str, run: m.RunWorld, now: float) -> None:
        """A worker finished a step."""
        if run.generation < self._stepping and now > self._void_until:
            self._fail(
                f"{place} steps in generation {run.generation} after generation "
                f"{self._stepping} has stepped"
            )
        self._stepping = max(run.generation, self._stepping)

    def disk_lied(self, void_until: float) -> None:
        """The master may have forgotten a whole world, while every node that knew of it is dead, or
        cut off until its leases end. The master then gives the numbers of that world again, and
        another world may compute beside it. A node that knew of it and lives is heard before state
        of either world is kept. Messages that the master had sent may arrive much later, at a node
        that was cut off."""
        self._void |= self._given
        self._given.clear()
        self._worlds.clear()
        self._places.clear()
        self._void_until = void_until
