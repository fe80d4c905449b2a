# SPDX-License-Identifier: Apache-2.0
"""What goes to which other node."""

from holdfast.checkpoint.replicas import (
    Transfer,
    is_due,
    parity_transfers,
    replica_transfers,
)
from holdfast.model.checkpoint import rank_part
from holdfast.model.parity import Block
from holdfast.protocol.checkpoints import Peer

PARTS = (rank_part(0), rank_part(1))
PEERS = tuple(Peer(number, f"10.0.0.{number}:1") for number in range(1, 3))


def test_every_part_goes_to_every_peer() -> None:
    """Prior art: replica_count 1 means no copy at all, and nobody says so."""
    assert replica_transfers(PARTS, PEERS[:1]) == tuple(Transfer(p, PEERS[0]) for p in PARTS)
    both = replica_transfers(PARTS, PEERS)
    assert [(transfer.part, transfer.peer) for transfer in both] == [
        (part, peer) for part in PARTS for peer in PEERS
    ]
    assert replica_transfers(PARTS, ()) == ()


def test_a_stripe_of_every_part_goes_to_every_other_member() -> None:
    group = [
        Peer(7, "a:1", first_rank=4, nproc=2),
        Peer(3, "b:1", first_rank=0, nproc=1),
        Peer(5, "c:1", first_rank=1, nproc=3),
    ]
    transfers = parity_transfers(group, node_id=7)
    assert [(one.part, one.peer.node_id, one.block) for one in transfers] == [
        (rank_part(4), 3, Block(1, (4, 0, 1))),
        (rank_part(4), 5, Block(2, (4, 0, 1))),
        (rank_part(5), 3, Block(1, (5, -1, 2))),
        (rank_part(5), 5, Block(2, (5, -1, 2))),
    ]
    assert parity_transfers(group, node_id=8) == ()


def test_which_steps_go_to_other_nodes() -> None:
    assert [step for step in range(7) if is_due(step, 3)] == [0, 3, 6]
    assert is_due(2**24 + 1, 1)
