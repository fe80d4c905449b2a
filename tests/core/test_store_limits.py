# SPDX-License-Identifier: Apache-2.0
"""What the key-value store refuses to hold, what it forgets, and how large its records get."""

from holdfast.core.job import records as rec
from holdfast.core.job.sync.scopes import (
    ANSWERS_BYTES_MAX,
    ENTRY_BYTES,
    NAME_MAX,
    PIECE_BYTES,
    SCOPE_BYTES_MAX,
    SCOPES_MAX,
    SESSION_MAX,
    SESSIONS_MAX,
    VALUE_BYTES_MAX,
)
from holdfast.core.job.sync.sync import Sync
from holdfast.core.kernel import Record
from holdfast.protocol import codec
from holdfast.protocol import messages as m
from tests.core.harness import Job, answers, of_kind, running_pair

LONG_S = 1000.0
LARGEST = bytes(VALUE_BYTES_MAX)
RECORD_BYTES_MAX = 3 * PIECE_BYTES


def store() -> Job:
    return running_pair(is_small=False, silence_s=10_000.0, lease_s=20_000.0)


def refused(job: Job, body: m.KvCall, why: str) -> None:
    """The store says why not, and nothing has changed."""
    before = len(job.records)
    answer = job.answer(body)
    assert isinstance(answer, m.Refused)
    assert answer.kind == "rejected"
    assert why in answer.message
    assert len(job.records) == before


def largest(records: list[Record]) -> int:
    return max(len(rec.encode_record(record)) for record in records)


def replayed(records: list[Record]) -> Sync:
    sync = Sync()
    for record in records:
        sync.apply(rec.decode_record(rec.encode_record(record)))
    return sync


# ---- appends ------------------------------------------------------------------------------------


def test_an_append_is_journaled_as_what_was_appended() -> None:
    """The whole value each time made 547 MB of a value of 84 MB."""
    job = store()
    job.answer(m.KvSet(1, "k", bytes(1000)))
    outcome = job.ask(m.KvAppend(1, "k", b"more"), "a")
    (record,) = outcome.records
    assert isinstance(record, rec.KvAppended)
    assert len(rec.encode_record(record)) < 200
    again = replayed([r for r in job.records if isinstance(r, rec.KvChanged | rec.KvAppended)])
    assert of_kind(rec.KvChanged, list(again.snapshot()))[0].values == (bytes(1000) + b"more",)


def test_an_append_makes_the_key_and_ends_a_wait() -> None:
    job = store()
    job.ask(m.KvGet(1, ("k",), LONG_S), "b")
    assert m.Values((b"x",)) in answers(job.ask(m.KvAppend(1, "k", b"x"), "a"))


def test_a_repeated_append_appends_once() -> None:
    job = store()
    for _ in range(2):
        assert answers(job.ask(m.KvAppend(1, "k", b"x"), "a", session="s", seq=1)) == [m.Done()]
    assert job.answer(m.KvGet(1, ("k",), LONG_S)) == m.Values((b"x",))


# ---- limits -------------------------------------------------------------------------------------


def test_the_largest_value_fits_an_answer_and_a_larger_one_is_refused() -> None:
    job = store()
    assert job.answer(m.KvSet(1, "k", LARGEST)) == m.Done()
    assert codec.encode(job.answer(m.KvGet(1, ("k",), LONG_S)), 1, "s" * 32, 1)
    over = "over the limit of"
    refused(job, m.KvAppend(1, "k", b"x"), over)
    refused(job, m.KvSet(1, "other", LARGEST + b"x"), over)
    refused(job, m.KvMultiSet(1, ("small", "other"), (b"", LARGEST + b"x")), over)
    refused(job, m.KvCompareSet(1, "other", b"", LARGEST + b"x"), over)
    refused(job, m.QueuePush(1, "q", LARGEST + b"x"), over)
    assert job.answer(m.KvCount(1)) == m.Number(1)


def test_names_have_a_limit() -> None:
    job = store()
    long = "n" * (NAME_MAX + 1)
    assert job.answer(m.KvSet(1, long[1:], b"")) == m.Done()
    for body in (
        m.KvSet(1, long, b""),
        m.KvAdd(1, long, 1),
        m.KvAppend(1, long, b"x"),
        m.QueuePush(1, long, b""),
        m.Barrier(1, long, "me", 1, LONG_S),
    ):
        refused(job, body, f"a name of {NAME_MAX + 1} characters")


