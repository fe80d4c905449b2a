# SPDX-License-Identifier: Apache-2.0
"""Pauses between tries: they grow, have a limit, begin anew, and heed what a server asks for."""

from holdfast.platforms.kubernetes.answers import Rejected, Unavailable
from holdfast.platforms.kubernetes.pauses import RETRY_AFTER_MAX_S, Pauses


def test_each_pause_is_up_to_twice_as_long_as_the_last_until_the_limit() -> None:
    pauses = Pauses(0.2, 10.0)
    for failures, full_s in enumerate((0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0), start=1):
        assert 0.5 * full_s <= pauses.after() <= full_s
        assert pauses.failures == failures
    pauses.renew()
    assert pauses.failures == 0
    assert pauses.after() <= 0.2


def test_a_server_is_left_alone_for_as_long_as_it_asks_within_reason() -> None:
    pauses = Pauses(0.2, 10.0)
    assert pauses.after(Unavailable("busy", retry_after_s=7.0)) == 7.0
    assert pauses.after(Unavailable("busy", retry_after_s=1e6)) == RETRY_AFTER_MAX_S
    # One that asked once is not left alone for so long again.
    assert pauses.after(Rejected("no")) <= 0.8


def test_many_who_wait_for_one_server_do_not_come_back_at_one_moment() -> None:
    assert len({Pauses().after() for _ in range(100)}) > 50
