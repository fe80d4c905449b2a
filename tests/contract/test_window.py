# SPDX-License-Identifier: Apache-2.0
"""The terminal of a worker's stream: what is written comes out as it was, and then the end."""

import os
import select
import termios
import tty

import pytest

from holdfast.agent import window

LIMIT_S = 120.0


def test_bytes_come_out_as_they_went_in_and_then_the_end() -> None:
    opened = window.open_window()
    assert opened is not None
    reader, worker = opened
    os.set_blocking(reader, False)
    with pytest.raises(BlockingIOError):
        window.read(reader, 1000)
    written = bytes(range(256)) * 12
    assert os.write(worker, written) == len(written)
    os.close(worker)
    seen = b""
    while select.select([reader], [], [], LIMIT_S)[0] and (data := window.read(reader, 1000)):
        assert len(data) <= 1000
        seen += data
    assert seen == written
    assert window.read(reader, 1000) == b""
    os.close(reader)


@pytest.mark.parametrize("error", [termios.error(5, "Input/output error"), OSError(5, "the same")])
def test_a_terminal_that_cannot_be_set_up_is_none_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(_: int) -> None:
        raise error

    monkeypatch.setattr(tty, "setraw", fail)
    before = sorted(os.listdir("/proc/self/fd"))
    assert window.open_window() is None
    assert sorted(os.listdir("/proc/self/fd")) == before
