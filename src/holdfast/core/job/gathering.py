# SPDX-License-Identifier: Apache-2.0
"""Asking nodes what they hold. Nothing here is durable."""

from collections.abc import Iterable

from holdfast.core.job.commands import Push
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import Holding
from holdfast.model.ids import NodeId
from holdfast.protocol.checkpoints import InventoryWanted

PATIENCE_S = 5.0
"""How long the holdings of a node are waited for; after that it goes without them."""


class Gathering:
    """One question to several nodes, and their answers so far."""

    def __init__(self, directory: str, number: int, nodes: Iterable[NodeId], now: float) -> None:
        self._question = InventoryWanted(directory, number)
        self._missing = set(nodes)
        self._until = now + PATIENCE_S
        self.found: dict[NodeId, tuple[Holding, ...]] = {}

    def ask(self, outcome: Outcome) -> None:
        for node_id in sorted(self._missing):
            outcome.commands.append(Push(node_id, self._question))

    def ask_again(self, outcome: Outcome, node_id: NodeId) -> None:
        """The node came back: it may have missed the question."""
        if node_id in self._missing:
            outcome.commands.append(Push(node_id, self._question))

    def taken(self, number: int, node_id: NodeId, holdings: tuple[Holding, ...]) -> None:
        if number == self._question.number and node_id in self._missing:
            self._missing.discard(node_id)
            self.found[node_id] = holdings

    def lost(self, node_id: NodeId) -> None:
        self._missing.discard(node_id)
        self.found.pop(node_id, None)

    def is_over(self, now: float) -> bool:
        return not self._missing or now >= self._until

    def deadline(self) -> float | None:
        return self._until if self._missing else None
