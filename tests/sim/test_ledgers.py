# SPDX-License-Identifier: Apache-2.0
"""Both ledgers under the load of a whole cluster: what they commit and restore is right."""

from random import Random

import pytest

from holdfast.model.checkpoint import NONE, Shape, Version, rank_part
from holdfast.model.dataset import Piece, Position
from holdfast.sim.checkers import Violation
from holdfast.sim.failures import CRASH, HOUR_S, Fault
from holdfast.sim.ledger_checker import LedgerChecker
from holdfast.sim.ledgers import LedgerRun, Load


def fault(at_s: float, machine: int, *, is_transient: bool = False) -> Fault:
    return Fault(at_s, machine, "gpu_compute", CRASH, is_transient, False, 1e6)


def test_10000_nodes_save_read_and_restore_for_an_hour() -> None:
    """The prior art's ledgers were never run at this size; ours are, and every commit is checked.

    A machine is lost in the third save, which stays incomplete: the second one is restored.
    """
    load = Load(nodes=10_000, spares=60, saves=3, save_every_s=HOUR_S / 3, persist_every=2)
    result = LedgerRun(load, [fault(0.7 * HOUR_S, 4321)], seed=1).run()
    assert result.rounds == 2
    assert result.restores == 1
    assert result.commits >= 1
    assert result.samples > 10 * 10_000
    assert result.events > 300_000


def test_nothing_is_lost_or_read_twice_whatever_fails_when() -> None:
    rounds = restores = commits = 0
    for seed in range(40):
        chance = Random(seed)
        load = Load(
            nodes=chance.randrange(3, 30),
            spares=chance.randrange(4),
            saves=12,
            save_every_s=600.0,
            persist_every=chance.choice((1, 2, 3)),
        )
        faults = [
            fault(chance.uniform(1, 7200), chance.randrange(99), is_transient=chance.random() < 0.3)
            for _ in range(chance.randrange(12))
        ]
        result = LedgerRun(load, faults, seed).run()
        rounds += result.rounds
        restores += result.restores
        commits += result.commits
    assert rounds > 150
    assert restores > 80, "too little was restored to say anything"
    assert commits > 150


def test_a_seed_gives_the_same_run_again() -> None:
    load = Load(nodes=20, spares=2, saves=6, save_every_s=600.0, persist_every=2)
    faults = [fault(1000.0, 3), fault(2000.0, 7, is_transient=True)]
    assert LedgerRun(load, faults, 5).run() == LedgerRun(load, faults, 5).run()
    assert LedgerRun(load, faults, 5).run() != LedgerRun(load, faults, 6).run()


# ---- the checker notices -------------------------------------------------------------------------

SHAPE = Shape(2, False)
FIRST = Version(0, 1)


def trained() -> LedgerChecker:
    """Two ranks have read a shard of 8 samples each; the second one half of it."""
    checker = LedgerChecker(8)
    checker.restored(NONE, 0)
    checker.consumed(0, 0, 0, 8)
    checker.consumed(0, 1, 8, 12)
    for rank in range(2):
        checker.saved(FIRST, rank)
        checker.written("a", (rank_part(rank),))
    return checker


def at(cut: int, *open_pieces: tuple[int, int]) -> tuple[Position, ...]:
    pieces = tuple(Piece(0, 0, begin, end) for begin, end in open_pieces)
    return (Position("train", 0, (cut,), pieces),)


def test_a_right_commit_passes() -> None:
    checker = trained()
    checker.commit("a", FIRST, SHAPE, at(2, (12, 16)))
    assert list(checker.committed) == [FIRST]


@pytest.mark.parametrize(
    ("attempt", "positions", "message"),
    [
        ("b", at(2, (12, 16)), "without rank-00000"),
        ("a", (), "how far its data were"),
        ("a", at(2, (11, 16)), "twice"),
        ("a", at(2, (13, 16)), "lost samples"),
        ("a", at(3, (12, 16)), "lost samples"),
    ],
)
def test_a_wrong_commit_is_noticed(
    attempt: str, positions: tuple[Position, ...], message: str
) -> None:
    with pytest.raises(Violation, match=message):
        trained().commit(attempt, FIRST, SHAPE, positions)


def test_a_version_that_is_called_safe_too_soon_is_noticed() -> None:
    checker = trained()
    checker.copied(FIRST, 7)
    with pytest.raises(Violation, match="1 of 2"):
        checker.safe(FIRST, 2)


def test_a_restore_of_something_older_than_the_commit_is_noticed() -> None:
    checker = trained()
    checker.commit("a", FIRST, SHAPE, at(2, (12, 16)))
    with pytest.raises(Violation, match="is committed"):
        checker.restored(NONE, 1)


def test_a_sample_that_is_read_again_after_a_restore_is_noticed() -> None:
    checker = trained()
    checker.restored(FIRST, 1)
    checker.consumed(1, 0, 4, 8)
    checker.saved(Version(1, 2), 0)
    with pytest.raises(Violation, match="twice"):
        checker.restored(Version(1, 2), 2)
