# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a world do together: a step ends when all ranks have reached its end."""

from holdfast.sim.clock import Clock, Promise


class Collective:
    """The ranks of one world. A rank that dies during a step leaves the others waiting, or with an
    error (`is_loud`), depending on the collective's library."""

    def __init__(self, clock: Clock, world_size: int, *, is_loud: bool) -> None:
        self._clock = clock
        self._world_size = world_size
        self._is_loud = is_loud
        self._arrived: dict[int, bool] = {}
        self._all_there: Promise[bool | None] = Promise(clock)
        self._is_broken = False

    def meet(self, rank: int, *, is_finished: bool) -> Promise[bool | None]:
        """Reach the end of a step. The promise is kept when all ranks have: with whether all are
        finished, or with None if some rank never will."""
        promise = self._all_there
        self._arrived[rank] = is_finished
        if self._is_broken:
            self._fail()
        elif len(self._arrived) == self._world_size:
            is_all = all(self._arrived.values())
            self._arrived, self._all_there = {}, Promise(self._clock)
            promise.keep(is_all)
        return promise

    def leave(self) -> None:
        """A rank is gone: the ranks complete no more steps together."""
        self._is_broken = True
        self._fail()

    def _fail(self) -> None:
        if self._is_loud:
            self._all_there.keep(None)
