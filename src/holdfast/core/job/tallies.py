# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of the job in numbers. Nothing here decides anything, and nothing is durable.

Agents count from their start on and tell it with their beats, so a new master knows their numbers
after one beat of each. Its own counts begin anew with it, as counters of Prometheus may.
"""

from collections import Counter
from collections.abc import Iterable

from holdfast.core.job import events as ev
from holdfast.core.kernel import NOTHING, Event, Outcome, Record
from holdfast.model.ids import NodeId
from holdfast.protocol.checkpoints import Tally


class Tallies:
    """The newest tally of every node, and what the ledger did."""

    def __init__(self) -> None:
        #: By node: what it told last, and when.
        self._told: dict[NodeId, tuple[Tally, float]] = {}
        #: What nodes told that are lost by now.
        self._lost: list[Tally] = []
        #: With their node ranks.
        self._members: dict[NodeId, int] = {}
        #: By node: how many failed saves people were told of.
        self._failures_told: dict[NodeId, int] = {}
        self._commits = self._failures = 0
        self._committed_at: float | None = None

    def handle(self, event: Event, now: float) -> Outcome:
        match event:
            case ev.BeatReceived():
                if event.beat.checkpoints is not None:
                    self._told[event.node_id] = event.beat.checkpoints, now
                    return self._failed(event.node_id, event.beat.checkpoints)
            case ev.NodeLost():
                self._failures_told.pop(event.node_id, None)
                tally, _ = self._told.pop(event.node_id, (None, 0.0))
                if tally is not None:
                    self._lost = [_sum([*self._lost, tally])]
            case ev.WorldFormed() | ev.WorldFound():
                self._members = {one.node_id: one.node_rank for one in event.world.members}
            case ev.CheckpointCommitted():
                self._commits += 1
                self._committed_at = now
            case ev.AttemptFailed():
                self._failures += 1
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

    def deadline(self) -> float | None:
        return None

    def apply(self, record: Record) -> None:
        raise TypeError(f"{record!r} is not a record of the tallies: they have none")

    def snapshot(self) -> Iterable[Record]:
        return ()

    def view(self, now: float) -> dict[str, object]:
        """The numbers; an age is -1 where nothing is known."""
        total = _sum([*self._lost, *(tally for tally, _ in self._told.values())])
        members = [self._told[node_id] for node_id in self._members if node_id in self._told]
        saved = [(tally, at) for tally, at in members if tally.step >= 0]
        is_whole = bool(self._members) and len(saved) == len(self._members)
        committed_at = self._committed_at
        return {
            "saves": total.saves,
            "waited_s": total.waited_s,
            "memory_step": min(tally.step for tally, _ in saved) if is_whole else -1,
            "memory_age_s": max(t.age_s + now - at for t, at in saved) if is_whole else -1.0,
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
