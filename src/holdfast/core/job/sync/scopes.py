# SPDX-License-Identifier: Apache-2.0
"""The durable part of `sync`: what each scope holds, and how records change it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.protocol import messages as m
from holdfast.protocol.codec import FRAME_BYTES_MAX

JOB_SCOPE = 0
"""The scope of the whole job; any other number is a round."""

NAME_MAX = 64 * 1024
"""Characters of the name of a key, a queue or a barrier."""
VALUE_BYTES_MAX = FRAME_BYTES_MAX - 4 * NAME_MAX
"""A longer value could be made by appending, but no answer could carry it."""
SCOPE_BYTES_MAX = 512 * 1024 * 1024
"""All that a scope holds, with ENTRY_BYTES for each thing in it: its master holds it in memory."""
ENTRY_BYTES = 128
SCOPES_MAX = 4096
"""Only two are in use at a time; a worker that invents others is a mistake."""
SESSION_MAX = 128
"""Characters of the name of a session."""
SESSIONS_MAX = 1 << 18
"""Sessions that a scope remembers: several for each worker of the largest jobs. A round's are
forgotten with it, the job's when this many others have changed something since. The job's records
do not say whose a session is, so one of a living worker may be forgotten too (docs/store.md)."""
ANSWERS_BYTES_MAX = 256 * 1024 * 1024
"""How many bytes the values in the remembered answers of a scope hold, except for the last."""
FORGOTTEN = m.Refused(
    "rejected",
    "this request took effect, but its answer is not remembered any more: other clients got more "
    f"than {ANSWERS_BYTES_MAX} bytes of values since. If it popped a value, push that value again",
)
"""Takes the place of an answer over that limit. Its session stays known: the repeat of a request
that has lost its answer is refused, it never takes effect a second time."""
PIECE_BYTES = 1024 * 1024
"""How much of the values one record of a snapshot holds."""


@dataclass(slots=True)
class ScopeState:
    """Keys, queues, barriers and sessions of one round, or of the job."""

    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, deque[bytes]] = field(default_factory=dict)
    #: Releases so far of each barrier.
    barriers: dict[str, int] = field(default_factory=dict)
    #: The last changing request of each session, and its answer; the session that asked last is
    #: last.
    sessions: dict[str, tuple[int, m.Answer]] = field(default_factory=dict)
    #: The sessions whose answers hold a value, in the same order.
    heavy: dict[str, None] = field(default_factory=dict)
    #: What is in it, as the limits count it.
    held_bytes: int = 0
    answers_bytes: int = 0

    def validate(self) -> None:
        assert all(self.queues.values()), "an empty queue is kept"
        held = sum(cost(key, len(value)) for key, value in self.values.items())
        held += sum(cost(key, len(one)) for key, queue in self.queues.items() for one in queue)
        held += sum(cost(name, 0) for name in self.barriers)
        assert held == self.held_bytes, (held, self.held_bytes)
        heavy = [session for session, (_, answer) in self.sessions.items() if _weight(answer)]
        assert sorted(heavy) == sorted(self.heavy), self.heavy
        assert self.answers_bytes == sum(_weight(self.sessions[one][1]) for one in heavy)

    def has(self, key: str) -> bool:
        """Whether `check` and `wait` find it: a key, or a queue with elements."""
        return key in self.values or key in self.queues

    def put(self, key: str, value: bytes) -> None:
        self.held_bytes += self.growth(key, len(value))
        self.values[key] = value

    def growth(self, key: str, length: int) -> int:
        """By how much it grows when the key gets a value of this length."""
        old = self.values.get(key)
        return length - len(old) if old is not None else cost(key, length)

    def drop(self, key: str) -> None:
        old = self.values.pop(key, None)
        if old is not None:
            self.held_bytes -= cost(key, len(old))

    def push(self, key: str, value: bytes) -> None:
        self.queues.setdefault(key, deque()).append(value)
        self.held_bytes += cost(key, len(value))

    def pop(self, key: str) -> None:
        queue = self.queues[key]
        self.held_bytes -= cost(key, len(queue.popleft()))
        if not queue:
            del self.queues[key]

    def release(self, name: str, generation: int) -> None:
        if name not in self.barriers:
            self.held_bytes += cost(name, 0)
        self.barriers[name] = generation

    def remember(self, session: str, seq: int, answer: m.Answer) -> None:
        self._forget(session)
        self.sessions[session] = (seq, answer)
        if weight := _weight(answer):
            self.heavy[session] = None
            self.answers_bytes += weight
        while self.answers_bytes > ANSWERS_BYTES_MAX and len(self.heavy) > 1:
            oldest = next(iter(self.heavy))
            # The session keeps its place: sessions are ordered by when they asked last.
            seq, forgotten = self.sessions[oldest]
            self.sessions[oldest] = (seq, FORGOTTEN)
            del self.heavy[oldest]
            self.answers_bytes -= _weight(forgotten)
        while len(self.sessions) > SESSIONS_MAX:
            self._forget(next(iter(self.sessions)))

    def _forget(self, session: str) -> None:
        old = self.sessions.pop(session, None)
        if old is not None:
            self.heavy.pop(session, None)
            self.answers_bytes -= _weight(old[1])


class Scopes:
    """All scopes that are still wanted."""

    def __init__(self) -> None:
        self._scopes: dict[int, ScopeState] = {JOB_SCOPE: ScopeState()}
        #: Scopes of rounds before this one are gone.
        self.first_round = 0
        #: How many nodes the present world has.
        self.world_nodes = 0

    def of(self, number: int) -> ScopeState:
        """The scope of that round, to be read; empty if nothing was put there yet."""
        return self._scopes.get(number) or ScopeState()

    def _changed(self, number: int) -> ScopeState:
        return self._scopes.setdefault(number, ScopeState())

    def over_limit(self, number: int, growth: int) -> str:
        """Why a scope cannot grow by this much; empty if it can."""
        if number not in self._scopes and len(self._scopes) >= SCOPES_MAX:
            return f"there are {SCOPES_MAX} scopes with keys already"
        if growth > 0 and self.of(number).held_bytes + growth > SCOPE_BYTES_MAX:
            what = "the job" if number == JOB_SCOPE else f"round {number}"
            return f"the keys and queues of {what} are full ({SCOPE_BYTES_MAX} bytes): delete some"
        return ""

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
                scope = self._changed(record.scope)
                for key, value in zip(record.keys, record.values, strict=True):
                    scope.put(key, value)
                _remember(scope, record)
            case rec.KvAppended():
                scope = self._changed(record.scope)
                scope.put(record.key, scope.values.get(record.key, b"") + record.value)
                _remember(scope, record)
            case rec.KvDropped():
                scope = self._changed(record.scope)
                scope.drop(record.key)
                _remember(scope, record)
            case rec.QueueChanged():
                scope = self._changed(record.scope)
                if record.value is not None:
                    scope.push(record.key, record.value)
                else:
                    scope.pop(record.key)
                _remember(scope, record)
            case rec.SessionRemembered():
                self._changed(record.scope).remember(record.session, record.seq, record.answer)
            case rec.BarrierReleased():
                scope = self._changed(record.scope)
                scope.release(record.name, record.generation)
                for session, seq in record.sessions:
                    if session:
                        scope.remember(session, seq, m.Number(record.generation))
            case rec.ScopesDropped():
                self.first_round, self.world_nodes = record.before, record.nodes
                for number in [n for n in self._scopes if JOB_SCOPE < n < record.before]:
                    del self._scopes[number]
            case _:
                raise TypeError(f"{record!r} is not a record of sync")

    def validate(self) -> None:
        """Only scopes that are wanted are held, and the sums match what they hold."""
        for number, scope in self._scopes.items():
            assert not self.is_over(number), number
            scope.validate()

    def snapshot(self) -> Iterable[Record]:
        yield rec.ScopesDropped(self.first_round, self.world_nodes)
        for number, scope in self._scopes.items():
            yield from _values_in_pieces(number, scope.values)
            for key, queue in scope.queues.items():
                for value in queue:
                    yield rec.QueueChanged(number, key, value)
            for name, generation in scope.barriers.items():
                yield rec.BarrierReleased(number, name, generation)
            for session, (seq, answer) in scope.sessions.items():
                yield rec.SessionRemembered(number, session, seq, answer)


def _values_in_pieces(number: int, values: dict[str, bytes]) -> Iterable[Record]:
    """Records of about PIECE_BYTES: one of all values would be beyond what a journal can hold."""
    some: dict[str, bytes] = {}
    room = PIECE_BYTES
    for key, value in values.items():
        if room < 0:
            yield rec.KvChanged(number, tuple(some), tuple(some.values()))
            some, room = {}, PIECE_BYTES
        some[key] = value[:PIECE_BYTES]
        room -= cost(key, len(some[key]))
        if len(value) > PIECE_BYTES:
            yield rec.KvChanged(number, tuple(some), tuple(some.values()))
            some, room = {}, PIECE_BYTES
            for begin in range(PIECE_BYTES, len(value), PIECE_BYTES):
                yield rec.KvAppended(number, key, value[begin : begin + PIECE_BYTES])
    if some:
        yield rec.KvChanged(number, tuple(some), tuple(some.values()))


def _remember(
    scope: ScopeState, record: rec.KvChanged | rec.KvAppended | rec.KvDropped | rec.QueueChanged
) -> None:
    if record.session and record.answer is not None:
        scope.remember(record.session, record.seq, record.answer)


def cost(name: str, length: int) -> int:
    """What a key, an element of a queue or a barrier counts."""
    return ENTRY_BYTES + len(name.encode()) + length


def _weight(answer: m.Answer) -> int:
    """Only values count: all other answers together are small, as the sessions have a limit."""
    return len(answer.value) if isinstance(answer, m.Value) else 0
