# SPDX-License-Identifier: Apache-2.0
"""Queues and barriers: order, held pops, generations, and whom a barrier waits for."""

import pytest

from holdfast.protocol import messages as m
from tests.core.harness import Job, answers, running_pair

LONG_S = 1000.0


def store(**spec: int) -> Job:
    return running_pair(silence_s=10_000.0, lease_s=20_000.0, **spec)


def push(job: Job, value: bytes, **key: object) -> list[m.Answer]:
    return answers(job.ask(m.QueuePush(0, "q", value), "a", **key))  # type: ignore[arg-type]


def arrive(
    job: Job, name: str, *, agent: str = "a", size: int = 2, scope: int = 1, barrier: str = "go"
) -> list[m.Answer]:
    return answers(job.ask(m.Barrier(scope, barrier, name, size, LONG_S), agent))


def test_a_queue_is_first_in_first_out() -> None:
    job = store()
    assert [push(job, value) for value in (b"1", b"2")] == [[m.Number(1)], [m.Number(2)]]
    assert job.answer(m.QueueLength(0, "q")) == m.Number(2)
    assert job.answer(m.QueuePop(0, "q", 0.0)) == m.Value(b"1")
    assert job.answer(m.QueuePop(0, "q", 0.0)) == m.Value(b"2")
    assert job.answer(m.QueueLength(0, "q")) == m.Number(0)


def test_an_empty_queue_without_patience_says_so() -> None:
    job = store()
    assert job.answer(m.QueuePop(0, "q", 0.0)) == m.Refused("timeout", "queue 'q' is empty")


def test_held_pops_are_served_in_the_order_they_came() -> None:
    job = store()
    first = job.link("first")
    second = job.link("second")
    job.ask(m.QueuePop(0, "q", LONG_S), "a", link=first)
    job.ask(m.QueuePop(0, "q", LONG_S), "b", link=second)
    for value, link in ((b"1", first), (b"2", second)):
        outcome = job.ask(m.QueuePush(0, "q", value), "a")
        popped = [c for c in outcome.commands if getattr(c, "body", None) == m.Value(value)]
        assert [getattr(command, "link", None) for command in popped] == [link]
    assert job.answer(m.QueueLength(0, "q")) == m.Number(0)


def test_a_held_pop_ends_with_its_time_out_and_takes_nothing_later() -> None:
    job = store()
    job.ask(m.QueuePop(0, "q", 2.0), "a")
    assert answers(job.wait(2.0)) == [m.Refused("timeout", "queue 'q' stayed empty for 2 s")]
    assert push(job, b"1") == [m.Number(1)]
    assert job.answer(m.QueueLength(0, "q")) == m.Number(1)


def test_the_pop_of_a_lost_stream_takes_nothing() -> None:
    job = store()
    job.ask(m.QueuePop(0, "q", LONG_S), "b")
    job.absent("b")
    assert push(job, b"1") == [m.Number(1)]
    assert job.answer(m.QueueLength(0, "q")) == m.Number(1)


def test_a_pop_repeated_over_a_new_stream_takes_one_element() -> None:
    """The old stream is not known to be broken yet: still one request, one element."""
    job = store()
    job.ask(m.QueuePop(0, "q", LONG_S), "b", session="w", seq=1)
    job.attach("b", round=1)
    job.ask(m.QueuePop(0, "q", LONG_S), "b", session="w", seq=1)
    assert push(job, b"1") == [m.Number(1), m.Value(b"1")]
    assert push(job, b"2") == [m.Number(1)]
    assert job.answer(m.QueueLength(0, "q")) == m.Number(1)


def test_a_key_and_a_queue_of_one_name_do_not_meet() -> None:
    job = store()
    job.ask(m.QueuePop(0, "q", LONG_S), "b")
    assert job.answer(m.KvSet(0, "q", b"key")) == m.Done()
    push(job, b"1")
    assert job.answer(m.KvGet(0, ("q",), 0.0)) == m.Values((b"key",))


