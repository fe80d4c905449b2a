# SPDX-License-Identifier: Apache-2.0
"""The machines of a simulated cluster, and the platform that gives them to the job."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from holdfast.sim.clock import Clock


class MachinesState:
    """Which machines are free, on their way to the job, used by it, or broken."""

    def __init__(
        self,
        clock: Clock,
        machines: int,
        replace_s: float,
        arrived: Callable[[int, int], None],
    ) -> None:
        self._clock = clock
        self._replace_s = replace_s
        self._arrived = arrived
        self._free = deque(range(machines))
        self._used: set[int] = set()
        self._broken: set[int] = set()
        #: Machines that are being started, with the order they are for.
        self._coming: dict[int, int] = {}
        #: Orders that wait for a machine.
        self._waiting: deque[int] = deque()

    def is_used(self, machine: int) -> bool:
        return machine in self._used

    def is_broken(self, machine: int) -> bool:
        return machine in self._broken

    def are_well(self, machines: Iterable[int]) -> bool:
        return self._broken.isdisjoint(machines)

    def order(self, order: int) -> None:
        """The job wants a node: the next free machine becomes one."""
        if not self._free:
            self._waiting.append(order)
            return
        machine = self._free.popleft()
        self._coming[machine] = order
        # The first machines of the job were started before the job begins.
        pause_s = self._replace_s if self._clock.now > 0 else 0.0
        self._clock.after(pause_s, partial(self._started, machine, order))

    def _started(self, machine: int, order: int) -> None:
        if self._coming.get(machine) == order:
            del self._coming[machine]
            self._used.add(machine)
            self._arrived(order, machine)

    def broke(self, machine: int, repair_s: float) -> None:
        self._broken.add(machine)
        self._clock.after(repair_s, partial(self._repaired, machine))
        if machine in self._coming:
            self.order(self._coming.pop(machine))
        elif machine not in self._used:
            self._free.remove(machine)

    def lost(self, machine: int) -> None:
        """The job gives up a machine."""
        self._used.discard(machine)
        if machine not in self._broken:
            self._offer(machine)

    def _repaired(self, machine: int) -> None:
        self._broken.discard(machine)
        if machine not in self._used:
            self._offer(machine)

    def _offer(self, machine: int) -> None:
        # Repaired machines go back to work first: the reserve stays a reserve.
        self._free.appendleft(machine)
        if self._waiting:
            self.order(self._waiting.popleft())
