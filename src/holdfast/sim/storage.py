# SPDX-License-Identifier: Apache-2.0
"""The storage that all nodes share: the files of attempts, and the named checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.model.checkpoint import SHARED, Shape, Stored, Version, rank_of
from holdfast.model.dataset import Position
from holdfast.sim.checkers import Checkers
from holdfast.sim.clock import Clock


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint under its name."""

    shape: Shape
    parts: frozenset[str]
    positions: tuple[Position, ...]

    @property
    def first_rank(self) -> int:
        """The lowest rank with a part in it, as its manifest would say."""
        ranks = (rank_of(part) for part in self.parts if part != SHARED)
        return min(ranks, default=self.shape.world_size)


class Storage:
    """A directory of checkpoints."""

    def __init__(self, clock: Clock, checkers: Checkers) -> None:
        self._clock = clock
        self._checkers = checkers
        self._written: dict[str, set[str]] = {}
        self.committed: dict[Version, Committed] = {}
        #: Versions that could not be written because the storage was out of order.
        self.refused: set[Version] = set()
        #: The node that writes each part of an attempt now.
        self._being_written: dict[tuple[str, str], int] = {}
        self.broken_until = 0.0

    @property
    def is_broken(self) -> bool:
        return self._clock.now < self.broken_until

    def refuse(self, version: Version) -> str:
        """Note the version, and return the error for the node that writes or names it."""
        self.refused.add(version)
        return "the storage is out of order"

    @contextmanager
    def writing(self, attempt: str, part: str, node_id: int) -> Iterator[None]:
        """Held while a node writes a part: two writers at once would tear the file."""
        other = self._being_written.get((attempt, part))
        if other is not None:
            self._checkers.written_twice(attempt, part, other, node_id)
        self._being_written[attempt, part] = node_id
        try:
            yield
        finally:
            self._being_written.pop((attempt, part), None)

    def write(self, attempt: str, part: str) -> None:
        """A part is on storage, under the name of the attempt."""
        self._written.setdefault(attempt, set()).add(part)

    def commit(
        self, attempt: str, version: Version, shape: Shape, positions: tuple[Position, ...]
    ) -> None:
        """Give the files of an attempt their name."""
        parts = frozenset(self._written.get(attempt, ()))
        self._checkers.committed(version, shape, parts, positions)
        self.committed[version] = Committed(shape, parts, positions)

    def stored(self, prepared: Version) -> tuple[Stored, ...]:
        """The committed versions; only the prepared one has its positions (see NodeRestore)."""
        return tuple(
            Stored(
                version,
                entry.shape,
                entry.positions if version == prepared else (),
                entry.first_rank,
            )
            for version, entry in sorted(self.committed.items())
        )

    def has(self, version: Version, part: str) -> bool:
        entry = self.committed.get(version)
        return entry is not None and part in entry.parts
