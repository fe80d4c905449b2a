# SPDX-License-Identifier: Apache-2.0
"""The key-value store: what each request does, how waits end, and that a repeat is no request."""

import math

import pytest

from holdfast.protocol import messages as m
from holdfast.protocol.data import ShardsTake
from holdfast.protocol.services import METHODS
from tests.core.harness import Job, answers, running_pair

LONG_S = 1000.0


def store() -> Job:
    """A job whose nodes stay silent for longer than any wait of these tests."""
    return running_pair(silence_s=10_000.0, lease_s=20_000.0)


def values_of(job: Job, *keys: str, scope: int = 1) -> tuple[bytes, ...]:
    answer = job.answer(m.KvGet(scope, keys, LONG_S), "a")
    assert isinstance(answer, m.Values)
    return answer.values


def is_set(job: Job, key: str, scope: int = 1) -> bool:
    return job.answer(m.KvCheck(scope, (key,)), "a") == m.Number(1)


def test_set_and_get() -> None:
    job = store()
    assert job.answer(m.KvSet(1, "k", b"one"), "a") == m.Done()
    job.answer(m.KvSet(1, "k", b"two"), "b")
    assert values_of(job, "k") == (b"two",)


def test_multi_set_and_multi_get_keep_the_order_asked_for() -> None:
    job = store()
    assert job.answer(m.KvMultiSet(1, ("a", "b", "c"), (b"1", b"2", b"3"))) == m.Done()
    assert values_of(job, "c", "a") == (b"3", b"1")


def test_a_multi_set_with_unequal_lengths_changes_nothing() -> None:
    job = store()
    assert job.answer(m.KvMultiSet(1, ("a", "b"), (b"1",))) == m.Refused(
        "rejected", "2 keys came with 1 values"
    )
    assert job.answer(m.KvCount(1)) == m.Number(0)


def test_add_starts_at_zero_and_is_kept_as_text() -> None:
    job = store()
    assert job.answer(m.KvAdd(1, "n", 5)) == m.Number(5)
    assert job.answer(m.KvAdd(1, "n", -7)) == m.Number(-2)
    assert values_of(job, "n") == (b"-2",)
    job.answer(m.KvSet(1, "n", b"40"))
    assert job.answer(m.KvAdd(1, "n", 2)) == m.Number(42)


def test_add_to_what_is_no_number_is_refused() -> None:
    job = store()
    job.answer(m.KvSet(1, "n", b"many"))
    refused = job.answer(m.KvAdd(1, "n", 1))
    assert refused == m.Refused("rejected", "the value of 'n' is not a number")
    assert values_of(job, "n") == (b"many",)


def test_a_sum_that_fits_no_frame_is_refused_and_does_not_stop_the_master() -> None:
    job = store()
    job.answer(m.KvSet(1, "n", b"9" * 40))
    assert isinstance(job.answer(m.KvAdd(1, "n", 1)), m.Refused)
    job.answer(m.KvSet(1, "n", str(2**63 - 1).encode()))
    assert isinstance(job.answer(m.KvAdd(1, "n", 1)), m.Refused)
    assert job.answer(m.KvAdd(1, "n", -1)) == m.Number(2**63 - 2)


def test_compare_set_on_a_present_key() -> None:
    job = store()
    job.answer(m.KvSet(1, "k", b"a"))
    assert job.answer(m.KvCompareSet(1, "k", b"wrong", b"b")) == m.Value(b"a")
    assert job.answer(m.KvCompareSet(1, "k", b"a", b"b")) == m.Value(b"b")
    assert values_of(job, "k") == (b"b",)


def test_compare_set_on_a_missing_key_needs_an_empty_expectation() -> None:
    job = store()
    assert job.answer(m.KvCompareSet(1, "k", b"a", b"b")) == m.Value(b"a")
    assert not is_set(job, "k")
    assert job.answer(m.KvCompareSet(1, "k", b"", b"b")) == m.Value(b"b")
    assert values_of(job, "k") == (b"b",)


def test_append_creates_and_extends() -> None:
    job = store()
    assert job.answer(m.KvAppend(1, "k", b"ab")) == m.Done()
    assert job.answer(m.KvAppend(1, "k", b"cd")) == m.Done()
    assert values_of(job, "k") == (b"abcd",)


