# SPDX-License-Identifier: Apache-2.0
"""The checkpoint ledger: what is restored, what is on storage, and what is safe on other nodes.

Per directory it leads the restore agreement (agreement.py) and the attempts to bring versions to
storage (attempts.py), and knows which version every node has copied to others. Durable are only
the newest committed version, the lineage, and the positions that the datasets that follow the
directory had at each version: all else is in calls that agents hold and send again.

It needs little of the rest of the job: the world of the round, and who comes and goes.
"""

from collections.abc import Iterable
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.checkpoints.agreement import Agreement, RestoreCall
from holdfast.core.job.checkpoints.checkpoint_state import CheckpointState
from holdfast.core.job.checkpoints.crew import Crew
from holdfast.core.job.checkpoints.gathering import Gathering
from holdfast.core.job.checkpoints.series import SeriesState
from holdfast.core.job.commands import Reply
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick
from holdfast.model.checkpoint import NONE, Stored
from holdfast.model.ids import NodeId, Round
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m

SETTLE_S = 600.0
"""How long the end of the job waits for what is still on its way to storage."""

RETURN_S = 15.0
"""How long a new master waits for agents that may still bring something to storage."""

BREAKPOINT = "the newest state in memory, as the world changed"

Handled = (
    ev.CheckpointRequested
    | ev.DataMarks
    | ev.VersionMarked
    | ev.NodeReady
    | ev.NodeAbsent
    | ev.NodeSilent
    | ev.NodeExpected
    | ev.NodeLost
    | ev.WorldFormed
    | ev.MasterStarted
    | ev.DatasetFollows
    | ev.WorldFound
    | ev.WorldBroken
    | ev.WorldDone
    | ev.JobFinished
    | Tick
)


