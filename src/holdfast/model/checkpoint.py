# SPDX-License-Identifier: Apache-2.0
"""The nouns of checkpoints: what is saved, by whom, and which of two is newer.

A checkpoint of a step consists of *parts*: one per rank, and one that is *shared* when all ranks
hold the same model. Which parts there must be is the checkpoint's *shape*: the workers that save
declare it, and it is never derived from the parts that are found.

A step number alone does not name a state: after a rollback the same step is reached again. Each
world that begins to save gets a higher *lineage*; a *version* is a step of a lineage, and the newer
of two versions has the higher lineage, then the higher step.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from holdfast.model.dataset import Position

SHARED = "shared"
"""The part that is the same on every rank; any one copy of it serves all."""


def rank_part(rank: int) -> str:
    """The name of the part that belongs to one rank."""
    return f"rank-{rank:05d}"


def rank_of(part: str) -> int:
    """The rank that a part belongs to."""
    return int(part.removeprefix("rank-"))


class Version(Struct, frozen=True, array_like=True, order=True):
    """Names one saved state. Ordered: the greater is the newer."""

    lineage: int
    step: int


NONE = Version(-1, -1)
"""No state at all; older than every version."""


class Shape(Struct, frozen=True, array_like=True):
    """Which parts a checkpoint has."""

    world_size: int
    shared: bool
    """True when the model is the same on every rank. Then the shared part must not be lost. A rank
    whose own part is lost takes another rank's, so at least one rank's part must be left."""

    def parts(self) -> Iterator[str]:
        """Every part that there must be."""
        if self.shared:
            yield SHARED
        for rank in range(self.world_size):
            yield rank_part(rank)


class FileEntry(Struct, frozen=True, array_like=True):
    """One file of a part, as it is on storage."""

    name: str
    """Relative to the checkpoint's own directory; may have "/" in it, never ".."."""
    size: int
    digest: int
    """CRC-32C over the CRC-32Cs of the file's chunks: see checkpoint/digests.py."""
    part: str = ""
    """The part that the file belongs to: a reader of one part reads only the files of that part."""


class Holding(Struct, frozen=True, array_like=True):
    """A sealed part in the memory of a node."""

    version: Version
    shape: Shape
    part: str
    length: int
    """Bytes of its slot's data."""
    digest: int = -1
    """Over the slot's data; -1 while it has not been computed."""
    parity: bool = False
    """True for the XOR of other nodes' stripes: not the part itself, see checkpoint/parity.py."""


class Stored(Struct, frozen=True, array_like=True):
    """A committed checkpoint on storage."""

    version: Version
    shape: Shape
    positions: tuple[Position, ...] = ()
    """The positions that the datasets that follow the directory had when it was saved."""
    first_rank: int = 0
    """The lowest rank whose part is in it. Beside a shared part, parts of ranks may have been lost
    before they were written: a reader that tried one of those would give the checkpoint up."""


class Series(Struct, frozen=True, array_like=True):
    """Where the checkpoints of one Checkpointer go, what they are called, and how they are kept."""

    directory: str
    """An absolute path, or a URL that fsspec knows. It must be the same storage on every node."""
    pattern: str = "step-{step:010d}"
    """The name of a checkpoint's directory."""
    tracker: str = "latest"
    """The file that names the newest committed checkpoint."""
    tracker_text: str = "{name}"
    """What stands in it: {name} and {step} are filled in."""
    keep_last: int = 0
    """How many of the newest are kept; 0 keeps all."""
    keep_every: int = 0
    """Steps that are multiples of this are kept beside the newest; 0: none."""
    replicas: int = 0
    """To how many other nodes every memory checkpoint is copied."""
    replicate_every: int = 1
    """Only steps that are multiples of this go to other nodes."""
    parity: int = 0
    """The size of a parity group: any one node of it can be lost; 0: no parity."""
    slots: int = 2
    """Memory slots per part: 1 loses the last checkpoint when a worker dies while copying."""
    breakpoint: bool = True
    """Whether the newest complete memory checkpoint goes to storage when a world breaks or ends."""

    def name(self, step: int) -> str:
        """What the checkpoint of a step is called."""
        return filled(self.pattern, step=step)

    def step_of(self, name: str) -> int | None:
        """The step of the checkpoint with this name; None if no checkpoint can have it.

        0 for the one name that a pattern without a step gives.
        """
        blank = next((one for one in _BLANK.finditer(self.pattern) if one[0] != "{name}"), None)
        if blank is None:
            return 0 if name == self.name(0) else None
        head = filled(self.pattern[: blank.start()], step=0)
        digits = _DIGITS.match(name, len(head))
        found = "" if digits is None else digits[0]
        # The longest number first. Shorter ones are for patterns with digits behind the step.
        for end in range(len(found), 0, -1):
            if self.name(int(found[:end])) == name:
                return int(found[:end])
        return None


_BLANK = re.compile(r"\{name\}|\{step(?::(?:0(\d{1,2}))?d?)?\}")
_DIGITS = re.compile(r"[0-9]+")


def filled(text: str, *, step: int, name: str = "") -> str:
    """A pattern with {name}, {step} and {step:010d} filled in, and nothing else.

    Not str.format, which follows attributes: a pattern may come from a stranger's checkpoint.
    """
    return _BLANK.sub(
        lambda blank: name if blank[0] == "{name}" else str(step).zfill(int(blank[1] or 0)), text
    )
