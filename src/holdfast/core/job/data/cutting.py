# SPDX-License-Identifier: Apache-2.0
"""How a dataset is cut into shards: the n-th shard of an epoch, computed from its number alone.

Nothing is listed in advance, so a dataset of a billion samples costs as much memory as one of ten.
The order depends on the parameters and the epoch, never on who asks or on what has failed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

from holdfast.model.dataset import BY_SHARD, LISTED, STREAM, Dataset, Piece
from holdfast.model.permutation import Permutation


class Cutter:
    """The shards of one epoch, and how many of them are cut (of each partition for a stream)."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        extents = dataset.extents if dataset.kind != LISTED else ()
        #: How many shards each file or partition has; -1: without end.
        self._counts = [
            -1 if extent.size < 0 else _shards(extent.size, dataset.shard_size)
            for extent in extents
        ] or [_shards(dataset.size, dataset.shard_size)]
        #: Of a stream that grows: how far each partition is known to be written.
        self.ends = [extent.begin for extent in extents] if dataset.grows else []
        self._total = -1 if -1 in self._counts else sum(self._counts)
        #: The number of each file's first shard.
        self._starts = [0, *accumulate(self._counts)][:-1]
        self.epoch = 0
        self.cut = [0]
        #: Of listed shards: what each is called and its size, from `first_listed` on.
        self.listed: list[tuple[str, int]] = []
        self.first_listed = 0
        self.is_listed = False
        #: Partitions by how many shards are cut; entries that are no longer true are passed over.
        self._turns: list[tuple[int, int]] = []
        self._order: Permutation | None = None
        self.begin(0)

    def begin(self, epoch: int, cut: Sequence[int] = ()) -> None:
        """Go on from here: in an epoch that has this much cut."""
        self.epoch = epoch
        partitions = len(self._counts) if self._dataset.kind == STREAM else 1
        self.cut = list(cut) or [0] * partitions
        self._turns = [(done, i) for i, done in enumerate(self.cut) if self._has_next(i)]
        heapify(self._turns)
        self._order = None
        if self._dataset.shuffle == BY_SHARD:
            self._order = Permutation(self.total, self._dataset.seed, epoch)

    # ---- looking --------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """How many shards an epoch has; -1 while that is not known."""
        if self._dataset.kind == LISTED:
            return self.named if self.is_listed else -1
        return self._total

    @property
    def named(self) -> int:
        """How many listed shards were named so far."""
        return self.first_listed + len(self.listed)

    @property
    def size(self) -> int:
        """How many records, bytes or offsets an epoch has; -1 while that is not known."""
        if self._dataset.kind == LISTED:
            return sum(size for _, size in self.listed) if self.is_listed else -1
        if -1 in self._counts:
            return -1
        return self._dataset.size or sum(extent.size for extent in self._dataset.extents)

    @property
    def size_cut(self) -> int:
        """About how much of `size` is cut: short shards count as whole ones before the end."""
        if self._dataset.kind == LISTED:
            return sum(size for _, size in self.listed[: self.cut[0] - self.first_listed])
        cut = sum(self.cut) * self._dataset.shard_size
        return min(cut, self.size) if self.size >= 0 else cut

    @property
    def is_at_end(self) -> bool:
        """True when every shard of the epoch is cut."""
        if self._dataset.kind == STREAM:
            return not self._next_turns(1) and not self._can_grow
        return self.total >= 0 and self.cut[0] >= self.total

    def is_cut_by(self, cut: Sequence[int]) -> bool:
        """Whether a saved position could be one of this dataset."""
        return len(cut) == len(self.cut) and all(number >= 0 for number in cut)

    def next(self, epoch: int, want: int) -> list[Piece]:
        """The next shards of this epoch; the first ones if it is not begun yet. Cuts nothing."""
        if self._dataset.kind == STREAM:
            return [self._block(done, i) for done, i in self._next_turns(want)]
        if epoch > self.epoch:
            fresh = (
                Permutation(self.total, self._dataset.seed, epoch)
                if self._order is not None
                else None
            )
            return self._shards_from(epoch, 0, want, fresh)
        return self._shards_from(epoch, self.cut[0], want, self._order)

    def _shards_from(
        self, epoch: int, first: int, want: int, order: Permutation | None
    ) -> list[Piece]:
        if self._dataset.kind == LISTED:
            numbers = range(first, min(first + want, self.named))
            return [self._listed_shard(epoch, number) for number in numbers]
        numbers = range(first, min(first + want, self.total))
        return [self._shard(epoch, n if order is None else order[n]) for n in numbers]

    def _shard(self, epoch: int, number: int) -> Piece:
        dataset = self._dataset
        file = bisect_right(self._starts, number) - 1 if dataset.extents else 0
        size = dataset.extents[file].size if dataset.extents else dataset.size
        begin = (number - self._starts[file]) * dataset.shard_size
        return Piece(epoch, file, begin, min(begin + dataset.shard_size, size))

    def _listed_shard(self, epoch: int, number: int) -> Piece:
        return Piece(epoch, number, 0, self.listed[number - self.first_listed][1])

    def key(self, piece: Piece) -> str:
        """What the user called the shard; empty if it was not named."""
        if self._dataset.kind != LISTED:
            return ""
        return self.listed[piece.extent - self.first_listed][0]

    # ---- streams: partitions take turns ---------------------------------------------------------

    def _is_at_end(self, partition: int) -> bool:
        return 0 <= self._counts[partition] <= self.cut[partition]

    def _has_next(self, partition: int) -> bool:
        """Whether the next shard of a partition can be dealt."""
        if self._is_at_end(partition):
            return False
        return not self.ends or self.cut[partition] < self._written(partition, self.ends[partition])

    def _written(self, partition: int, end: int) -> int:
        """How many shards are whole when a partition is written up to here."""
        extent, step = self._dataset.extents[partition], self._dataset.shard_size
        if 0 <= extent.size <= end - extent.begin:
            return self._counts[partition]
        return (end - extent.begin) // step

    @property
    def _can_grow(self) -> bool:
        return bool(self.ends) and not all(map(self._is_at_end, range(len(self.ends))))

    def has_more_with(self, ends: Sequence[int]) -> bool:
        """Whether there are more shards when the partitions are written up to here."""
        pairs = enumerate(zip(self.ends, ends, strict=True))
        return any(self._written(i, new) > self._written(i, known) for i, (known, new) in pairs)

    def _next_turns(self, want: int) -> list[tuple[int, int]]:
        """The partitions whose turn is next: at most one shard of each."""
        found: list[tuple[int, int]] = []
        while self._turns and len(found) < want:
            turn = heappop(self._turns)
            if self.cut[turn[1]] == turn[0]:
                found.append(turn)
        for turn in found:
            heappush(self._turns, turn)
        return found

    def _block(self, done: int, partition: int) -> Piece:
        extent, step = self._dataset.extents[partition], self._dataset.shard_size
        begin = extent.begin + done * step
        end = begin + step if extent.size < 0 else min(begin + step, extent.begin + extent.size)
        return Piece(0, partition, begin, end)

    # ---- cutting --------------------------------------------------------------------------------

    def took(self, piece: Piece) -> None:
        """This shard, which `next` named, is cut."""
        if piece.epoch > self.epoch:
            self.begin(piece.epoch)
        if self._dataset.kind != STREAM:
            self.cut[0] += 1
            return
        self.cut[piece.extent] += 1
        if self._has_next(piece.extent):
            heappush(self._turns, (self.cut[piece.extent], piece.extent))

    def grow(self, ends: Sequence[int]) -> None:
        """The partitions are written up to here, at least."""
        for i, end in enumerate(ends):
            had_next = self._has_next(i)
            self.ends[i] = max(self.ends[i], end)
            if self._has_next(i) and not had_next:
                heappush(self._turns, (self.cut[i], i))

    def name(self, first: int, shards: Sequence[tuple[str, int]], *, is_last: bool) -> None:
        """The user names shards; those that are known already change nothing."""
        self.listed.extend(shards[self.named - first :])
        self.is_listed = self.is_listed or is_last


def _shards(size: int, shard_size: int) -> int:
    return -(-size // shard_size)