def test_a_scope_that_is_full_says_so_until_something_is_deleted() -> None:
    job = store()
    count = SCOPE_BYTES_MAX // VALUE_BYTES_MAX
    for number in range(count):
        assert job.answer(m.KvSet(0, str(number), LARGEST)) == m.Done()
    refused(job, m.KvSet(0, "more", LARGEST), "keys and queues of the job are full")
    refused(job, m.QueuePush(0, "q", LARGEST), "are full")
    assert job.answer(m.KvSet(1, "more", LARGEST)) == m.Done(), "a scope of its own"
    assert job.answer(m.KvSet(0, "0", b"smaller")) == m.Done()
    assert job.answer(m.KvSet(0, "more", LARGEST)) == m.Done()
    refused(job, m.KvSet(0, "0", LARGEST), "are full")
    assert job.answer(m.KvDelete(0, "1")) == m.Number(1)
    assert job.answer(m.QueuePush(0, "q", LARGEST)) == m.Number(1)
    refused(job, m.KvSet(0, "1", LARGEST), "are full")
    assert job.answer(m.QueuePop(0, "q", 0.0)) == m.Value(LARGEST)
    assert job.answer(m.KvSet(0, "1", LARGEST)) == m.Done()


def test_a_key_that_comes_more_than_once_counts_with_its_last_value() -> None:
    job = store()
    count = SCOPE_BYTES_MAX // VALUE_BYTES_MAX
    for number in range(count):
        assert job.answer(m.KvSet(0, str(number), LARGEST)) == m.Done()
    again = ("0",) * 30
    refused(job, m.KvMultiSet(0, ("more", *again), (LARGEST, *[b""] * 29, LARGEST)), "are full")
    refused(job, m.KvMultiSet(0, ("a", "b", *again), (LARGEST, LARGEST, *[b""] * 30)), "are full")
    # What it makes free counts once, and a new key that comes twice costs once.
    keys, values = ("more", "0", "0", "more"), (LARGEST, LARGEST, b"", LARGEST)
    assert job.answer(m.KvMultiSet(0, keys, values)) == m.Done()
    refused(job, m.KvSet(0, "0", LARGEST), "are full")


def test_a_name_counts_with_its_bytes() -> None:
    job = store()
    names = ("\N{EURO SIGN}" * (NAME_MAX - 5) + f"{number:05}" for number in range(NAME_MAX))
    fit = SCOPE_BYTES_MAX // (ENTRY_BYTES + 3 * (NAME_MAX - 5) + 5)
    for _ in range(fit):
        assert job.answer(m.KvSet(0, next(names), b"")) == m.Done()
    refused(job, m.KvSet(0, next(names), b""), "are full")


def test_scopes_have_a_limit_and_reading_makes_none() -> None:
    job = store()
    for number in range(2, 3 * SCOPES_MAX):
        assert job.answer(m.KvCount(number)) == m.Number(0)
    for number in range(1, SCOPES_MAX):
        assert job.answer(m.KvSet(number, "k", b"")) == m.Done()
    refused(job, m.KvSet(SCOPES_MAX + 1, "k", b""), f"there are {SCOPES_MAX} scopes")
    assert job.answer(m.KvSet(1, "k", b"2")) == m.Done()


def test_the_name_of_a_session_has_a_limit() -> None:
    job = store()
    outcome = job.ask(m.KvAdd(1, "n", 1), "a", session="s" * (SESSION_MAX + 1), seq=1)
    assert answers(outcome) == [m.Refused("rejected", "the name of the session is too long")]
    assert not outcome.records


def test_the_sessions_that_were_quiet_longest_are_forgotten() -> None:
    sync = Sync()
    for number in range(SESSIONS_MAX):
        sync.apply(rec.SessionRemembered(0, str(number), 1, m.Done()))
    sync.apply(rec.SessionRemembered(0, "0", 2, m.Done()))
    sync.apply(rec.SessionRemembered(0, "new", 1, m.Done()))
    kept = {r.session for r in of_kind(rec.SessionRemembered, list(sync.snapshot()))}
    assert len(kept) == SESSIONS_MAX
    assert {"0", "new", "2"} <= kept
    assert "1" not in kept


