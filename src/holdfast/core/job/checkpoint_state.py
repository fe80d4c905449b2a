# SPDX-License-Identifier: Apache-2.0
"""The durable part of the ledger of checkpoints: what is committed, and what was agreed last."""

from collections.abc import Iterable

from holdfast.core.job import records as rec
from holdfast.core.kernel import Outcome, Record
from holdfast.model.checkpoint import NONE, Version


class CheckpointState:
    """Per directory, the newest committed version and the newest lineage."""

    def __init__(self) -> None:
        self.committed: dict[str, rec.CheckpointCommitted] = {}
        self.agreed: dict[str, rec.LineageSet] = {}

    def newest(self, directory: str) -> Version:
        """The newest version that is committed; NONE if none is."""
        found = self.committed.get(directory)
        return NONE if found is None else found.version

    def base(self, directory: str) -> Version:
        """What the last agreement came to: the newest lineage begins with it."""
        agreed = self.agreed.get(directory)
        return NONE if agreed is None else agreed.version

    def lineage(self, directory: str) -> int:
        """The highest lineage that was given out or committed; -1 if none was."""
        agreed = self.agreed.get(directory)
        given = -1 if agreed is None else agreed.lineage
        return max(given, self.newest(directory).lineage)

    def commit(self, outcome: Outcome, record: Record) -> None:
        """Make a record true and durable."""
        self.apply(record)
        outcome.records.append(record)

    def apply(self, record: Record) -> None:
        match record:
            case rec.CheckpointCommitted():
                self.committed[record.directory] = record
            case rec.LineageSet():
                self.agreed[record.directory] = record
            case _:
                raise TypeError(f"{record!r} is not a record of the checkpoints")

    def snapshot(self) -> Iterable[Record]:
        yield from self.committed.values()
        yield from self.agreed.values()
