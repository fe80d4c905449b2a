# SPDX-License-Identifier: Apache-2.0
"""The storage that all nodes share: what attempts have written, and what has its name."""

from dataclasses import dataclass

from holdfast.model.checkpoint import Shape, Stored, Version
from holdfast.model.dataset import Position
from holdfast.sim.checkers import Checkers
from holdfast.sim.clock import Clock


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint under its name."""

    shape: Shape
    parts: frozenset[str]
    positions: tuple[Position, ...]


class Storage:
    """A directory of checkpoints."""

    def __init__(self, clock: Clock, checkers: Checkers) -> None:
        self._clock = clock
        self._checkers = checkers
        self._written: dict[str, set[str]] = {}
        self.committed: dict[Version, Committed] = {}
        self.broken_until = 0.0

    @property
    def is_broken(self) -> bool:
        return self._clock.now < self.broken_until

    def write(self, attempt: str, part: str) -> None:
        """A part is on storage, under the name of the attempt."""
        self._written.setdefault(attempt, set()).add(part)

    def commit(
        self, attempt: str, version: Version, shape: Shape, positions: tuple[Position, ...]
    ) -> None:
        """Give what an attempt has written its name."""
        parts = frozenset(self._written.get(attempt, ()))
        self._checkers.committed(version, shape, parts, positions)
        self.committed[version] = Committed(shape, parts, positions)

    def stored(self, prepared: Version) -> tuple[Stored, ...]:
        """What is committed; with its positions only what was prepared (see NodeRestore)."""
        return tuple(
            Stored(version, entry.shape, entry.positions if version == prepared else ())
            for version, entry in sorted(self.committed.items())
        )

    def has(self, version: Version, part: str) -> bool:
        entry = self.committed.get(version)
        return entry is not None and part in entry.parts
