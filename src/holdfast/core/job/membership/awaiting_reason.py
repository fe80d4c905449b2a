# SPDX-License-Identifier: Apache-2.0
"""Nodes that were given up while their platform may still tell why they ended.

A part of `fleet`. A container that dies breaks its stream first; the platform says a second later
what killed it. The world goes on without the node at once. Its successor waits for the reason,
because that decides over memory, budgets and hosts. Nothing here is durable: a restarted master
waits again, for every wanted rank without a node.
"""

from dataclasses import dataclass

from holdfast.core.job.membership.node_table import NodeState
from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason

WORD_S = 10.0
"""A platform that lives needs a second or two, and more if its machines are loaded."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that has ended, and how."""

    node: NodeState
    reason: ExitReason
    has_run: bool = True
    was_leaving: bool = False
    ended_well: bool = False
    """It has left by itself, before its job ended: nothing to replace."""


class AwaitingReason:
    """Losses that wait for a reason, and until when. All wait equally long: the first is due."""

    def __init__(self) -> None:
        self._waiting: dict[NodeId, tuple[float, Loss]] = {}

    def wait(self, loss: Loss, now: float) -> None:
        self._waiting[loss.node.node_id] = (now + WORD_S, loss)

    def take(self, node_id: NodeId) -> Loss | None:
        """Stop waiting for the reason of this node's end; None if it was not waited for."""
        _, loss = self._waiting.pop(node_id, (0.0, None))
        return loss

    def due(self, now: float) -> list[NodeId]:
        """The nodes whose reason has not come in time."""
        return [node_id for node_id, (until, _) in self._waiting.items() if until <= now]

    def clear(self) -> list[NodeId]:
        """Stop waiting; returns the nodes whose reasons were waited for."""
        waited = list(self._waiting)
        self._waiting.clear()
        return waited

    def deadline(self) -> float | None:
        return next((until for until, _ in self._waiting.values()), None)
