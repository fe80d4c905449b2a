# SPDX-License-Identifier: Apache-2.0
"""The numbers of a journal's entries: by them a master is known that has forgotten something."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.test_journal import LOCATIONS, Location, batch


@pytest.mark.parametrize("place", LOCATIONS)
def test_the_number_of_the_last_entry_only_rises_and_is_known_to_the_next_owner(
    tmp_path: Path, place: Callable[[Path], Location]
) -> None:
    location = place(tmp_path)
    with closing(location.open()) as journal:
        assert journal.end() == 0
        journal.append(batch(0, 3))
        assert journal.end() == 3
    with closing(location.open()) as journal:
        assert journal.end() == 3
        journal.compact(batch(0, 2))
        assert journal.end() == 5
    with closing(location.open()) as journal:
        assert journal.end() == 5
        journal.compact([])
    with closing(location.open()) as journal:
        journal.append(batch(3, 1))
        assert journal.end() == 6


@pytest.mark.parametrize("place", LOCATIONS)
def test_what_follows_the_newest_snapshot_is_known_to_the_next_owner(
    tmp_path: Path, place: Callable[[Path], Location]
) -> None:
    location = place(tmp_path)
    with closing(location.open()) as journal:
        assert journal.since_snapshot() == (0, 0)
        journal.append(batch(0, 3))
        assert journal.since_snapshot() == (3, 3 * 24)
    with closing(location.open()) as journal:
        assert journal.since_snapshot() == (3, 3 * 24)
        journal.compact(batch(0, 2))
        assert journal.since_snapshot() == (0, 0)
        journal.append(batch(3, 1))
    with closing(location.open()) as journal:
        assert journal.since_snapshot() == (1, 24)
        journal.compact([])
        assert journal.since_snapshot() == (0, 0)
        journal.append(batch(3, 1))
        assert journal.since_snapshot() == (1, 24)
