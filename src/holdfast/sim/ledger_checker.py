# SPDX-License-Identifier: Apache-2.0
"""Invariants of the two ledgers in a large job, in a form that is cheap for 10,000 ranks.

The model of a version is the samples it was trained on: those of the restored version, and those
that every rank consumed in its lineage before it saved. A rank's reading is a list that only grows,
so a version is stored as the length of each of these lists.
"""

from collections import defaultdict
from itertools import pairwise

from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.model.dataset import Position
from holdfast.sim.checkers import Violation

Extent = tuple[int, int]
"""Samples from the first number up to, but without, the second."""


class LedgerChecker:
    """Exactly once with respect to the model; no commit without all parts; no version goes back."""

    def __init__(self, shard_size: int) -> None:
        self._shard_size = shard_size
        #: By lineage: samples in its models before it began, and each rank's samples since.
        self._bases: dict[int, list[Extent]] = {}
        self._read: dict[int, defaultdict[int, list[Extent]]] = {}
        #: By version and rank: how much of the rank's reading is in the version.
        self._saved: dict[Version, dict[int, int]] = {}
        self._written: defaultdict[str, set[str]] = defaultdict(set)
        #: By version: the nodes that have copied it to other nodes.
        self._copied: defaultdict[Version, set[int]] = defaultdict(set)
        self.committed: dict[Version, tuple[Shape, tuple[Position, ...]]] = {}
        self.restores = self.samples = 0

    def consumed(self, lineage: int, rank: int, begin: int, end: int) -> None:
        self._read[lineage][rank].append((begin, end))
        self.samples += end - begin

    def saved(self, version: Version, rank: int) -> None:
        ranks = self._saved.setdefault(version, {})
        ranks[rank] = len(self._read[version.lineage][rank])

    def copied(self, version: Version, node_id: int) -> None:
        self._copied[version].add(node_id)

    def safe(self, version: Version, nodes: int) -> None:
        """The ledger says that all `nodes` nodes have copied a version."""
        if len(self._copied[version]) != nodes:
            copied = len(self._copied[version])
            raise Violation(f"{version} is called safe when {copied} of {nodes} have copied it")

    def written(self, attempt: str, parts: tuple[str, ...]) -> None:
        self._written[attempt].update(parts)

    def commit(
        self, attempt: str, version: Version, shape: Shape, positions: tuple[Position, ...]
    ) -> None:
        """A checkpoint gets its name: all parts are there, and its data position fits its model."""
        missing = set(shape.parts()) - self._written.pop(attempt, set())
        if missing:
            raise Violation(f"{version} is committed without {min(missing)}")
        if version < max(self.committed, default=NONE):
            raise Violation(f"{version} is committed after {max(self.committed)}")
        self._check_position(version, positions)
        self.committed[version] = (shape, positions)

    def _check_position(self, version: Version, positions: tuple[Position, ...]) -> None:
        """Every sample that the ledger has dealt is either in the model or open, never both."""
        if len(positions) != 1:
            raise Violation(f"{version} is committed without saying how far its data were")
        (position,) = positions
        rest = [(piece.begin, piece.end) for piece in position.open]
        whole = _union([*self._model(version), *rest], version)
        dealt = position.cut[0] * self._shard_size
        if whole != ([(0, dealt)] if dealt else []):
            raise Violation(f"{version} lost samples: {whole[:2]} of {dealt} that were dealt")

    def restored(self, version: Version, lineage: int) -> None:
        """All ranks go on from this version, under a new lineage."""
        newest = max(self.committed, default=NONE)
        if version < newest:
            raise Violation(f"{version} is restored, but {newest} is committed")
        if version != NONE and version not in self._saved:
            raise Violation(f"{version} is restored, which nobody saved or which is void")
        self.restores += version != NONE
        self._bases[lineage] = [] if version == NONE else self._model(version)
        self._read[lineage] = defaultdict(list)
        # Newer versions are void: no rank may restore one any more.
        self._saved = {one: ranks for one, ranks in self._saved.items() if one <= version}

    def _model(self, version: Version) -> list[Extent]:
        """The samples a version was trained on; fails if one is there twice."""
        read = self._read[version.lineage]
        own = [one for rank, many in self._saved[version].items() for one in read[rank][:many]]
        return _union([*self._bases[version.lineage], *own], version)


def _union(extents: list[Extent], version: Version) -> list[Extent]:
    """The same samples in as few extents as possible."""
    ordered = sorted(extent for extent in extents if extent[0] < extent[1])
    for one, other in pairwise(ordered):
        if other[0] < one[1]:
            raise Violation(f"sample {other[0]} is twice in the model of {version}, or left over")
    joined: list[Extent] = []
    for begin, end in ordered:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
