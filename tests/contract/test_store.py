# SPDX-License-Identifier: Apache-2.0
"""One suite for torch's TCPStore and for HoldfastStore: what holds for one holds for the other.

Where the two differ on purpose a test says so by name; docs/store.md lists those.
"""

import gc
import itertools
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed

from holdfast.core.job.sync.scopes import VALUE_BYTES_MAX
from holdfast.torch import HoldfastStore
from tests.masters import Master

LIMIT_S = 120.0
LONG = timedelta(seconds=LIMIT_S)
SHORT = timedelta(milliseconds=100)
SCOPES = itertools.count(1)

# torch's type declarations have neither half of these names nor half of their methods.
dist: Any = torch.distributed
Store = Any


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    server = Master(tmp_path_factory.mktemp("master"))
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def holdfast_store(master: Master) -> Iterator[HoldfastStore]:
    """A store without keys: every test has a scope of its own."""
    client = master.client(next(SCOPES))
    yield HoldfastStore(client, LONG)
    client.close()


@pytest.fixture(params=["TCPStore", "HoldfastStore"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "HoldfastStore":
        return request.getfixturevalue("holdfast_store")
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=LONG, wait_for_workers=False)


@pytest.fixture(params=["bare", "prefixed", "nested"])
def wrapped(request: pytest.FixtureRequest, store: Store) -> Store:
    """The store, and what C++ makes of it."""
    if request.param == "bare":
        return store
    prefixed = dist.PrefixStore("one", store)
    return prefixed if request.param == "prefixed" else dist.PrefixStore("two", prefixed)


@pytest.fixture(params=["TCPStore", "HoldfastStore", "TCPStore, prefixed"])
def queues(request: pytest.FixtureRequest) -> Store:
    """Stores that have queues: not HoldfastStore in a PrefixStore, as a test below says."""
    if request.param == "HoldfastStore":
        return request.getfixturevalue("holdfast_store")
    tcp = dist.TCPStore("127.0.0.1", 0, None, is_master=True, timeout=LONG, wait_for_workers=False)
    return tcp if request.param == "TCPStore" else dist.PrefixStore("one", tcp)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


# ---- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", b"text"),
        ("\u00e9", b"\xc3\xa9"),
        ("", b""),
        (b"\xff\x00\xfe", b"\xff\x00\xfe"),
        (bytearray(b"array"), b"array"),
        (b"x" * 1_000_000, b"x" * 1_000_000),
    ],
    ids=["text", "utf-8", "empty", "bytes", "bytearray", "1 MB"],
)
def test_get_returns_the_bytes_that_were_set(
    wrapped: Store, value: str | bytes, expected: bytes
) -> None:
    wrapped.set("key", value)
    assert wrapped.get("key") == expected


@pytest.mark.parametrize("key", ["key", "a/b/c", "with space", "\u00fc", "", "x" * 1000])
def test_any_text_is_a_key(wrapped: Store, key: str) -> None:
    wrapped.set(key, "value")
    assert wrapped.get(key) == b"value"


def test_set_overwrites(wrapped: Store) -> None:
    wrapped.set("key", "first, and longer")
    wrapped.set("key", "second")
    assert wrapped.get("key") == b"second"


def test_a_key_may_come_as_bytes(store: Store) -> None:
    store.set(b"key", "value")
    assert store.get("key") == b"value"


@pytest.mark.parametrize("value", [5, None, [1, 2], 1.5])
def test_a_value_is_text_or_bytes(store: Store, value: object) -> None:
    with pytest.raises(TypeError):
        store.set("key", value)
    assert not store.check(["key"])


# ---- time-outs and waits ------------------------------------------------------------------------


def test_the_timeout_can_be_read_and_set(wrapped: Store) -> None:
    assert wrapped.timeout == LONG
    wrapped.set_timeout(SHORT)
    assert wrapped.timeout == SHORT


def test_a_prefix_sets_the_timeout_of_its_store(store: Store) -> None:
    dist.PrefixStore("one", store).set_timeout(SHORT)
    assert store.timeout == SHORT
    with pytest.raises(dist.DistStoreError, match="timeout"):
        store.get("missing")


@pytest.mark.parametrize(
    "act",
    [
        lambda store: store.get("missing"),
        lambda store: store.wait(["missing"]),
        lambda store: store.wait(["missing"], SHORT),
        lambda store: store.multi_get(["there", "missing"]),
        lambda store: store.wait(["there", "missing"], timedelta(0)),
    ],
    ids=["get", "wait", "wait with limit", "multi_get", "wait 0"],
)
def test_a_missing_key_is_a_store_error(wrapped: Store, act: Callable[[Store], object]) -> None:
    wrapped.set("there", "value")
    wrapped.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after (100|0)ms, keys: .*missing"):
        act(wrapped)
    assert wrapped.get("there") == b"value", "the store is of use after a time-out"


