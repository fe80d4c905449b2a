# SPDX-License-Identifier: Apache-2.0
"""The bottom of the terminal: drawn below the lines, taken away before the next ones."""

import pytest

from holdfast.cli.screen import ROWS_MAX, Screen, plain


def shown(drawn: bytes) -> list[bytes]:
    """The rows, without the switch that keeps long ones from wrapping."""
    return drawn.removeprefix(b"\x1b[?7l").removesuffix(b"\x1b[?7h").split(b"\r\n")


def test_bars_stand_in_the_order_of_ranks_above_the_status() -> None:
    screen = Screen()
    assert screen.set_rows((1, True), [b"[rank1] 20%"])
    assert screen.set_rows((0, True), [b"[rank0] 10%"])
    assert screen.set_status(b"step 7")
    assert shown(screen.draw(24)) == [b"[rank0] 10%", b"[rank1] 20%", b"step 7"]


def test_all_of_it_is_taken_away_at_once() -> None:
    screen = Screen()
    assert screen.clear() == b""
    screen.set_status(b"step 7")
    screen.draw(24)
    assert screen.clear() == b"\r\x1b[J"
    screen.set_rows((0, False), [b"a", b"b"])
    screen.draw(24)
    assert screen.clear() == b"\r\x1b[2A\x1b[J"
    assert screen.clear() == b""


def test_a_bar_that_ends_leaves_no_row() -> None:
    screen = Screen()
    screen.set_rows((0, True), [b"99%"])
    assert screen.set_rows((0, True), [])
    assert screen.draw(24) == b""


def test_nothing_is_drawn_again_for_no_change() -> None:
    screen = Screen()
    assert screen.set_rows((0, True), [b"99%"])
    assert not screen.set_rows((0, True), [b"99%"])
    assert not screen.set_status(b"")


def test_more_bars_than_there_is_room_for_are_counted() -> None:
    screen = Screen()
    for rank in range(30):
        screen.set_rows((rank, True), [b"bar %d" % rank])
    assert shown(screen.draw(100))[-1] == b"... and %d more" % (30 - (ROWS_MAX - 1))
    assert len(shown(screen.draw(6))) == 3


def test_a_row_keeps_its_colours_to_itself_and_cannot_move_the_cursor() -> None:
    screen = Screen()
    screen.set_rows((0, True), [b"\x1b[32mgreen\x1b[5A\x1b[2J\x07 text"])
    assert shown(screen.draw(24)) == [b"\x1b[32mgreen text\x1b[0m"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        pytest.param(b"\x1b[1;31mred\x1b[0m\ttext\n", None, id="colours, tabs and newlines"),
        pytest.param("\u2501\u2578 50%\n".encode(), None, id="other alphabets"),
        pytest.param(b"\x1b[?25lhidden\x1b[?1049h\n", b"hidden\n", id="modes"),
        pytest.param(
            b"\x1b[6nasked\x1bc\x1b(0\x0e\n", b"asked\n", id="questions, resets, alphabets"
        ),
        pytest.param(
            b"\x1b]8;id=1;file:///a\x1b\\a.py\x1b]8;;\x1b\\\n", b"a.py\n", id="links of rich"
        ),
        pytest.param(b"\x1b]0;title\x07text\n", b"text\n", id="titles"),
        pytest.param(b"cut\x1b[3\nnext\x1b]0;t\nlast\x1b\n", b"cut\nnext\nlast\n", id="cut off"),
    ],
)
def test_only_colours_come_through(written: bytes, shown: bytes | None) -> None:
    assert plain(written) == (written if shown is None else shown)
