# SPDX-License-Identifier: Apache-2.0
"""Which nodes keep copies for which: a ring in which neighbours fail for different reasons.

Nodes of equal topology (a switch, a rack) are likely to be lost together. In the ring they are
dealt out like cards: the first node of every topology, then the second of every one, and so on. So
the successors of a node stand elsewhere as long as there is an elsewhere, and each node keeps about
as much for others as any other does.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from holdfast.model.ids import NodeId
from holdfast.model.world import Member


class Ring:
    """The members of a world in the order in which copies go around; made once per world."""

    def __init__(self, members: Sequence[Member]) -> None:
        #: How many members stand at each place.
        self._at_site: Counter[str] = Counter()
        dealt: list[tuple[int, int, Member]] = []
        for position, member in enumerate(members):
            dealt.append((self._at_site[_site(member)], position, member))
            self._at_site[_site(member)] += 1
        self.members = [member for *_, member in sorted(dealt, key=lambda entry: entry[:2])]
        self._position = {member.node_id: i for i, member in enumerate(self.members)}

    def replica_peers(
        self, node_id: NodeId, replicas: int, passed_over: Collection[NodeId] = ()
    ) -> list[Member]:
        """The nodes that keep copies for this one: nodes elsewhere first, none `passed_over`."""
        start = self._position.get(node_id)
        if start is None or replicas < 1:
            return []
        size, site = len(self.members), _site(self.members[start])
        others_left = size - self._at_site[site]
        elsewhere: list[Member] = []
        beside: list[Member] = []
        for distance in range(1, size):
            is_enough = len(elsewhere) + len(beside) >= replicas
            if len(elsewhere) >= replicas or (others_left == 0 and is_enough):
                break
            member = self.members[(start + distance) % size]
            is_elsewhere = _site(member) != site
            others_left -= is_elsewhere
            if member.node_id not in passed_over:
                (elsewhere if is_elsewhere else beside).append(member)
        return [*elsewhere, *beside][:replicas]

    def parity_group(self, node_id: NodeId, size: int) -> list[Member]:
        """The parity group of this node, itself included, in order; empty if there can be none.

        When the size does not divide the number of nodes, the remainder is spread over the groups:
        some are larger, none is smaller, and no node is left without a group.
        """
        position, count = self._position.get(node_id), len(self.members)
        if position is None or size < 2 or count < 2:
            return []
        least, larger = divmod(count, max(1, count // size))
        # The first `larger` groups have one member more.
        in_larger = larger * (least + 1)
        if position < in_larger:
            start, length = position - position % (least + 1), least + 1
        else:
            start, length = position - (position - in_larger) % least, least
        return self.members[start : start + length]


def _site(member: Member) -> str:
    """The place whose nodes fail together; a node that names none stands alone."""
    return member.topology or f"#{member.node_id}"
