# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a world do together: a step ends when all of them have come to it."""

from holdfast.sim.clock import Clock, Promise


class Collective:
    """The ranks of one world. Whoever dies on the way leaves the others waiting."""

    def __init__(self, clock: Clock, world_size: int) -> None:
        self._clock = clock
        self._world_size = world_size
        self._arrived: dict[int, bool] = {}
        self._all_there: Promise[bool] = Promise(clock)
        self._is_broken = False

    def meet(self, rank: int, *, is_finished: bool) -> Promise[bool]:
        """Come to the end of a step; kept when all have, with whether all are finished."""
        promise = self._all_there
        self._arrived[rank] = is_finished
        if len(self._arrived) == self._world_size and not self._is_broken:
            is_all = all(self._arrived.values())
            self._arrived, self._all_there = {}, Promise(self._clock)
            promise.keep(is_all)
        return promise

    def leave(self) -> None:
        """A rank is gone: nothing is done together any more."""
        self._is_broken = True
