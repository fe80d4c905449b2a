# SPDX-License-Identifier: Apache-2.0
"""Arbitrary histories: no state that the journal does not explain, no world against the rules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.histories import ACTIONS, SLOTS, SPECS, Player, Step, digest_of

ROOT = Path(__file__).resolve().parents[2]

steps = st.tuples(st.integers(0, ACTIONS - 1), st.integers(0, SLOTS - 1), st.integers(0, 23))


@pytest.mark.parametrize("number", range(len(SPECS)))
@given(history=st.lists(steps, max_size=40))
@settings(max_examples=60, deadline=None)
def test_what_must_hold_holds_after_every_step(number: int, history: list[Step]) -> None:
    Player(SPECS[number]).play(history)


def test_long_histories_too() -> None:
    assert digest_of(range(100, 116), 150)


def test_the_hash_seed_decides_nothing() -> None:
    digests = set()
    for seed in ("1", "2"):
        environ = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src"))),
        }
        command = [sys.executable, "-m", "tests.core.histories", "12", "80"]
        run = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=True
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1
    assert digests.pop() == digest_of(range(12), 80)
