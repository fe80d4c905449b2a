# SPDX-License-Identifier: Apache-2.0
"""The nouns of data: what is read, in which order, and how far it has come.

A *dataset* is cut into *shards*. What a worker is given is a *lease* on a *piece*: a shard, or the
rest of one that another worker began. A piece names the same samples wherever it is read, so a
position is small: how far the cutting has come, and the pieces that are not consumed.
"""

from msgspec import Struct

RANGE, LINES, STREAM, LISTED = "range", "lines", "stream", "listed"
"""Kinds of datasets: records 0..size; lines of files, by bytes; partitions with offsets; shards
that the user names."""

IN_ORDER, BY_SHARD, BY_SAMPLE = "none", "shards", "samples"
"""What is shuffled: nothing, the order of the shards, or the order of all samples."""

TRAIN, EVALUATE, PREDICT = "train", "evaluate", "predict"
"""What a dataset is read for."""


class Extent(Struct, frozen=True, array_like=True):
    """A file or a partition of a dataset."""

    name: str
    size: int
    """Bytes of a file, records of a partition from `begin` on; -1: a partition without an end."""
    begin: int = 0
    """The first offset of a partition."""


class Dataset(Struct, frozen=True, array_like=True):
    """What a dataset is: the same for every worker that reads it."""

    name: str
    kind: str = RANGE
    size: int = 0
    """Records of a range."""
    shard_size: int = 1
    """Records, bytes or offsets of a shard; listed shards have their own sizes."""
    epochs: int = 1
    """0: without end. A stream has one epoch."""
    shuffle: str = IN_ORDER
    seed: int = 0
    extents: tuple[Extent, ...] = ()
    """The files of lines, the partitions of a stream."""
    task: str = TRAIN
    series: str = ""
    """The directory of the Checkpointer that its position is saved with. Empty: its position is not
    saved with any model, and a sample may be read twice after a failure."""
    attempts: int = 3
    """How often a piece may fail in its reader before it is set aside."""
    grows: bool = False
    """Of a stream: a shard is dealt when all its records are known to be written."""


class Piece(Struct, frozen=True, array_like=True, order=True):
    """Some samples of one epoch that follow each other.

    Of a range: positions in the epoch's order, which the reader turns into records (with BY_SAMPLE
    by the permutation of model/permutation.py). Of lines: bytes of the file `extent`; a line
    belongs to the piece in which its first byte is. Of a stream: offsets of the partition `extent`.
    """

    epoch: int
    extent: int
    """Which file or partition; 0 for a range. For listed shards, which shard."""
    begin: int
    end: int


class Lease(Struct, frozen=True, array_like=True):
    """A piece in the hands of one worker."""

    number: int
    """Given once in the life of a job: a piece that is given out again has a new lease."""
    piece: Piece
    key: str = ""
    """What the user called a listed shard."""


class Position(Struct, frozen=True, array_like=True):
    """How far a dataset is consumed: everything that was cut, except the open pieces."""

    name: str
    epoch: int
    """The epoch that is being cut."""
    cut: tuple[int, ...]
    """How many shards of this epoch are cut; for a stream, how many of each partition."""
    open: tuple[Piece, ...] = ()
    """Cut, but not consumed: the rest of each."""
    aside: tuple[Piece, ...] = ()
    """Set aside because they failed again and again."""
    listed: tuple[tuple[str, int], ...] = ()
    """For listed shards: name and size of each from `first_listed` on that is not consumed."""
    first_listed: int = 0
    is_listed: bool = False
    """True when no more shards will be named."""
    recipe: str = ""
    """How the dataset was cut: a position means nothing to a dataset that is cut another way."""
