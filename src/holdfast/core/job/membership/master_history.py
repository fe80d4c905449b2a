# SPDX-License-Identifier: Apache-2.0
"""Which masters this journal had, and what each of them may have told: is the journal behind?

Every answer of a master says how far its journal was. An agent keeps the last such number, with the
name of the master who said it, and brings both when it attaches. If the journal has less of that
master's life, then a disk has lost what it said it had synced: rounds, samples and numbers that are
in use would be given a second time, and nothing else would ever notice.

A number alone is not enough: the journal may have grown past it since, with another history.
"""

from collections.abc import Iterable

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.protocol import messages as m


class MasterHistory:
    """The masters of a job, oldest first. Durable, as a part of the node table."""

    def __init__(self) -> None:
        #: How each of them began. The first one gives the journal its name.
        self._began: dict[str, rec.LifeBegan] = {}
        #: Where the lives of earlier masters ended, in this journal.
        self._ended: dict[str, int] = {}
        self.present = ""

    @property
    def journal(self) -> str:
        """The name of the journal; empty before the first master has begun."""
        return next(iter(self._began), "")

    @property
    def clock(self) -> tuple[str, float]:
        """The monotonic clock of the present master, and what it showed at job time 0."""
        began = self._began.get(self.present)
        return ("", 0.0) if began is None else (began.clock, began.zero_s)

    def missing(self, told: m.Told | None) -> str:
        """What the journal should have and has not, in words; empty if it has everything."""
        if told is None or told.journal != self.journal or told.life == self.present:
            return ""
        ends = self._ended.get(told.life, self._began[self.present].after)
        if told.life in self._ended and told.position <= ends:
            return ""
        return f"was told position {told.position}, and the journal ends at {ends}"

    def apply(self, record: rec.LifeBegan) -> None:
        if self.present:
            self._ended[self.present] = record.after
        self._began[record.life] = record
        self.present = record.life

    def snapshot(self) -> Iterable[Record]:
        return self._began.values()
