# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of the job in numbers. Nothing here decides anything, and nothing is durable.

Agents count from their start on and send the counts with their beats, so a new master knows them
after one beat of each. A new master's own counts begin at 0, as counters of Prometheus may.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, assert_never

from holdfast.core.job import events as ev
from holdfast.core.kernel import NOTHING, Outcome, Record
from holdfast.model.ids import NodeId
from holdfast.protocol.checkpoints import Tally

Handled = (
    ev.BeatReceived
    | ev.WorldBroken
    | ev.NodeLost
    | ev.WorldFormed
    | ev.WorldFound
    | ev.RestoreAgreed
    | ev.CheckpointCommitted
    | ev.AttemptFailed
)


class Tallies:
    """The newest tally of every node, and what the ledger did."""

    OWNS = ()

    def __init__(self) -> None:
        #: By node: what it told last, and when.
        self._told: dict[NodeId, tuple[Tally, float]] = {}
        #: Nodes that beat since this master began, or since they came: some have nothing to tell.
        self._heard: set[NodeId] = set()
        #: The last tallies of nodes that are lost by now.
        self._lost: list[Tally] = []
        #: The members of the world, with their node ranks.
        self._members: dict[NodeId, int] = {}
        #: By node: how many failed saves people were told of.
        self._failures_told: dict[NodeId, int] = {}
        #: The newest step that all members had before an incident, and when it was saved.
        self._before = -1, 0.0
        self._is_noted = False
        #: By directory: the step that the ranks of the present round went on from.
        self._agreed: dict[str, int] = {}
        #: A step saved before this time counts only up to the agreed step: the ranks cannot go back
        #: to a later one. In a new round no such step counts until its ranks have agreed.
        self._void_before = -math.inf
        self._commits = self._failures = 0
        self._committed_at: float | None = None

    def handle(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.BeatReceived():
                self._heard.add(event.node_id)
                if event.beat.checkpoints is not None:
                    self._told[event.node_id] = event.beat.checkpoints, now
                    return self._failed(event.node_id, event.beat.checkpoints)
            case ev.WorldBroken():
                self._note(now)
            case ev.NodeLost():
                self._failures_told.pop(event.node_id, None)
                self._heard.discard(event.node_id)
                if not self._is_noted and event.node_id in self._members:
                    self._note(now)
                tally, _ = self._told.pop(event.node_id, (None, 0.0))
                if tally is not None:
                    self._lost = [_sum([*self._lost, tally])]
            case ev.WorldFormed() | ev.WorldFound():
                self._note(now)
                self._is_noted = False
                self._members = {one.node_id: one.node_rank for one in event.world.members}
                self._agreed.clear()
                # In a world that a restarted master found, the ranks agreed long ago.
                self._void_before = now if isinstance(event, ev.WorldFormed) else -math.inf
            case ev.RestoreAgreed():
                self._agreed[event.directory] = event.version.step
                self._void_before = now
                if self._agreed_step() < self._before[0]:
                    self._before = -1, 0.0
            case ev.CheckpointCommitted():
                self._commits += 1
                self._committed_at = now
            case ev.AttemptFailed():
                self._failures += 1
            case _:
                assert_never(event)
        return NOTHING

    def _failed(self, node_id: NodeId, tally: Tally) -> Outcome:
        """Tell people of saves that failed: seldom, as they may fail at every step."""
        told = self._failures_told.get(node_id, 0)
        if tally.failed < max(1, 2 * told):
            return NOTHING
        self._failures_told[node_id] = tally.failed
        rank = self._members.get(node_id, -1)
        failed = ev.SavesFailed(node_id, rank, tally.failed, tally.failed_step, tally.failed_why)
        return Outcome(facts=[failed])

    def _note(self, now: float) -> None:
        """Note, once per incident, what all had in memory before some are lost and others come."""
        if not self._is_noted:
            self._is_noted = True
            step, age_s = self._in_memory(now)
            if step >= 0:
                self._before = step, now - age_s

    def _in_memory(self, now: float) -> tuple[int, float]:
        """The newest step that every member has in memory, and its age; -1: not all have told."""
        members = [self._told[node_id] for node_id in self._members if node_id in self._told]
        saved = [
            (tally, at) for tally, at in members if tally.step >= 0 and not self._is_void(tally, at)
        ]
        if not saved or len(saved) < len(self._members):
            return -1, -1.0
        return min(tally.step for tally, _ in saved), max(t.age_s + now - at for t, at in saved)

    def _is_known(self) -> bool:
        """Whether all members have told, and what they told last is true of their memory now."""
        if not self._members.keys() <= self._heard:
            return False
        told = (self._told[node_id] for node_id in self._members if node_id in self._told)
        return not any(self._is_void(tally, at) for tally, at in told)

    def _is_void(self, tally: Tally, at: float) -> bool:
        """Whether the ranks went back to before the step that was told, or still may."""
        return tally.step > self._agreed_step() and at - tally.age_s < self._void_before

    def _agreed_step(self) -> int:
        return max(self._agreed.values(), default=-1)

    def deadline(self) -> None:
        """Nothing here waits."""

    def validate(self) -> None:
        assert len(self._lost) <= 1, self._lost
        assert self._told.keys() <= self._heard, (self._told, self._heard)

    def apply(self, record: Record) -> None:
        raise TypeError(f"{record!r} is not a record of the tallies: they have none")

    def snapshot(self) -> Iterable[Record]:
        return ()

    def view(self, now: float) -> dict[str, Any]:
        """The numbers; an age is -1 where nothing is known."""
        total = _sum([*self._lost, *(tally for tally, _ in self._told.values())])
        step, age_s = self._in_memory(now)
        is_confirmed = step >= 0 or (self._before[0] < 0 and self._is_known())
        if not is_confirmed and self._before[0] >= 0:
            step, age_s = self._before[0], now - self._before[1]
        committed_at = self._committed_at
        return {
            "saves": total.saves,
            "waited_s": total.waited_s,
            "memory_step": step,
            "memory_age_s": age_s,
            "memory_confirmed": is_confirmed,
            "written_bytes": total.written_bytes,
            "written_s": total.written_s,
            "restored": total.restored,
            "commits": self._commits,
            "failures": self._failures,
            "storage_age_s": -1.0 if committed_at is None else now - committed_at,
            "failed_saves": total.failed,
            "failed_step": total.failed_step,
            "failed_why": total.failed_why,
        }


def _sum(tallies: Iterable[Tally]) -> Tally:
    saves = written_bytes = 0
    waited_s = written_s = 0.0
    restored: Counter[str] = Counter()
    failed, failed_step, failed_why = 0, -1, ""
    for tally in tallies:
        saves += tally.saves
        waited_s += tally.waited_s
        written_bytes += tally.written_bytes
        written_s += tally.written_s
        restored.update(tally.restored)
        failed += tally.failed
        if tally.failed_step > failed_step:
            failed_step, failed_why = tally.failed_step, tally.failed_why
    return Tally(
        saves,
        waited_s,
        -1,
        -1.0,
        written_bytes,
        written_s,
        dict(restored),
        failed,
        failed_step,
        failed_why,
    )
