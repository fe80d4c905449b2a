# SPDX-License-Identifier: Apache-2.0
"""Keys, queues and barriers that workers share.

Everything lives in a *scope*: the round it belongs to, or 0 for the whole job. When a round is
over its scope is dropped, and whoever still asks for it is fenced: no worker of a new world can
read what a dead one left behind. Waits are held and answered when their time has come.

A request is known by its session and number. The last answer to each session's changing request is
part of the durable state, so that a repeated request changes nothing and gets the same answer.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Reply
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, Tick, commit
from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m

JOB_SCOPE = 0
INT_LIMIT = 1 << 63
WAIT_MAX_S = 10 * 365 * 86400.0


@dataclass(slots=True)
class _Scope:
    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, deque[bytes]] = field(default_factory=dict)
    #: Releases so far of each barrier.
    barriers: dict[str, int] = field(default_factory=dict)
    #: The last changing request of each session, and its answer.
    sessions: dict[str, tuple[int, m.Answer]] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """A request that waits. `missing` are the keys it still waits for."""

    request: ev.KvRequested
    missing: set[str]


class Sync:
    """The key-value store, its queues and its barriers."""

    def __init__(self) -> None:
        self._scopes: dict[int, _Scope] = {JOB_SCOPE: _Scope()}
        #: Scopes of rounds before this one are gone.
        self._first_round = 0
        self._world_nodes = 0
        # Volatile: agents repeat what was not answered.
        self._held: dict[int, _Held] = {}
        self._held_by_node: dict[NodeId, set[int]] = {}
        self._next_held = 0
        #: The held requests that wait for each key, in the order in which they came.
        self._waiting_for: dict[tuple[int, str], dict[int, None]] = {}
        self._arrived: dict[tuple[int, str], dict[str, int]] = {}
        self._timeouts: list[tuple[float, int]] = []
        self._nodes: set[NodeId] = set()

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Outcome:
        match event:
            case ev.KvRequested():
                return self._request(event, now)
            case ev.WorldFormed():
                return self._drop_scopes(event.world.round, len(event.world.members))
            case Tick():
                return self._expire(now)
            case ev.NodeReady():
                # What the agent still waits for it repeats on its new stream.
                self._forget_node(event.member.node_id)
                self._nodes.add(event.member.node_id)
            case ev.NodeExpected():
                self._nodes.add(event.node_id)
            case ev.NodeAbsent():
                self._forget_node(event.node_id)
            case ev.NodeLost():
                self._nodes.discard(event.node_id)
                self._forget_node(event.node_id)
                return self._recheck_barriers()
        return NOTHING

    def _request(self, event: ev.KvRequested, now: float) -> Outcome:
        body, outcome = event.body, Outcome()
        if body.scope != JOB_SCOPE and body.scope < self._first_round:
            _answer(outcome, event, m.Refused("fenced", f"round {body.scope} is over"))
            return outcome
        scope = self._scopes.setdefault(body.scope, _Scope())
        last = scope.sessions.get(event.session)
        if event.session and last is not None and event.seq <= last[0]:
            # An older one is an echo from a lost stream: its asker has had its answer long ago.
            echo = m.Refused("stale", "a later request of this session was answered already")
            _answer(outcome, event, last[1] if event.seq == last[0] else echo)
            return outcome
        match body:
            case m.KvGet() | m.KvWait():
                self._wait_for_keys(outcome, event, body, scope, now)
            case m.KvCheck():
                found = all(key in scope.values for key in body.keys)
                _answer(outcome, event, m.Number(int(found)))
            case m.KvCount():
                _answer(outcome, event, m.Number(len(scope.values)))
            case m.KvKeys():
                _answer(outcome, event, m.Keys(tuple(scope.values)))
            case m.KvDelete():
                self._delete(outcome, event, body, scope)
            case m.QueuePush() | m.QueuePop() | m.QueueLength():
                self._queue(outcome, event, body, scope, now)
            case m.Barrier():
                self._arrive(outcome, event, body, now)
            case _:
                self._change(outcome, event, body, scope)
        return outcome

    def _change(
        self,
        outcome: Outcome,
        event: ev.KvRequested,
        body: m.KvSet | m.KvMultiSet | m.KvAdd | m.KvAppend | m.KvCompareSet,
        scope: _Scope,
    ) -> None:
        """Requests that give keys new values."""
        answer: m.Answer = m.Done()
        keys: tuple[str, ...]
        values: tuple[bytes, ...]
        match body:
            case m.KvSet():
                keys, values = (body.key,), (body.value,)
            case m.KvMultiSet():
                keys, values = body.keys, body.values
                if len(keys) != len(values):
                    refusal = f"{len(keys)} keys came with {len(values)} values"
                    return _answer(outcome, event, m.Refused("rejected", refusal))
            case m.KvAppend():
                keys, values = (body.key,), (scope.values.get(body.key, b"") + body.value,)
            case m.KvAdd():
                current = _integer(scope.values.get(body.key, b"0"))
                if current is None:
                    refusal = f"the value of {body.key!r} is not a number"
                    return _answer(outcome, event, m.Refused("rejected", refusal))
                answer = m.Number(current + body.amount)
                if not -INT_LIMIT <= answer.number < INT_LIMIT:
                    refusal = f"the sum in {body.key!r} would not fit into 64 bits"
                    return _answer(outcome, event, m.Refused("rejected", refusal))
                keys, values = (body.key,), (str(answer.number).encode(),)
            case m.KvCompareSet():
                current_value = scope.values.get(body.key)
                if current_value is None and body.expected:
                    return _answer(outcome, event, m.Value(body.expected))
                if current_value is not None and current_value != body.expected:
                    return _answer(outcome, event, m.Value(current_value))
                answer = m.Value(body.desired)
                keys, values = (body.key,), (body.desired,)
        record = rec.KvChanged(body.scope, keys, values, event.session, event.seq, answer)
        commit(self, outcome, record)
        _answer(outcome, event, answer)
        for key in keys:
            self._key_arrived(outcome, body.scope, key)

    def _delete(
        self, outcome: Outcome, event: ev.KvRequested, body: m.KvDelete, scope: _Scope
    ) -> None:
        answer = m.Number(int(body.key in scope.values))
        if answer.number:
            record = rec.KvDropped(body.scope, body.key, event.session, event.seq, answer)
            commit(self, outcome, record)
        _answer(outcome, event, answer)

    def _wait_for_keys(
        self,
        outcome: Outcome,
        event: ev.KvRequested,
        body: m.KvGet | m.KvWait,
        scope: _Scope,
        now: float,
    ) -> None:
        missing = {key for key in body.keys if key not in scope.values}
        if not missing:
            _answer(outcome, event, self._found(body, scope))
            return
        self._hold(event, missing, body.timeout_s, now)

    def _found(self, body: m.KvGet | m.KvWait, scope: _Scope) -> m.Answer:
        if isinstance(body, m.KvGet):
            return m.Values(tuple(scope.values[key] for key in body.keys))
        return m.Done()

    def _hold(
        self, event: ev.KvRequested, keys: set[str], timeout_s: float, now: float
    ) -> int:
        number = self._next_held
        self._next_held += 1
        self._held[number] = _Held(event, keys)
        self._held_by_node.setdefault(event.node_id, set()).add(number)
        for key in sorted(keys):
            self._waiting_for.setdefault((event.body.scope, key), {})[number] = None
        # In this order, a time-out that is not a number counts as 0.
        heappush(self._timeouts, (now + min(max(0.0, timeout_s), WAIT_MAX_S), number))
        return number

    def _unhold(self, number: int) -> _Held | None:
        held = self._held.pop(number, None)
        if held is not None:
            self._held_by_node[held.request.node_id].discard(number)
            self._stop_waiting(number, held)
        return held

    def _stop_waiting(self, number: int, held: _Held) -> None:
        for key in held.missing:
            waited = (held.request.body.scope, key)
            waiting = self._waiting_for.get(waited, {})
            if waiting.pop(number, True) is None and not waiting:
                del self._waiting_for[waited]

    def _key_arrived(self, outcome: Outcome, scope_number: int, key: str) -> None:
        for number in self._waiting_for.pop((scope_number, key), ()):
            held = self._held.get(number)
            if held is None:
                continue
            held.missing.discard(key)
            body = held.request.body
            if not held.missing and isinstance(body, m.KvGet | m.KvWait):
                # A key awaited earlier may have been deleted since: then the wait goes on.
                scope = self._scopes[scope_number]
                gone = {other for other in body.keys if other not in scope.values}
                for other in sorted(gone):
                    held.missing.add(other)
                    self._waiting_for.setdefault((scope_number, other), {})[number] = None
                if not gone:
                    self._unhold(number)
                    _answer(outcome, held.request, self._found(body, scope))

    # ---- queues ---------------------------------------------------------------------------------

    def _queue(
        self,
        outcome: Outcome,
        event: ev.KvRequested,
        body: m.QueuePush | m.QueuePop | m.QueueLength,
        scope: _Scope,
        now: float,
    ) -> None:
        queue = scope.queues.get(body.key, ())
        match body:
            case m.QueueLength():
                _answer(outcome, event, m.Number(len(queue)))
            case m.QueuePush():
                answer = m.Number(len(queue) + 1)
                commit(self, outcome, _queue_record(event, body.value, answer))
                _answer(outcome, event, answer)
                self._serve_queue(outcome, body.scope, body.key)
            case m.QueuePop():
                if queue:
                    self._pop(outcome, event)
                elif body.timeout_s <= 0:
                    _answer(outcome, event, m.Refused("timeout", f"queue {body.key!r} is empty"))
                else:
                    self._hold(event, {_queue_key(body.key)}, body.timeout_s, now)

    def _serve_queue(self, outcome: Outcome, scope_number: int, key: str) -> None:
        waiting = self._waiting_for.get((scope_number, _queue_key(key)), {})
        while waiting and self._scopes[scope_number].queues.get(key):
            held = self._unhold(next(iter(waiting)))
            assert held is not None
            self._pop(outcome, held.request)

    def _pop(self, outcome: Outcome, event: ev.KvRequested) -> None:
        assert isinstance(event.body, m.QueuePop)
        answer = m.Value(self._scopes[event.body.scope].queues[event.body.key][0])
        commit(self, outcome, _queue_record(event, None, answer))
        _answer(outcome, event, answer)

    # ---- barriers -------------------------------------------------------------------------------

    def _arrive(
        self, outcome: Outcome, event: ev.KvRequested, body: m.Barrier, now: float
    ) -> None:
        arrived = self._arrived.setdefault((body.scope, body.name), {})
        earlier = arrived.get(body.member)
        if earlier is not None:
            # The same member again, on a new link: only the newest request is answered.
            self._unhold(earlier)
        arrived[body.member] = self._hold(event, set(), body.timeout_s, now)
        self._release_if_full(outcome, body)

    def _release_if_full(self, outcome: Outcome, body: m.Barrier) -> None:
        arrived = self._arrived.get((body.scope, body.name), {})
        size = body.size
        if size == 0:
            size = len(self._nodes) if body.scope == JOB_SCOPE else self._world_nodes
        if not arrived or len(arrived) < size:
            return
        waiting = [self._held[number] for number in arrived.values()]
        scope = self._scopes.setdefault(body.scope, _Scope())
        generation = scope.barriers.get(body.name, 0) + 1
        sessions = tuple((held.request.session, held.request.seq) for held in waiting)
        commit(self, outcome, rec.BarrierReleased(body.scope, body.name, generation, sessions))
        for number in arrived.values():
            held = self._unhold(number)
            if held is not None:
                _answer(outcome, held.request, m.Number(generation))
        del self._arrived[body.scope, body.name]

    def _recheck_barriers(self) -> Outcome:
        """A lost node is no longer waited for."""
        outcome = Outcome()
        for arrived in list(self._arrived.values()):
            for number in arrived.values():
                held = self._held.get(number)
                if held is not None and isinstance(held.request.body, m.Barrier):
                    self._release_if_full(outcome, held.request.body)
                    break
        return outcome

    # ---- ends of waits --------------------------------------------------------------------------

    def _expire(self, now: float) -> Outcome:
        outcome = Outcome()
        while self._timeouts and self._timeouts[0][0] <= now:
            _, number = heappop(self._timeouts)
            held = self._unhold(number)
            if held is not None:
                _answer(outcome, held.request, m.Refused("timeout", _late(held)))
                self._forget_arrival(held.request.body, number)
        return outcome

    def _forget_arrival(self, body: m.KvCall, number: int) -> None:
        if isinstance(body, m.Barrier):
            arrived = self._arrived.get((body.scope, body.name), {})
            if arrived.get(body.member) == number:
                del arrived[body.member]

    def _forget_node(self, node_id: NodeId) -> None:
        """Its agent repeats what it still waits for once it is back."""
        for number in sorted(self._held_by_node.pop(node_id, ())):
            held = self._held.pop(number)
            self._stop_waiting(number, held)
            self._forget_arrival(held.request.body, number)

    def _drop_scopes(self, round_number: int, nodes: int) -> Outcome:
        outcome = Outcome()
        for number, held in list(self._held.items()):
            scope = held.request.body.scope
            if JOB_SCOPE < scope < round_number:
                self._unhold(number)
                _answer(outcome, held.request, m.Refused("fenced", f"round {scope} is over"))
        for key in [key for key in self._waiting_for if JOB_SCOPE < key[0] < round_number]:
            del self._waiting_for[key]
        for key in [key for key in self._arrived if JOB_SCOPE < key[0] < round_number]:
            del self._arrived[key]
        commit(self, outcome, rec.ScopesDropped(round_number, nodes))
        return outcome

    def deadline(self) -> float | None:
        while self._timeouts and self._timeouts[0][1] not in self._held:
            heappop(self._timeouts)
        return self._timeouts[0][0] if self._timeouts else None

    # ---- durable state --------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        match record:
            case rec.KvChanged():
                scope = self._scopes.setdefault(record.scope, _Scope())
                scope.values.update(zip(record.keys, record.values, strict=True))
                _remember(scope, record)
            case rec.KvDropped():
                scope = self._scopes[record.scope]
                scope.values.pop(record.key, None)
                _remember(scope, record)
            case rec.QueueChanged():
                scope = self._scopes.setdefault(record.scope, _Scope())
                queue = scope.queues.setdefault(record.key, deque())
                if record.value is not None:
                    queue.append(record.value)
                else:
                    queue.popleft()
                    if not queue:
                        del scope.queues[record.key]
                _remember(scope, record)
            case rec.SessionRemembered():
                scope = self._scopes.setdefault(record.scope, _Scope())
                scope.sessions[record.session] = (record.seq, record.answer)
            case rec.BarrierReleased():
                scope = self._scopes.setdefault(record.scope, _Scope())
                scope.barriers[record.name] = record.generation
                for session, seq in record.sessions:
                    if session:
                        scope.sessions[session] = (seq, m.Number(record.generation))
            case rec.ScopesDropped():
                self._first_round, self._world_nodes = record.before, record.nodes
                for number in [n for n in self._scopes if JOB_SCOPE < n < record.before]:
                    del self._scopes[number]
            case _:
                raise TypeError(f"{record!r} is not a record of sync")

    def snapshot(self) -> Iterable[Record]:
        yield rec.ScopesDropped(self._first_round, self._world_nodes)
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

    def view(self) -> dict[str, object]:
        """Sizes, for people and metrics."""
        return {
            "keys": sum(len(scope.values) for scope in self._scopes.values()),
            "waiting": len(self._held),
        }


def _answer(outcome: Outcome, event: ev.KvRequested, answer: m.Answer) -> None:
    outcome.commands.append(Reply(event.link, event.call, answer))


def _remember(scope: _Scope, record: rec.KvChanged | rec.KvDropped | rec.QueueChanged) -> None:
    if record.session and record.answer is not None:
        scope.sessions[record.session] = (record.seq, record.answer)


def _queue_record(
    event: ev.KvRequested, value: bytes | None, answer: m.Answer
) -> rec.QueueChanged:
    assert isinstance(event.body, m.QueuePush | m.QueuePop)
    return rec.QueueChanged(
        event.body.scope, event.body.key, value, event.session, event.seq, answer
    )


def _queue_key(key: str) -> str:
    """Queues have names of their own: a key and a queue of one name never meet."""
    return "\0queue\0" + key


def _integer(value: bytes) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


def _late(held: _Held) -> str:
    body = held.request.body
    if isinstance(body, m.Barrier):
        return f"barrier {body.name!r}: not everybody arrived within {body.timeout_s:g} s"
    if isinstance(body, m.QueuePop):
        return f"queue {body.key!r} stayed empty for {body.timeout_s:g} s"
    missing = ", ".join(repr(key) for key in sorted(held.missing)[:5])
    limit = body.timeout_s if isinstance(body, m.KvGet | m.KvWait) else 0.0
    return f"no value for {missing} within {limit:g} s"
