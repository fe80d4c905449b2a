# SPDX-License-Identifier: Apache-2.0
"""Workers that wait for a piece of an epoch, and until when. Nothing here is durable."""

from dataclasses import dataclass
from heapq import heappop, heappush

from holdfast.core.job import events as ev
from holdfast.core.kernel import WAIT_MAX_S
from holdfast.protocol.data import ShardsTake


@dataclass(frozen=True, slots=True)
class Taker:
    """A request that waits."""

    request: ev.DataRequested
    body: ShardsTake


class Takers:
    """Waiting requests, by dataset and epoch, node, session and time."""

    def __init__(self) -> None:
        self._held: dict[int, Taker] = {}
        self._next = 0
        #: The requests that wait for each epoch of each dataset, in the order in which they came.
        self._queues: dict[str, dict[int, dict[int, None]]] = {}
        self._by_session: dict[str, int] = {}
        self._by_node: dict[int, dict[int, None]] = {}
        self._timeouts: list[tuple[float, int]] = []
        #: By dataset: the epoch that an idle worker asked for a piece of in vain, without waiting.
        self._in_vain: dict[str, int] = {}

    def validate(self) -> None:
        """Every index leads to requests that wait, and each has an end."""
        indexed = [*self._by_session.values()]
        indexed += [number for numbers in self._by_node.values() for number in numbers]
        indexed += [n for of in self._queues.values() for queue in of.values() for n in queue]
        assert self._held.keys() >= set(indexed), indexed
        assert {number for _, number in self._timeouts} >= self._held.keys(), self._timeouts

    def hold(self, request: ev.DataRequested, body: ShardsTake, now: float) -> bool:
        """Let a request wait; False if its asker does not want to."""
        if body.timeout_s <= 0:
            if body.is_idle:
                self._in_vain[body.name] = body.epoch
            return False
        number = self._next
        self._next += 1
        self._held[number] = Taker(request, body)
        queues = self._queues.setdefault(body.name, {})
        queues.setdefault(body.epoch, {})[number] = None
        self._by_node.setdefault(request.node_id, {})[number] = None
        if request.session:
            self._by_session[request.session] = number
        # In this order, a time-out that is not a number counts as 0.
        heappush(self._timeouts, (now + min(max(0.0, body.timeout_s), WAIT_MAX_S), number))
        return True

    def served(self, name: str) -> None:
        """A worker got a piece: one that asked in vain may get the next."""
        self._in_vain.pop(name, None)

    def have_nothing(self, name: str, epoch: int) -> bool:
        """Whether a worker waits for a piece of this epoch, or asked for one in vain."""
        return self._in_vain.get(name) == epoch or self.first(name, epoch) is not None

    def epochs(self, name: str) -> list[int]:
        """The epochs that workers want a piece of, the lowest first."""
        return sorted(self._queues.get(name, ()))

    def first(self, name: str, epoch: int) -> Taker | None:
        """The request that has waited longest."""
        queue = self._queues.get(name, {}).get(epoch)
        return None if not queue else self._held[next(iter(queue))]

    def take_first(self, name: str, epoch: int) -> Taker:
        return self._take(next(iter(self._queues[name][epoch])))

    def waiting(self, session: str) -> int:
        """The number of the request that the session waits for; -1 if it waits for none."""
        number = self._by_session.get(session)
        return -1 if number is None else self._held[number].request.seq

    def drop(self, session: str, seq: int) -> None:
        """End what the session waits for, if it is this request or an earlier one."""
        if 0 <= self.waiting(session) <= seq:
            self._take(self._by_session[session])

    def drop_node(self, node_id: int) -> None:
        """Its agent asks again on its next stream, if ever."""
        for number in list(self._by_node.get(node_id, ())):
            self._take(number)

    def take_dataset(self, name: str) -> list[Taker]:
        queues = self._queues.get(name, {}).values()
        return [self._take(number) for number in [n for queue in queues for n in queue]]

    def take_rounds_before(self, before: int) -> list[Taker]:
        old = [n for n, taker in self._held.items() if 0 < taker.body.scope < before]
        return [self._take(number) for number in old]

    def take_late(self, now: float) -> list[Taker]:
        """End the waits whose time is up."""
        late = []
        while (at := self.deadline()) is not None and at <= now:
            late.append(self._take(self._timeouts[0][1]))
        return late

    def _take(self, number: int) -> Taker:
        taker = self._held.pop(number)
        name, epoch = taker.body.name, taker.body.epoch
        del self._by_node[taker.request.node_id][number]
        queues = self._queues[name]
        del queues[epoch][number]
        if not queues[epoch]:
            del queues[epoch]
        if not queues:
            del self._queues[name]
        if self._by_session.get(taker.request.session) == number:
            del self._by_session[taker.request.session]
        return taker

    def deadline(self) -> float | None:
        while self._timeouts and self._timeouts[0][1] not in self._held:
            heappop(self._timeouts)
        return self._timeouts[0][0] if self._timeouts else None