def test_check_count_keys_and_delete() -> None:
    job = store()
    job.answer(m.KvMultiSet(1, ("a", "b"), (b"", b"2")))
    assert job.answer(m.KvCheck(1, ("a", "b"))) == m.Number(1)
    assert job.answer(m.KvCheck(1, ("a", "c"))) == m.Number(0)
    assert job.answer(m.KvCount(1)) == m.Number(2)
    assert job.answer(m.KvKeys(1)) == m.Keys(("a", "b"))
    assert job.answer(m.KvDelete(1, "a")) == m.Number(1)
    assert job.answer(m.KvDelete(1, "a")) == m.Number(0)
    assert job.answer(m.KvKeys(1)) == m.Keys(("b",))


@pytest.mark.parametrize("kind", [m.KvGet, m.KvWait])
def test_a_wait_is_answered_when_the_last_key_is_there(kind: type[m.KvGet | m.KvWait]) -> None:
    job = store()
    assert answers(job.ask(kind(1, ("x", "y"), LONG_S), "a")) == []
    assert answers(job.ask(m.KvSet(1, "x", b"1"), "b")) == [m.Done()]
    expected = m.Values((b"1", b"2")) if kind is m.KvGet else m.Done()
    assert answers(job.ask(m.KvSet(1, "y", b"2"), "b")) == [m.Done(), expected]
    assert answers(job.ask(m.KvSet(1, "y", b"3"), "b")) == [m.Done()]


@pytest.mark.parametrize(
    "creation",
    [
        m.KvSet(1, "x", b"1"),
        m.KvMultiSet(1, ("w", "x"), (b"0", b"1")),
        m.KvAdd(1, "x", 1),
        m.KvAppend(1, "x", b"1"),
        m.KvCompareSet(1, "x", b"", b"1"),
    ],
    ids=lambda body: type(body).__name__,
)
def test_every_way_to_create_a_key_ends_a_wait(creation: m.KvCall) -> None:
    job = store()
    job.ask(m.KvGet(1, ("x",), LONG_S), "a")
    assert m.Values((b"1",)) in answers(job.ask(creation, "b"))


def test_a_key_deleted_before_the_others_came_is_waited_for_again() -> None:
    job = store()
    job.ask(m.KvGet(1, ("x", "y"), LONG_S), "a")
    job.ask(m.KvSet(1, "x", b"old"), "b")
    job.ask(m.KvDelete(1, "x"), "b")
    assert answers(job.ask(m.KvSet(1, "y", b"2"), "b")) == [m.Done()]
    assert answers(job.ask(m.KvSet(1, "x", b"new"), "b"))[1:] == [m.Values((b"new", b"2"))]


def test_a_wait_ends_with_a_time_out_that_names_what_is_missing() -> None:
    job = store()
    job.ask(m.KvGet(1, ("there", "gone"), 3.0), "a")
    job.ask(m.KvSet(1, "there", b""), "b")
    assert job.deadline == 3.0
    assert answers(job.wait(2.9)) == []
    assert answers(job.wait(3.0)) == [m.Refused("timeout", "no value for 'gone' within 3 s")]
    assert answers(job.ask(m.KvSet(1, "gone", b""), "b")) == [m.Done()]


def test_time_outs_end_in_their_own_order() -> None:
    job = store()
    for limit in (5.0, 1.0, 3.0):
        job.ask(m.KvWait(1, (f"k{limit:g}",), limit), "a")
    late = [answer for answer in answers(job.wait(10.0)) if isinstance(answer, m.Refused)]
    assert [answer.message.split("'")[1] for answer in late] == ["k1", "k3", "k5"]


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, -math.inf])
def test_a_time_out_that_is_none_ends_at_once(limit: float) -> None:
    job = store()
    job.ask(m.KvWait(1, ("x",), limit), "a")
    job.ask(m.KvWait(1, ("x",), 5.0), "b")
    assert len(answers(job.wait(0.0))) == 1
    assert len(answers(job.wait(5.0))) == 1, "a bad time-out does not stop the others"


def test_an_endless_time_out_leaves_a_deadline_a_timer_can_take() -> None:
    job = store()
    job.ask(m.KvWait(1, ("x",), math.inf), "a")
    assert job.deadline is not None
    assert math.isfinite(job.deadline)


def test_scopes_do_not_see_each_other() -> None:
    job = store()
    job.answer(m.KvSet(0, "k", b"job"))
    job.answer(m.KvSet(1, "k", b"round"))
    assert values_of(job, "k", scope=0) == (b"job",)
    assert values_of(job, "k", scope=1) == (b"round",)


