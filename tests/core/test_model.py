# SPDX-License-Identifier: Apache-2.0
"""The nouns: phases, failure classes, specs and the order of a world."""

import itertools

import pytest

from holdfast.model.errors import UsageError
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.job import NODE_RELAUNCHES, WORKER_RESTARTS, JobSpec
from holdfast.model.node import ExitReason, Phase, classify_exit
from holdfast.model.world import Member, World, in_order


def member(rank: int, topology: str = "", nproc: int = 1) -> Member:
    return Member(
        node_id=NodeId(100 + rank),
        incarnation=Incarnation(1),
        node_rank=NodeRank(rank),
        nproc=nproc,
        host="h",
        store_port=1,
        topology=topology,
    )


def test_every_pair_of_phases_has_an_answer_and_none_leads_back() -> None:
    order = list(Phase)
    for before, seen in itertools.product(Phase, Phase):
        after = before.after(seen)
        assert after in (before, seen)
        assert order.index(after) >= order.index(before)
        if before.is_final:
            assert after.is_final
            assert after in (before, Phase.GONE)


@pytest.mark.parametrize(
    ("before", "seen", "after"),
    [
        (Phase.INITIAL, Phase.PENDING, Phase.PENDING),
        (Phase.INITIAL, Phase.RUNNING, Phase.RUNNING),
        (Phase.INITIAL, Phase.FAILED, Phase.FAILED),
        (Phase.INITIAL, Phase.GONE, Phase.GONE),
        (Phase.PENDING, Phase.RUNNING, Phase.RUNNING),
        (Phase.PENDING, Phase.SUCCEEDED, Phase.SUCCEEDED),
        (Phase.PENDING, Phase.FAILED, Phase.FAILED),
        (Phase.RUNNING, Phase.SUCCEEDED, Phase.SUCCEEDED),
        (Phase.RUNNING, Phase.FAILED, Phase.FAILED),
        (Phase.PENDING, Phase.GONE, Phase.GONE),
        (Phase.RUNNING, Phase.GONE, Phase.GONE),
        (Phase.SUCCEEDED, Phase.GONE, Phase.GONE),
        (Phase.FAILED, Phase.GONE, Phase.GONE),
        (Phase.RUNNING, Phase.PENDING, Phase.RUNNING),
        (Phase.SUCCEEDED, Phase.FAILED, Phase.SUCCEEDED),
        (Phase.FAILED, Phase.RUNNING, Phase.FAILED),
        (Phase.GONE, Phase.RUNNING, Phase.GONE),
    ],
)
def test_phases_follow_the_table(before: Phase, seen: Phase, after: Phase) -> None:
    assert before.after(seen) is after


@pytest.mark.parametrize(
    ("code", "signal", "oom", "reason"),
    [
        (1, None, False, ExitReason.ERROR),
        (134, None, False, ExitReason.ERROR),
        (139, None, False, ExitReason.ERROR),
        (None, 6, False, ExitReason.ERROR),
        (None, 11, False, ExitReason.ERROR),
        (137, None, False, ExitReason.KILLED),
        (143, None, False, ExitReason.KILLED),
        (None, 9, False, ExitReason.KILLED),
        (None, 15, False, ExitReason.KILLED),
        (None, 1, False, ExitReason.KILLED),
        (None, 2, False, ExitReason.KILLED),
        (247, None, False, ExitReason.OOM),
        (137, None, True, ExitReason.OOM),
        (None, 9, True, ExitReason.OOM),
        (201, None, False, ExitReason.HARDWARE),
        (202, None, False, ExitReason.HARDWARE),
        (14, None, False, ExitReason.HARDWARE),
        (128, None, False, ExitReason.HARDWARE),
        (3, None, False, ExitReason.UNKNOWN),
        (None, None, False, ExitReason.UNKNOWN),
    ],
)
def test_exits_are_classified(
    code: int | None, signal: int | None, oom: bool, reason: ExitReason
) -> None:
    assert classify_exit(code, signal, oom=oom) is reason


@pytest.mark.parametrize("budgets", [WORKER_RESTARTS, NODE_RELAUNCHES])
def test_every_class_of_failure_has_a_budget(budgets: dict[ExitReason, int]) -> None:
    assert set(budgets) == set(ExitReason)


def test_the_default_spec_is_valid_and_specs_share_no_budget() -> None:
    one, other = JobSpec(), JobSpec()
    one.validate()
    one.worker_restarts[ExitReason.OOM] = 99
    assert other.worker_restarts[ExitReason.OOM] == WORKER_RESTARTS[ExitReason.OOM] == 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (JobSpec(min_nodes=0), "at least 1 node"),
        (JobSpec(min_nodes=3, max_nodes=2), "below min nodes"),
        (JobSpec(node_unit=0), "node unit must be at least 1"),
        (JobSpec(max_nodes=2, node_unit=3), "no world could ever form"),
        (JobSpec(beat_s=20.0), "must be longer than beat_s"),
        (JobSpec(lease_s=1.0), "below silence_s"),
    ],
)
def test_an_impossible_spec_is_refused(spec: JobSpec, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        spec.validate()


def test_ten_nodes_over_three_switches() -> None:
    members = [member(rank, f"switch-{rank % 3}") for rank in range(10)]
    for shuffled in (members, members[::-1], members[5:] + members[:5]):
        assert [m.node_rank for m in in_order(shuffled)] == [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]


def test_nodes_without_a_topology_stay_in_rank_order() -> None:
    assert [m.node_rank for m in in_order([member(2), member(0), member(1)])] == [0, 1, 2]
    mixed = [member(0, "x"), member(1), member(2, "x"), member(3)]
    assert [m.node_rank for m in in_order(mixed)] == [0, 2, 1, 3]


def test_ranks_follow_the_order_and_the_sizes() -> None:
    members = (member(0, nproc=2), member(1, nproc=8), member(2, nproc=1))
    world = World(round=Round(1), generation=Generation(1), members=members)
    assert world.size == 11
    assert world.rank_offsets() == {100: 0, 101: 2, 102: 10}
