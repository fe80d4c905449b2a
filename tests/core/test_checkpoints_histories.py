# SPDX-License-Identifier: Apache-2.0
"""Arbitrary histories of loads, saves, losses and master restarts: never two versions in a round,
never a commit of half a version, never back behind what is committed, and always an end. If data
follow the checkpoints, they are where the model is after every restore."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.ledger_histories import ACTIONS, NODES, Player, Step

USUAL = (0, 1, 3, 3, 4, 5, 6)
"""To load, to save, to hear of answers and pushes, to write, to commit."""

steps = st.tuples(st.integers(0, ACTIONS - 1), st.integers(0, NODES - 1), st.integers(0, 23))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sharded"])
@given(history=st.lists(steps, max_size=80))
@settings(max_examples=60, deadline=None)
def test_what_must_hold_holds_after_every_event(shared: bool, history: list[Step]) -> None:
    for follows in (False, True):
        player = Player(shared=shared, follows=follows)
        player.play(history)
        player.drain()


@pytest.mark.parametrize("follows", [False, True], ids=["no data", "data"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "sharded"])
def test_long_histories_too(shared: bool, follows: bool) -> None:
    commits = losses = 0
    for seed in range(24):
        source = random.Random(seed)
        # Trouble is rarer than what it disturbs.
        usual = [source.choice(USUAL) for _ in range(360)]
        actions = usual + [source.randrange(ACTIONS) for _ in range(140)]
        source.shuffle(actions)
        history = [(action, source.randrange(NODES), source.randrange(24)) for action in actions]
        player = Player(shared=shared, follows=follows)
        player.play(history)
        player.drain()
        commits += len(player.on_disk)
        losses += player.ledger.round - 1
    assert commits > 20, "the histories must commit something to prove anything"
    assert losses > 10
