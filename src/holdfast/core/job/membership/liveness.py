# SPDX-License-Identifier: Apache-2.0
"""Which nodes still answer: beats, broken streams and leases.

A broken stream is noticed at once and forgiven for `reconnect_s`; silence on an open one is
forgiven for `silence_s`. A node given up this way may still be computing out there, so its lease
runs on: only when it has expired is the node certain to have stopped by itself.

When no node at all is heard any more, the likely cause is the master's own network, and the nodes
train on. Then no node is given up before its lease is over, unless the platform says that it is
gone. Once the first is heard again, the others have `silence_s` to come back, too.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec

Handled = (
    ev.BeatReceived
    | ev.NodeReady
    | ev.NodeAbsent
    | ev.NodeExpected
    | ev.NodeLost
    | ev.LeaseExpired
    | Tick
)


class Liveness:
    """Deadlines of attached and absent nodes. Nothing here is durable: agents come back."""

    OWNS = ()

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        #: When each watched node is given up, and why.
        self._expires_at: dict[NodeId, float] = {}
        self._why: dict[NodeId, str] = {}
        self._heard_at: dict[NodeId, float] = {}
        self._leases: dict[NodeId, float] = {}
        #: (time, node): the time may be before the node's real deadline, never after it.
        self._heap: list[tuple[float, NodeId]] = []
        #: The one heap entry of each node that counts; others are skipped when they surface.
        self._queued_at: dict[NodeId, float] = {}
        #: When any node was heard last.
        self._last_heard_at = 0.0
        #: Watched nodes without a stream that had one.
        self._broken: set[NodeId] = set()
        #: Nodes that would have been given up, if any other node had been heard.
        self._waits_for: set[NodeId] = set()
        #: Nodes not heard again since no node was: each has until its deadline, with a stream or
        #: without.
        self._missed: set[NodeId] = set()

    def handle(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.BeatReceived():
                if event.node_id not in self._expires_at:
                    return NOTHING
                # A beat does not touch the heap: a few writes, however many nodes there are.
                outcome = self._hear(event.node_id, now)
                self._heard_at[event.node_id] = now
                self._expires_at[event.node_id] = now + self._spec.silence_s
                return outcome
            case Tick():
                return self._expire(now)
            case ev.NodeReady():
                outcome = self._hear(event.member.node_id, now)
                self._watch(event.member.node_id, now, self._spec.silence_s, "it went silent")
                self._leases.pop(event.member.node_id, None)
                return outcome
            case ev.NodeAbsent():
                self._absent(event.node_id, now)
            case ev.NodeExpected():
                why = "it did not come back to the restarted master"
                self._watch(event.node_id, now, self._spec.silence_s, why)
                self._last_heard_at = now
            case ev.NodeLost():
                self._lost(event, now)
            case ev.LeaseExpired():
                self._leases.pop(event.node_id, None)
            case _:
                assert_never(event)
        return NOTHING

    def _absent(self, node_id: NodeId, now: float) -> None:
        if node_id not in self._expires_at:
            return
        self._broken.add(node_id)
        if node_id not in self._missed and node_id not in self._waits_for:
            self._watch(node_id, now, self._spec.reconnect_s, "its stream broke")

    def _is_deaf(self, now: float) -> bool:
        """Whether no node is heard: every stream broke, or no beat came when many were due."""
        patience_s = max(self._spec.silence_s / 2, 1.5 * self._spec.beat_s)
        if now - self._last_heard_at > patience_s:
            return True
        return len(self._broken) == len(self._expires_at)

    def _hear(self, node_id: NodeId, now: float) -> Outcome:
        """A node is heard. If none was before, the others may be on their way back, too."""
        outcome = NOTHING
        if self._expires_at and self._is_deaf(now):
            if self._waits_for:
                quiet_s = now - self._last_heard_at
                outcome = Outcome(facts=[ev.HeardAgain(node_id, quiet_s)])
            for other in self._expires_at:
                self._expires_at[other] = now + self._spec.silence_s
                self._queue(other, self._expires_at[other])
            self._missed = set(self._expires_at)
            self._waits_for.clear()
        self._last_heard_at = now
        self._broken.discard(node_id)
        self._missed.discard(node_id)
        return outcome

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
        for nodes in (self._broken, self._waits_for, self._missed):
            nodes.discard(event.node_id)
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
            elif node_id in self._leases:
                del self._leases[node_id]
                outcome.facts.append(ev.LeaseExpired(node_id))
            elif not self._wait_for(outcome, node_id, now):
                del self._expires_at[node_id]
                self._broken.discard(node_id)
                outcome.facts.append(ev.NodeSilent(node_id, self._why.pop(node_id)))
        return outcome

    def _wait_for(self, outcome: Outcome, node_id: NodeId, now: float) -> bool:
        """Whether this silence may be the master's own, so that the node has its whole lease.

        All nodes have until the last lease is over: then they are lost in one step, which is one
        incident.
        """
        at = self._last_heard_at + self._spec.lease_s
        if at <= now or not self._is_deaf(now):
            return False
        if not self._waits_for:
            outcome.facts.append(ev.NobodyHeard(now - self._last_heard_at))
        self._waits_for.add(node_id)
        self._expires_at[node_id] = at
        self._queue(node_id, at)
        return True

    def validate(self) -> None:
        """A node is watched or under a lease, and the heap wakes us before its time is up."""
        watched = self._expires_at.keys()
        assert watched.isdisjoint(self._leases), self._leases
        assert watched == self._why.keys(), self._why
        for nodes in (self._broken, self._waits_for, self._missed):
            assert nodes <= watched, nodes
        for node_id, at in (self._expires_at | self._leases).items():
            assert self._queued_at[node_id] <= at, node_id
        assert set(self._heap) >= {(at, node_id) for node_id, at in self._queued_at.items()}

    def deadline(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def apply(self, record: Record) -> None:
        raise TypeError(f"{record!r} is not a record of liveness")

    def snapshot(self) -> Iterable[Record]:
        return ()
