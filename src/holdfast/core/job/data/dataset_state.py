# SPDX-License-Identifier: Apache-2.0
"""One dataset: what is cut, which worker has which piece, and what has come back.

Every sample of an epoch is in exactly one place: not cut yet, open (it came back and waits for a
worker), in a lease, consumed, or set aside. Only records change this (see shard_state.py).

A lease is *live* until it is consumed to its end or its rest has gone back. Without a checkpoint
that the dataset follows it is then forgotten. With one it is kept until a saved version is known to
contain it: until then a restored model would not have seen its samples.
"""

from bisect import insort
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from holdfast.core.job.data.cutting import Cutter
from holdfast.core.job.data.registration import recipe
from holdfast.model.dataset import Dataset, Lease, Piece
from holdfast.protocol.data import Consumed


@dataclass(slots=True)
class LeaseState:
    """A piece in a worker's hands. Its end moves down when the rest goes back."""

    number: int
    piece: Piece
    node_id: int
    scope: int
    #: How often this very piece has failed before.
    failures: int
    #: Consumed up to here, as its worker says.
    reported: int
    #: Consumed up to here in the newest version that every rank has marked.
    marked: int
    is_live: bool = True

    @property
    def is_begun(self) -> bool:
        return self.reported > self.piece.begin


class DatasetState:
    """Samples in their places."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.recipe = recipe(dataset)
        self.cutter = Cutter(dataset)
        #: Rises whenever the position jumps.
        self.term = 0
        #: The round whose models have read what is consumed; -1 while no worker has read.
        self.round = -1
        #: Pieces that came back, the lowest last.
        self.open: list[Piece] = []
        #: How often pieces in `open` have failed.
        self.failures: dict[Piece, int] = {}
        #: Pieces that failed too often, and why; empty for those from a checkpoint.
        self.aside: dict[Piece, str] = {}
        self.leases: dict[int, LeaseState] = {}
        self.next_lease = 1
        #: The live leases of each node; all are of one epoch.
        self.live: dict[int, dict[int, LeaseState]] = {}
        self.live_epoch = 0
        #: Why no worker can read from it as it is; empty if workers can.
        self.problem = ""
        #: Samples reported as consumed, for people.
        self.reported = 0

    def validate(self) -> None:
        """A sample is in one place: no two pieces that are open, set aside or leased overlap."""
        live = {number: one for of in self.live.values() for number, one in of.items()}
        assert live == {n: one for n, one in self.leases.items() if one.is_live}, live.keys()
        assert all(self.live.values()), self.live
        for number, lease in self.leases.items():
            assert number == lease.number < self.next_lease, lease
            assert lease.piece.begin <= lease.reported <= lease.piece.end, lease
            assert lease.marked <= lease.piece.end, lease
            assert not lease.is_live or lease.piece.epoch == self.live_epoch, lease
        assert self.open == sorted(self.open, key=lowest_last), self.open
        assert self.failures.keys() <= set(self.open), self.failures
        left = [replace(lease.piece, begin=lease.reported) for lease in live.values()]
        for one, other in pairwise(sorted([*self.open, *self.aside, *left])):
            is_same_extent = (one.epoch, one.extent) == (other.epoch, other.extent)
            assert not is_same_extent or one.end <= other.begin, (one, other)

    # ---- looking --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The lowest epoch that has something left, or the last one that was cut."""
        if self.live:
            return self.live_epoch
        return self.open[-1].epoch if self.open else self.cutter.epoch

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left of the epoch."""
        return not self.live and not self.open and self.cutter.is_at_end

    @property
    def first_left(self) -> int:
        """The lowest epoch that is not over."""
        if self.live:
            return self.live_epoch
        return self.epoch + self.is_drained

    def is_over(self, epoch: int) -> bool:
        """Whether every piece of the epoch is consumed or set aside, and none can come back."""
        if 0 < self.dataset.epochs <= epoch or epoch < self.first_left:
            return True
        return self.is_drained and self.cutter.total == 0  # Each further epoch is as empty.

    def available(self, epoch: int, want: int) -> tuple[list[Piece], int]:
        """Pieces of an epoch for a worker that wants some, and how many of them had come back.

        An epoch begins when nothing is left of the one before it.
        """
        if epoch != self.first_left:
            return [], 0
        came_back = [piece for piece in self.open[: -want - 1 : -1] if piece.epoch == epoch]
        if epoch < self.cutter.epoch or len(came_back) == want:
            return came_back, len(came_back)
        return came_back + self.cutter.next(epoch, want - len(came_back)), len(came_back)

    def lease_on(self, piece: Piece, ahead: int) -> Lease:
        """A new lease, the `ahead`-th after those that were given out."""
        return Lease(self.next_lease + ahead, piece, self.cutter.key(piece))

    def held_by(self, node_id: int) -> tuple[int, ...]:
        """The live leases of a node."""
        return tuple(self.live.get(node_id, ()))

    def too_early(self, scope: int) -> str:
        """Why a round cannot read yet; empty if it can.

        What its models have seen is known only when they are restored.
        """
        series = self.dataset.series
        if not series or self.round in (-1, scope):
            return ""
        follows = f"dataset {self.dataset.name!r} follows the checkpoints of {series}"
        return f"{follows}: load them before you read"

    def wrong_report(self, consumed: tuple[Consumed, ...]) -> str:
        """The first claim that cannot be true; empty if there is none."""
        for said in consumed:
            lease = self.leases.get(said.lease)
            if said.lease >= self.next_lease or said.lease < 1:
                return f"no lease {said.lease} of dataset {self.dataset.name!r} was given out"
            if lease is None or not lease.is_live:
                continue
            begin, end = lease.piece.begin, lease.piece.end
            if not begin <= said.upto <= end:
                return f"lease {said.lease} is {begin} to {end}, and not read up to {said.upto}"
            if -1 < said.end < said.upto:
                return f"lease {said.lease} is read up to {said.upto}, it cannot end at {said.end}"
        return ""

    def is_news(self, said: Consumed) -> bool:
        """Whether a report changes anything: it is cumulative and may be said twice."""
        lease = self.leases.get(said.lease)
        if lease is None or not lease.is_live:
            return False
        is_cut = -1 < said.end < lease.piece.end
        return bool(said.upto > lease.reported or said.problem or said.returned or is_cut)

    # ---- changes --------------------------------------------------------------------------------

    def grant(self, leases: tuple[Lease, ...], from_open: int, node_id: int, scope: int) -> None:
        for i, given in enumerate(leases):
            piece, failures = given.piece, 0
            if i < from_open:
                self._take_open(piece)
                failures = self.failures.pop(piece, 0)
            else:
                self.cutter.took(piece)
            state = LeaseState(
                given.number, piece, node_id, scope, failures, piece.begin, piece.begin
            )
            self.hold(state)
            self.next_lease = given.number + 1
        self.round = scope

    def hold(self, lease: LeaseState) -> None:
        self.leases[lease.number] = lease
        if lease.is_live:
            self.live.setdefault(lease.node_id, {})[lease.number] = lease
            self.live_epoch = lease.piece.epoch

    def _take_open(self, piece: Piece) -> None:
        if self.open[-1] == piece:
            self.open.pop()
        else:
            self.open.remove(piece)

    def report(self, said: Consumed) -> None:
        """Take a worker's report on its lease. A report on a lease that is over changes nothing."""
        lease = self.leases.get(said.lease)
        if lease is None or not lease.is_live:
            return
        self._advance(lease, said.upto)
        if lease.is_live and said.problem:
            self._give_back(lease, said.problem)
        elif lease.is_live and said.returned:
            self._give_back(lease)
        elif lease.is_live and -1 < said.end < lease.piece.end:
            self._cut(lease, said.end)

    def _advance(self, lease: LeaseState, upto: int) -> None:
        if upto > lease.reported:
            self.reported += upto - lease.reported
            lease.reported = upto
        if lease.reported >= lease.piece.end:
            self._end(lease)

    def _give_back(self, lease: LeaseState, problem: str = "") -> None:
        """The rest is open again, or set aside when it has failed too often."""
        piece = lease.piece
        rest = Piece(piece.epoch, piece.extent, lease.reported, piece.end)
        # If some of the piece was read, the earlier failures were not of the samples that are left.
        failures = bool(problem) + (0 if lease.is_begun else lease.failures)
        lease.piece = Piece(piece.epoch, piece.extent, piece.begin, lease.reported)
        self._end(lease)
        if problem and failures >= self.dataset.attempts:
            self.aside[rest] = problem
            return
        insort(self.open, rest, key=lowest_last)
        if failures:
            self.failures[rest] = failures

    def _cut(self, lease: LeaseState, end: int) -> None:
        """The lease ends earlier than its piece did, as its worker has promised; the tail is open.

        What failed before is at the beginning of the piece, so its failures are not the tail's.
        """
        piece = lease.piece
        lease.piece = Piece(piece.epoch, piece.extent, piece.begin, end)
        insort(self.open, Piece(piece.epoch, piece.extent, end, piece.end), key=lowest_last)
        if lease.reported >= end:
            self._end(lease)

    def _end(self, lease: LeaseState) -> None:
        lease.is_live = False
        of_node = self.live[lease.node_id]
        del of_node[lease.number]
        if not of_node:
            del self.live[lease.node_id]
        self._forget(lease)

    def _forget(self, lease: LeaseState) -> None:
        if not lease.is_live and (not self.dataset.series or lease.marked >= lease.piece.end):
            del self.leases[lease.number]

    def give_back(self, numbers: list[int]) -> None:
        """These leases have lost their owner. That does not count as a failure."""
        for number in numbers:
            lease = self.leases.get(number)
            if lease is not None and lease.is_live:
                self._give_back(lease)

    def abandoned(self, *, before: int, node_id: int) -> list[int]:
        """Live leases of older rounds, or of a node. None where a restore decides over leases."""
        if self.dataset.series:
            return []
        found = (lease for live in self.live.values() for lease in live.values())
        return [
            lease.number for lease in found if lease.node_id == node_id or 0 < lease.scope < before
        ]

    def mark(self, number: int, upto: int) -> None:
        """A version that every rank has saved contains the lease up to here."""
        lease = self.leases.get(number)
        if lease is None:
            return
        lease.marked = max(lease.marked, min(upto, lease.piece.end))
        if lease.is_live:
            self._advance(lease, lease.marked)
        else:
            self._forget(lease)


def lowest_last(piece: Piece) -> tuple[int, int, int]:
    """Sorts pieces so that the next one to be dealt can be popped."""
    return -piece.epoch, -piece.extent, -piece.begin
