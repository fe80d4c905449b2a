# SPDX-License-Identifier: Apache-2.0
"""Machines on which nodes of the job failed, and which of them are to be avoided.

One failure of the hardware is enough. A node that was lost for an unknown reason makes its machine
suspicious: the second such loss within a day decides. A failure of the program says nothing about
the machine, nor does a node that was ended from outside.
"""

from collections.abc import Collection, Iterable

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.node import ExitReason

REMEMBERED_S = 24 * 3600.0
AVOIDED_MAX = 16
"""A list that only grows would leave no machine in the end."""

_BLAMED_KEPT = 4 * AVOIDED_MAX
_ENOUGH = 2
_WEIGHTS = {
    ExitReason.HARDWARE: _ENOUGH,
    ExitReason.LOST: 1,
    ExitReason.STALLED: 1,
    ExitReason.UNKNOWN: 1,
}


class FailedHosts:
    """The newest failures of machines, oldest first."""

    def __init__(self) -> None:
        self._blamed: list[rec.HostBlamed] = []

    def avoided(self, known: Collection[str], now: float) -> tuple[str, ...]:
        """Machines on which no node is put: never all of the known ones, nor more than a few."""
        weights: dict[str, int] = {}
        for blame in self._blamed:
            if blame.at_s > now - REMEMBERED_S:
                # The host that was blamed last becomes the last in the order.
                weights[blame.host] = weights.pop(blame.host, 0) + blame.weight
        hosts = [host for host, weight in weights.items() if weight >= _ENOUGH][-AVOIDED_MAX:]
        while hosts and all(host in hosts for host in known):
            del hosts[0]
        return tuple(hosts)

    def apply(self, record: rec.HostBlamed) -> None:
        self._blamed.append(record)
        del self._blamed[:-_BLAMED_KEPT]

    def snapshot(self) -> Iterable[Record]:
        return tuple(self._blamed)


def blame(host: str, reason: ExitReason, now: float) -> rec.HostBlamed | None:
    """What a failure says about the machine that it happened on; None if nothing."""
    weight = _WEIGHTS.get(reason, 0)
    return rec.HostBlamed(host, weight, now) if host and weight else None
