# SPDX-License-Identifier: Apache-2.0
"""Names of processes: who is gone is told from who cannot be seen."""

import os
import subprocess
import sys

import pytest

from holdfast.runtime.process_names import Whereabouts, look_for, own_name, pid_of

OTHER = (
    "import sys; from holdfast.runtime.process_names import own_name; print(own_name(), flush=True)"
    "; sys.stdin.read()"
)


def test_a_process_is_alive_until_it_ends_also_if_no_one_has_reaped_it() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        name = other.stdout.readline().decode().strip()
        assert pid_of(name) == other.pid
        assert look_for(name) is Whereabouts.ALIVE
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert look_for(name) is Whereabouts.GONE
    assert look_for(name) is Whereabouts.GONE


def test_another_process_with_the_same_number_is_not_taken_for_it() -> None:
    realm, _, started = own_name().rpartition("/")
    assert look_for(f"{realm}/{int(started) - 1}") is Whereabouts.GONE


@pytest.mark.parametrize("place", [0, 1], ids=["another machine", "another container"])
def test_of_another_place_nothing_is_known(place: int) -> None:
    words = own_name().split("/")
    words[place] = "elsewhere"
    assert look_for("/".join(words)) is Whereabouts.UNKNOWN


@pytest.mark.parametrize("name", ["", "x", "a/b/c/d", "////", "a/b/17/"])
def test_what_is_no_name_tells_nothing(name: str) -> None:
    assert look_for(name) is Whereabouts.UNKNOWN
