# SPDX-License-Identifier: Apache-2.0
"""A world: the nodes of one round, in order, with the ranks that follow from it."""

from msgspec import Struct

from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round


class Member(Struct, frozen=True, kw_only=True, array_like=True):
    """One node as it stands ready to be part of a world."""

    node_id: NodeId
    incarnation: Incarnation
    node_rank: NodeRank
    nproc: int
    host: str
    """The address at which other nodes reach this one's workers."""
    store_port: int
    """A port reserved on that host, on which worker rank 0 can serve the next round's store."""
    hosted_port: int = 0
    """A port on which a fresh store server listens already; 0 if there is none."""
    topology: str = ""
    """Where the node stands, e.g. its switch: nodes of equal topology are kept together."""
    peer_port: int = 0
    """Where its agent serves parts of checkpoints; 0 if nowhere."""
    peer_certificate: str = ""
    """The fingerprint of the only certificate that its agent shows there; empty without TLS."""


class World(Struct, frozen=True, kw_only=True, array_like=True):
    """An agreed set of members. Published once, never changed."""

    round: Round
    generation: Generation
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """The number of workers."""
        return sum(member.nproc for member in self.members)

    def rank_offsets(self) -> dict[NodeId, int]:
        """The first worker rank of each node."""
        offsets: dict[NodeId, int] = {}
        rank = 0
        for member in self.members:
            offsets[member.node_id] = rank
            rank += member.nproc
        return offsets


def in_order(members: list[Member]) -> list[Member]:
    """Lowest node rank first, but nodes that share a topology with an earlier one follow it.

    Rank 0's switch comes first, then the others as they are first met: neighbours in the ring
    are neighbours in the network wherever that is possible.
    """
    by_rank = sorted(members, key=lambda member: member.node_rank)
    first_met: dict[str, int] = {}
    for position, member in enumerate(by_rank):
        first_met.setdefault(member.topology or f"#{member.node_rank}", position)
    if len(first_met) == len(by_rank):
        return by_rank
    return sorted(
        by_rank,
        key=lambda member: (
            first_met[member.topology or f"#{member.node_rank}"],
            member.node_rank,
        ),
    )