def test_the_error_of_a_timeout_is_a_runtime_error(store: Store) -> None:
    store.set_timeout(SHORT)
    with pytest.raises(RuntimeError):
        store.get("missing")


def test_get_waits_for_another_client(wrapped: Store, threads: ThreadPoolExecutor) -> None:
    waiting = threads.submit(wrapped.clone().get, "later")
    wrapped.set("later", "value")
    assert waiting.result(LIMIT_S) == b"value"


def test_wait_ends_when_the_last_key_is_set(wrapped: Store, threads: ThreadPoolExecutor) -> None:
    waiting = threads.submit(wrapped.clone().wait, ["a", "b", "c"])
    for key in "abc":
        assert not waiting.done()
        wrapped.set(key, "")
    assert waiting.result(LIMIT_S) is None


def test_add_append_and_compare_set_end_a_wait_too(
    wrapped: Store, threads: ThreadPoolExecutor
) -> None:
    waiting = threads.submit(wrapped.clone().wait, ["added", "appended", "swapped"])
    wrapped.add("added", 1)
    wrapped.append("appended", "x")
    wrapped.compare_set("swapped", "", "x")
    assert waiting.result(LIMIT_S) is None


def test_a_signal_does_not_end_a_wait(wrapped: Store, threads: ThreadPoolExecutor) -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.set())
    main = threading.get_ident()

    def disturb(store: Store) -> None:
        for _ in range(5):
            signal.pthread_kill(main, signal.SIGUSR1)
        store.set("later", "value")

    try:
        disturbing = threads.submit(disturb, wrapped.clone())
        wrapped.wait(["later"])
        assert disturbing.result(LIMIT_S) is None
        assert wrapped.get("later") == b"value"
        assert heard.wait(LIMIT_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_nothing_to_wait_for(wrapped: Store) -> None:
    wrapped.wait([])
    assert wrapped.multi_get([]) == []
    assert wrapped.check([])


def test_one_text_is_no_list_of_keys(store: Store) -> None:
    with pytest.raises(TypeError):
        store.wait("key")


def test_check_wants_all_keys(wrapped: Store) -> None:
    wrapped.set("there", "")
    assert wrapped.check(["there"])
    assert not wrapped.check(["there", "missing"])


# ---- add ----------------------------------------------------------------------------------------


def test_add_counts_from_zero_and_leaves_a_decimal(wrapped: Store) -> None:
    assert wrapped.add("count", 5) == 5
    assert wrapped.add("count", -7) == -2
    assert wrapped.add("count", 0) == -2
    assert wrapped.get("count") == b"-2"


def test_add_goes_on_from_a_value_that_was_set(wrapped: Store) -> None:
    wrapped.set("count", "40")
    assert wrapped.add("count", 2) == 42


def test_add_to_text_is_an_error(store: Store) -> None:
    store.set("key", "text")
    with pytest.raises(dist.DistError):
        store.add("key", 1)


@pytest.mark.parametrize("amount", [1.5, "1", None, 2**63])
def test_add_takes_an_integer_of_64_bits(store: Store, amount: object) -> None:
    with pytest.raises(TypeError):
        store.add("count", amount)


def test_no_addition_of_many_threads_is_lost(wrapped: Store, threads: ThreadPoolExecutor) -> None:
    def add(_: int) -> list[int]:
        return [wrapped.add("count", 1) for _ in range(25)]

    sums = sorted(itertools.chain.from_iterable(threads.map(add, range(8), timeout=LIMIT_S)))
    assert sums == list(range(1, 201))


# ---- compare_set, append, delete ----------------------------------------------------------------


def test_compare_set_creates_a_key_that_is_expected_to_be_missing(wrapped: Store) -> None:
    assert wrapped.compare_set("key", "", "new") == b"new"
    assert wrapped.get("key") == b"new"


def test_compare_set_of_a_missing_key_returns_what_was_expected(wrapped: Store) -> None:
    assert wrapped.compare_set("key", "old", "new") == b"old"
    assert not wrapped.check(["key"])


@pytest.mark.parametrize(("expected", "result"), [("old", b"new"), ("other", b"old"), ("", b"old")])
def test_compare_set_of_an_existing_key(wrapped: Store, expected: str, result: bytes) -> None:
    wrapped.set("key", "old")
    assert wrapped.compare_set("key", expected, "new") == result
    assert wrapped.get("key") == result


def test_compare_set_of_bytes(wrapped: Store) -> None:
    wrapped.set("key", b"\xff")
    assert wrapped.compare_set("key", b"\xff", b"\x00\xfe") == b"\x00\xfe"


def test_one_of_many_threads_wins_a_compare_set(
    wrapped: Store, threads: ThreadPoolExecutor
) -> None:
    def swap(number: int) -> bytes:
        result: bytes = wrapped.compare_set("leader", "", str(number))
        return result

    seen = set(threads.map(swap, range(8), timeout=LIMIT_S))
    assert seen == {wrapped.get("leader")}


def test_append(wrapped: Store) -> None:
    wrapped.append("key", "a")
    wrapped.append("key", b"\xff")
    assert wrapped.get("key") == b"a\xff"


def test_delete_key(wrapped: Store) -> None:
    wrapped.set("key", "value")
    assert wrapped.delete_key("key") is True
    assert wrapped.delete_key("key") is False
    assert not wrapped.check(["key"])


# ---- many keys ----------------------------------------------------------------------------------


def test_the_extended_api_is_there(wrapped: Store) -> None:
    assert wrapped.has_extended_api()


def test_multi_set_and_multi_get_keep_the_order(wrapped: Store) -> None:
    wrapped.multi_set(["a", "b", "c"], ["1", b"\xff", ""])
    assert wrapped.multi_get(["c", "a", "b", "a"]) == [b"", b"1", b"\xff", b"1"]


def test_multi_set_wants_a_value_per_key(store: Store) -> None:
    with pytest.raises(dist.DistStoreError):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


def test_num_keys(wrapped: Store) -> None:
    # TCPStore may count keys of its own.
    before = wrapped.num_keys()
    wrapped.set("a", "")
    wrapped.set("a", "again")
    wrapped.add("b", 1)
    assert wrapped.num_keys() == before + 2
    wrapped.delete_key("a")
    assert wrapped.num_keys() == before + 1


def test_list_keys(store: Store) -> None:
    store.set("a", "")
    store.add("b", 1)
    assert set(store.list_keys()) >= {"a", "b"}


def test_a_prefix_is_part_of_the_key(store: Store) -> None:
    outer = dist.PrefixStore("outer", store)
    dist.PrefixStore("inner", outer).set("key", "value")
    assert store.get("outer/inner/key") == b"value"
    assert outer.get("inner/key") == b"value"
    assert not outer.check(["key"])


def test_gloo_meets_through_the_store(wrapped: Store, threads: ThreadPoolExecutor) -> None:
    """Torch's own C++ code asks the store, and not what is called from Python."""

    def sum_of_ranks(store: Store, rank: int) -> float:
        group = dist.ProcessGroupGloo(store, rank, 2, LONG)
        number = torch.tensor(1.0 + rank)
        group.allreduce([number]).wait()
        return float(number)

    met = [threads.submit(sum_of_ranks, wrapped.clone(), rank) for rank in range(2)]
    assert [rank.result(LIMIT_S) for rank in met] == [3.0, 3.0]


# ---- queues -------------------------------------------------------------------------------------


def test_a_queue_is_first_in_first_out(queues: Store) -> None:
    for value in ("1", b"\xff", "3"):
        queues.queue_push("queue", value)
    assert queues.queue_len("queue") == 3
    assert [queues.queue_pop("queue") for _ in range(3)] == [b"1", b"\xff", b"3"]
    assert queues.queue_len("queue") == 0


def test_an_empty_queue(queues: Store) -> None:
    queues.set_timeout(SHORT)
    assert queues.queue_len("queue") == 0
    with pytest.raises(dist.QueueEmptyError):
        queues.queue_pop("queue", block=False)
    with pytest.raises(dist.DistStoreError, match=r"wait timeout after 100ms, keys: .*queue"):
        queues.queue_pop("queue")


def test_each_element_is_popped_once(queues: Store, threads: ThreadPoolExecutor) -> None:
    def popped(store: Store) -> bytes:
        while True:
            try:
                return store.queue_pop("queue")
            except dist.QueueEmptyError:
                # torch's own store wakes several for one element, and lets the later ones fail.
                assert isinstance(queues, dist.TCPStore)

    waiting: list[Future[bytes]] = [threads.submit(popped, queues.clone()) for _ in range(4)]
    for value in "abcd":
        queues.queue_push("queue", value)
    assert sorted(pop.result(LIMIT_S) for pop in waiting) == [b"a", b"b", b"c", b"d"]


def test_check_and_wait_see_a_queue_with_elements(
    queues: Store, threads: ThreadPoolExecutor
) -> None:
    assert not queues.check(["queue"])
    with pytest.raises(dist.DistStoreError, match="timeout after 100ms"):
        queues.wait(["queue"], SHORT)
    waiting = threads.submit(queues.clone().wait, ["queue", "key"])
    queues.set("key", "")
    queues.queue_push("queue", "element")
    assert waiting.result(LIMIT_S) is None
    assert queues.check(["queue", "key"])
    assert queues.queue_pop("queue") == b"element"
    assert not queues.check(["queue"])


def test_two_queues_carry_questions_and_answers(queues: Store, threads: ThreadPoolExecutor) -> None:
    def answer(store: Store) -> None:
        for _ in range(20):
            store.queue_push("answers", store.queue_pop("questions") + b"!")

    answering = threads.submit(answer, queues.clone())
    for number in range(20):
        queues.queue_push("questions", str(number))
        assert queues.queue_pop("answers") == f"{number}!".encode()
    assert answering.result(LIMIT_S) is None


def test_a_queue_is_no_key_to_count_list_or_delete(queues: Store) -> None:
    before = queues.num_keys()
    queues.queue_push("queue", "element")
    assert queues.num_keys() == before
    assert not any("queue" in key for key in queues.list_keys())
    assert queues.delete_key("queue") is False
    assert queues.queue_len("queue") == 1


def test_a_queue_and_a_key_of_one_name_do_not_meet(store: Store) -> None:
    store.set("name", "value")
    store.queue_push("name", "element")
    assert store.get("name") == b"value"
    assert store.queue_pop("name") == b"element"
    assert store.num_keys() == len(store.list_keys())


# ---- barrier, clone, processes ------------------------------------------------------------------


def test_a_barrier_opens_when_all_are_there(wrapped: Store, threads: ThreadPoolExecutor) -> None:
    first = threads.submit(wrapped.clone().barrier, "barrier", 2, LONG)
    wrapped.barrier("barrier", 2, LONG)
    assert first.result(LIMIT_S) is None


def test_a_barrier_that_is_not_full_times_out(wrapped: Store) -> None:
    with pytest.raises(dist.DistStoreError, match="timeout after 100ms"):
        wrapped.barrier("barrier", 2, SHORT)


def test_a_clone_has_the_keys_but_its_own_timeout(store: Store) -> None:
    store.set("key", "value")
    clone = store.clone()
    clone.set_timeout(SHORT)
    assert clone.get("key") == b"value"
    assert store.timeout == LONG


def test_a_store_lives_as_long_as_a_prefix_refers_to_it(store: Store) -> None:
    prefixed = dist.PrefixStore("outer", dist.PrefixStore("inner", store.clone())).clone()
    gc.collect()
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value"


def test_a_forked_child_uses_a_clone(store: Store) -> None:
    store.add("count", 1)
    child = multiprocessing.get_context("fork").Process(target=_add_in_child, args=(store,))
    child.start()
    try:
        child.join(LIMIT_S)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
        child.close()
    assert store.add("count", 1) == 3


def _add_in_child(store: Store) -> None:
    clone = store.clone()
    assert clone.add("count", 1) == 2
    clone.set("from child", "value")


# ---- what HoldfastStore does otherwise ----------------------------------------------------------


def test_one_thread_may_wait_while_another_uses_the_same_store(
    holdfast_store: HoldfastStore, threads: ThreadPoolExecutor
) -> None:
    """A TCPStore object serves one request at a time."""
    begun = threading.Event()

    def wait() -> bytes:
        begun.set()
        return holdfast_store.get("later")

    waiting = threads.submit(wait)
    assert begun.wait(LIMIT_S)
    holdfast_store.set("later", "value")
    assert waiting.result(LIMIT_S) == b"value"


def test_a_failed_add_leaves_the_store_usable(holdfast_store: HoldfastStore) -> None:
    """A TCPStore loses its connection for good."""
    holdfast_store.set("key", "text")
    with pytest.raises(dist.DistStoreError, match="not a number"):
        holdfast_store.add("key", 1)
    assert holdfast_store.get("key") == b"text"


def test_a_value_over_the_limit_is_refused_in_words(holdfast_store: HoldfastStore) -> None:
    holdfast_store.set("key", bytes(VALUE_BYTES_MAX))
    with pytest.raises(dist.DistStoreError, match=r"for 'key' is over the limit of \d+ bytes"):
        holdfast_store.append("key", "x")
    assert holdfast_store.get("key") == bytes(VALUE_BYTES_MAX)


def test_torch_does_not_pass_queues_and_lists_through_a_prefix(
    holdfast_store: HoldfastStore,
) -> None:
    """A limit of torch 2.13 for any store in Python. If this fails, correct docs/store.md."""
    prefixed = dist.PrefixStore("prefix", holdfast_store)
    for method, arguments in {
        prefixed.queue_push: ("queue", "value"),
        prefixed.queue_pop: ("queue",),
        prefixed.queue_len: ("queue",),
        prefixed.list_keys: (),
    }.items():
        with pytest.raises(NotImplementedError):
            method(*arguments)
