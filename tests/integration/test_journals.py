# SPDX-License-Identifier: Apache-2.0
"""The check of a job's journal notices what it is for."""

from dataclasses import dataclass

import pytest

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.model.ids import Generation, Round
from holdfast.model.world import World
from tests.core.ledger import member
from tests.integration.journals import DRAWN, check_records

SHAPE = Shape(1, shared=False)


def world(round: int, generation: int, *nodes: int) -> Record:
    members = tuple(map(member, nodes))
    agreed = World(round=Round(round), generation=Generation(generation), members=members)
    return rec.WorldAgreed(agreed, "")


def admitted(incarnation: int) -> Record:
    return rec.NodeAdmitted(0, 0, incarnation, "key", 1, "host")


def committed(lineage: int, step: int) -> Record:
    return rec.CheckpointCommitted("/ckpt", Version(lineage, step), "attempt", SHAPE)


def restored(round: int, lineage: int, version: Version) -> Record:
    return rec.LineageSet("/ckpt", lineage, round, version, SHAPE)


def drawn(number: int) -> Record:
    return rec.KvChanged(0, (DRAWN,), (b"%d" % number,))


END = rec.JobClosed(True, "")
GOOD = [
    rec.GenerationSet(1),
    admitted(1),
    world(1, 2, 0),
    restored(1, 1, NONE),
    drawn(1),
    committed(1, 5),
    drawn(2),
    rec.GenerationSet(3),
    admitted(2),
    world(2, 4, 0, 1),
    restored(2, 2, Version(1, 7)),
    committed(2, 8),
    END,
]


@dataclass(frozen=True)
class Broken:
    at: int
    record: Record


BROKEN = {
    "a generation twice": Broken(7, rec.GenerationSet(2)),
    "an incarnation twice": Broken(8, admitted(1)),
    "a round twice": Broken(9, world(1, 4, 0, 1)),
    "a world of an old generation": Broken(9, world(2, 3, 0, 1)),
    "a world of nobody": Broken(9, world(2, 4)),
    "a node in two places": Broken(9, world(2, 4, 0, 0)),
    "an agreement of another round": Broken(10, restored(1, 2, Version(1, 7))),
    "older than what was committed": Broken(10, restored(2, 2, Version(1, 4))),
    "a commit that goes back": Broken(11, committed(1, 4)),
    "a number twice": Broken(6, drawn(1)),
    "a number that was lost": Broken(6, drawn(3)),
    "a job that failed": Broken(12, rec.JobClosed(False, "")),
    "no end": Broken(12, drawn(3)),
}


def test_a_good_story_passes() -> None:
    check_records(GOOD)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_does_not(name: str) -> None:
    records = list(GOOD)
    records[BROKEN[name].at] = BROKEN[name].record
    with pytest.raises(AssertionError):
        check_records(records)
