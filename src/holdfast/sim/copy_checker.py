# SPDX-License-Identifier: Apache-2.0
"""Invariants of copies on other nodes: a version that the ledger calls safe survives the loss of
one node of the world, unless it rotted or could not be read."""

from collections.abc import Callable

from holdfast.model.checkpoint import Version


class CopyChecker:
    """Knows which nodes have copied which versions, and which machines lost their memory."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        #: By round: how many nodes it has, and on which machines they are.
        self._sizes: dict[int, int] = {}
        self._members: dict[int, set[str]] = {}
        self._copied: dict[tuple[int, Version], set[str]] = {}
        self._safe: tuple[int, Version] | None = None
        #: Machines that have lost their memory since something was safe.
        self._lost: set[str] = set()
        self._rotten: set[Version] = set()
        self._unreadable: set[int] = set()
        self.safe_restores = 0

    def began(self, round_number: int, size: int, place: str) -> None:
        """A node begins a round."""
        self._sizes[round_number] = size
        self._members.setdefault(round_number, set()).add(place)

    def copied(self, round_number: int, version: Version, place: str) -> None:
        """A node has its parts of a version on other nodes."""
        self._copied.setdefault((round_number, version), set()).add(place)

    def safe(self, round_number: int, version: Version) -> None:
        """The ledger says that every node of the round has its copies on other nodes."""
        size, copied = self._sizes[round_number], len(self._copied[round_number, version])
        if copied != size:
            self._fail(f"{version} is called safe when {copied} of {size} nodes have copied it")
        if self._safe is None or self._safe < (round_number, version):
            self._safe = (round_number, version)
            self._lost.clear()

    def memory_lost(self, place: str) -> None:
        self._lost.add(place)

    def rotted(self, version: Version) -> None:
        self._rotten.add(version)

    def has_rotted(self, version: Version) -> bool:
        return version in self._rotten

    def unreadable(self, round_number: int) -> None:
        """A node could not get a copy in this round: the restore may pass over it."""
        self._unreadable.add(round_number)

    def forgotten(self) -> None:
        """A new master does not know what was safe."""
        self._safe = None

    def restored(self, round_number: int, version: Version) -> None:
        """All ranks go on from this version: it is not older than the safe version."""
        if self._safe is None:
            return
        (in_round, safe), self._safe = self._safe, None
        members = self._members[in_round]
        gone = (members - self._members[round_number]) | (members & self._lost)
        if len(gone) > 1 or safe in self._rotten or round_number in self._unreadable:
            return
        self.safe_restores += 1
        if version < safe:
            self._fail(f"{version} is restored, but {safe} was safe and {len(gone)} nodes are gone")