def test_remembered_values_have_a_limit_together() -> None:
    sync = Sync()
    fit = ANSWERS_BYTES_MAX // VALUE_BYTES_MAX
    sync.apply(rec.SessionRemembered(0, "light", 1, m.Number(1)))
    for number in range(2 * fit):
        sync.apply(rec.SessionRemembered(0, str(number), 1, m.Value(LARGEST)))

    def kept(sync: Sync) -> dict[str, m.Answer]:
        return {r.session: r.answer for r in of_kind(rec.SessionRemembered, list(sync.snapshot()))}

    found = kept(sync)
    assert len(found) == 2 * fit + 1, "an answer is forgotten, its session is not"
    assert found["light"] == m.Number(1)
    whole = [str(number) for number in range(fit, 2 * fit)]
    assert [session for session, one in found.items() if isinstance(one, m.Value)] == whole
    assert kept(replayed(list(sync.snapshot()))) == found
    # An answer that takes the place of a large one takes its bytes, too.
    for session in whole:
        sync.apply(rec.SessionRemembered(0, session, 2, m.Done()))
    for number in range(fit):
        sync.apply(rec.SessionRemembered(0, str(number), 2, m.Value(LARGEST)))
    assert not any(isinstance(one, m.Refused) for one in kept(sync).values())


def test_no_request_takes_effect_twice_however_much_others_have_popped() -> None:
    job = store()
    add, pop = m.KvAdd(0, "n", 1), m.QueuePop(0, "q", 0.0)

    def pop_as(session: str) -> list[m.Answer]:
        return answers(job.ask(pop, "a", session=session, seq=1))

    assert answers(job.ask(add, "a", session="w0", seq=1)) == [m.Number(1)]
    count = 2 * (ANSWERS_BYTES_MAX // VALUE_BYTES_MAX)
    for number in range(count):
        job.answer(m.QueuePush(0, "q", LARGEST))
        assert pop_as(str(number)) == [m.Value(LARGEST)]
    assert answers(job.ask(add, "a", session="w0", seq=1)) == [m.Number(1)]
    assert job.answer(m.KvGet(0, ("n",), 0.0)) == m.Values((b"1",))
    # A pop whose answer is gone takes no second element.
    job.answer(m.QueuePush(0, "q", b"next"))
    (refused_pop,) = pop_as("0")
    assert isinstance(refused_pop, m.Refused)
    assert "took effect" in refused_pop.message
    assert pop_as(str(count - 1)) == [m.Value(LARGEST)]
    assert job.answer(m.QueueLength(0, "q")) == m.Number(1)


# ---- snapshots ----------------------------------------------------------------------------------


def test_a_snapshot_of_many_and_of_large_values_is_in_pieces() -> None:
    sync = Sync()
    for number in range(3000):
        sync.apply(rec.KvChanged(0, (f"small{number}",), (bytes([number % 256]) * 4000,)))
    for number, size in enumerate((PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES - 3)):
        sync.apply(rec.KvChanged(1, (f"large{number}", "beside"), (bytes([7]) * size, b"x")))
    snapshot = list(sync.snapshot())
    assert largest(snapshot) < RECORD_BYTES_MAX
    assert len(of_kind(rec.KvChanged, snapshot)) < 100
    again = replayed(snapshot)
    assert list(again.snapshot()) == snapshot
    assert again.view() == sync.view()


# ---- queues that are looked for -----------------------------------------------------------------


def test_check_and_wait_see_a_queue_with_elements() -> None:
    job = store()
    check = m.KvCheck(1, ("q", "k"))
    job.answer(m.KvSet(1, "k", b""))
    assert job.answer(check) == m.Number(0)
    job.ask(m.KvWait(1, ("q", "k"), LONG_S), "b")
    assert m.Done() in answers(job.ask(m.QueuePush(1, "q", b"x"), "a"))
    assert job.answer(check) == m.Number(1)
    assert job.answer(m.KvWait(1, ("q",), 0.0)) == m.Done()
    job.answer(m.QueuePop(1, "q", 0.0))
    assert job.answer(check) == m.Number(0)
    assert job.answer(m.KvCount(1)) == m.Number(1)


def test_a_wait_for_a_queue_ends_though_a_pop_was_first() -> None:
    job = store()
    job.ask(m.QueuePop(1, "q", LONG_S), "a")
    job.ask(m.KvWait(1, ("q",), LONG_S), "b")
    said = answers(job.ask(m.QueuePush(1, "q", b"x"), "a"))
    assert m.Done() in said
    assert m.Value(b"x") in said


def test_a_queue_is_no_value() -> None:
    job = store()
    job.ask(m.KvGet(1, ("q",), LONG_S), "b")
    assert answers(job.ask(m.QueuePush(1, "q", b"x"), "a")) == [m.Number(1)]
    assert m.Values((b"v",)) in answers(job.ask(m.KvSet(1, "q", b"v"), "a"))
