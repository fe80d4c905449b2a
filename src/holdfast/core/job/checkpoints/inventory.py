# SPDX-License-Identifier: Apache-2.0
"""What is where: every copy of every part that was reported, and what can be made of them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from holdfast.core.job.checkpoints.crew import Crew
from holdfast.model.checkpoint import (
    NONE,
    SHARED,
    Holding,
    Shape,
    Stored,
    Version,
    rank_of,
    rank_part,
)
from holdfast.model.ids import NodeId
from holdfast.model.parity import rebuildable
from holdfast.protocol.checkpoints import BadCopy, Source

ON_STORAGE = NodeId(-1)
"""The node id of a bad copy that is on storage, and in no node's memory."""

_NEAREST = NodeId(-2)
"""Among the stand-ins, the key of the lowest part in memory, on whichever node it is."""

NOTES_MAX = 8
"""More sentences than this are no help."""


class Inventory:
    """The copies in the memory of nodes and on storage, without those that turned out bad."""

    def __init__(
        self,
        held: Mapping[NodeId, Iterable[Holding]],
        stored: Iterable[Stored] = (),
        bad: Collection[BadCopy] = (),
    ) -> None:
        self._shapes: dict[Version, Shape] = {}
        #: By version and part: the nodes that hold it, in the order of `held`.
        self._copies: dict[Version, dict[str, dict[NodeId, Holding]]] = {}
        #: The versions on storage, each with the lowest rank whose part is there.
        self._stored: dict[Version, int] = {}
        self._bad = {(copy.version, copy.part, copy.node_id): copy.why for copy in bad}
        #: Parts that are lost but can be rebuilt, with what that takes; filled when asked for.
        self._rebuilt: dict[Version, dict[str, tuple[str, ...]]] = {}
        #: Which rank part stands in for a lost one; filled when asked for.
        self._stand_ins: dict[Version, dict[NodeId, str]] = {}
        for entry in stored:
            self._shapes.setdefault(entry.version, entry.shape)
            known = self._stored.get(entry.version, 0)
            self._stored[entry.version] = max(known, entry.first_rank)
        for node_id, holdings in held.items():
            for holding in holdings:
                self._add(node_id, holding)

    def _add(self, node_id: NodeId, holding: Holding) -> None:
        if (holding.version, holding.part, node_id) in self._bad:
            return
        self._shapes.setdefault(holding.version, holding.shape)
        copies = self._copies.setdefault(holding.version, {})
        copies.setdefault(holding.part, {})[node_id] = holding

    # ---- what there is --------------------------------------------------------------------------

    def shape(self, version: Version) -> Shape:
        return self._shapes.get(version, Shape(0, False))

    def without_position(self, known: Collection[Version]) -> set[Version]:
        """Versions that are in memory alone and whose data positions are not known."""
        return self._shapes.keys() - known - self._stored.keys()

    def highest_lineage(self) -> int:
        return max((version.lineage for version in self._shapes), default=-1)

    def newest(
        self,
        *,
        step: int = -1,
        passed_over: Collection[Version] = (),
        memory_only: bool = False,
        base: Version = NONE,
    ) -> Version:
        """The newest version that can be restored (of this step, if one is given); NONE if none.

        A version in which one rank's part must stand in for another's is passed over when memory
        holds every part of an older one: of the same lineage, or the `base` it began with. So a
        worker that dies while it copies, or a node that is lost while peers have its copies, costs
        a step or two, and no rank's data position or random state.
        """
        versions = [
            version
            for version in sorted(self._shapes, reverse=True)
            if version not in passed_over and step in (-1, version.step)
        ]
        for position, version in enumerate(versions):
            if next(self.lost(version, memory_only=memory_only), None) is None:
                # What is on storage, or was agreed on, is never given up for something older.
                kept = (one for one in versions[position:] if one in self._stored or one == base)
                floor = next(kept, NONE)
                older = [
                    one
                    for one in versions[position:]
                    if one.lineage == version.lineage or one == base
                ]
                whole = self._with_every_part(older, memory_only=memory_only)
                return whole if whole is not None and whole >= floor else version
        return NONE

    def _with_every_part(self, versions: Sequence[Version], *, memory_only: bool) -> Version | None:
        """The first that has every part, in memory or on storage. None if neither it nor any that
        follows it is whole in memory: storage alone may be far behind."""
        for position, version in enumerate(versions):
            parts = self.shape(version).parts()
            if not any(self._is_gone(version, part, memory_only=memory_only) for part in parts):
                return version if any(map(self._is_all_near, versions[position:])) else None
        return None

    def _is_all_near(self, version: Version) -> bool:
        return all(self._is_near(version, part) for part in self.shape(version).parts())

    def has_whole(self, version: Version) -> bool:
        """Whether memory holds every part of this version or of another of its lineage: to bring
        one with parts missing to storage would force every rank to restore that one."""
        lineage = [one for one in self._copies if one.lineage == version.lineage]
        return any(map(self._is_all_near, lineage))

    def lost(self, version: Version, *, memory_only: bool = False) -> Iterator[str]:
        """The parts that the version cannot be restored without and that have no copy left.

        If a part is shared, one rank's part stands in for another's (see `Shape`), but there must
        be one: without any, every rank would find its part nowhere.
        """
        shape = self.shape(version)
        if shape.shared and self._is_gone(version, SHARED, memory_only=memory_only):
            yield SHARED
        gone = (
            self._is_gone(version, rank_part(rank), memory_only=memory_only)
            for rank in range(shape.world_size)
        )
        if shape.shared:
            if all(gone):
                yield rank_part(0)
            return
        yield from (rank_part(rank) for rank, is_gone in enumerate(gone) if is_gone)

    def _is_gone(self, version: Version, part: str, *, memory_only: bool = False) -> bool:
        if self.holders(version, part):
            return False
        return memory_only or not (self._is_near(version, part) or self._is_stored(version, part))

    def _is_near(self, version: Version, part: str) -> bool:
        """Whether the part is in memory, or can be rebuilt from what is."""
        return bool(self.holders(version, part)) or part in self._rebuildable(version)

    def holders(self, version: Version, part: str) -> Collection[NodeId]:
        """The nodes that have a good copy in memory."""
        return self._copies.get(version, {}).get(part, {}).keys()

    def is_stored(self, version: Version) -> bool:
        """Whether the version is committed on storage, readable or not."""
        return version in self._stored

    def _is_stored(self, version: Version, part: str) -> bool:
        first_rank = self._stored.get(version)
        if first_rank is None or (part != SHARED and rank_of(part) < first_rank):
            return False
        return not (
            (version, part, ON_STORAGE) in self._bad or (version, "", ON_STORAGE) in self._bad
        )

    def _rebuildable(self, version: Version) -> dict[str, tuple[str, ...]]:
        found = self._rebuilt.get(version)
        if found is None:
            copies = self._copies.get(version, {})
            blocks = [part for part, nodes in copies.items() if _is_parity(nodes)]
            parts = copies.keys() - set(blocks)
            found = self._rebuilt[version] = rebuildable(parts, blocks) if blocks else {}
        return found

    # ---- where it is ----------------------------------------------------------------------------

    def sources(
        self, version: Version, parts: Iterable[str], node_id: NodeId, crew: Crew
    ) -> tuple[Source, ...]:
        """Where this node gets each of the parts from: the nearest place of all.

        A rank part that is nowhere is replaced by another rank's when a part is shared. A part that
        must be rebuilt has one source for each piece that the rebuild needs. Parts that cannot be
        had are left out.
        """
        found: list[Source] = []
        for asked in parts:
            places = self._places(version, asked, asked, node_id, crew)
            if not places and asked != SHARED and self.shape(version).shared:
                others = self._substitutes(version, node_id)
                tried = (self._places(version, asked, other, node_id, crew) for other in others)
                places = next(filter(None, tried), [])
            found += places
        return tuple(found)

    def _places(
        self, version: Version, asked: str, part: str, node_id: NodeId, crew: Crew
    ) -> list[Source]:
        copy = self._copy(version, asked, part, node_id, crew)
        if copy is not None:
            return [copy]
        ingredients = [
            self._copy(version, asked, needed, node_id, crew, kind="parity")
            for needed in self._rebuildable(version).get(part, ())
        ]
        reachable = [source for source in ingredients if source is not None]
        if reachable and len(reachable) == len(ingredients):
            return reachable
        if _is_of(self.shape(version), part) and self._is_stored(version, part):
            return [Source(asked, part, "storage")]
        return []

    def _copy(
        self, version: Version, asked: str, part: str, node_id: NodeId, crew: Crew, kind: str = ""
    ) -> Source | None:
        """The copy in memory that this node should read; None if it can reach none."""
        nodes = self._copies.get(version, {}).get(part, {})
        if node_id in nodes:
            chosen, where = node_id, "memory"
        else:
            reachable = [other for other in nodes if crew.address(other)]
            if not reachable:
                return None
            # Many nodes may want the same part: each begins with a different holder.
            chosen, where = reachable[crew.place(node_id)[0] % len(reachable)], "peer"
        holding = nodes[chosen]
        return Source(
            asked, part, kind or where, chosen, crew.address(chosen), holding.digest, holding.length
        )

    def _substitutes(self, version: Version, node_id: NodeId) -> Iterator[str]:
        """Rank parts that may stand in for a lost one: the one that this node holds, the lowest in
        memory, and the lowest on storage, in case this node cannot reach the one in memory."""
        found = self._stand_ins.get(version)
        if found is None:
            found = self._stand_ins[version] = self._find_stand_ins(version)
        if node_id in found:
            yield found[node_id]
        yield from (part for key, part in found.items() if key == _NEAREST)
        yield from (part for key, part in found.items() if key == ON_STORAGE)

    def _find_stand_ins(self, version: Version) -> dict[NodeId, str]:
        """The lowest rank part that each node holds, and under _NEAREST the lowest of all of them,
        under ON_STORAGE the lowest there."""
        found: dict[NodeId, str] = {}
        copies = self._copies.get(version, {})
        for part in sorted(copies):
            if part != SHARED and not _is_parity(copies[part]):
                for node_id in copies[part]:
                    found.setdefault(node_id, part)
        if found:
            found[_NEAREST] = min(found.values())
        ranks = (part for part in self.shape(version).parts() if part != SHARED)
        stored = next((part for part in ranks if self._is_stored(version, part)), None)
        if stored is not None:
            found[ON_STORAGE] = stored
        return found

    # ---- in words -------------------------------------------------------------------------------

    def notes(self, chosen: Version, *, step: int = -1) -> tuple[str, ...]:
        """Why versions newer than the chosen one were not taken, and what is lost of the chosen."""
        notes = [
            f"{where} cannot be used: {why}"
            for (version, part, node_id), why in sorted(self._bad.items())
            if (where := _copy_in_words(version, part, node_id))
        ]
        for version in sorted(self._shapes, reverse=True):
            if version <= chosen:
                break
            first = next((p for p in self.shape(version).parts() if self._is_gone(version, p)), "")
            if first and step in (-1, version.step):
                notes.append(f"step {version.step} is not whole: no copy of {first} is left")
        shape = self.shape(chosen)
        gone = [part for part in shape.parts() if self._is_gone(chosen, part)]
        if gone and shape.shared:
            whose = gone[0] if len(gone) == 1 else f"{gone[0]} and {len(gone) - 1} more"
            notes.append(f"{whose} of step {chosen.step}: lost, another rank's part stands in")
        return tuple(notes[:NOTES_MAX])


def _is_parity(nodes: Mapping[NodeId, Holding]) -> bool:
    return next(iter(nodes.values())).parity


def _is_of(shape: Shape, part: str) -> bool:
    """Whether a checkpoint of this shape has such a part; without listing them all."""
    if part == SHARED:
        return shape.shared
    digits = part.removeprefix("rank-")
    return digits.isdigit() and int(digits) < shape.world_size and part == rank_part(int(digits))


def _copy_in_words(version: Version, part: str, node_id: int) -> str:
    where = "on storage" if node_id == ON_STORAGE else f"in the memory of node id {node_id}"
    what = part or "everything"
    return f"{what} of step {version.step} {where}"
