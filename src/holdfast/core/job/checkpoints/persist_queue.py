# SPDX-License-Identifier: Apache-2.0
"""The step that waits for its turn to go to storage. Nothing here is durable."""

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.crew import Crew
from holdfast.core.job.commands import Reply
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.model.ids import NodeId
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

Waiting = tuple[ev.CheckpointRequested, c.PersistAsk]


class PersistQueue:
    """One step waits at a time: a newer one takes the place of an older."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.version = NONE
        self._shape = Shape(0, False)
        self._asks: dict[NodeId, Waiting] = {}
        #: The node that writes each part of it.
        self._writers: dict[str, NodeId] = {}

    def add(self, out: Outcome, request: ev.CheckpointRequested, body: c.PersistAsk) -> None:
        """A node asks with the step that waits or a newer one. Its newest ask is answered."""
        if body.version != self.version:
            self.refuse_before(out, body.version)
            self.version, self._shape = body.version, body.shape
        elif body.shape != self._shape:
            why = f"the nodes do not agree on which parts step {body.version.step} has"
            out.commands.append(Reply(request.link, request.call, m.Refused("rejected", why)))
            return
        self._asks[request.node_id] = (request, body)
        self._assign(request.node_id, body.parts)

    def _assign(self, node_id: NodeId, parts: tuple[str, ...]) -> None:
        """Of several nodes that hold a part, the first of the group writes it.

        A rank part is held by one node and the shared one by all, so a new master divides a step
        as the old one did.
        """
        for part in parts:
            writer = self._writers.setdefault(part, node_id)
            if self._crew.place(node_id) < self._crew.place(writer):
                self._writers[part] = node_id

    def whole(self) -> tuple[Shape, dict[str, NodeId]] | None:
        """The parts of the step that waits, with the writer of each, if every part is there."""
        # Cheap first: fewer parts than ranks cannot be all, and need not be compared by name.
        if not self._asks or len(self._writers) < self._shape.world_size:
            return None
        parts = list(self._shape.parts())
        if any(part not in self._writers for part in parts):
            return None
        return self._shape, {part: self._writers[part] for part in parts}

    def take(self, version: Version) -> list[Waiting]:
        """Take out the asks that wait with this version."""
        if version != self.version:
            return []
        return self._take_all()

    def refuse_before(self, out: Outcome, version: Version) -> None:
        if self.version < version:
            for request, _ in self._take_all():
                out.commands.append(superseded(request, version))

    def refuse(self, out: Outcome, refusal: m.Refused) -> None:
        """Refuse every ask that waits."""
        for request, _ in self._take_all():
            out.commands.append(Reply(request.link, request.call, refusal))

    def _take_all(self) -> list[Waiting]:
        asks, self._asks, self._writers, self.version = self._asks, {}, {}, NONE
        return list(asks.values())

    def withdraw(self, node_id: NodeId) -> None:
        if self._asks.pop(node_id, None) is not None:
            self._writers.clear()
            for request, body in self._asks.values():
                self._assign(request.node_id, body.parts)


def superseded(request: ev.CheckpointRequested, version: Version) -> Reply:
    """The answer to a node that asks with an older version."""
    why = f"superseded by step {version.step}"
    return Reply(request.link, request.call, m.Refused("rejected", why))
