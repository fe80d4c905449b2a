# SPDX-License-Identifier: Apache-2.0
"""Parity groups: which node keeps which XOR, and what can be rebuilt from what is left.

The nodes of a group save one part each (nodes with several ranks: the n-th parts of all the nodes
together, for every n). The image of a part is cut into as many stripes as there are other members,
and every other member gets one of them. A member keeps the XOR of what it got, its *block*, and
never a stripe of its own part. So if any one member is lost, each of its stripes is in another
member's block, together with stripes of members that are still there.

A block is listed in an inventory as a Holding with `parity=True` whose `part` is the block's name.
The name says everything: "parity-1-of-0_4_8" is the block that the member at place 1 keeps for the
parts of the ranks 0, 4 and 8. A member that has no n-th part has an "x" in its place.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec import Struct

from holdfast.model.checkpoint import rank_part

ABSENT = -1
"""Stands for the rank of a member that has no part in this block's set."""

_PREFIX = "parity-"


class Block(Struct, frozen=True):
    """The XOR that one member of a group keeps for the others."""

    keeper: int
    """The place in the group of the member that keeps it."""
    ranks: tuple[int, ...]
    """The ranks whose parts the group protects, by place; ABSENT for a member without one."""

    @property
    def name(self) -> str:
        """What the block is called in inventories and in slots."""
        places = "_".join("x" if rank == ABSENT else str(rank) for rank in self.ranks)
        return f"{_PREFIX}{self.keeper}-of-{places}"

    @staticmethod
    def parse(name: str) -> "Block | None":
        """The block of this name; None if it is not the name of a block."""
        keeper, separator, places = name.removeprefix(_PREFIX).partition("-of-")
        ranks = places.split("_")
        if not (name.startswith(_PREFIX) and separator and _is_number(keeper)):
            return None
        if len(ranks) < 2 or int(keeper) >= len(ranks):
            return None
        if not all(rank == "x" or _is_number(rank) for rank in ranks):
            return None
        return Block(int(keeper), tuple(ABSENT if rank == "x" else int(rank) for rank in ranks))

    def contributors(self) -> Iterator[str]:
        """The parts that have a stripe in this block."""
        for place, rank in enumerate(self.ranks):
            if place != self.keeper and rank != ABSENT:
                yield rank_part(rank)

    def place_of(self, part: str) -> int:
        """The place of the member whose part this is; ValueError if it is no member's."""
        for place, rank in enumerate(self.ranks):
            if rank != ABSENT and rank_part(rank) == part:
                return place
        raise ValueError(f"{part} is not protected by {self.name}")

    def stripe_of(self, part: str) -> int:
        """Which stripe of this part's image is in this block."""
        return stripe_for(self.place_of(part), self.keeper, len(self.ranks))


def blocks_of(members: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """The sets of ranks that are protected together: the n-th ranks of all members, for every n.

    `members` has the ranks of every node of the group, in the group's order.
    """
    most = max((len(ranks) for ranks in members), default=0)
    return [tuple(ranks[n] if n < len(ranks) else ABSENT for ranks in members) for n in range(most)]


def stripe_for(member: int, keeper: int, size: int) -> int:
    """Which stripe of a member's image the keeper gets, in a group of `size`.

    Stripes are numbered 0 to size - 2; each of the other members gets a different one.
    """
    if member == keeper or not (0 <= member < size and 0 <= keeper < size):
        raise ValueError(f"member {member} gives nothing to {keeper} in a group of {size}")
    return (keeper - member - 1) % size


def rebuildable(parts: Collection[str], blocks: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The parts that are lost but can be rebuilt, each with all that is needed for it.

    `parts` and `blocks` are the names of everything that is left of one version, wherever it is.
    What is needed are the blocks of all other members, then the parts of all other members.
    """
    keepers: dict[tuple[int, ...], set[int]] = {}
    for name in blocks:
        block = Block.parse(name)
        if block is not None:
            keepers.setdefault(block.ranks, set()).add(block.keeper)
    found: dict[str, tuple[str, ...]] = {}
    for ranks, places in keepers.items():
        present = [place for place, rank in enumerate(ranks) if rank != ABSENT]
        lost = [place for place in present if rank_part(ranks[place]) not in parts]
        if len(lost) != 1:
            continue
        others = [place for place in range(len(ranks)) if place != lost[0]]
        if places.issuperset(others):
            needed = [Block(place, ranks).name for place in others]
            needed += [rank_part(ranks[place]) for place in present if place != lost[0]]
            found[rank_part(ranks[lost[0]])] = tuple(needed)
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
