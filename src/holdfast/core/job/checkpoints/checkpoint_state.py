# SPDX-License-Identifier: Apache-2.0
"""The durable part of the checkpoint ledger: commits, the last agreements, positions of data.

Datasets may follow the model of a directory. Then a version without their positions is worthless:
samples that its model has seen would be read again, or samples would never be read.
"""

from collections.abc import Collection, Iterable, Mapping

from holdfast.core.job import records as rec
from holdfast.core.kernel import Outcome, Record
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.dataset import Position

VERSIONS_MAX = 64
"""No memory holds more versions of a directory."""


class CheckpointState:
    """Per directory, the newest committed version, the newest lineage, positions of versions."""

    def __init__(self) -> None:
        self.committed: dict[str, rec.CheckpointCommitted] = {}
        self.agreed: dict[str, rec.LineageSet] = {}
        #: The directories that datasets follow: told again at every start of a master.
        self.followed: set[str] = set()
        self._positions: dict[str, dict[Version, tuple[Position, ...]]] = {}

    def newest(self, directory: str) -> Version:
        """The newest version that is committed; NONE if none is."""
        found = self.committed.get(directory)
        return NONE if found is None else found.version

    def base(self, directory: str) -> Version:
        """The version of the last agreement: the newest lineage begins with it."""
        agreed = self.agreed.get(directory)
        return NONE if agreed is None else agreed.version

    def lineage(self, directory: str) -> int:
        """The highest lineage that was given out or committed; -1 if none was."""
        agreed = self.agreed.get(directory)
        given = -1 if agreed is None else agreed.lineage
        return max(given, self.newest(directory).lineage)

    # ---- positions of data ----------------------------------------------------------------------

    def positions(self, directory: str) -> Mapping[Version, tuple[Position, ...]]:
        """The versions whose positions are known."""
        return self._positions.get(directory, {})

    def lacks_position(self, directory: str, version: Version) -> bool:
        """Whether this version cannot be restored from memory alone, for want of its positions."""
        return directory in self.followed and version not in self.positions(directory)

    def keep_positions(
        self, out: Outcome, directory: str, version: Version, positions: tuple[Position, ...]
    ) -> None:
        """Keep the positions of a version: what is on storage may be out of reach later."""
        if version not in self.positions(directory):
            self.commit(out, rec.VersionPositioned(directory, version, positions))

    def replace_positions(
        self,
        out: Outcome,
        directory: str,
        version: Version,
        positions: tuple[Position, ...],
        held: Collection[Version] | None,
    ) -> None:
        """Keep the positions of a version, and drop those of versions that are not `held` anywhere.

        None: not every node of the round has said yet what it holds.
        """
        known = sorted(self.positions(directory).keys() - {version})
        if held is None:
            needed = set(known)
        else:
            needed = {*held, self.base(directory), self.newest(directory)}
        kept = [one for one in known if one in needed][1 - VERSIONS_MAX :]
        dropped = tuple(one for one in known if one not in kept)
        self.commit(out, rec.VersionPositioned(directory, version, positions, dropped))

    # ---- records --------------------------------------------------------------------------------

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
            case rec.VersionPositioned():
                positions = self._positions.setdefault(record.directory, {})
                positions[record.version] = record.positions
                for version in record.dropped:
                    positions.pop(version, None)
            case _:
                raise TypeError(f"{record!r} is not a record of the checkpoints")

    def snapshot(self) -> Iterable[Record]:
        yield from self.committed.values()
        yield from self.agreed.values()
        for directory, known in self._positions.items():
            for version, positions in known.items():
                yield rec.VersionPositioned(directory, version, positions)
