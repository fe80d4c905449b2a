# SPDX-License-Identifier: Apache-2.0
"""What a node's vault decides: when all its ranks have asked, and when a step is whole here.

The ranks of a node come one after the other, in any order, and some may die half-way. To the master
a node speaks with one voice: it asks once when all its ranks have asked, and a step counts as saved
here once every part that this node must have of it is sealed.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from holdfast.core.node.marks import Marks, merged
from holdfast.model.checkpoint import NONE, SHARED, Shape, Version, rank_of, rank_part
from holdfast.protocol.checkpoints import RestoreAsk

Caller = TypeVar("Caller")


@dataclass(frozen=True, slots=True)
class Turn:
    """What all ranks of the node together ask in one turn of a restore agreement."""

    prepared: Version
    fresh: bool
    step: int
    mixed: bool = False
    """Whether the ranks have different versions at hand: then the node has none."""


class RestoreMeeting(Generic[Caller]):
    """The ranks of one node on their way through the restore agreement of one round."""

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._asks: dict[int, tuple[Caller, RestoreAsk]] = {}
        self._is_asked = False

    @property
    def is_open(self) -> bool:
        """Whether any rank has asked and has no answer yet."""
        return bool(self._asks)

    def ask(self, caller: Caller, ask: RestoreAsk) -> Turn | None:
        """A rank asks; returns what to ask the master when it was the last one.

        A rank that asks again, because its connection broke, only changes which caller is answered.
        """
        self._asks[ask.local_rank] = (caller, ask)
        if self._is_asked or len(self._asks) < self._nproc:
            return None
        self._is_asked = True
        asks = [ask for _, ask in self._asks.values()]
        prepared = {ask.prepared for ask in asks}
        is_mixed = len(prepared) > 1
        steps = {ask.step for ask in asks}
        return Turn(
            # What one rank lacks, the node lacks.
            prepared=NONE if is_mixed else prepared.pop(),
            fresh=all(ask.fresh for ask in asks),
            step=steps.pop() if len(steps) == 1 else -1,
            mixed=is_mixed,
        )

    def disagreement(self) -> str:
        """Why the asks of the ranks do not fit together; empty if they do."""
        asks = [ask for _, ask in self._asks.values()]
        if len({ask.fresh for ask in asks}) > 1:
            return "some ranks call load and others save first: all must do the same"
        if len({ask.step for ask in asks}) > 1:
            steps = ", ".join(str(step) for step in sorted({ask.step for ask in asks}))
            return f"the ranks want to load different steps: {steps}"
        return ""

    def answered(self) -> list[Caller]:
        """The turn is over; returns the callers to answer."""
        callers = [caller for caller, _ in self._asks.values()]
        self._asks.clear()
        self._is_asked = False
        return callers


@dataclass(frozen=True, slots=True)
class SavedStep:
    """A version that has every part of this node sealed."""

    version: Version
    shape: Shape
    parts: tuple[str, ...]
    persist: bool
    follows: bool = False
    """Whether a rank of this node reads a dataset that follows the series."""
    marks: Mapping[int, Marks] = field(default_factory=dict)
    """By rank: how far each was in its datasets, with the marks of versions that were overtaken."""


@dataclass(slots=True)
class _Arriving:
    shape: Shape
    parts: set[str] = field(default_factory=set)
    persist: bool = False
    #: By rank, for ranks whose datasets follow the series.
    marks: dict[int, Marks] = field(default_factory=dict)


class SavedSteps:
    """Which parts of which versions have been sealed here, until a version is whole."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}
        self._arriving: dict[Version, _Arriving] = {}

    def rank_is(self, local_rank: int, rank: int) -> None:
        """A worker said which rank it has in the present round."""
        self._ranks[local_rank] = rank

    def own_parts(self, shape: Shape) -> tuple[str, ...]:
        """What this node must save of a version, in a fixed order."""
        shared = (SHARED,) if shape.shared else ()
        return (*shared, *(rank_part(rank) for rank in sorted(self._ranks.values())))

    def sealed(
        self,
        version: Version,
        shape: Shape,
        part: str,
        persist: bool,
        marks: Marks | None = None,
    ) -> SavedStep | None:
        """A part is sealed; returns the version when it is whole now.

        `marks`: how far its rank was in its data; None if it follows none.
        """
        arriving = self._arriving.setdefault(version, _Arriving(shape))
        arriving.parts.add(part)
        arriving.persist = arriving.persist or persist
        if marks is not None:
            arriving.marks[rank_of(part)] = marks
        own = self.own_parts(shape)
        if not arriving.parts.issuperset(own):
            return None
        marked = {rank: self._marks_up_to(version, rank) for rank in sorted(self._ranks.values())}
        del self._arriving[version]
        follows = bool(arriving.marks)
        return SavedStep(version, shape, own, arriving.persist, follows, marked)

    def _marks_up_to(self, version: Version, rank: int) -> Marks:
        """What a rank said of its data, at this version and at those that this one overtakes."""
        older = sorted(one for one in self._arriving if one <= version)
        return merged(self._arriving[one].marks.get(rank, ()) for one in older)

    def overtaken(self, by: Version) -> list[Version]:
        """Versions older than `by` that some rank never sealed: they will not be whole any more."""
        older = sorted(version for version in self._arriving if version < by)
        for version in older:
            del self._arriving[version]
        return older

    def begin_round(self) -> Iterable[Version]:
        """New workers, new ranks; returns the versions that will not be whole any more."""
        left = sorted(self._arriving)
        self._ranks.clear()
        self._arriving.clear()
        return left
