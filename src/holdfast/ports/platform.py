# SPDX-License-Identifier: Apache-2.0
"""The platform port: whatever can start and remove nodes."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What the platform saw of one node. A node missing from a full listing is GONE."""

    node_id: NodeId
    phase: Phase
    reason: ExitReason | None = None
    message: str = ""
    host: str = ""
    """The machine that it was put on; empty while it is on none, or if the platform has one."""


class Platform(Protocol):
    """Starts and removes nodes.

    Guarantees: `launch` and `remove` are idempotent by node id and may be repeated after a crash;
    a launch of a node that has ended is answered by `watch`: its end is told again, or it begins;
    `watch` first reports every node it knows, then each change, and after a gap lists again;
    a node that cannot be looked up is *unknown* (no sighting), never reported as gone.
    """

    async def launch(self, order: Order) -> None:
        """Ask for the node; that it runs is learned from `watch` or from its agent."""

    async def remove(self, node_id: NodeId) -> None:
        """Make the node go away; no error if there is none."""

    def watch(self) -> AsyncIterator[Sighting]:
        """All nodes now, then every change, for as long as it is iterated."""

    def look_again(self) -> None:
        """A node's stream broke: something may have happened that `watch` has not told yet.

        A platform that learns of changes over a network lists its nodes again unless it hears of
        something soon. Calls that come together make one listing.
        """

    async def close(self) -> None:
        """Let go of everything; nodes keep running."""
