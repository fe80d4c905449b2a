# SPDX-License-Identifier: Apache-2.0
"""Every sample exactly once with respect to the model, over random histories of everything that can
go wrong (shard_histories.py). HOLDFAST_SOAK_SEEDS: how many, for those who want to be surer."""

import os

import pytest

from tests.core.shard_histories import History

SEEDS = int(os.environ.get("HOLDFAST_SOAK_SEEDS", "400"))
GROUPS = 10


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_sample_is_in_the_committed_model_exactly_once(group: int) -> None:
    rounds = restored = cuts = grown = 0
    for seed in range(group, SEEDS, GROUPS):
        history = History(seed)
        try:
            history.run()
        except AssertionError as exc:
            exc.add_note(f"seed {seed}, {history.dataset}")
            raise
        rounds += history.round
        restored += history.restored
        cuts += history.cuts
        grown += history.growth.words
    assert rounds > SEEDS / GROUPS, "without trouble nothing is proved"
    assert restored > 0
    assert cuts > 0, "nobody was so slow that others got the tail of what it read"
    assert grown > 0, "no stream was read while it grew"
