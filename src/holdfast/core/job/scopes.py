# SPDX-License-Identifier: Apache-2.0
"""The durable part of `sync`: what each scope holds, and how records change it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.protocol import messages as m

JOB_SCOPE = 0
"""The scope of the whole job; any other number is a round."""


@dataclass(slots=True)
class ScopeState:
    """Keys, queues, barriers and sessions of one round, or of the job."""

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, deque[bytes]] = field(default_factory=dict)
    #: Releases so far of each barrier.
    barriers: dict[str, int] = field(default_factory=dict)
    #: The last changing request of each session, and its answer.
    sessions: dict[str, tuple[int, m.Answer]] = field(default_factory=dict)


class Scopes:
    """All scopes that are still wanted."""

    def __init__(self) -> None:
        self._scopes: dict[int, ScopeState] = {JOB_SCOPE: ScopeState()}
        #: Scopes of rounds before this one are gone.
        self.first_round = 0
        #: How many nodes the present world has.
        self.world_nodes = 0

    def of(self, number: int) -> ScopeState:
        """The scope of that round; empty if nothing was put there yet."""
        return self._scopes.setdefault(number, ScopeState())

    def is_over(self, number: int) -> bool:
        """Whether that round is past, and its scope gone with it."""
        return number != JOB_SCOPE and number < self.first_round

    @property
    def keys(self) -> int:
        """How many keys there are in all."""
        return sum(len(scope.values) for scope in self._scopes.values())

    def apply(self, record: Record) -> None:
        match record:
            case rec.KvChanged():
                scope = self.of(record.scope)
                scope.values.update(zip(record.keys, record.values, strict=True))
                _remember(scope, record)
            case rec.KvDropped():
                scope = self.of(record.scope)
                scope.values.pop(record.key, None)
                _remember(scope, record)
            case rec.QueueChanged():
                scope = self.of(record.scope)
                queue = scope.queues.setdefault(record.key, deque())
                if record.value is not None:
                    queue.append(record.value)
                else:
                    queue.popleft()
                    if not queue:
                        del scope.queues[record.key]
                _remember(scope, record)
            case rec.SessionRemembered():
                scope = self.of(record.scope)
                scope.sessions[record.session] = (record.seq, record.answer)
            case rec.BarrierReleased():
                scope = self.of(record.scope)
                scope.barriers[record.name] = record.generation
                for session, seq in record.sessions:
                    if session:
                        scope.sessions[session] = (seq, m.Number(record.generation))
            case rec.ScopesDropped():
                self.first_round, self.world_nodes = record.before, record.nodes
                for number in [n for n in self._scopes if JOB_SCOPE < n < record.before]:
                    del self._scopes[number]
            case _:
                raise TypeError(f"{record!r} is not a record of sync")

    def snapshot(self) -> Iterable[Record]:
        yield rec.ScopesDropped(self.first_round, self.world_nodes)
        for number, scope in self._scopes.items():
            if scope.values:
                keys, values = tuple(scope.values), tuple(scope.values.values())
                yield rec.KvChanged(number, keys, values)
            for key, queue in scope.queues.items():
                for value in queue:
                    yield rec.QueueChanged(number, key, value)
            for name, generation in scope.barriers.items():
                yield rec.BarrierReleased(number, name, generation)
            for session, (seq, answer) in scope.sessions.items():
                yield rec.SessionRemembered(number, session, seq, answer)


def _remember(scope: ScopeState, record: rec.KvChanged | rec.KvDropped | rec.QueueChanged) -> None:
    if record.session and record.answer is not None:
        scope.sessions[record.session] = (record.seq, record.answer)
