# SPDX-License-Identifier: Apache-2.0
"""The platform of a managed job: it starts nodes, late or not at all, ends them, and reports it.

It may have a quota: a maximum of nodes at a time. Orders beyond it stay pending, and when the quota
shrinks the platform preempts the newest nodes.
"""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from holdfast.core.job.events import NodeSeen
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import ExitReason, Phase, classify_exit
from holdfast.model.order import Order
from holdfast.sim.clock import Clock

GRACE_S = 15.0
"""Time between the request to leave and the kill."""

NOTICED_S = 30.0
"""How long the platform needs to notice that a machine is gone."""


class Machine(Protocol):
    """A node as the platform knows it."""

    def terminate(self) -> None:
        """Ask its agent to leave."""

    def kill(self) -> None:
        """End its agent."""


class Platform:
    """Every node that was ever ordered, by id."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._start: Callable[[NodeId, NodeRank], Machine] | None = None
        self._tell: Callable[[NodeSeen], None] = lambda seen: None
        self._sightings: dict[NodeId, NodeSeen] = {}
        self._machines: dict[NodeId, Machine] = {}
        #: Ordered nodes that wait for the quota.
        self._waiting: list[tuple[NodeId, NodeRank]] = []
        self._quota: int | None = None
        self._quota_until = 0.0
        self.launches_to_fail = 0
        self.slow_until = 0.0

    def use(self, start: Callable[[NodeId, NodeRank], Machine]) -> None:
        """Set the function that starts an agent."""
        self._start = start

    def watch(self, tell: Callable[[NodeSeen], None]) -> None:
        """Report all nodes now, then every change, to the newest watcher only."""
        self._tell = tell
        for seen in list(self._sightings.values()):
            self._clock.after(self._rng.uniform(0.0, 0.5), partial(tell, seen))

    def launch(self, order: Order) -> None:
        """Order a node; a repeated order changes nothing."""
        node_id, node_rank = order.node_id, order.node_rank
        if seen := self._sightings.get(node_id):
            self._clock.after(self._rng.uniform(0.001, 0.2), partial(self._tell, seen))
            return
        self._see(node_id, Phase.PENDING)
        pending_s = self._rng.uniform(0.2, 3.0)
        if self._clock.now < self.slow_until:
            pending_s += self._rng.uniform(5.0, 30.0)
        self._clock.after(pending_s, lambda: self._begin(node_id, node_rank))

    def _begin(self, node_id: NodeId, node_rank: NodeRank) -> None:
        if self._sightings[node_id].phase.is_final:
            return
        if not self._has_place():
            self._waiting.append((node_id, node_rank))
            return
        if self.launches_to_fail:
            self.launches_to_fail -= 1
            self._see(node_id, Phase.FAILED, ExitReason.HARDWARE, "it could not be started")
            return
        assert self._start is not None
        self._machines[node_id] = self._start(node_id, node_rank)

    def _has_place(self) -> bool:
        return self._quota is None or len(self._machines) < self._quota

    def _fill(self) -> None:
        while self._waiting and self._has_place():
            self._begin(*self._waiting.pop(0))

    def shrink_quota(self, quota: int, seconds: float) -> None:
        """Allow at most `quota` nodes for a while; nodes beyond it are asked to leave."""
        self._quota = quota
        self._quota_until = max(self._quota_until, self._clock.now + seconds)
        for machine in list(self._machines.values())[quota:]:
            machine.terminate()
            self._clock.after(GRACE_S, machine.kill)
        self._clock.at(self._quota_until, self._lift_quota)

    def _lift_quota(self) -> None:
        if self._clock.now >= self._quota_until:
            self._quota = None
            self._fill()

    def remove(self, node_id: NodeId) -> None:
        """Make a node leave."""
        machine = self._machines.get(node_id)
        if machine is not None:
            machine.terminate()
            self._clock.after(GRACE_S, machine.kill)
        elif node_id in self._sightings and not self._sightings[node_id].phase.is_final:
            self._see(node_id, Phase.GONE)

    def agent_ended(self, node_id: NodeId, exit_code: int) -> None:
        """An agent process is over; an exit code below 0 is a signal."""
        self._machines.pop(node_id, None)
        if exit_code == 0:
            self._see(node_id, Phase.SUCCEEDED)
        else:
            reason = classify_exit(max(exit_code, 0), -exit_code if exit_code < 0 else None)
            self._see(node_id, Phase.FAILED, reason, "its agent process ended")
        self._fill()

    def machine_lost(self, node_id: NodeId) -> None:
        """A machine is gone; the platform notices that later."""
        self._machines.pop(node_id, None)
        gone = (node_id, Phase.FAILED, ExitReason.HARDWARE, "its machine is gone")
        self._clock.after(NOTICED_S * self._rng.uniform(0.1, 1.5), lambda: self._see(*gone))
        self._fill()

    def _see(
        self,
        node_id: NodeId,
        phase: Phase,
        reason: ExitReason | None = None,
        message: str = "",
    ) -> None:
        seen = self._sightings[node_id] = NodeSeen(node_id, phase, reason, message)
        self._clock.after(self._rng.uniform(0.001, 0.2), lambda: self._tell(seen))
