# SPDX-License-Identifier: Apache-2.0
"""How a rank reads the job's data, with the real books of the client. Both modes use it; each mode
sends requests to the master in its own way."""

from collections.abc import Awaitable, Callable

from holdfast.client.data.books import Books
from holdfast.client.data.parts import Part
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.sim.checkers import Checkers, Sample
from holdfast.sim.scenario import BATCH, Scenario

WAIT_S = 0.5
"""How long a rank waits for a piece before it steps without one, because the others wait."""

Ask = Callable[[d.DataCall], Awaitable[m.AnyMessage]]
"""Sends a request, and waits for its answer."""

Tell = Callable[[d.DataCall, Callable[[m.AnyMessage], None]], None]
"""Sends a request; the answer is passed on later, unless the asker is dead by then."""


class Reader:
    """One rank of one round as a reader."""

    def __init__(
        self, scenario: Scenario, checkers: Checkers, run: m.RunWorld, ask: Ask, tell: Tell
    ) -> None:
        dataset = scenario.dataset()
        assert dataset is not None
        self._scenario = scenario
        self._checkers = checkers
        self._run = run
        self._ask = ask
        self._tell = tell
        self._dataset = dataset
        self._books = Books(dataset)
        self._part: Part | None = None
        self._is_reporting = False
        self.trained: list[Sample] = []

    async def open(self) -> None:
        opened = await self._ask(d.DatasetOpen(self._run.round, self._dataset))
        assert isinstance(opened, d.DatasetOpened)
        self._books.opened(opened)

    @property
    def is_finished(self) -> bool:
        return not self._books.has_more_epochs

    def marks(self) -> tuple[d.Mark, ...]:
        """Its data position, for a checkpoint."""
        return self._books.marks()

    async def read(self, lineage: int) -> None:
        """Train on the samples of one step, as far as there are any."""
        books, left = self._books, BATCH
        self._report()
        while left and books.has_more_epochs:
            if self._part is None:
                if not books.ready:
                    await self._take()
                if not books.ready:
                    return
                self._part = books.ready.popleft()
            part = self._part
            if part.is_wanted:
                self._checkers.cuts += _share(books, part)
            end = min(part.end, part.given + left)
            of = part.extent if self._scenario.grows else part.epoch
            for at in range(part.given, end):
                self.trained.append((of, at))
                self._checkers.consumed(self._run, lineage, of, at)
            left -= end - part.given
            books.finish(part, end)
            if end == part.end:
                self._part = None

    async def _take(self) -> None:
        body = self._request(self._scenario.ahead, WAIT_S)
        taken = await self._ask(body)
        assert isinstance(taken, d.ShardsTaken)
        self._books.taken(body, taken)

    def _report(self) -> None:
        """Report its progress while it goes on, unless the last report is still under way."""
        books = self._books
        if self._is_reporting or not (books.has_news or books.owes_report):
            return
        body = self._request(0, 0.0)
        books.owes_report = False

        def answered(answer: m.AnyMessage) -> None:
            self._is_reporting = False
            if isinstance(answer, d.ShardsTaken):
                books.taken(body, answer)

        self._is_reporting = True
        self._tell(body, answered)

    def _request(self, want: int, wait_s: float) -> d.ShardsTake:
        books, words = self._books, self._books.words()
        return d.ShardsTake(
            self._run.round, "train", books.term, books.epoch, want, words, wait_s, want > 0
        )


def _share(books: Books, part: Part) -> bool:
    """Other ranks wait for this part: return half of its rest, as in client/data/holdings.py.

    Returns whether there was anything to return.
    """
    part.is_wanted = False
    rest = part.end - part.given
    if rest > 1:
        books.cut(part, part.end - rest // 2)
    return rest > 1
