# SPDX-License-Identifier: Apache-2.0
"""The order in which parts go to other nodes, and what happens when these have no room."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.replicas import (
    Deliveries,
    Outcome,
    Transfer,
    is_due,
    parity_deliveries,
    replica_deliveries,
)
from holdfast.model.checkpoint import Version, rank_part
from holdfast.model.parity import Block
from holdfast.protocol.checkpoints import Peer

PARTS = (rank_part(0), rank_part(1))
PEERS = tuple(Peer(number, f"10.0.0.{number}:1") for number in range(1, 5))


def version(step: int) -> Version:
    return Version(1, step)


def run(
    queue: Deliveries, takes: Callable[[Transfer], bool]
) -> tuple[list[Transfer], list[Outcome]]:
    """Carry out everything; a peer takes a part or has no room."""
    sent: list[Transfer] = []
    outcomes: list[Outcome] = []
    while True:
        while (outcome := queue.finished()) is not None:
            outcomes.append(outcome)
        transfer = queue.next()
        if transfer is None:
            return sent, outcomes
        assert queue.next() == transfer
        if takes(transfer):
            sent.append(transfer)
            queue.accepted(transfer)
        else:
            queue.failed(transfer, "it has no room")


def test_every_part_gets_its_copies_on_the_preferred_peers() -> None:
    queue = Deliveries()
    queue.add(version(0), replica_deliveries(PARTS, PEERS, copies=2))
    sent, outcomes = run(queue, lambda _: True)
    assert [(transfer.part, transfer.peer) for transfer in sent] == [
        (part, peer) for part in PARTS for peer in PEERS[:2]
    ]
    assert outcomes == [Outcome(version(0), is_safe=True)]
    assert queue.versions == ()


def test_versions_leave_in_order_and_none_is_skipped() -> None:
    queue = Deliveries()
    for step in (5, 6, 7):
        queue.add(version(step), replica_deliveries(PARTS, PEERS, copies=1))
    assert queue.versions == (version(5), version(6), version(7))
    sent, outcomes = run(queue, lambda _: True)
    assert [transfer.version.step for transfer in sent] == [5, 5, 6, 6, 7, 7]
    assert [outcome.version.step for outcome in outcomes] == [5, 6, 7]


def test_the_next_version_waits_until_the_outcome_was_taken() -> None:
    queue = Deliveries()
    queue.add(version(1), replica_deliveries(PARTS[:1], PEERS, copies=1))
    queue.add(version(2), replica_deliveries(PARTS[:1], PEERS, copies=1))
    first = queue.next()
    assert first is not None
    queue.accepted(first)
    assert queue.next() is None
    assert queue.finished() == Outcome(version(1), is_safe=True)
    following = queue.next()
    assert following is not None
    assert following.version == version(2)


def test_a_peer_without_room_is_passed_over() -> None:
    queue = Deliveries()
    queue.add(version(0), replica_deliveries(PARTS, PEERS, copies=2))
    sent, outcomes = run(queue, lambda transfer: transfer.peer != PEERS[0])
    assert {transfer.peer for transfer in sent} == set(PEERS[1:3])
    assert outcomes == [Outcome(version(0), is_safe=True)]


def test_fewer_copies_than_wanted_are_told() -> None:
    queue = Deliveries()
    queue.add(version(9), replica_deliveries(PARTS, PEERS, copies=2))
    _, outcomes = run(queue, lambda transfer: transfer.peer == PEERS[3])
    (outcome,) = outcomes
    assert outcome.is_safe
    assert outcome.problem.startswith("rank-00000 of step 9 is on 1 of 2 other nodes: it has no")


def test_a_version_of_which_one_part_found_no_place_is_not_safe() -> None:
    """Prior art: replica_count 1 means no copy at all, and nobody says so."""
    queue = Deliveries()
    queue.add(version(9), replica_deliveries(PARTS, PEERS, copies=1))
    _, (outcome,) = run(queue, lambda transfer: transfer.part == PARTS[0])
    assert not outcome.is_safe
    assert outcome.problem.startswith("rank-00001 of step 9 is on 0 of 1 other nodes")


def test_alone_nothing_is_safe() -> None:
    queue = Deliveries()
    queue.add(version(0), replica_deliveries(PARTS, (), copies=1))
    queue.add(version(1), ())
    _, outcomes = run(queue, lambda _: True)
    assert [outcome.is_safe for outcome in outcomes] == [False, False]
    assert "there are no more nodes" in outcomes[0].problem


def test_what_was_given_up_is_not_sent_and_late_reports_do_no_harm() -> None:
    queue = Deliveries()
    queue.add(version(0), replica_deliveries(PARTS, PEERS, copies=1))
    queue.add(version(1), replica_deliveries(PARTS, PEERS, copies=1))
    under_way = queue.next()
    assert under_way is not None
    queue.give_up(version(0))
    queue.accepted(under_way)
    sent, outcomes = run(queue, lambda _: True)
    assert {transfer.version for transfer in sent} == {version(1)}
    assert [outcome.version for outcome in outcomes] == [version(1)]


def test_new_peers_begin_anew() -> None:
    queue = Deliveries()
    queue.add(version(0), replica_deliveries(PARTS, PEERS, copies=1))
    old = queue.next()
    assert old is not None
    queue.add(version(0), replica_deliveries(PARTS, PEERS[2:], copies=1))
    queue.accepted(old)  # To a node that may be gone: it does not count.
    sent, outcomes = run(queue, lambda _: True)
    assert {transfer.peer for transfer in sent} == {PEERS[2]}
    assert len(sent) == 2
    assert outcomes == [Outcome(version(0), is_safe=True)]


def test_a_stripe_of_every_part_goes_to_every_other_member() -> None:
    group = [
        Peer(7, "a:1", first_rank=4, nproc=2),
        Peer(3, "b:1", first_rank=0, nproc=1),
        Peer(5, "c:1", first_rank=1, nproc=3),
    ]
    deliveries = parity_deliveries(group, node_id=7)
    assert [(d.part, d.candidates[0].node_id, d.block) for d in deliveries] == [
        (rank_part(4), 3, Block(1, (4, 0, 1))),
        (rank_part(4), 5, Block(2, (4, 0, 1))),
        (rank_part(5), 3, Block(1, (5, -1, 2))),
        (rank_part(5), 5, Block(2, (5, -1, 2))),
    ]
    queue = Deliveries()
    queue.add(version(0), deliveries)
    _, (outcome,) = run(queue, lambda transfer: transfer.peer.node_id != 5)
    assert not outcome.is_safe


@given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_it_always_ends_and_says_what_is_so(rooms: list[list[bool]], copies: int) -> None:
    """For any pattern of room: as many copies as there can be, none twice, and an honest end."""
    parts = [rank_part(number) for number in range(len(rooms))]
    peers = [Peer(number, "x:1") for number in range(6)]
    queue = Deliveries()
    queue.add(version(0), replica_deliveries(parts, peers, copies))

    def takes(transfer: Transfer) -> bool:
        room = rooms[parts.index(transfer.part)]
        return transfer.peer.node_id < len(room) and room[transfer.peer.node_id]

    sent, (outcome,) = run(queue, takes)
    assert len(set(sent)) == len(sent)
    counts = [sum(transfer.part == part for transfer in sent) for part in parts]
    assert counts == [min(copies, sum(room)) for room in rooms]
    assert outcome.is_safe == (min(counts) > 0)
    assert bool(outcome.problem) == (min(counts) < copies)


def test_which_steps_go_to_other_nodes() -> None:
    assert [step for step in range(7) if is_due(step, 3)] == [0, 3, 6]
    assert is_due(2**24 + 1, 1)
