# SPDX-License-Identifier: Apache-2.0
"""Keys, queues and barriers that workers share.

Everything lives in a *scope*: the round it belongs to, or 0 for the whole job. When a round is
over its scope is dropped, and requests for it are fenced: no worker of a new world can
read what a dead one left behind. Waits are held and answered when their time has come.

A request is known by its session and number. The last answer to each session's changing request is
part of the durable state, so that a repeated request changes nothing and gets the same answer.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Reply
from holdfast.core.job.sync.scopes import (
    JOB_SCOPE,
    NAME_MAX,
    SESSION_MAX,
    VALUE_BYTES_MAX,
    Scopes,
    ScopeState,
    cost,
)
from holdfast.core.job.sync.waits import HeldState, Waits
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick, commit
from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m

INT_LIMIT = 1 << 63
"""Sums are kept within the signed 64 bits that other stores have."""


_Change = m.KvSet | m.KvMultiSet | m.KvAdd | m.KvCompareSet

Handled = (
    ev.KvRequested
    | ev.WorldFormed
    | ev.RequestDropped
    | ev.NodeReady
    | ev.NodeExpected
    | ev.NodeAbsent
    | ev.NodeLost
    | Tick
)


class Sync:
    """The key-value store, its queues and its barriers."""

    OWNS = (
        rec.KvChanged,
        rec.KvAppended,
        rec.KvDropped,
        rec.QueueChanged,
        rec.SessionRemembered,
        rec.BarrierReleased,
        rec.ScopesDropped,
    )

    def __init__(self) -> None:
        self._scopes = Scopes()
        # Volatile: agents repeat what was not answered.
        self._waits = Waits()
        #: The members that have arrived at each barrier, each with the number of its held request.
        self._arrived: dict[tuple[int, str], dict[str, int]] = {}
        self._nodes: set[NodeId] = set()

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.KvRequested():
                return self._request(event, now)
            case ev.WorldFormed():
                return self._drop_scopes(event.world.round, len(event.world.members))
            case Tick():
                return self._expire(now)
            case ev.RequestDropped():
                number = self._waits.of_session(event.session)
                if number is not None and self._waits[number].request.seq == event.seq:
                    self._forget(number)
            case ev.NodeReady():
                # The agent repeats on its new stream what it still waits for.
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
            case _:
                assert_never(event)
        return NOTHING

    def _request(self, event: ev.KvRequested, now: float) -> Outcome:
        body, outcome = event.body, Outcome()
        if self._scopes.is_over(body.scope):
            _answer(outcome, event, m.Refused("fenced", f"round {body.scope} is over"))
            return outcome
        if len(event.session) > SESSION_MAX:
            _answer(outcome, event, m.Refused("rejected", "the name of the session is too long"))
            return outcome
        scope = self._scopes.of(body.scope)
        last = scope.sessions.get(event.session)
        if event.session and last is not None and event.seq <= last[0]:
            # An older one is an echo from a lost stream: its asker has had its answer long ago.
            echo = m.Refused("stale", "a later request of this session was answered already")
            _answer(outcome, event, last[1] if event.seq == last[0] else echo)
            return outcome
        earlier = self._waits.of_session(event.session)
        if earlier is not None:
            # The same request again, or its asker has given up: only the newest is answered.
            self._forget(earlier)
        match body:
            case m.KvGet() | m.KvWait():
                self._wait_for_keys(outcome, event, now)
            case m.KvCheck():
                found = all(scope.has(key) for key in body.keys)
                _answer(outcome, event, m.Number(int(found)))
            case m.KvCount():
                _answer(outcome, event, m.Number(len(scope.values)))
            case m.KvKeys():
                _answer(outcome, event, m.Keys(tuple(scope.values)))
            case m.KvAppend():
                self._append(outcome, event, body, scope)
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
        self, outcome: Outcome, event: ev.KvRequested, body: _Change, scope: ScopeState
    ) -> None:
        """Requests that give keys new values."""
        change = _new_values(body, scope)
        if isinstance(change, m.Refused | m.Value):
            return _answer(outcome, event, change)
        keys, values, answer = change
        lengths = [len(value) for value in values]
        # If a key comes more than once, only its last value stays.
        last = dict(zip(keys, lengths, strict=True))
        growth = sum(scope.growth(key, length) for key, length in last.items())
        if problem := self._problem(body.scope, keys, lengths, growth):
            return _answer(outcome, event, problem)
        record = rec.KvChanged(body.scope, keys, values, event.session, event.seq, answer)
        commit(self, outcome, record)
        _answer(outcome, event, answer)
        for key in keys:
            self._key_arrived(outcome, body.scope, key)

    def _append(
        self, outcome: Outcome, event: ev.KvRequested, body: m.KvAppend, scope: ScopeState
    ) -> None:
        length = len(scope.values.get(body.key, b"")) + len(body.value)
        growth = scope.growth(body.key, length)
        if problem := self._problem(body.scope, (body.key,), (length,), growth):
            return _answer(outcome, event, problem)
        record = rec.KvAppended(
            body.scope, body.key, body.value, event.session, event.seq, m.Done()
        )
        commit(self, outcome, record)
        _answer(outcome, event, m.Done())
        self._key_arrived(outcome, body.scope, body.key)

    def _problem(
        self, scope_number: int, names: Sequence[str], lengths: Sequence[int], growth: int
    ) -> m.Refused | None:
        """Why a scope does not take values of these lengths; None if it does."""
        for name, length in zip(names, lengths, strict=True):
            if len(name) > NAME_MAX:
                return m.Refused(
                    "rejected", f"a name of {len(name)} characters is over the limit of {NAME_MAX}"
                )
            if length > VALUE_BYTES_MAX:
                return m.Refused(
                    "rejected",
                    f"a value of {length} bytes for {name[:200]!r} is over the limit of "
                    f"{VALUE_BYTES_MAX} bytes",
                )
        why = self._scopes.over_limit(scope_number, growth)
        return m.Refused("rejected", why) if why else None

    def _delete(
        self, outcome: Outcome, event: ev.KvRequested, body: m.KvDelete, scope: ScopeState
    ) -> None:
        answer = m.Number(int(body.key in scope.values))
        if answer.number:
            record = rec.KvDropped(body.scope, body.key, event.session, event.seq, answer)
            commit(self, outcome, record)
        _answer(outcome, event, answer)

    def _wait_for_keys(self, outcome: Outcome, event: ev.KvRequested, now: float) -> None:
        body, scope = event.body, self._scopes.of(event.body.scope)
        assert isinstance(body, m.KvGet | m.KvWait)
        missing = _missing(body, scope)
        if missing:
            self._waits.hold(event, missing, body.timeout_s, now)
        else:
            _answer(outcome, event, _found(body, scope))

    def _key_arrived(self, outcome: Outcome, scope_number: int, key: str) -> None:
        scope = self._scopes.of(scope_number)
        for number in self._waits.arrived(scope_number, key):
            request = self._waits[number].request
            assert isinstance(request.body, m.KvGet | m.KvWait)
            gone = _missing(request.body, scope)
            if gone:
                self._waits.wait_again(number, gone)
            else:
                self._waits.take(number)
                _answer(outcome, request, _found(request.body, scope))

    # ---- queues ---------------------------------------------------------------------------------

    def _queue(
        self,
        outcome: Outcome,
        event: ev.KvRequested,
        body: m.QueuePush | m.QueuePop | m.QueueLength,
        scope: ScopeState,
        now: float,
    ) -> None:
        queue = scope.queues.get(body.key, ())
        match body:
            case m.QueueLength():
                _answer(outcome, event, m.Number(len(queue)))
            case m.QueuePush():
                length = len(body.value)
                growth = cost(body.key, length)
                if problem := self._problem(body.scope, (body.key,), (length,), growth):
                    return _answer(outcome, event, problem)
                answer = m.Number(len(queue) + 1)
                commit(self, outcome, _queue_record(event, body.value, answer))
                _answer(outcome, event, answer)
                # A wait takes nothing away: it ends before a pop may empty the queue again.
                self._key_arrived(outcome, body.scope, body.key)
                self._serve_queue(outcome, body.scope, body.key)
            case m.QueuePop():
                if queue:
                    self._pop(outcome, event)
                elif body.timeout_s <= 0:
                    _answer(outcome, event, m.Refused("timeout", f"queue {body.key!r} is empty"))
                else:
                    self._waits.hold(event, {_queue_key(body.key)}, body.timeout_s, now)

    def _serve_queue(self, outcome: Outcome, scope_number: int, key: str) -> None:
        while self._scopes.of(scope_number).queues.get(key):
            number = self._waits.first_for(scope_number, _queue_key(key))
            held = None if number is None else self._waits.take(number)
            if held is None:
                return
            self._pop(outcome, held.request)

    def _pop(self, outcome: Outcome, event: ev.KvRequested) -> None:
        assert isinstance(event.body, m.QueuePop)
        answer = m.Value(self._scopes.of(event.body.scope).queues[event.body.key][0])
        commit(self, outcome, _queue_record(event, None, answer))
        _answer(outcome, event, answer)

    # ---- barriers -------------------------------------------------------------------------------

    def _arrive(self, outcome: Outcome, event: ev.KvRequested, body: m.Barrier, now: float) -> None:
        is_new = body.name not in self._scopes.of(body.scope).barriers
        growth = cost(body.name, 0) if is_new else 0
        if problem := self._problem(body.scope, (body.name,), (0,), growth):
            return _answer(outcome, event, problem)
        arrived = self._arrived.setdefault((body.scope, body.name), {})
        earlier = arrived.get(body.member)
        if earlier is not None:
            # The same member again, on a new link: only the newest request is answered.
            self._waits.take(earlier)
        arrived[body.member] = self._waits.hold(event, set(), body.timeout_s, now)
        self._release_if_full(outcome, body)

    def _release_if_full(self, outcome: Outcome, body: m.Barrier) -> None:
        arrived = self._arrived.get((body.scope, body.name), {})
        size = body.size
        if size == 0:
            size = len(self._nodes) if body.scope == JOB_SCOPE else self._scopes.world_nodes
        if not arrived or len(arrived) < size:
            return
        waiting = [self._waits[number] for number in arrived.values()]
        scope = self._scopes.of(body.scope)
        generation = scope.barriers.get(body.name, 0) + 1
        sessions = tuple((held.request.session, held.request.seq) for held in waiting)
        commit(self, outcome, rec.BarrierReleased(body.scope, body.name, generation, sessions))
        for number, held in zip(list(arrived.values()), waiting, strict=True):
            self._waits.take(number)
            _answer(outcome, held.request, m.Number(generation))
        del self._arrived[body.scope, body.name]

    def _recheck_barriers(self) -> Outcome:
        """A lost node is no longer waited for."""
        outcome = Outcome()
        for arrived in list(self._arrived.values()):
            body = self._waits[next(iter(arrived.values()))].request.body
            assert isinstance(body, m.Barrier)
            self._release_if_full(outcome, body)
        return outcome

    # ---- ends of waits --------------------------------------------------------------------------

    def _expire(self, now: float) -> Outcome:
        outcome = Outcome()
        for number in self._waits.late(now):
            held = self._forget(number)
            _answer(outcome, held.request, m.Refused("timeout", _late(held)))
        return outcome

    def _forget(self, number: int) -> HeldState:
        """End a wait without an answer."""
        held = self._waits.take(number)
        assert held is not None
        body = held.request.body
        if isinstance(body, m.Barrier):
            arrived = self._arrived.get((body.scope, body.name), {})
            if arrived.get(body.member) == number:
                del arrived[body.member]
                if not arrived:
                    del self._arrived[body.scope, body.name]
        return held

    def _forget_node(self, node_id: NodeId) -> None:
        """Its agent repeats what it still waits for once it is back."""
        for number in self._waits.of_node(node_id):
            self._forget(number)

    def _drop_scopes(self, round_number: int, nodes: int) -> Outcome:
        outcome = Outcome()
        for number in self._waits.of_rounds_before(round_number):
            request = self._forget(number).request
            over = f"round {request.body.scope} is over"
            _answer(outcome, request, m.Refused("fenced", over))
        for key in [key for key in self._arrived if JOB_SCOPE < key[0] < round_number]:
            del self._arrived[key]
        commit(self, outcome, rec.ScopesDropped(round_number, nodes))
        return outcome

    def deadline(self) -> float | None:
        return self._waits.deadline()

    # ---- durable state --------------------------------------------------------------------------

    def validate(self) -> None:
        self._scopes.validate()
        self._waits.validate()
        for (scope, name), arrived in self._arrived.items():
            bodies = [self._waits[number].request.body for number in arrived.values()]
            assert bodies, name
            assert not self._scopes.is_over(scope), (scope, name)
            assert all(isinstance(one, m.Barrier) and one.name == name for one in bodies), bodies

    def apply(self, record: Record) -> None:
        self._scopes.apply(record)

    def snapshot(self) -> Iterable[Record]:
        return self._scopes.snapshot()

    def view(self) -> dict[str, object]:
        """Sizes, for people and metrics."""
        return {"keys": self._scopes.keys, "waiting": len(self._waits)}


def _answer(outcome: Outcome, event: ev.KvRequested, answer: m.Answer) -> None:
    outcome.commands.append(Reply(event.link, event.call, answer))


def _missing(body: m.KvGet | m.KvWait, scope: ScopeState) -> set[str]:
    """The keys that are still missing. For a wait a queue with elements is there; for a get it has
    no value."""
    if isinstance(body, m.KvGet):
        return {key for key in body.keys if key not in scope.values}
    return {key for key in body.keys if not scope.has(key)}


def _found(body: m.KvGet | m.KvWait, scope: ScopeState) -> m.Answer:
    if isinstance(body, m.KvGet):
        return m.Values(tuple(scope.values[key] for key in body.keys))
    return m.Done()


def _new_values(
    body: _Change, scope: ScopeState
) -> tuple[tuple[str, ...], tuple[bytes, ...], m.Answer] | m.Refused | m.Value:
    """Which keys get which values, and the answer; or only the answer, if nothing changes."""
    match body:
        case m.KvSet():
            return (body.key,), (body.value,), m.Done()
        case m.KvMultiSet():
            if len(body.keys) != len(body.values):
                counts = f"{len(body.keys)} keys came with {len(body.values)} values"
                return m.Refused("rejected", counts)
            return body.keys, body.values, m.Done()
        case m.KvAdd():
            current = _integer(scope.values.get(body.key, b"0"))
            if current is None:
                return m.Refused("rejected", f"the value of {body.key!r} is not a number")
            total = current + body.amount
            if not -INT_LIMIT <= total < INT_LIMIT:
                return m.Refused("rejected", f"the sum in {body.key!r} would not fit into 64 bits")
            return (body.key,), (str(total).encode(),), m.Number(total)
        case m.KvCompareSet():
            present = scope.values.get(body.key)
            if present is None and body.expected:
                return m.Value(body.expected)
            if present is not None and present != body.expected:
                return m.Value(present)
            return (body.key,), (body.desired,), m.Value(body.desired)


def _queue_record(event: ev.KvRequested, value: bytes | None, answer: m.Answer) -> rec.QueueChanged:
    assert isinstance(event.body, m.QueuePush | m.QueuePop)
    return rec.QueueChanged(
        event.body.scope, event.body.key, value, event.session, event.seq, answer
    )


def _queue_key(key: str) -> str:
    """What a pop waits for: an element, not a key of the same name."""
    return "\0queue\0" + key


def _integer(value: bytes) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None


def _late(held: HeldState) -> str:
    body = held.request.body
    if isinstance(body, m.Barrier):
        return f"barrier {body.name!r}: not everybody arrived within {body.timeout_s:g} s"
    if isinstance(body, m.QueuePop):
        return f"queue {body.key!r} stayed empty for {body.timeout_s:g} s"
    missing = ", ".join(repr(key) for key in sorted(held.missing)[:5])
    limit = body.timeout_s if isinstance(body, m.KvGet | m.KvWait) else 0.0
    return f"no value for {missing} within {limit:g} s"