class Checkpoints:
    """All directories of the job."""

    OWNS = (rec.CheckpointCommitted, rec.LineageSet, rec.VersionPositioned)

    def __init__(self) -> None:
        self._crew = Crew()
        self._state = CheckpointState()
        self._series: dict[str, SeriesState] = {}
        self._breaks = 0
        #: The round that is done, and the earliest and the latest time to tell its end.
        self._settling: tuple[Round, float, float] | None = None
        self._ended = False

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
        out = Outcome()
        match event:
            case ev.CheckpointRequested():
                self._requested(out, event, now)
                self._advance(out, self._touched(event.body), now)
                return out
            case ev.DataMarks():
                body = event.body
                if self._crew.is_current(event.node_id, body.round):
                    self._of(body.directory).note_held(event.node_id, body.held)
                return NOTHING
            case ev.VersionMarked():
                self._of(event.directory).marked(out, event.version, event.positions)
            case ev.NodeReady():
                self._crew.arrived(event.member)
                for series in self._series.values():
                    series.node_returned(out, event.member.node_id)
            case ev.NodeAbsent() | ev.NodeSilent() | ev.NodeExpected():
                self._crew.expected(event.node_id)
                return NOTHING
            case ev.NodeLost():
                self._crew.lost(event.node_id)
                for series in self._series.values():
                    series.node_lost(out, event.node_id)
            case ev.WorldFormed():
                self._crew.formed(event.world)
                for series in self._series.values():
                    series.round_over(out)
            case ev.MasterStarted():
                self._crew.nonce = event.nonce
            case ev.DatasetFollows():
                self._state.followed.add(event.directory)
            case ev.WorldFound():
                self._crew.found(event.world)
                self._breaks = event.restarts
                if event.done:
                    # Its agents may have something to say yet.
                    self._settling = (event.world.round, now + RETURN_S, now + SETTLE_S)
            case ev.WorldBroken():
                if not event.by_plan:
                    self._breaks += 1
            case ev.WorldDone():
                self._settling = (event.round, now, now + SETTLE_S)
            case ev.JobFinished():
                self._ended = True
                self._settling = None
            case Tick():
                for series in self._series.values():
                    series.attempts.expire(out, now)
            case _:
                assert_never(event)
        self._advance(out, self._series.values(), now)
        return out

    def _touched(self, body: c.CheckpointCall) -> Iterable[SeriesState]:
        return () if isinstance(body, c.PeersAsk) else (self._of(body.directory),)

    def _of(self, directory: str) -> SeriesState:
        series = self._series.get(directory)
        if series is None:
            series = self._series[directory] = SeriesState(directory, self._crew, self._state)
        return series

    def _requested(self, out: Outcome, event: ev.CheckpointRequested, now: float) -> None:
        body = event.body
        answer: m.Answer | None = None
        if isinstance(
            body, c.NodeRestore | c.PersistAsk | c.PeersAsk | c.Replicated | c.CopyFailed
        ) and not (self._crew.is_current(event.node_id, body.round) or self._is_awaited(body)):
            answer = m.Refused("stale", f"round {body.round} is over")
        else:
            match body:
                case c.NodeRestore():
                    answer = self._restore(out, event, body, now)
                case c.PartsLocate():
                    self._of(body.directory).locate(event, body)
                case c.PersistAsk():
                    self._of(body.directory).attempts.ask(out, event, body)
                case c.PartsPersisted():
                    self._of(body.directory).attempts.persisted(out, event, body, now)
                case c.FlushAsk():
                    self._of(body.directory).flush(event, body)
                case c.CommitDone():
                    self._of(body.directory).attempts.commit_done(out, event.node_id, body)
                    answer = m.Done()
                case c.InventoryTaken():
                    self._of(body.directory).inventory_taken(event.node_id, body)
                    answer = m.Done()
                case c.Replicated():
                    self._of(body.directory).replication.replicated(out, event, body)
                case c.CopyFailed():
                    replication = self._of(body.directory).replication
                    answer = replication.failed(out, event.node_id, body)
                case c.PeersAsk():
                    answer = self._peers(event.node_id, body)
                case _:
                    assert_never(body)
        if answer is not None:
            out.commands.append(Reply(event.link, event.call, answer))

    def _is_awaited(self, body: c.CheckpointCall) -> bool:
        """Whether a node asks again, after its round, what to write for an attempt that is open."""
        if not isinstance(body, c.PersistAsk):
            return False
        return body.version in self._of(body.directory).attempts.versions()

    def _peers(self, node_id: NodeId, body: c.PeersAsk) -> c.Peers:
        ring = self._crew.ring
        if body.parity:
            return c.Peers(self._crew.peers(ring.parity_group(node_id, body.parity)))
        return c.Peers(self._crew.peers(ring.replica_peers(node_id, body.replicas)))

    def _advance(self, out: Outcome, touched: Iterable[SeriesState], now: float) -> None:
        """Continue everything that can go on after the event."""
        for series in touched:
            self._agree(out, series, now)
            series.advance(out, now)
        self._settle(out, now)

    def _settle(self, out: Outcome, now: float) -> None:
        if self._settling is None:
            return
        round_number, earliest, latest = self._settling
        if now >= latest or (now >= earliest and not any(s.is_busy for s in self._series.values())):
            self._settling = None
            out.facts.append(ev.WorkSettled(round_number))

    # ---- the restore agreement ------------------------------------------------------------------

    def _restore(
        self, out: Outcome, event: ev.CheckpointRequested, body: c.NodeRestore, now: float
    ) -> m.Answer | None:
        agreed = self._state.agreed.get(body.directory)
        if agreed is not None and agreed.round == body.round and body.lineage < agreed.lineage:
            # The others have gone on: this node missed the answer.
            if body.prepared == agreed.version and not body.mixed:
                return self._go(agreed, (), now)
            what = f"step {agreed.version.step}" if agreed.version != NONE else "a fresh start"
            return m.Refused("rejected", f"the other nodes of the round agreed on {what} already")
        series = self._of(body.directory)
        if series.agreement is None:
            outsiders = self._crew.outsiders()
            number = self._crew.next_number()
            gathering = Gathering(body.directory, number, outsiders, now)
            gathering.ask(out)
            series.agreement = Agreement(gathering)
        series.agreement.ask(RestoreCall(event, body))
        return None

    def _agree(self, out: Outcome, series: SeriesState, now: float) -> None:
        agreement = series.agreement
        if agreement is None or not agreement.is_complete(self._crew.index, now):
            return
        if problem := agreement.disagreement():
            for call in agreement.take_asks():
                out.commands.append(call.answer(m.Refused("usage", problem)))
            series.agreement = None
            return
        directory, state = series.directory, self._state
        committed, is_followed = state.committed.get(directory), directory in state.followed
        choice = agreement.choose(
            None if committed is None else Stored(committed.version, committed.shape),
            state.base(directory),
            state.positions(directory).keys() if is_followed else None,
            series.promised,
            tuple(series.attempts.versions()),
        )
        if choice is None:
            # Wait for a version to reach storage. The outsiders have had their time.
            agreement.outsiders.stop_waiting()
            return
        inventory = series.inventory = agreement.inventory
        version, shape = choice.version, inventory.shape(choice.version)
        stored_positions = agreement.stored_positions(version)
        asks = list(agreement.take_asks())
        if not choice.go:
            for call in asks:
                node_id = call.request.node_id
                sources = inventory.sources(version, call.body.wants, node_id, self._crew)
                rate = self._failures_per_s(now)
                plan = c.RestorePlan(version, shape, False, -1, sources, rate, choice.notes)
                out.commands.append(call.answer(plan))
            return
        lineage = 1 + max(state.lineage(directory), inventory.highest_lineage())
        agreed = rec.LineageSet(directory, lineage, self._crew.round, version, shape)
        state.commit(out, agreed)
        series.agreement = None
        notes, positions = choice.notes, state.positions(directory).get(version, stored_positions)
        if positions:
            state.keep_positions(out, directory, version, positions)
        elif is_followed and version != NONE:
            notes += (f"step {version.step} does not say how far its data were: they begin anew",)
        self._of(directory).replication.restored(version)
        out.facts.append(
            ev.RestoreAgreed(
                directory, self._crew.round, version, lineage, choice.fresh, notes, positions
            )
        )
        for call in asks:
            out.commands.append(call.answer(self._go(agreed, notes, now)))
        if any(call.body.breakpoint for call in asks) and not choice.fresh:
            series.bring_to_storage(out, version, inventory, BREAKPOINT, now)

    def _go(self, agreed: rec.LineageSet, notes: tuple[str, ...], now: float) -> c.RestorePlan:
        rate = self._failures_per_s(now)
        follows = agreed.directory in self._state.followed
        return c.RestorePlan(
            agreed.version, agreed.shape, True, agreed.lineage, (), rate, notes, follows
        )

    def _failures_per_s(self, now: float) -> float:
        return self._breaks / now if now > 0 else 0.0

    # ---- time, durable state, looking -----------------------------------------------------------

    def deadline(self) -> float | None:
        if self._ended and not any(series.is_busy for series in self._series.values()):
            return None
        found = [series.deadline() for series in self._series.values()]
        if self._settling is not None:
            _, earliest, latest = self._settling
            # What is busy until then wakes us by itself.
            is_busy = any(series.is_busy for series in self._series.values())
            found.append(latest if is_busy else earliest)
        return min((at for at in found if at is not None), default=None)

    def validate(self) -> None:
        self._crew.validate()
        for series in self._series.values():
            series.attempts.validate()

    def apply(self, record: Record) -> None:
        self._state.apply(record)

    def snapshot(self) -> Iterable[Record]:
        return self._state.snapshot()

    def newest_safe(self) -> int:
        """The newest step that is copied to other nodes, or was before an incident; or -1."""
        known = (series.replication.newest_safe.step for series in self._series.values())
        return max(known, default=-1)

    def view(self) -> list[dict[str, object]]:
        """Each directory as people see it."""
        known = self._state.committed.keys() | self._series.keys() | self._state.agreed.keys()
        return [self._of(directory).view() for directory in sorted(known)]
