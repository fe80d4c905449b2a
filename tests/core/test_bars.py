# SPDX-License-Identifier: Apache-2.0
"""Unfinished lines: what a terminal would show of them, and when they become lines."""

import pytest

from holdfast.agent.bars import ROW_BYTES_MAX, ROWS_MAX, Bars


def after(*writes: bytes) -> tuple[list[bytes], list[bytes]]:
    """The lines and the rows that are left when all of it has been written."""
    bars = Bars()
    lines = [line for data in writes for line in bars.write(data)]
    return lines + bars.settle(), bars.rows


@pytest.mark.parametrize(
    ("written", "lines", "rows"),
    [
        pytest.param(b"\r 10%\r 20%", [], [b" 20%"], id="a bar that begins with a return"),
        pytest.param(b"10%\r20%\r", [], [b"20%"], id="a bar that ends with one"),
        pytest.param(b"\r 10%\r100%\n", [b"100%"], [], id="a bar that is done"),
        pytest.param(b"one\r\ntwo\r\n", [b"one", b"two"], [], id="lines of another system"),
        pytest.param(b"\r 10%\nhello\n\r 20%", [b" 10%", b"hello"], [b" 20%"], id="lines between"),
        pytest.param(b"\r 10%\r    \r", [], [], id="a bar that clears itself"),
        pytest.param(b"\r 10%\x1b[2K\r 20%", [], [b" 20%"], id="a row that is erased"),
        pytest.param(b"\r\x1b[32m5%\x1b[0m", [], [b"\x1b[32m5%\x1b[0m"], id="colours stay"),
        pytest.param(
            b"\router 1\n\rinner 1\x1b[A\n\rinner 2\x1b[A\router 2",
            [],
            [b"outer 2", b"inner 2"],
            id="two bars",
        ),
        pytest.param(b"a\r\x1b[9A\rb", [], [b"b"], id="above the top there is nothing"),
    ],
)
def test_rows_are_what_a_terminal_shows(
    written: bytes, lines: list[bytes], rows: list[bytes]
) -> None:
    assert after(written) == (lines, rows)
    every_byte_alone = [written[at : at + 1] for at in range(len(written))]
    assert after(*every_byte_alone) == (lines, rows)


def test_a_bar_that_moves_up_in_time_is_no_line() -> None:
    bars = Bars()
    bars.write(b"\router")
    bars.write(b"\n")
    bars.write(b"\rinner\x1b[A")
    assert (bars.settle(), bars.rows) == ([], [b"outer", b"inner"])


def test_what_grows_without_end_becomes_lines() -> None:
    many = b"".join(b"\rrow %d\n" % number for number in range(100_000))
    lines, _ = after(many)
    assert len(lines) == 100_000
    assert after(b"\r" + b"x" * (ROW_BYTES_MAX + 1))[0] == [b"x" * (ROW_BYTES_MAX + 1)]
    bars = Bars()
    bars.write(many)
    assert len(bars.rows) <= ROWS_MAX


def test_what_is_left_at_the_end_is_lines() -> None:
    bars = Bars()
    bars.write(b"\r 10%\n\r 20%\x1b[A")
    assert bars.end() == [b" 10%", b" 20%"]
    assert not bars.is_open


HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
AGAIN = b"\r\x1b[2K"
UP = b"\x1b[1A\x1b[2K"
"""How rich begins to draw a region of one row again, and what it adds for each row more."""


class Shown:
    """A stream that settles after each write, as when its worker takes its time."""

    def __init__(self) -> None:
        self._bars = Bars()
        self.lines: list[bytes] = []

    def after(self, *writes: bytes) -> list[bytes]:
        """The rows after these writes."""
        for data in writes:
            self.lines += [*self._bars.write(data), *self._bars.settle()]
        return self._bars.rows


def test_a_live_region_of_rich_stays_in_its_rows() -> None:
    shown = Shown()
    assert shown.after(b"begin\n", HIDE, b"outer 1\ninner 1") == [b"outer 1", b"inner 1"]
    assert shown.after(AGAIN + UP + b"outer 2\ninner 2") == [b"outer 2", b"inner 2"]
    assert shown.after(AGAIN + UP + b"outer 3\ninner 3\nnew 3") == [
        b"outer 3",
        b"inner 3",
        b"new 3",
    ]
    assert shown.lines == [b"begin"]
    assert shown.after(b"\n" + SHOW) == []
    assert shown.lines == [b"begin", b"outer 3", b"inner 3", b"new 3"]


@pytest.mark.parametrize("height", [1, 2, 3])
def test_what_rich_prints_above_its_region_is_lines(height: int) -> None:
    region = b"\n".join(b"bar %d" % row for row in range(height))
    again = AGAIN + UP * (height - 1)
    shown = Shown()
    shown.after(HIDE, region, again + b"said\nand more\n" + region)
    # Only when it draws again is it known where the region begins.
    assert shown.after(again + region) == region.split(b"\n")
    assert shown.lines == [b"said", b"and more"]


def test_a_region_that_goes_leaves_nothing() -> None:
    shown = Shown()
    shown.after(HIDE, b"outer\ninner", AGAIN + UP + b"outer\ninner\n" + SHOW + b"\r" + UP + UP)
    assert shown.after(b"then\n") == []
    assert shown.lines == [b"then"]


def test_a_worker_that_dies_in_its_region_leaves_it_as_lines() -> None:
    bars = Bars()
    bars.write(HIDE + b"outer\ninner")
    assert bars.settle() == []
    assert bars.end() == [b"outer", b"inner"]


def test_lines_are_lines_where_the_cursor_is_hidden_for_good() -> None:
    shown = Shown()
    lines = [b"line %d" % number for number in range(100)]
    assert shown.after(HIDE, *(line + b"\n" for line in lines)) == []
    assert shown.lines == lines


@pytest.mark.parametrize(
    "drawn",
    [
        pytest.param(b"\r50%", id="one bar"),
        pytest.param(b"\router 1\n\rinner 1\x1b[A\router 2", id="two bars"),
        pytest.param(b"outer 1\ninner 1" + AGAIN + UP + b"outer 2\ninner 2", id="a block"),
    ],
)
def test_lines_are_lines_after_a_program_that_died_with_the_cursor_hidden(drawn: bytes) -> None:
    shown = Shown()
    shown.after(HIDE, drawn, b"\n")
    lines = [b"line %d" % number for number in range(100)]
    assert shown.after(*(line + b"\n" for line in lines)) == []
    assert shown.lines[-99:] == lines[1:]  # The first stands on a row that was drawn.


def test_half_an_escape_code_waits_for_its_other_half() -> None:
    shown = Shown()
    shown.after(b"\r100%\n\x1b[")
    assert shown.after(b"32mgreen\x1b[0m\n") == []
    assert shown.lines == [b"100%", b"\x1b[32mgreen\x1b[0m"]