def test_a_dead_scope_is_fenced_and_the_job_scope_stays() -> None:
    job = store()
    job.answer(m.KvSet(0, "k", b"job"))
    job.answer(m.KvSet(1, "k", b"round"))
    held = job.ask(m.KvGet(1, ("never",), LONG_S), "a")
    assert answers(held) == []
    broken = job.failed("b", 1)
    assert m.Refused("fenced", "round 1 is over") in answers(broken)
    for body in (m.KvSet(1, "k", b"late"), m.KvGet(1, ("k",), 1.0), m.KvAdd(1, "n", 1)):
        assert job.answer(body, "a") == m.Refused("fenced", "round 1 is over")
    assert not is_set(job, "k", scope=2)
    assert values_of(job, "k", scope=0) == (b"job",)


MUTATIONS: list[tuple[m.KvCall, m.Answer]] = [
    (m.KvSet(1, "k", b"v"), m.Done()),
    (m.KvMultiSet(1, ("k",), (b"v",)), m.Done()),
    (m.KvAdd(1, "n", 1), m.Number(1)),
    (m.KvAppend(1, "k", b"v"), m.Done()),
    (m.KvCompareSet(1, "k", b"", b"v"), m.Value(b"v")),
    (m.KvDelete(1, "old"), m.Number(1)),
    (m.QueuePush(1, "q", b"e"), m.Number(3)),
    (m.QueuePop(1, "q", 0.0), m.Value(b"1")),
    (m.Barrier(1, "b", "0", 1, LONG_S), m.Number(1)),
]


def test_every_mutating_method_is_tested_for_repeats() -> None:
    mutating = {kind for kind, method in METHODS.items() if method.mutates}
    # The repeats of taking shards are in test_shards.py.
    assert {type(body) for body, _ in MUTATIONS} == mutating - {ShardsTake}


@pytest.mark.parametrize("restarted", ["no", "journal", "snapshot"])
@pytest.mark.parametrize(
    ("body", "answer"), MUTATIONS, ids=[type(body).__name__ for body, _ in MUTATIONS]
)
def test_a_repeat_changes_nothing_and_gets_the_same_answer(
    body: m.KvCall, answer: m.Answer, restarted: str
) -> None:
    job = store()
    job.answer(m.KvSet(1, "old", b"x"))
    job.answer(m.QueuePush(1, "q", b"1"))
    job.answer(m.QueuePush(1, "q", b"2"))
    assert job.answer(body, "a", session="w", seq=7) == answer
    before = job.snapshot()
    if restarted != "no":
        job.restart(compacted=restarted == "snapshot")
        job.attach("a", round=1)
        job.attach("b", round=1)
        before = job.snapshot()
    for _ in range(2):
        assert job.answer(body, "a", session="w", seq=7) == answer
    assert job.snapshot() == before


def test_an_echo_of_an_older_request_changes_nothing() -> None:
    """Bytes of a lost stream may be read after the session went on over a new one."""
    job = store()
    job.answer(m.KvAdd(1, "n", 1), "a", session="w", seq=1)
    job.answer(m.KvAdd(1, "n", 1), "a", session="w", seq=2)
    echo = job.answer(m.KvAdd(1, "n", 1), "a", session="w", seq=1)
    assert isinstance(echo, m.Refused)
    assert values_of(job, "n") == (b"2",)


def test_sessions_are_separate() -> None:
    job = store()
    assert job.answer(m.KvAdd(1, "n", 1), "a", session="v", seq=1) == m.Number(1)
    assert job.answer(m.KvAdd(1, "n", 1), "a", session="w", seq=1) == m.Number(2)


def test_a_held_wait_of_a_broken_stream_is_forgotten_and_asked_again() -> None:
    job = store()
    job.ask(m.KvGet(1, ("x",), LONG_S), "a", session="w", seq=1)
    job.absent("a")
    assert answers(job.ask(m.KvSet(1, "x", b"1"), "b")) == [m.Done()]
    job.attach("a", round=1)
    assert job.answer(m.KvGet(1, ("x",), LONG_S), "a", session="w", seq=1) == m.Values((b"1",))


def test_what_is_waiting_is_counted_and_does_not_pile_up() -> None:
    job = store()
    for _ in range(50):
        job.ask(m.KvWait(1, ("never",), 0.1), "a")
        assert job.machines.sync.view()["waiting"] == 1
        job.wait(job.now + 1.0)
        assert job.machines.sync.view()["waiting"] == 0
