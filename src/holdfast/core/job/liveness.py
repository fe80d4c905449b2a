# SPDX-License-Identifier: Apache-2.0
"""Who still answers: beats, broken streams and leases.

A broken stream is noticed at once and forgiven for `reconnect_s`; silence on an open one is
forgiven for `silence_s`. A node given up this way may still be computing out there, so its lease
runs on: only when it has expired is the node certain to have stopped by itself.
"""

from collections.abc import Iterable
from heapq import heappop, heappush

from holdfast.core.job import events as ev
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, Tick
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec


class Liveness:
    """Deadlines of attached and absent nodes. Nothing here is durable: agents come back."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        #: When each watched node is given up, and why.
        self._expires_at: dict[NodeId, float] = {}
        self._why: dict[NodeId, str] = {}
        self._heard_at: dict[NodeId, float] = {}
        self._leases: dict[NodeId, float] = {}
        #: (time, node): may be older than the node's real deadline, never younger.
        self._heap: list[tuple[float, NodeId]] = []
        #: The one heap entry of each node that counts; others are skipped when they surface.
        self._queued_at: dict[NodeId, float] = {}

    def handle(self, event: Event, now: float) -> Outcome:
        match event:
            case ev.BeatReceived():
                if event.node_id in self._expires_at:
                    # A beat does not touch the heap: one dict write, however many nodes there are.
                    self._heard_at[event.node_id] = now
                    self._expires_at[event.node_id] = now + self._spec.silence_s
                return NOTHING
            case Tick():
                return self._expire(now)
            case ev.NodeReady():
                self._watch(event.member.node_id, now, self._spec.silence_s, "it went silent")
                self._leases.pop(event.member.node_id, None)
            case ev.NodeAbsent():
                if event.node_id in self._expires_at:
                    self._watch(event.node_id, now, self._spec.reconnect_s, "its stream broke")
            case ev.NodeExpected():
                why = "it did not come back to the restarted master"
                self._watch(event.node_id, now, self._spec.silence_s, why)
            case ev.NodeLost():
                self._lost(event, now)
            case ev.LeaseExpired():
                self._leases.pop(event.node_id, None)
        return NOTHING

    def _watch(self, node_id: NodeId, now: float, patience_s: float, why: str) -> None:
        at = now + patience_s
        self._heard_at[node_id] = now
        self._expires_at[node_id] = at
        self._why[node_id] = why
        self._queue(node_id, at)

    def _queue(self, node_id: NodeId, at: float) -> None:
        queued_at = self._queued_at.get(node_id)
        if queued_at is None or at < queued_at:
            self._queued_at[node_id] = at
            heappush(self._heap, (at, node_id))

    def _lost(self, event: ev.NodeLost, now: float) -> None:
        self._expires_at.pop(event.node_id, None)
        self._why.pop(event.node_id, None)
        heard_at = self._heard_at.pop(event.node_id, now)
        if not event.proven:
            at = heard_at + self._spec.lease_s
            self._leases[event.node_id] = at
            self._queue(event.node_id, at)

    def _expire(self, now: float) -> Outcome:
        outcome = Outcome()
        while self._heap and self._heap[0][0] <= now:
            at, node_id = heappop(self._heap)
            if self._queued_at.get(node_id) != at:
                continue
            del self._queued_at[node_id]
            due_at = self._expires_at.get(node_id, self._leases.get(node_id))
            if due_at is None:
                continue
            if due_at > now:
                self._queue(node_id, due_at)
            elif node_id in self._expires_at:
                del self._expires_at[node_id]
                outcome.facts.append(ev.NodeSilent(node_id, self._why.pop(node_id)))
            else:
                del self._leases[node_id]
                outcome.facts.append(ev.LeaseExpired(node_id))
        return outcome

    def deadline(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def apply(self, record: Record) -> None:
        raise TypeError(f"{record!r} is not a record of liveness")

    def snapshot(self) -> Iterable[Record]:
        return ()
