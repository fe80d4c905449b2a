# SPDX-License-Identifier: Apache-2.0
"""Asking nodes what they hold. Nothing here is durable."""

from collections.abc import Collection, Iterable

from holdfast.core.job.commands import Push
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import Holding
from holdfast.model.ids import NodeId
from holdfast.protocol.checkpoints import InventoryTaken, InventoryWanted

PATIENCE_S = 5.0
"""How long to wait for the holdings of a node; after that, whatever needs them does without."""


class Gathering:
    """One question to several nodes, and their answers so far."""

    def __init__(self, directory: str, number: int, nodes: Iterable[NodeId], now: float) -> None:
        self._question = InventoryWanted(directory, number)
        self._missing = set(nodes)
        self._until = now + PATIENCE_S
        self._waits = True
        self.found: dict[NodeId, tuple[Holding, ...]] = {}
        #: What is being written, by attempt and part.
        self._written: set[tuple[str, str]] = set()
        #: Nodes that do not say what they write.
        self._silent: set[NodeId] = set()

    def ask(self, outcome: Outcome) -> None:
        for node_id in sorted(self._missing):
            outcome.commands.append(Push(node_id, self._question))

    def ask_again(self, outcome: Outcome, node_id: NodeId) -> None:
        """The node came back: it may have missed the question."""
        if node_id in self._missing:
            outcome.commands.append(Push(node_id, self._question))

    def taken(self, node_id: NodeId, body: InventoryTaken) -> None:
        if body.number != self._question.number or node_id not in self._missing:
            return
        self._missing.discard(node_id)
        self.found[node_id] = body.holdings
        if body.writing is None:
            self._silent.add(node_id)
        else:
            self._written.update((one.attempt, part) for one in body.writing for part in one.parts)

    def may_write(self, attempt: str, part: str, holders: Collection[NodeId]) -> bool:
        """Whether one of the asked nodes may be writing this part, which `holders` hold."""
        return (attempt, part) in self._written or not self._silent.isdisjoint(holders)

    def lost(self, node_id: NodeId) -> None:
        self._missing.discard(node_id)
        self.found.pop(node_id, None)

    def is_over(self, now: float) -> bool:
        return not self._missing or now >= self._until

    def stop_waiting(self) -> None:
        """Something else is waited for from now on. Late answers still count."""
        self._waits = False

    def deadline(self) -> float | None:
        return self._until if self._missing and self._waits else None
