# SPDX-License-Identifier: Apache-2.0
"""The books of this process: which parts it has, and what the ledger must still be told.

There is no thread and no waiting here: the caller holds the lock.
"""

from collections import deque

from holdfast.client.data.parts import Part
from holdfast.model.dataset import Dataset, Lease, Position
from holdfast.protocol.data import Consumed, DatasetOpened, Mark, ShardsTake, ShardsTaken

NOT_OPEN = -1


class Books:
    """The parts of one dataset in this process."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self.term = NOT_OPEN
        """The term of the parts; NOT_OPEN also when the parts that were held are void."""
        self.epoch = 0
        """The epoch that is being read; those before are over."""
        self.position: Position | None = None
        """The dataset's position when it was opened."""
        self.ready: deque[Part] = deque()
        """Parts that have no reader now, in the order in which they are to be read."""
        self.parts: dict[int, Part] = {}
        """All parts, by the number of their lease."""
        self.owes_report = False
        """True when the ledger should hear soon what goes back."""
        self.named = 0
        """How many listed shards the ledger knew when the dataset was opened."""
        #: Samples of parts that have ended.
        self._consumed = 0
        #: The last reports on parts that are over, until they are sent.
        self._last_words: list[Consumed] = []
        #: Parts that ended since the last save, and where. Only with a series.
        self._unsaved: dict[int, int] = {}

    @property
    def has_more_epochs(self) -> bool:
        return not 0 < self.dataset.epochs <= self.epoch

    # ---- what the ledger says -------------------------------------------------------------------

    def opened(self, answer: DatasetOpened) -> None:
        """The dataset is open; if the term is another one, everything starts over."""
        if answer.term != self.term:
            self.drop()
            self.term, self.position = answer.term, answer.position
            self.epoch, self.named = answer.position.epoch, answer.position.first_listed

    def taken(self, request: ShardsTake, answer: ShardsTaken) -> None:
        """The answer to a request that `words` were sent with."""
        if request.term != self.term:
            return  # The position jumped meanwhile: these leases are void.
        for lease in answer.leases:
            self.ready.append(self.enter(lease))
        if answer.is_over and request.epoch == self.epoch and self.has_more_epochs:
            self.epoch += 1
        self._wanted([self.parts[n] for n in answer.wanted if n in self.parts])

    def _wanted(self, parts: list[Part]) -> None:
        """Other workers wait for these. Those that are not begun go back; if all are, readers cut
        tails off."""
        unread = [part for part in parts if part in self.ready and part.given == part.begin]
        for part in unread:
            self.give_back(part)
        for part in parts if not unread else ():
            part.is_wanted = True

    def enter(self, lease: Lease) -> Part:
        """A new part; the one that is there already, if the lease is known."""
        if lease.number not in self.parts:
            self.parts[lease.number] = Part(lease, self.term, self.dataset)
        return self.parts[lease.number]

    def drop(self) -> None:
        """The position has jumped: everything that is held is void."""
        self.term, self.position = NOT_OPEN, None
        self.parts.clear()
        self.ready.clear()
        self._consumed = 0
        self._last_words.clear()
        self._unsaved.clear()

    # ---- what it is told ------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether there is something that the ledger does not know."""
        return bool(self._last_words) or any(p.done > p.reported for p in self.parts.values())

    def words(self) -> tuple[Consumed, ...]:
        """What the ledger does not know yet. Each report is returned once, because the request that
        carries it is repeated until it is answered."""
        words, self._last_words = self._last_words, []
        for part in self.parts.values():
            if part.done > part.reported:
                part.reported = part.done
                words.append(Consumed(part.number, part.done))
        return tuple(words)

    def finish(self, part: Part, upto: int) -> None:
        """The reader has finished with everything before `upto`."""
        if part.number in self.parts:
            part.done = part.given = upto
            if upto >= part.end:
                self._end(part, Consumed(part.number, part.end))

    def fail(self, part: Part, why: str) -> None:
        """The rest of a part cannot be read."""
        if part.number in self.parts:
            self._end(part, Consumed(part.number, part.given, problem=why))
            self.owes_report = True

    def give_back(self, part: Part) -> None:
        """Give the rest of a part to other workers."""
        # With a series, what was given is in the model when that is saved; without, only what is
        # done may be left out.
        upto = part.given if self.dataset.series else part.done
        self._end(part, Consumed(part.number, upto, returned=upto < part.end))
        self.owes_report = True

    def cut(self, part: Part, end: int) -> None:
        """Give the tail of a part to other workers; from now on no reader here reads it."""
        part.end = end
        self._last_words.append(Consumed(part.number, part.done, end=end))
        self.owes_report = True

    def give_back_lease(self, number: int, begin: int) -> None:
        """Give what was not reported of a lease to other workers."""
        self._last_words.append(Consumed(number, begin, returned=True))
        self.owes_report = True

    def _end(self, part: Part, word: Consumed) -> None:
        del self.parts[part.number]
        if part in self.ready:
            self.ready.remove(part)
        self._last_words.append(word)
        self._consumed += word.upto - part.begin
        if self.dataset.series and word.upto > part.begin:
            self._unsaved[part.number] = word.upto

    # ---- what a checkpoint says -----------------------------------------------------------------

    def marks(self) -> tuple[Mark, ...]:
        """How far this process is in its parts, those included that ended since the last call."""
        over = [Consumed(number, upto) for number, upto in self._unsaved.items()]
        begun = [
            Consumed(part.number, part.given)
            for part in self.parts.values()
            if part.given > part.begin
        ]
        self._unsaved.clear()
        return (Mark(self.dataset.name, self.term, (*over, *begun)),)

    def consumed(self) -> int:
        """How many samples (bytes of files) were given to this process since it opened."""
        return self._consumed + sum(part.given - part.begin for part in self.parts.values())
