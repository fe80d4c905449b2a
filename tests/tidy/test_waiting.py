# SPDX-License-Identifier: Apache-2.0
"""`until` is what other tests trust to wait, so it is tested itself."""

import threading

import pytest

from tests.waiting import until


def test_it_returns_what_was_found() -> None:
    box: list[int] = []
    thread = threading.Thread(target=box.append, args=(7,))
    thread.start()
    assert until(lambda: box, timeout_s=10) == [7]
    thread.join()


def test_a_true_condition_needs_no_time() -> None:
    assert until(lambda: "now", timeout_s=0) == "now"


def test_it_fails_with_what_was_waited_for() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.02 s in vain for: the node to join"):
        until(lambda: False, timeout_s=0.02, what="the node to join")


def test_a_broken_condition_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        until(lambda: 1 / 0, timeout_s=10)
