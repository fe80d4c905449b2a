# SPDX-License-Identifier: Apache-2.0
"""How the records of a range are drawn from the parts of this process."""

from collections.abc import Iterator

import numpy as np

from holdfast.client.data.holdings import Claims, Holdings
from holdfast.client.data.parts import Part, records
from holdfast.client.permuting import Records

AT_ONCE = 4096
"""This many record numbers are computed together."""

NOTHING: Records = np.empty(0, dtype=np.int64)


class Reader:
    """Draws batches of record numbers from one part after another. For one thread."""

    def __init__(self, holdings: Holdings, epoch: int, *, waits: bool) -> None:
        """`waits`: for parts that may come back; a batch that has begun never waits for them."""
        self._holdings, self._epoch, self._waits = holdings, epoch, waits
        self._part: Part | None = None
        self._at = 0
        #: The record numbers of the part from `_window_at` on, computed together.
        self._window, self._window_at = NOTHING, 0
        #: Parts that are drawn from, until everything of them is given.
        self._open: list[Part] = []

    def draw(self, count: int) -> tuple[Records, Claims]:
        """The next records, fewer at the end of an epoch, and none when there is nothing more.

        It never waits with some records in its hands: it would wait for its own part, and the epoch
        could never end.
        """
        rows: list[Records] = []
        claims: list[tuple[Part, int]] = []
        missing = count
        while missing > 0:
            part = self._part
            if part is None or self._at >= part.end or part.term != self._holdings.term:
                part = self._next_part(wait=self._waits and not claims)
                if part is None:
                    break
            if part.is_wanted:
                self._holdings.share(part, self._at)
            upto = min(part.end, self._at + missing)
            rows.append(self._numbers(part, self._at, upto))
            claims.append((part, upto))
            missing -= upto - self._at
            self._at = upto
        return (rows[0] if len(rows) == 1 else np.concatenate([NOTHING, *rows])), claims

    def _next_part(self, *, wait: bool) -> Part | None:
        self._part = self._holdings.next_part(self._epoch, wait=wait)
        if self._part is not None:
            self._at = self._part.given
            self._window, self._window_at = NOTHING, self._at
            self._open = [part for part in self._open if part.given < part.end]
            self._open.append(self._part)
        return self._part

    def _numbers(self, part: Part, begin: int, end: int) -> Records:
        if end > self._window_at + len(self._window):
            ahead = min(part.end, max(end, begin + AT_ONCE))
            self._window = records(self._holdings.dataset, part.epoch, begin, ahead)
            self._window_at = begin
        # A copy: a caller that keeps a batch must not keep thousands of numbers.
        return self._window[begin - self._window_at : end - self._window_at].copy()

    def leave(self) -> None:
        """Leave what is drawn and not given, and the rest, to the next reader."""
        self._holdings.put_back(part for part in self._open if part.given < part.end)
        self._part, self._open = None, []


def in_chunks(holdings: Holdings, part: Part) -> Iterator[list[int]]:
    """The record numbers of the rest of a part."""
    for begin in range(part.given, part.end, AT_ONCE):
        end = min(part.end, begin + AT_ONCE)
        yield records(holdings.dataset, part.epoch, begin, end).tolist()
