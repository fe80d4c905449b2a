# SPDX-License-Identifier: Apache-2.0
"""What this process holds of a dataset, for any number of threads that read it."""

import time
from collections.abc import Iterable, Sequence

from holdfast.client.data.books import NOT_OPEN
from holdfast.client.data.errands import HOLD_S, Errand, Errands
from holdfast.client.data.ledgers import Ledger
from holdfast.client.data.parts import Part
from holdfast.model.dataset import Dataset, Lease, Piece, Position
from holdfast.model.errors import HoldfastError
from holdfast.protocol.data import Mark

Claims = Sequence[tuple[Part, int]]
"""The parts that a batch is from, and how far it goes in each."""


class Holdings:
    """The parts of this process."""

    def __init__(
        self, ledger: Ledger, dataset: Dataset, *, prefetch: int, report_every_s: float
    ) -> None:
        self.dataset = dataset
        self._report_every_s = report_every_s
        self._errands = Errands(ledger, dataset, prefetch, report_every_s)
        self._books, self._changed = self._errands.books, self._errands.changed

    @property
    def report_at(self) -> float:
        """When the next report is due; readers look at it before they call `report_if_due`."""
        return self._errands.report_at

    @property
    def term(self) -> int:
        """The term of the parts that are valid; readers must leave parts of another term."""
        return self._books.term

    def open(self) -> Position:
        """The position when this process opened the dataset; registers it if no process has."""
        with self._changed:
            while self._books.position is None:
                self._errands.wait_for(self._errands.quick or self._errands.send(want=0))
            return self._books.position

    def epoch(self) -> int:
        """The epoch to read now: the first one that is not known to be over."""
        self.open()
        with self._changed:
            return self._books.epoch

    # ---- readers --------------------------------------------------------------------------------

    def next_part(self, epoch: int, *, wait: bool, hold_s: float = 0.0) -> Part | None:
        """A part for one reader. None: the epoch is over.

        Without `wait`, None also means that there is nothing now, though something may come back;
        `hold_s` is how long it may take to be sure of that.
        """
        with self._changed:
            if not self._found(epoch, wait, hold_s):
                return None
            part = self._books.ready.popleft()
            part.read_from, part.read_since = part.given, time.monotonic()
            self._errands.fetch()
            return part

    def has_more(self, epoch: int, *, wait: bool = True) -> bool:
        """Whether there is something to read: now, or, with `wait`, before the epoch is over."""
        with self._changed:
            return self._found(epoch, wait)

    def _found(self, epoch: int, wait: bool, hold_s: float = 0.0) -> bool:
        """Whether a part is ready, now or after asking for one. The lock is held."""
        asked: Errand | None = None
        hold_s = HOLD_S if wait else hold_s
        while True:
            self._errands.check()
            if self._books.term != NOT_OPEN:
                if epoch != self._books.epoch or not self._books.has_more_epochs:
                    return False
                if self._books.ready:
                    return True
                if asked is not None and asked.want and not wait:
                    return False
            asked = self._errands.quick
            if asked is None and hold_s and self._errands.held is not None:
                # The held errand may wait for something that only this process knows.
                asked = self._errands.send(want=0) if self._books.has_news else self._errands.held
            if asked is None:
                asked = self._errands.send(want=1, hold_s=hold_s, is_idle=True)
            self._errands.wait_for(asked)

    def deliver(self, claims: Claims) -> bool:
        """The caller gets these now. False: the position jumped, they must not be used."""
        with self._changed:
            if any(part.term != self._books.term for part, _ in claims):
                return False
            for part, upto in claims:
                part.given = upto
            return True

    def finish(self, claims: Claims) -> None:
        """The caller has finished with these."""
        with self._changed:
            for part, upto in claims:
                self._books.finish(part, upto)

    def fail(self, part: Part, why: str) -> None:
        """The rest of a part cannot be read: another worker tries, or it is set aside."""
        with self._changed:
            self._books.fail(part, why)
            self._errands.send(want=0)

    def share(self, part: Part, drawn: int) -> None:
        """Other workers wait for this part: cut off half of what its reader has not drawn.

        Only its reader calls this, so no reader can be beyond the cut. What is read in no more time
        than two reports take stays here: it would be read before another worker had it.
        """
        part.is_wanted = False
        rest = part.end - drawn
        pace_s = (time.monotonic() - part.read_since) / max(1, drawn - part.read_from)
        if rest > 1 and rest * pace_s > 2 * self._report_every_s:
            with self._changed:
                if part.number in self._books.parts:
                    self._books.cut(part, part.end - rest // 2)
                    self._errands.send(want=0)

    def put_back(self, parts: Iterable[Part]) -> None:
        """These have no reader any more: the next reader of this process goes on with them."""
        with self._changed:
            for part in sorted(parts, key=lambda part: part.number, reverse=True):
                if part.number in self._books.parts and part not in self._books.ready:
                    self._books.ready.appendleft(part)
            self._changed.notify_all()

    def report_if_due(self) -> None:
        """Say in the background how far the readers are, if that was not said for a while."""
        if time.monotonic() >= self.report_at and self._errands.quick is None:
            with self._changed:
                self._errands.send(want=0)

    # ---- parts that loader processes took, for the process that trains --------------------------

    def adopt(self, number: int, term: int, begin: int, end: int) -> Part | None:
        """The part of a lease that a loader process took; None if the lease is void."""
        self.open()
        with self._changed:
            if term != self._books.term:
                return None
            return self._books.enter(Lease(number, Piece(self._books.epoch, 0, begin, end)))

    def hand_on(self, part: Part) -> None:
        """The process that trains speaks for this part; here it is forgotten."""
        with self._changed:
            self._books.parts.pop(part.number, None)

    def give_back_leases(self, leases: Iterable[tuple[int, int]]) -> None:
        """Give back what was not reported of these leases (number, begin), and wait for it."""
        with self._changed:
            for number, begin in leases:
                self._books.give_back_lease(number, begin)
        self.flush()

    def release(self, parts: Iterable[Part]) -> None:
        """Give back the rest of these, and wait for it."""
        with self._changed:
            for part in parts:
                if part.number in self._books.parts:
                    self._books.give_back(part)
        self.flush()

    def give_back_ready(self) -> None:
        """Give back what has no reader here, and wait for it."""
        with self._changed:
            ready = list(self._books.ready)
        self.release(ready)

    def flush(self) -> None:
        """Return when the ledger knows what is known here, or does not answer for some seconds."""
        with self._changed:
            self._errands.flush()

    # ---- checkpoints ----------------------------------------------------------------------------

    def marks(self) -> tuple[Mark, ...]:
        """How far this process is in its parts, those included that ended since the last call."""
        with self._changed:
            return self._books.marks()

    def consumed(self) -> int:
        """How many samples (bytes of files) were given to this process since it opened."""
        with self._changed:
            return self._books.consumed()

    def drop(self) -> None:
        """The position has jumped: what is held is void, and the dataset is opened again."""
        with self._changed:
            self._books.drop()
            self._changed.notify_all()

    # ---- the rest -------------------------------------------------------------------------------

    def add(self, shards: Sequence[tuple[str, int]], last: bool) -> None:
        """Name more shards; the ledger hears it now, and again when the dataset is opened again."""
        self.open()
        self._errands.name_shards(shards, last)

    def abort(self, error: HoldfastError) -> None:
        """There is no way on: every reader raises this."""
        with self._changed:
            self._errands.fail(error)

    def close(self) -> None:
        """Give back what is not read, and tell the ledger how far the rest is."""
        with self._changed:
            if self._errands.is_closed:
                return
            self._errands.is_closed = True
            rest = list(self._books.parts.values())
        self.release(rest)
