# SPDX-License-Identifier: Apache-2.0
"""One attempt to bring a version to storage: which node writes what, and what is written by now."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from holdfast.core.job import events as ev
from holdfast.core.job.checkpoints.crew import Crew
from holdfast.core.job.checkpoints.gathering import Gathering
from holdfast.core.job.checkpoints.inventory import Inventory
from holdfast.core.job.commands import Push
from holdfast.model.checkpoint import SHARED, FileEntry, Shape, Version
from holdfast.model.dataset import Position
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
    #: The node that writes each missing part; unknown for an attempt of an earlier master.
    writers: dict[str, NodeId] = field(default_factory=dict)
    is_resumed: bool = False
    #: Of a resumed attempt: whether it is not known yet which missing parts some node still has.
    is_unclear: bool = False
    #: The missing parts whose writer was lost.
    orphans: set[str] = field(default_factory=set)
    #: What nodes were told to write and have not reported.
    orders: dict[ReportKey, None] = field(default_factory=dict)
    files: dict[ReportKey, tuple[FileEntry, ...]] = field(default_factory=dict)
    held: dict[ReportKey, ev.CheckpointRequested] = field(default_factory=dict)
    #: The node that was told to give the checkpoint its name.
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
            is_unclear=True,
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

    def find_orphans(self, inventory: Inventory, survey: Gathering) -> None:
        """An earlier master's attempt: a part that no node may be writing has lost its writer."""
        self.orphans = {
            part
            for part in self.missing - self.writers.keys()
            if not survey.may_write(self.attempt, part, inventory.holders(self.version, part))
        }

    def adopt_orphans(self, inventory: Inventory, crew: Crew) -> tuple[list[str], str]:
        """Find other nodes that have the parts that lost nodes left unwritten.

        Returns the parts that have a writer again, and a lost part without which the attempt cannot
        go on, or "".
        """
        loads: dict[NodeId, int] = {}
        orphans, self.orphans = sorted(self.orphans), set()
        for part in orphans:
            writer = writer_of(part, inventory.holders(self.version, part), crew, loads)
            if writer is not None:
                self.writers[part] = writer
            elif self.shape.shared and part != SHARED and not inventory.has_whole(self.version):
                self.missing.discard(part)
            else:
                return [], part
        written = (part for _, parts in self.files for part in parts)
        if all(part == SHARED for part in (*self.missing, *written)):
            return [], orphans[0]  # No rank's part is left that could stand in for it.
        return [part for part in orphans if part in self.writers], ""

    def share_of(
        self, node_id: NodeId, parts: tuple[str, ...], *, is_first: bool
    ) -> tuple[str, ...]:
        """Which of these parts the node, which holds them all, writes.

        `is_first`: it is the first node of the group.
        """
        # A node is already writing the parts that it was ordered to write. Its report on them would
        # come before a second write ends, and the checkpoint would get its name during that write.
        ordered = {part for _, ordered in self.orders for part in ordered}
        parts = tuple(part for part in parts if part not in ordered)
        if self.is_resumed:
            # As the earlier master divided it, see PersistQueue.
            for part in parts:
                if (part != SHARED or is_first) and part in self.missing:
                    self.writers.setdefault(part, node_id)
        return tuple(part for part in parts if self.writers.get(part) == node_id)

    def order_parts(self, directory: str, parts: Iterable[str]) -> list[Push]:
        """Tell the writers of these parts to write them, each once."""
        shares: dict[NodeId, list[str]] = {}
        for part in sorted(parts):
            shares.setdefault(self.writers[part], []).append(part)
        return [self.order(directory, (node, tuple(shares[node]))) for node in sorted(shares)]

    def order(self, directory: str, key: ReportKey) -> Push:
        """Tell a node to write these parts."""
        self.orders[key] = None
        version, shape, name = self.version, self.shape, self.attempt
        order = c.PersistOrder(directory, version, shape, name, key[1], self.reason)
        return Push(key[0], order)

    def commit_order(self, directory: str, positions: tuple[Position, ...]) -> c.CommitOrder:
        """Tell a node to give the checkpoint its name; `positions` are those of the data."""
        named = {entry.name: entry for entries in self.files.values() for entry in entries}
        files = tuple(named[name] for name in sorted(named))
        return c.CommitOrder(directory, self.version, self.shape, self.attempt, files, positions)

    def named_twice(self) -> str:
        """A file that two nodes claim to have written; empty if there is none."""
        writers: dict[str, NodeId] = {}
        for (node_id, _), entries in self.files.items():
            for entry in entries:
                if writers.setdefault(entry.name, node_id) != node_id:
                    return entry.name
        return ""


def writer_of(
    part: str, holders: Collection[NodeId], crew: Crew, loads: dict[NodeId, int]
) -> NodeId | None:
    """The node that writes a part that several may hold: of those present, the least loaded.

    A node that runs the part's rank comes first. On other nodes the part is a copy, and copies have
    two slots: one that is held for a slow storage would stop the copies of all later steps.
    """
    here = [node_id for node_id in holders if node_id in crew.present]
    if not here:
        return None
    chosen = min(
        here, key=lambda node: (not crew.runs(node, part), loads.get(node, 0), crew.place(node))
    )
    loads[chosen] = loads.get(chosen, 0) + 1
    return chosen
