# SPDX-License-Identifier: Apache-2.0
"""What must hold for worlds: one per round, one holder of each place, and none that computes after
a newer one has."""

from collections.abc import Callable

from holdfast.protocol import messages as m


class WorldChecker:
    """Knows who was told which world, and who steps."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        #: By round: its generation, and who holds which place.
        self._worlds: dict[int, tuple[int, int, int]] = {}
        self._places: dict[tuple[int, int], tuple[str, int]] = {}
        self._stepping = 0
        self._void_until = -1.0

    def received(self, place: str, node_id: int, run: m.RunWorld) -> None:
        """A node begins a round."""
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
        """The master may have forgotten a whole world, and everybody who knew of it may be dead, or
        cut off until its leases end: its numbers are given again, and another world may compute
        beside it. Whoever knew and lives is heard before anything of both is kept."""
        self._worlds.clear()
        self._places.clear()
        self._void_until = void_until
