# SPDX-License-Identifier: Apache-2.0
"""Who is there, as the ledger of checkpoints sees it. Nothing here is durable."""

from holdfast.core.job.checkpoints.placement import Ring
from holdfast.model.checkpoint import SHARED, rank_of
from holdfast.model.ids import NodeId, Round
from holdfast.model.world import Member, World
from holdfast.protocol.checkpoints import Peer


class Crew:
    """The present world, and the nodes that can be told something."""

    def __init__(self) -> None:
        self.world: World | None = None
        #: Whether this master began with a world of an earlier one: what its nodes told that one
        #: and need not tell again is not known.
        self.began_with_world = False
        #: Nodes with a stream.
        self.present: set[NodeId] = set()
        #: Nodes without one that may come back.
        self.absent: set[NodeId] = set()
        #: Nodes that are not lost, also while their stream is broken: their memory is still there.
        self._known: dict[NodeId, Member] = {}
        #: The group rank of each member of the world.
        self.index: dict[NodeId, int] = {}
        #: The first worker rank of each.
        self._first_rank: dict[NodeId, int] = {}
        self._ring: Ring | None = None
        #: Drawn by the driver at every start of a master: names given out are never given again.
        self.nonce = ""
        self._given = 0

    def validate(self) -> None:
        """A node is here or away; who is here is known."""
        assert self.present.isdisjoint(self.absent), (self.present, self.absent)
        assert self.present <= self._known.keys(), self.present

    @property
    def round(self) -> Round:
        return Round(0) if self.world is None else self.world.round

    @property
    def ring(self) -> Ring:
        """Which node keeps the copies of which. Made on request: many worlds need none."""
        if self._ring is None:
            self._ring = Ring(() if self.world is None else self.world.members)
        return self._ring

    def found(self, world: World) -> None:
        """A restarted master knows this world, but not yet who of it is still there."""
        self.began_with_world = True
        self._is_now(world)

    def formed(self, world: World) -> None:
        """Only nodes that are there become members of a world."""
        self._is_now(world)
        self.present.update(self.index)

    def _is_now(self, world: World) -> None:
        self.world = world
        self.index = {member.node_id: i for i, member in enumerate(world.members)}
        self._first_rank = world.rank_offsets()
        self._ring = None
        self._known.update((member.node_id, member) for member in world.members)

    def expected(self, node_id: NodeId) -> None:
        """The node is not there now, but is not lost either."""
        self.present.discard(node_id)
        self.absent.add(node_id)

    def arrived(self, member: Member) -> None:
        self.present.add(member.node_id)
        self.absent.discard(member.node_id)
        self._known[member.node_id] = member

    def lost(self, node_id: NodeId) -> None:
        self.present.discard(node_id)
        self.absent.discard(node_id)
        self._known.pop(node_id, None)

    def is_current(self, node_id: NodeId, round_number: int) -> bool:
        """Whether a node speaks of the present round, and is part of it.

        A node that has said it leaves may still ask for something, and would not see it through.
        """
        return round_number == self.round and node_id in self.index and node_id in self._known

    def outsiders(self) -> list[NodeId]:
        """Nodes that are there and have no place in the world."""
        return sorted(self.present - self.index.keys())

    def place(self, node_id: NodeId) -> tuple[int, int]:
        """Sorts nodes: members by group rank, then the others."""
        return self.index.get(node_id, len(self.index)), node_id

    def runs(self, node_id: NodeId, part: str) -> bool:
        """Whether this part belongs to a rank that the node runs now."""
        if self.world is None or part == SHARED or node_id not in self.index:
            return False
        first = self._first_rank[node_id]
        return first <= rank_of(part) < first + self.world.members[self.index[node_id]].nproc

    def address(self, node_id: NodeId) -> str:
        """Where the node serves parts of checkpoints, as in `Peer.address`; empty if nowhere."""
        member = self._known.get(node_id)
        if member is None or not member.peer_port:
            return ""
        host = f"[{member.host}]" if ":" in member.host else member.host
        address = f"{host}:{member.peer_port}"
        return f"{address}#{member.peer_certificate}" if member.peer_certificate else address

    def node_rank(self, node_id: NodeId) -> int:
        """What people call this node; -1 if it is not known."""
        member = self._known.get(node_id)
        return -1 if member is None else member.node_rank

    def peers(self, members: list[Member]) -> tuple[Peer, ...]:
        """These members of the world as others reach them, without those that cannot be reached."""
        return tuple(
            Peer(member.node_id, address, self._first_rank[member.node_id], member.nproc)
            for member in members
            if (address := self.address(member.node_id))
        )

    def next_number(self) -> int:
        """A number that this master has not given out yet."""
        self._given += 1
        return self._given

    def new_attempt(self) -> str:
        """A name that no attempt had before."""
        return f"{self.nonce}-{self.round}-{self.next_number()}"

    def is_ours(self, attempt: str) -> bool:
        """Whether this master gave the attempt its name, and not one before it."""
        return attempt.startswith(f"{self.nonce}-")
