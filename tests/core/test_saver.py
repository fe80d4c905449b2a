# SPDX-License-Identifier: Apache-2.0
"""The decisions of a node's vault: one voice for all ranks, and steps that are whole or nothing."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.node.marks import merged
from holdfast.core.node.saver import RestoreMeeting, SavedStep, SavedSteps, Turn
from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.protocol.checkpoints import RestoreAsk
from holdfast.protocol.data import Consumed, Mark

V1, V2, V3 = (Version(1, step) for step in (1, 2, 3))


def ask(
    local_rank: int, prepared: Version = NONE, *, fresh: bool = False, step: int = -1
) -> RestoreAsk:
    return RestoreAsk("/d", 1, local_rank, prepared, fresh=fresh, step=step)


def test_the_node_asks_once_all_its_ranks_have() -> None:
    meeting: RestoreMeeting[str] = RestoreMeeting(3)
    assert meeting.ask("a", ask(2, V1)) is None
    assert meeting.ask("b", ask(0, V1)) is None
    assert meeting.ask("c", ask(1, V1)) == Turn(V1, fresh=False, step=-1)
    assert sorted(meeting.answered()) == ["a", "b", "c"]
    assert not meeting.is_open


def test_what_one_rank_lacks_the_node_lacks() -> None:
    """The prior art let some ranks load one step and others another: mixed-step restore."""
    meeting: RestoreMeeting[str] = RestoreMeeting(2)
    meeting.ask("a", ask(0, V2))
    assert meeting.ask("b", ask(1, V1)) == Turn(NONE, fresh=False, step=-1, mixed=True)


def test_a_rank_that_asks_again_only_changes_who_is_answered() -> None:
    meeting: RestoreMeeting[str] = RestoreMeeting(2)
    meeting.ask("a", ask(0))
    assert meeting.ask("a again", ask(0)) is None
    assert meeting.ask("b", ask(1)) is not None
    assert meeting.ask("b again", ask(1)) is None
    assert sorted(meeting.answered()) == ["a again", "b again"]


def test_ranks_that_want_different_things_are_told_so() -> None:
    meeting: RestoreMeeting[str] = RestoreMeeting(2)
    meeting.ask("a", ask(0, fresh=True))
    meeting.ask("b", ask(1))
    assert "others save first" in meeting.disagreement()
    meeting.answered()
    meeting.ask("a", ask(0, step=5))
    meeting.ask("b", ask(1, step=7))
    assert "different steps: 5, 7" in meeting.disagreement()


def steps_of_two_ranks() -> SavedSteps:
    steps = SavedSteps()
    steps.rank_is(0, 4)
    steps.rank_is(1, 5)
    return steps


def test_a_step_is_whole_once_every_part_of_the_node_is_sealed() -> None:
    steps, shape = steps_of_two_ranks(), Shape(8, shared=True)
    assert steps.sealed(V1, shape, "rank-00005", persist=False) is None
    assert steps.sealed(V1, shape, "shared", persist=True) is None
    whole = steps.sealed(V1, shape, "rank-00004", persist=False)
    parts, nothing = ("shared", "rank-00004", "rank-00005"), {4: (), 5: ()}
    assert whole == SavedStep(V1, shape, parts, persist=True, follows=False, marks=nothing)


def test_a_step_that_a_rank_left_out_is_overtaken_by_the_next_whole_one() -> None:
    """The prior art counted done files of a step that never became whole, and waited for ever."""
    steps, shape = steps_of_two_ranks(), Shape(8, shared=False)
    steps.sealed(V1, shape, "rank-00004", persist=True)
    steps.sealed(V2, shape, "rank-00004", persist=True)
    assert steps.sealed(V2, shape, "rank-00005", persist=True) is not None
    assert steps.overtaken(V2) == [V1]
    assert steps.overtaken(V2) == []


def test_a_rank_that_reads_no_data_is_marked_with_those_that_do() -> None:
    steps, shape = steps_of_two_ranks(), Shape(8, shared=False)
    assert steps.sealed(V1, shape, "rank-00004", False, marks=()) is None
    whole = steps.sealed(V1, shape, "rank-00005", False)
    assert whole is not None
    assert (whole.follows, whole.marks) == (True, {4: (), 5: ()})


def test_what_was_said_of_an_overtaken_step_is_said_with_the_next() -> None:
    """A lease that ended is named once: were it lost, its samples would be trained again."""
    steps, shape = steps_of_two_ranks(), Shape(8, shared=False)
    steps.sealed(V1, shape, "rank-00004", False, marks=mark({1: 10, 2: 3}))
    # Rank 5 could not save step 1.
    steps.sealed(V2, shape, "rank-00004", False, marks=mark({2: 7}))
    whole = steps.sealed(V2, shape, "rank-00005", False, marks=mark({9: 2}))
    assert whole is not None
    assert whole.marks == {4: mark({1: 10, 2: 7}), 5: mark({9: 2})}
    steps.overtaken(V2)
    steps.sealed(V3, shape, "rank-00004", False, marks=mark({2: 8}))
    whole = steps.sealed(V3, shape, "rank-00005", False, marks=())
    assert whole is not None
    assert whole.marks == {4: mark({2: 8}), 5: ()}


def test_what_was_said_before_the_position_jumped_is_worth_nothing() -> None:
    assert merged([mark({1: 10}, term=1), mark({2: 3}, term=2)]) == mark({2: 3}, term=2)
    assert merged([mark({2: 3}, term=2), mark({1: 10}, term=1)]) == mark({2: 3}, term=2)
    closed = (Mark("train", -1, ()),)
    assert merged([closed, mark({1: 10})]) == merged([mark({1: 10}), closed]) == mark({1: 10})
    other = (Mark("other", 1, (Consumed(1, 1),)),)
    assert merged([mark({1: 10}), other]) == (*mark({1: 10}), *other)


def mark(leases: dict[int, int], term: int = 1) -> tuple[Mark, ...]:
    return (Mark("train", term, tuple(Consumed(*said) for said in leases.items())),)


def test_a_new_round_knows_nothing_of_half_saved_steps() -> None:
    steps, shape = steps_of_two_ranks(), Shape(8, shared=False)
    steps.sealed(V3, shape, "rank-00004", persist=True)
    assert list(steps.begin_round()) == [V3]
    steps.rank_is(0, 0)
    whole = steps.sealed(V3, Shape(1, shared=False), "rank-00000", persist=False)
    assert whole is not None
    assert whole.persist is False


@given(st.permutations([(v, part) for v in (V1, V2, V3) for part in ("rank-00004", "rank-00005")]))
def test_in_whatever_order_parts_are_sealed_each_step_becomes_whole_once(
    order: list[tuple[Version, str]],
) -> None:
    steps, shape = steps_of_two_ranks(), Shape(8, shared=False)
    whole = [steps.sealed(version, shape, part, persist=False) for version, part in order]
    assert sorted(step.version for step in whole if step is not None) == [V1, V2, V3]
