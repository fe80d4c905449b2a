# SPDX-License-Identifier: Apache-2.0
"""A part: a piece of a dataset in the hands of this process, and what is in it."""

import os
from collections.abc import Iterator

import numpy as np

from holdfast.client.permuting import Records, permuted
from holdfast.model.dataset import BY_SAMPLE, LINES, STREAM, Dataset, Lease
from holdfast.model.errors import StateError
from holdfast.model.permutation import Permutation


class Part:
    """A piece that this process reads. Only one reader at a time has it.

    It is consumed in order: `done <= given <= end`. What is *given* was handed to the caller and
    counts as consumed in a checkpoint. What is *done* the caller has finished with, because it came
    back for more: the ledger is told that, so that nothing is lost if this process dies.
    """

    __slots__ = (
        "begin",
        "done",
        "end",
        "epoch",
        "extent",
        "given",
        "is_wanted",
        "name",
        "number",
        "read_from",
        "read_since",
        "reported",
        "term",
    )

    def __init__(self, lease: Lease, term: int, dataset: Dataset) -> None:
        piece = lease.piece
        self.number, self.term = lease.number, term
        self.epoch, self.extent = piece.epoch, piece.extent
        self.begin, self.end = piece.begin, piece.end
        self.given = self.done = self.reported = piece.begin
        self.is_wanted = False
        """Other workers wait for its tail: only its reader may cut it (Holdings.share)."""
        self.read_from, self.read_since = piece.begin, 0.0
        """Where its reader began, and when."""
        self.name = lease.key
        """The file, the partition, or what the user called a listed shard."""
        if dataset.kind in (LINES, STREAM):
            self.name = dataset.extents[piece.extent].name

    def __repr__(self) -> str:
        of = f" of {self.name!r}" if self.name else ""
        return f"Part({self.begin}..{self.end}{of}, epoch {self.epoch})"


def records(dataset: Dataset, epoch: int, begin: int, end: int) -> Records:
    """The record numbers at these positions of an epoch's order."""
    if dataset.shuffle == BY_SAMPLE:
        return permuted(Permutation(dataset.size, dataset.seed, epoch), begin, end)
    return np.arange(begin, end, dtype=np.int64)


def lines(part: Part) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in the rest of a part: where each ends, and the line itself.

    A line belongs to the part in which its first byte is, so it may end beyond the part's end.
    """
    with open(part.name, "rb") as file:
        at = part.given
        if at > 0:
            # One byte back: if that is the end of a line, a line begins right here.
            file.seek(at - 1)
            at += max(0, len(file.readline()) - 1)
        while at < part.end:
            line = file.readline()
            if not line:
                raise StateError(
                    f"{part.name} has {os.fstat(file.fileno()).st_size} bytes, but it had "
                    f"{part.end} at least when the dataset was made"
                )
            at += len(line)
            yield at, line
