# SPDX-License-Identifier: Apache-2.0
"""Which nodes keep copies for which: for any number of nodes and any topology."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.job.checkpoints.placement import Ring
from holdfast.model.ids import NodeId
from holdfast.model.world import Member
from tests.core.ledger import member

topologies = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=24)


def nodes(*topology: str) -> list[Member]:
    return [member(number, switch) for number, switch in enumerate(topology)]


def ids(members: list[Member]) -> list[int]:
    return [one.node_id for one in members]


def test_the_first_peer_stands_on_another_switch() -> None:
    members = nodes("a", "a", "a", "b", "b", "b")
    for one in members:
        assert Ring(members).replica_peers(one.node_id, 1)[0].topology != one.topology


def test_everybody_keeps_for_one_other_node() -> None:
    members = nodes("a", "a", "a", "b", "b", "b")
    keepers = Counter(Ring(members).replica_peers(one.node_id, 1)[0].node_id for one in members)
    assert set(keepers.values()) == {1}


def test_nodes_of_one_switch_keep_for_each_other_when_there_is_no_other() -> None:
    members = nodes("a", "a", "a")
    assert ids(Ring(members).replica_peers(members[0].node_id, 1)) == [1]


def test_who_is_passed_over_gets_nothing_and_elsewhere_still_comes_first() -> None:
    ring = Ring(nodes("a", "a", "b", "b"))
    assert ids(ring.replica_peers(NodeId(0), 2)) == [2, 3]
    assert ids(ring.replica_peers(NodeId(0), 2, [NodeId(2)])) == [3, 1]
    assert ids(ring.replica_peers(NodeId(0), 2, [NodeId(2), NodeId(3)])) == [1]


def test_a_lonely_node_has_no_peer() -> None:
    (alone,) = nodes("")
    assert Ring([alone]).replica_peers(alone.node_id, 2) == []
    assert Ring([alone]).parity_group(alone.node_id, 3) == []


@given(topologies, st.integers(1, 4))
def test_peers_are_others_and_elsewhere_comes_first(topology: list[str], replicas: int) -> None:
    members = nodes(*topology)
    assert sorted(ids(Ring(members).members)) == ids(members)
    for one in members:
        peers = Ring(members).replica_peers(one.node_id, replicas)
        assert one.node_id not in ids(peers)
        assert len(peers) == len(set(ids(peers)))
        assert len(peers) == min(replicas, len(members) - 1)
        beside = [bool(peer.topology) and peer.topology == one.topology for peer in peers]
        assert beside == sorted(beside)


@given(topologies, st.integers(2, 8))
def test_everybody_is_in_one_parity_group(topology: list[str], size: int) -> None:
    """The prior art's last group names ranks outside the world when the size does not divide."""
    members = nodes(*topology)
    groups = {tuple(ids(Ring(members).parity_group(one.node_id, size))) for one in members}
    if len(members) < 2:
        assert groups == {()}
        return
    for one in members:
        assert one.node_id in ids(Ring(members).parity_group(one.node_id, size))
    assert sorted(node for group in groups for node in group) == ids(members)
    for group in groups:
        assert min(size, len(members)) <= len(group) < max(2 * size, len(members) + 1)


@pytest.mark.parametrize(("count", "sizes"), [(5, [2, 3]), (6, [2, 2, 2]), (7, [2, 2, 3])])
def test_a_rest_is_spread_over_the_groups(count: int, sizes: list[int]) -> None:
    members = nodes(*[""] * count)
    groups = {tuple(ids(Ring(members).parity_group(one.node_id, 2))) for one in members}
    assert sorted(len(group) for group in groups) == sizes
