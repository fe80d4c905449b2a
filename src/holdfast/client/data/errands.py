# SPDX-License-Identifier: Apache-2.0
"""Requests to the ledger, each in a thread that lives as long as the request.

So readers go on with what they hold while the master is away, and a late answer is not lost. There
are at most two errands: a *quick* one, which is answered at once (reports, and the next part before
it is needed), and a *held* one, for readers that have nothing left. A ledger in this process needs
no thread for quick ones.
"""

import logging
import threading
import time
from collections.abc import Sequence

from holdfast.client.data.books import NOT_OPEN, Books
from holdfast.client.data.ledgers import Ledger
from holdfast.model.dataset import Dataset
from holdfast.model.errors import FencedError, HoldfastError, StateError, UsageError
from holdfast.protocol.data import ShardsTake

HOLD_S = 60.0
"""How long the ledger may hold a request of a reader that has nothing left."""
SAY_EVERY_S = 30.0
"""How often a log line says that a reader waits."""
CLOSE_S = 5.0
"""How long a process that leaves waits until the ledger has heard what goes back."""

log = logging.getLogger(__name__)


class Errand:
    """One request to the ledger."""

    def __init__(self, want: int, hold_s: float, is_idle: bool) -> None:
        self.want, self.hold_s, self.is_idle = want, hold_s, is_idle
        self.is_done = False


class Errands:
    """The requests about one dataset. Use it with the lock `changed`, unless it says otherwise."""

    def __init__(
        self, ledger: Ledger, dataset: Dataset, prefetch: int, report_every_s: float
    ) -> None:
        self.changed = threading.Condition()
        """The lock of all this; notified when an errand is done."""
        self.books = Books(dataset)
        self.quick: Errand | None = None
        self.held: Errand | None = None
        self.report_at = 0.0
        """When the next report is due."""
        self.is_closed = False
        self._ledger, self._name, self._dataset = ledger, dataset.name, dataset
        self._prefetch, self._report_every_s = prefetch, report_every_s
        #: True: a reader took a part while a quick errand was under way; it may have to fetch more.
        self._fetches_next = False
        self._error: HoldfastError | None = None
        self._listed: list[tuple[str, int]] = []
        self._is_listed = False

    def check(self) -> None:
        """Raise what has gone wrong."""
        if self._error is not None:
            raise self._error
        if self.is_closed:
            raise UsageError(f"the dataset {self._name!r} was closed by this process")

    def fail(self, error: HoldfastError) -> None:
        """Every caller that reads or waits raises this."""
        self._error = self._error or error
        self.changed.notify_all()

    def send(self, want: int, hold_s: float = 0.0, *, is_idle: bool = False) -> Errand:
        """Start an errand. While a quick one is under way there is no second one: a report follows
        it."""
        if not hold_s and self.quick is not None:
            self.books.owes_report = True
            return self.quick
        errand = Errand(want, hold_s, is_idle)
        if hold_s:
            self.held = errand
        else:
            self.quick = errand
        if self._ledger.is_here and not hold_s:
            self._run(errand)
        else:
            name = f"holdfast-data-{self._name}"
            threading.Thread(target=self._run, args=(errand,), name=name, daemon=True).start()
        return errand

    def fetch(self) -> None:
        """Ask for the next parts before they are needed, at once or after what is under way."""
        self._fetches_next = self.quick is not None
        missing = self._prefetch - len(self.books.ready)
        if missing > 0 and self.quick is None:
            self.send(want=missing)

    def wait_for(self, errand: Errand) -> None:
        """Wait until an errand is done, or there is something to read without it.

        From time to time a log line says for how long already.
        """
        began = time.monotonic()
        say_at = began + SAY_EVERY_S
        while not self.changed.wait_for(
            lambda: errand.is_done or self.books.ready or self._error, say_at - time.monotonic()
        ):
            log.warning(
                "%r: waiting for %.0f s for %s",
                self._name,
                time.monotonic() - began,
                "work: the rest of the epoch is with other workers, or the master is away"
                if errand.hold_s
                else "the master: it is away",
            )
            say_at += SAY_EVERY_S
        self.check()

    def flush(self) -> None:
        """Return when the ledger knows what is known here, or does not answer for some seconds."""
        if self.books.term != NOT_OPEN and self._error is None:
            self.send(want=0)
            self.changed.wait_for(lambda: self.quick is None, CLOSE_S)

    def name_shards(self, shards: Sequence[tuple[str, int]], is_last: bool) -> None:
        """Name more listed shards. Call it without the lock: it waits for the ledger."""
        with self.changed:
            if self._is_listed:
                raise UsageError(f"the last shard of {self._name!r} was named already")
            self._listed += shards
            self._is_listed = is_last
            named = self.books.named
        self._tell_names(named)

    def _tell_names(self, named: int) -> None:
        """Name what the ledger did not know when the dataset was opened."""
        shards = tuple(self._listed[named:])
        if shards or self._is_listed:
            first = len(self._listed) - len(shards)
            self._ledger.add(self._name, first, shards, self._is_listed)

    # ---- carrying errands out: nothing here relies on the caller's lock -------------------------

    def _run(self, errand: Errand) -> None:
        error: HoldfastError | None = StateError(
            f"{self._name!r}: a request to the ledger failed, as the traceback above says"
        )
        try:
            self._carry_out(errand)
            error = None
        except HoldfastError as exc:
            error = exc
        finally:
            self._done(errand, error)

    def _done(self, errand: Errand, error: HoldfastError | None) -> None:
        with self.changed:
            errand.is_done = True
            self._error = self._error or error
            if self.held is errand:
                self.held = None
            else:
                self.quick = None
            if self.is_closed:
                # The answer came too late: no reader is left for what it brought.
                for part in list(self.books.ready):
                    self.books.give_back(part)
            if self.quick is None and self._error is None:
                if self._fetches_next and not self.is_closed:
                    self.fetch()
                if self.books.owes_report:
                    self.send(want=0)
            self.changed.notify_all()

    def _carry_out(self, errand: Errand) -> None:
        if self.books.term == NOT_OPEN:
            self._open()
        with self.changed:
            self.books.owes_report = False
            self.report_at = time.monotonic() + self._report_every_s
            request = ShardsTake(
                scope=self._ledger.scope,
                name=self._name,
                term=self.books.term,
                epoch=self.books.epoch,
                want=errand.want,
                consumed=self.books.words(),
                timeout_s=errand.hold_s,
                is_idle=errand.is_idle,
            )
        try:
            answer = self._ledger.take(request)
        except FencedError as refused:
            if self._open() == request.term:
                raise FencedError(f"{self._name!r}: {refused}") from refused
            return
        with self.changed:
            self.books.taken(request, answer)

    def _open(self) -> int:
        """Open the dataset, again or for the first time; returns the ledger's term."""
        try:
            opened = self._ledger.open(self._dataset)
            self._tell_names(opened.position.first_listed)
        except FencedError as refused:
            raise FencedError(
                f"{self._name!r}: a newer world has taken the place of the one that this process "
                f"belongs to, it should end ({refused})"
            ) from refused
        with self.changed:
            self.books.opened(opened)
        return opened.term
