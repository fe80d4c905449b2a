# SPDX-License-Identifier: Apache-2.0
"""One value of every message and every record about data; see samples.py."""

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.checkpoint import Version
from holdfast.model.dataset import (
    BY_SHARD,
    EVALUATE,
    LINES,
    LISTED,
    STREAM,
    Dataset,
    Extent,
    Lease,
    Piece,
    Position,
)
from holdfast.protocol import data as d
from holdfast.protocol import messages as m

DIRECTORY = "/data-ckpt"
VERSION = Version(2, 40)
TRAIN = Dataset(
    "train", LINES, 0, 100, 2, BY_SHARD, 7, (Extent("a.txt", 250), Extent("b.txt", 50)),
    series=DIRECTORY, attempts=2,
)  # fmt: skip
STREAMED = Dataset(
    "stream", STREAM, shard_size=100, extents=(Extent("p", -1, 50), Extent("q", 40)), grows=True
)
NAMED = Dataset("named", LISTED, task=EVALUATE)
FIRST, SECOND, THIRD = Piece(0, 0, 0, 100), Piece(0, 1, 0, 50), Piece(0, 0, 100, 200)
POSITION = Position(
    "train", 0, (2,), (Piece(0, 0, 30, 100),), (Piece(0, 0, 200, 250),), (("x", 5),), 3, True,
    "lines shard_size=100",
)  # fmt: skip

DATA_MESSAGES: tuple[m.AnyMessage, ...] = (
    d.DatasetOpen(scope=3, dataset=TRAIN),
    d.DatasetOpened(position=POSITION, term=4),
    d.ShardsTake(
        scope=3,
        name="train",
        term=4,
        epoch=1,
        want=2,
        consumed=(
            d.Consumed(7, 100),
            d.Consumed(8, 30, "unreadable"),
            d.Consumed(9, 0, "", True),
            d.Consumed(10, 20, end=60),
        ),
        timeout_s=30.0,
        is_idle=True,
    ),
    d.ShardsTaken(leases=(Lease(10, FIRST, "x"),), is_over=True, wanted=(9,)),
    d.ShardsAdd(scope=3, name="named", first=1, shards=(("x", 5),), is_last=True),
    d.ShardsGrown(scope=3, name="stream", ends=(250, 40)),
    d.DataMarked(
        directory=DIRECTORY,
        round=3,
        version=VERSION,
        marks={0: (d.Mark("train", 4, (d.Consumed(7, 100),)),), 1: ()},
        world_size=2,
    ),
)

DATA_RECORDS: list[Record] = [
    rec.DatasetRegistered(TRAIN),
    rec.DatasetRegistered(NAMED),
    rec.ShardsListed("named", 0, (("x", 5), ("y", 6)), True),
    rec.DatasetRegistered(STREAMED),
    rec.StreamGrown("stream", (250, 40)),
    rec.PositionsAdopted(DIRECTORY, 2, (), 3),
    rec.ShardsLeased("train", 0, 3, (Lease(1, FIRST), Lease(2, SECOND)), 0, "s", 4),
    rec.ShardsReported("train", (d.Consumed(1, 30), d.Consumed(2, 0, "unreadable"))),
    rec.ShardsLeased("train", 1, 3, (Lease(3, SECOND),), 1, "t", 2),
    rec.ShardsReported("train", (d.Consumed(3, 0, "unreadable again"),)),
    rec.ShardsLeased("train", 0, 3, (Lease(4, THIRD),), 0, "s", 5, (d.Consumed(1, 40),)),
    rec.ShardsReported("train", (d.Consumed(4, 120, end=150),)),
    rec.MarksFolded(DIRECTORY, VERSION, (("train", 1, 20),)),
    rec.LeasesReturned(3),
    rec.LeasesReturned(node_id=2),
    rec.DatasetKept(
        Dataset("kept", size=20, shard_size=10, series=DIRECTORY),
        5,
        Position("kept", 0, (2,), (Piece(0, 0, 15, 20),), (Piece(0, 0, 14, 15),)),
        4,
        (rec.LeaseKept(3, Piece(0, 0, 0, 10), 1, 3, 1, 6, 5, True),),
        ((Piece(0, 0, 15, 20), 1),),
        ("unreadable",),
        "",
        3,
    ),
    rec.AnswerKept("u", 9, "kept", 1, 3, (Lease(3, Piece(0, 0, 0, 10)),)),
]
