# SPDX-License-Identifier: Apache-2.0
"""The platform of a managed job: it starts nodes late or not at all, ends them, and tells of it."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from holdfast.core.job.events import NodeSeen
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import ExitReason, Phase, classify_exit
from holdfast.sim.clock import Clock

GRACE_S = 15.0
"""Between being asked to go and being killed."""

NOTICED_S = 30.0
"""How long it takes to see that a machine is gone."""


class Machine(Protocol):
    """A node as the platform knows it."""

    def terminate(self) -> None:
        """Ask its agent to go."""

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
        self.launches_to_fail = 0
        self.slow_until = 0.0

    def use(self, start: Callable[[NodeId, NodeRank], Machine]) -> None:
        """How an agent starts."""
        self._start = start

    def watch(self, tell: Callable[[NodeSeen], None]) -> None:
        """All nodes now, then every change, to the newest who watches."""
        self._tell = tell
        for seen in list(self._sightings.values()):
            self._clock.after(self._rng.uniform(0.0, 0.5), partial(tell, seen))

    def launch(self, node_id: NodeId, node_rank: NodeRank) -> None:
        """Order a node; an order that was given before changes nothing."""
        if node_id in self._sightings:
            return
        self._see(node_id, Phase.PENDING)
        pending_s = self._rng.uniform(0.2, 3.0)
        if self._clock.now < self.slow_until:
            pending_s += self._rng.uniform(5.0, 30.0)
        self._clock.after(pending_s, lambda: self._begin(node_id, node_rank))

    def _begin(self, node_id: NodeId, node_rank: NodeRank) -> None:
        if self._sightings[node_id].phase.is_final:
            return
        if self.launches_to_fail:
            self.launches_to_fail -= 1
            self._see(node_id, Phase.FAILED, ExitReason.HARDWARE, "it could not be started")
            return
        assert self._start is not None
        self._machines[node_id] = self._start(node_id, node_rank)

    def remove(self, node_id: NodeId) -> None:
        """Make the node go away."""
        machine = self._machines.get(node_id)
        if machine is not None:
            machine.terminate()
            self._clock.after(GRACE_S, machine.kill)
        elif node_id in self._sightings and not self._sightings[node_id].phase.is_final:
            self._see(node_id, Phase.GONE)

    def agent_ended(self, node_id: NodeId, exit_code: int) -> None:
        """An agent process is over; below 0: by a signal."""
        self._machines.pop(node_id, None)
        if exit_code == 0:
            self._see(node_id, Phase.SUCCEEDED)
        else:
            reason = classify_exit(max(exit_code, 0), -exit_code if exit_code < 0 else None)
            self._see(node_id, Phase.FAILED, reason, "its agent process ended")

    def machine_lost(self, node_id: NodeId) -> None:
        """A machine is gone; that is seen only later."""
        self._machines.pop(node_id, None)
        gone = (node_id, Phase.FAILED, ExitReason.HARDWARE, "its machine is gone")
        self._clock.after(NOTICED_S * self._rng.uniform(0.1, 1.5), lambda: self._see(*gone))

    def _see(
        self,
        node_id: NodeId,
        phase: Phase,
        reason: ExitReason | None = None,
        message: str = "",
    ) -> None:
        seen = self._sightings[node_id] = NodeSeen(node_id, phase, reason, message)
        self._clock.after(self._rng.uniform(0.001, 0.2), lambda: self._tell(seen))
