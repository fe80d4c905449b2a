# SPDX-License-Identifier: Apache-2.0
"""The journal port: where records survive the master."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class Entry(Struct, frozen=True):
    """One durable record: its job time, the wall clock when it was written, and its bytes."""

    at_s: float
    wall_s: float
    payload: bytes


class Journal(Protocol):
    """An append-only log with snapshots, owned by one master at a time.

    Guarantees: `append` returns only when all its entries are durable together (all or none);
    `load` returns what every returned `append` wrote, in order; a second owner of the same
    journal is refused while the first lives. `append` and `compact` raise DiskFullError if there is
    no room: then nothing has changed, and the same call may be made again. Not promised: any limit
    on how long `append` takes.
    """

    def load(self) -> list[Entry]:
        """Everything that rebuilds the state: the newest snapshot, then what follows it."""

    def end(self) -> int:
        """The number of the last entry that is durable: it rises with each, snapshots included, and
        never goes back, even when another master takes over the journal."""

    def since_snapshot(self) -> tuple[int, int]:
        """How many entries, and how many bytes, follow the newest snapshot: those of earlier
        masters too."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Make these durable, together. Called from one thread at a time."""

    def compact(self, snapshot: Sequence[Entry]) -> None:
        """Replace everything appended so far by `snapshot`, atomically."""

    def close(self) -> None:
        """Give the journal up. Idempotent."""
