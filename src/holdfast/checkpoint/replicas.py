# SPDX-License-Identifier: Apache-2.0
"""What goes to which other node: decided here, sent by agent/vault/copies.py."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.model.checkpoint import rank_part
from holdfast.model.parity import ABSENT, Block, blocks_of
from holdfast.protocol.checkpoints import Peer


@dataclass(frozen=True, slots=True)
class Transfer:
    """One part, or a stripe of it, that goes to one node at every due step."""

    part: str
    peer: Peer
    block: Block | None = None
    """The parity block that the part's stripe is for; None: the whole part goes."""


def is_due(step: int, every: int) -> bool:
    """Whether a step goes to other nodes. The same on every node, without talking about it."""
    return step % max(1, every) == 0


def replica_transfers(parts: Iterable[str], peers: Sequence[Peer]) -> tuple[Transfer, ...]:
    """Every part to each of the peers."""
    return tuple(Transfer(part, peer) for part in parts for peer in peers)


def parity_transfers(group: Sequence[Peer], node_id: int) -> tuple[Transfer, ...]:
    """A stripe of every part of this node to each other member of its parity group."""
    place = next((i for i, peer in enumerate(group) if peer.node_id == node_id), -1)
    if place < 0:
        return ()
    members = [range(peer.first_rank, peer.first_rank + peer.nproc) for peer in group]
    return tuple(
        Transfer(rank_part(ranks[place]), peer, Block(keeper, ranks))
        for ranks in blocks_of(members)
        if ranks[place] != ABSENT
        for keeper, peer in enumerate(group)
        if keeper != place
    )
