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
