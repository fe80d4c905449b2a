# SPDX-License-Identifier: Apache-2.0
"""Requests that wait: which one for which key, and until when. Nothing here is durable."""

from dataclasses import dataclass
from heapq import heappop, heappush

from holdfast.core.job import events as ev
from holdfast.core.kernel import WAIT_MAX_S
from holdfast.model.ids import NodeId


@dataclass(slots=True)
class HeldState:
    """A request that waits. `missing` are the keys it still waits for."""

    request: ev.KvRequested
    missing: set[str]


class Waits:
    """Held requests, by number, node, session, key and time."""

    def __init__(self) -> None:
        self._held: dict[int, HeldState] = {}
        self._by_node: dict[NodeId, set[int]] = {}
        self._by_session: dict[str, int] = {}
        self._next = 0
        #: The held requests that wait for each key, in the order in which they came.
        self._for_key: dict[tuple[int, str], dict[int, None]] = {}
        self._timeouts: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, number: int) -> HeldState:
        return self._held[number]

    def validate(self) -> None:
        """Every index leads to requests that wait, and each has an end."""
        indexed = [*self._by_session.values()]
        indexed += [number for numbers in self._by_node.values() for number in numbers]
        indexed += [number for numbers in self._for_key.values() for number in numbers]
        assert self._held.keys() >= set(indexed), indexed
        assert {number for _, number in self._timeouts} >= self._held.keys(), self._timeouts
        for number, held in self._held.items():
            assert number in self._by_node[held.request.node_id], number

    def hold(self, request: ev.KvRequested, keys: set[str], timeout_s: float, now: float) -> int:
        """Keep a request waiting; the number is how it is known here."""
        number = self._next
        self._next += 1
        self._held[number] = HeldState(request, keys)
        self._by_node.setdefault(request.node_id, set()).add(number)
        if request.session:
            self._by_session[request.session] = number
        for key in sorted(keys):
            self._for_key.setdefault((request.body.scope, key), {})[number] = None
        # In this order, a time-out that is not a number counts as 0.
        heappush(self._timeouts, (now + min(max(0.0, timeout_s), WAIT_MAX_S), number))
        return number

    def take(self, number: int) -> HeldState | None:
        """End a wait; None if it had ended already."""
        held = self._held.pop(number, None)
        if held is None:
            return None
        request = held.request
        self._by_node[request.node_id].discard(number)
        if self._by_session.get(request.session) == number:
            del self._by_session[request.session]
        for key in held.missing:
            waited = (request.body.scope, key)
            waiting = self._for_key.get(waited, {})
            if waiting.pop(number, True) is None and not waiting:
                del self._for_key[waited]
        return held

    def first_for(self, scope: int, key: str) -> int | None:
        """The request that has waited longest for a key."""
        return next(iter(self._for_key.get((scope, key), ())), None)

    def arrived(self, scope: int, key: str) -> list[int]:
        """A key has a value now: the requests that waited for it and miss nothing else."""
        complete = []
        for number in self._for_key.pop((scope, key), ()):
            held = self._held[number]
            held.missing.discard(key)
            if not held.missing:
                complete.append(number)
        return complete

    def wait_again(self, number: int, keys: set[str]) -> None:
        """A key awaited earlier was deleted since: the wait goes on."""
        held = self._held[number]
        for key in sorted(keys):
            held.missing.add(key)
            self._for_key.setdefault((held.request.body.scope, key), {})[number] = None

    def of_node(self, node_id: NodeId) -> list[int]:
        """What the node's agent has asked and not been answered."""
        return sorted(self._by_node.get(node_id, ()))

    def of_session(self, session: str) -> int | None:
        """What the session waits for: at most one request at a time."""
        return self._by_session.get(session)

    def of_rounds_before(self, round_number: int) -> list[int]:
        """Requests in scopes of rounds that are over."""
        return [
            number
            for number, held in self._held.items()
            if 0 < held.request.body.scope < round_number
        ]

    def late(self, now: float) -> list[int]:
        """Requests whose time is up."""
        numbers = []
        while self._timeouts and self._timeouts[0][0] <= now:
            _, number = heappop(self._timeouts)
            if number in self._held:
                numbers.append(number)
        return numbers

    def deadline(self) -> float | None:
        """When the next request's time is up."""
        while self._timeouts and self._timeouts[0][1] not in self._held:
            heappop(self._timeouts)
        return self._timeouts[0][0] if self._timeouts else None