def test_queues_survive_the_master() -> None:
    for compacted in (False, True):
        job = store()
        push(job, b"1")
        push(job, b"2")
        job.answer(m.QueuePop(0, "q", 0.0))
        job.restart(compacted=compacted)
        assert job.answer(m.QueuePop(0, "q", 0.0)) == m.Value(b"2")


def test_a_barrier_opens_for_all_when_the_last_arrives() -> None:
    job = store()
    assert arrive(job, "0") == []
    assert arrive(job, "1", agent="b") == [m.Number(1), m.Number(1)]


def test_a_barrier_can_be_used_again_at_once() -> None:
    job = store()
    for generation in range(1, 5):
        assert arrive(job, "0") == []
        assert arrive(job, "1", agent="b") == [m.Number(generation)] * 2


def test_a_member_that_arrives_twice_counts_once() -> None:
    job = store()
    assert arrive(job, "0") == []
    assert arrive(job, "0") == []
    assert arrive(job, "1", agent="b") == [m.Number(1), m.Number(1)]


def test_barriers_of_different_names_and_scopes_are_different() -> None:
    job = store()
    assert arrive(job, "0") == []
    assert arrive(job, "1", agent="b", barrier="stop") == []
    assert arrive(job, "1", agent="b", scope=0) == []
    assert arrive(job, "1", agent="b") == [m.Number(1), m.Number(1)]


def test_a_barrier_fails_loudly_when_somebody_stays_away() -> None:
    job = store()
    job.ask(m.Barrier(1, "go", "0", 2, 3.0), "a")
    assert answers(job.wait(3.0)) == [
        m.Refused("timeout", "barrier 'go': not everybody arrived within 3 s")
    ]
    assert arrive(job, "1", agent="b") == [], "who gave up is not counted"
    assert arrive(job, "0") == [m.Number(1), m.Number(1)]


@pytest.mark.parametrize("scope", [0, 1])
def test_size_0_means_every_node(scope: int) -> None:
    job = store()
    assert arrive(job, "0", size=0, scope=scope) == []
    assert arrive(job, "1", agent="b", size=0, scope=scope) == [m.Number(1), m.Number(1)]


def test_a_lost_node_is_no_longer_waited_for() -> None:
    job = store()
    assert arrive(job, "0", size=0, scope=0) == []
    assert m.Number(1) in answers(job.leave("b"))


def test_an_absent_node_is_still_waited_for() -> None:
    job = store(reconnect_s=50)
    arrive(job, "0", size=0, scope=0)
    assert answers(job.absent("b")) == []
    job.attach("b", round=1)
    assert arrive(job, "1", agent="b", size=0, scope=0) == [m.Number(1), m.Number(1)]


def test_a_lost_node_that_had_arrived_does_not_count() -> None:
    job = store()
    job.attach("c")
    arrive(job, "1", agent="b", size=0, scope=0)
    job.leave("b")
    assert arrive(job, "0", size=0, scope=0) == []
    assert arrive(job, "2", agent="c", size=0, scope=0) == [m.Number(1), m.Number(1)]


@pytest.mark.parametrize("compacted", [False, True])
def test_a_new_master_keeps_the_generations_and_waits_for_all(compacted: bool) -> None:
    job = store()
    arrive(job, "0")
    arrive(job, "1", agent="b")
    job.restart(compacted=compacted)
    job.attach("a", round=1)
    assert arrive(job, "0", size=0, scope=0) == [], "b is alive and expected"
    job.attach("b", round=1)
    assert arrive(job, "1", agent="b", size=0, scope=0) == [m.Number(1), m.Number(1)]
    arrive(job, "0")
    assert arrive(job, "1", agent="b") == [m.Number(2), m.Number(2)]


def test_the_barrier_of_a_dead_round_is_fenced() -> None:
    job = store()
    arrive(job, "0")
    assert m.Refused("fenced", "round 1 is over") in answers(job.failed("b", 1))
