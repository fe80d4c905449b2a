# SPDX-License-Identifier: Apache-2.0
"""One attempt to bring a version to storage: who writes what, and what is written by now."""

from collections.abc import Collection
from dataclasses import dataclass, field

from holdfast.core.job import events as ev
from holdfast.core.job.commands import Push
from holdfast.core.job.crew import Crew
from holdfast.model.checkpoint import FileEntry, Shape, Version
from holdfast.model.ids import NodeId
from holdfast.protocol import checkpoints as c

ReportKey = tuple[NodeId, tuple[str, ...]]
"""A node may report twice in an attempt: when it gets parts of a lost node to write as well."""


@dataclass(slots=True)
class AttemptState:
    """One try to bring one version to storage."""

    attempt: str
    version: Version
    shape: Shape
    reason: str
    until: float
    #: The parts that are not reported yet. When none is left the attempt is whole.
    missing: set[str]
    #: Who writes each of them; unknown for an attempt of an earlier master.
    writers: dict[str, NodeId] = field(default_factory=dict)
    is_resumed: bool = False
    #: The missing parts whose writer was lost.
    orphans: set[str] = field(default_factory=set)
    #: What nodes were told to write and have not reported.
    orders: dict[ReportKey, None] = field(default_factory=dict)
    files: dict[ReportKey, tuple[FileEntry, ...]] = field(default_factory=dict)
    held: dict[ReportKey, ev.CheckpointRequested] = field(default_factory=dict)
    #: Who was told to give the checkpoint its name.
    committer: NodeId | None = None

    @staticmethod
    def resumed(body: c.PartsPersisted) -> "AttemptState":
        """An attempt of an earlier master, as far as one of its writers knows it."""
        return AttemptState(
            body.attempt,
            body.version,
            body.shape,
            "an earlier master began it",
            until=0.0,
            missing=set(body.shape.parts()),
            is_resumed=True,
        )

    def reported(self, key: ReportKey, files: tuple[FileEntry, ...]) -> None:
        self.files[key] = files
        self.orders.pop(key, None)
        self.missing.difference_update(key[1])
        self.orphans.difference_update(key[1])
        for part in key[1]:
            self.writers.pop(part, None)

    def abandoned(self, node_id: NodeId) -> None:
        """The node is lost. What it has written is on storage all the same."""
        self.held = {key: held for key, held in self.held.items() if key[0] != node_id}
        if self.committer == node_id:
            self.committer = None
        self.orders = {key: None for key in self.orders if key[0] != node_id}
        left = {part for part, writer in self.writers.items() if writer == node_id}
        self.orphans |= left
        for part in left:
            del self.writers[part]

    def order(self, directory: str, key: ReportKey) -> Push:
        """Tell a node to write these parts."""
        self.orders[key] = None
        version, shape, name = self.version, self.shape, self.attempt
        order = c.PersistOrder(directory, version, shape, name, key[1], self.reason)
        return Push(key[0], order)

    def commit_order(self, directory: str) -> c.CommitOrder:
        named = {entry.name: entry for entries in self.files.values() for entry in entries}
        files = tuple(named[name] for name in sorted(named))
        return c.CommitOrder(directory, self.version, self.shape, self.attempt, files)

    def named_twice(self) -> str:
        """A file that two nodes claim to have written; empty if there is none."""
        writers: dict[str, NodeId] = {}
        for (node_id, _), entries in self.files.items():
            for entry in entries:
                if writers.setdefault(entry.name, node_id) != node_id:
                    return entry.name
        return ""


def writer_of(holders: Collection[NodeId], crew: Crew, loads: dict[NodeId, int]) -> NodeId | None:
    """Who writes a part that several may hold: who is there and has the least to write."""
    here = [node_id for node_id in holders if node_id in crew.present]
    if not here:
        return None
    chosen = min(here, key=lambda node: (loads.get(node, 0), crew.place(node)))
    loads[chosen] = loads.get(chosen, 0) + 1
    return chosen
