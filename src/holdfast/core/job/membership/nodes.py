# SPDX-License-Identifier: Apache-2.0
"""Who is part of the job: admission, incarnations, phases, and what follows when a node is lost.

Two agents may claim one node rank: a relaunched pod and its predecessor, or a node started twice.
The newer incarnation wins; the older is told so and stops (it is *fenced*).

A node that the platform could not start says nothing about the job: it uses up no budget. Its rank
is launched again, with longer and longer pauses, for as long as the job lasts; a job that gets no
world for want of nodes ends after `join_timeout_s`. What a managed job asks of its platform is in
fleet.py.
"""

from collections.abc import Iterable, Iterator
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Bind, Drop, Push, RemoveNode, Reply
from holdfast.core.job.membership.admission import refusal_of, rules_of, rules_of_agent, why_behind
from holdfast.core.job.membership.awaiting_reason import Loss
from holdfast.core.job.membership.demand import Demand
from holdfast.core.job.membership.fleet import Fleet
from holdfast.core.job.membership.master_history import MasterHistory
from holdfast.core.job.membership.node_table import NOBODY, NodeState, NodeTable
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, Tick
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER
from holdfast.model.world import Member, World
from holdfast.protocol import messages as m

Handled = (
    ev.BeatReceived
    | ev.AttachRequested
    | ev.NodeWarmed
    | ev.NodeSilent
    | ev.NodeSeen
    | ev.LeaveRequested
    | ev.LeaseExpired
    | ev.PlanAsked
    | ev.PlanPartAgreed
    | ev.MasterStarted
    | ev.GenerationRaised
    | ev.WorldFormed
    | ev.WorldFound
    | ev.WorldBroken
    | ev.FirstStepMade
    | ev.JobResumed
    | ev.JobFinished
    | Tick
)


class Nodes:
    """The node table."""

    OWNS = (
        rec.RulesSet,
        rec.NodePlanned,
        rec.NodeAdmitted,
        rec.NodePhaseChanged,
        rec.RelaunchCounted,
        rec.CountersSet,
        rec.NodePlaced,
        rec.NodeLeaves,
        rec.RankWanted,
        rec.JobSized,
        rec.PlanSettled,
        rec.HostBlamed,
        rec.GroupMoved,
        rec.LifeBegan,
    )

    def __init__(self, spec: JobSpec, job: str, demand: Demand) -> None:
        self._spec = spec
        self._job = job
        self._table = NodeTable(spec.first_node_id)
        self._fleet = Fleet(spec, self._table, demand)
        self._ended: ev.JobFinished | None = None
        #: Volatile: what the agents are told when they attach.
        self._generation = 0
        self._round = Round(0)
        #: Whether a platform launches nodes with agents.
        self._has_platform = spec.managed and WORKER not in spec.roles

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
        outcome = Outcome()
        match event:
            case ev.BeatReceived():
                if (node := self._table.nodes.get(event.node_id)) is not None:
                    node.heard(event.beat, now)
                return NOTHING
            case ev.AttachRequested():
                self._attach(outcome, event, now)
            case ev.NodeWarmed():
                self._fleet.departures.make_room(outcome, self._table.nodes[event.node_id])
            case ev.NodeSilent():
                why = event.reason
                self._lose(outcome, event.node_id, ExitReason.LOST, why, now, proven=False)
            case ev.NodeSeen():
                self._seen(outcome, event, now)
            case ev.LeaveRequested():
                why = event.reason
                self._lose(outcome, event.node_id, ExitReason.KILLED, why, now, proven=True)
                outcome.commands.append(Reply(event.link, event.call, m.Done()))
            case ev.LeaseExpired():
                self._stopped(outcome, event.node_id)
            case ev.PlanAsked():
                if event.plan.role not in self._spec.roles:
                    self._fleet.ask(outcome, event.plan, now)
            case ev.PlanPartAgreed():
                if event.part.role not in self._spec.roles:
                    self._fleet.carry_out(outcome, event.part, now)
            case ev.MasterStarted():
                self._began(outcome, event, now)
            case ev.GenerationRaised():
                self._generation, self._round = event.generation, event.round
            case ev.WorldFormed():
                self._round, self._generation = event.world.round, event.world.generation
                self._fleet.departures.formed(_ids(event.world), now)
            case ev.WorldFound():
                if not event.broken:
                    self._fleet.departures.world = frozenset(_ids(event.world))
            case ev.WorldBroken():
                self._fleet.departures.broke(outcome)
            case ev.FirstStepMade():
                self._fleet.departures.let_go(outcome)
            case ev.JobResumed():
                if event.stopped and self._has_platform:
                    self._fleet.orders.fill(outcome, "the job goes on", now)
            case ev.JobFinished():
                self._ended = event
                if self._has_platform:
                    self._fleet.finish(outcome)
            case Tick():
                self._fleet.tick(outcome, now)
            case _:
                assert_never(event)
        self._fleet.note_clock(outcome)
        return outcome

    def deadline(self) -> float | None:
        return self._fleet.deadline()

    def _began(self, outcome: Outcome, event: ev.MasterStarted, now: float) -> None:
        if event.nonce:
            began = (event.nonce, event.position, event.clock, event.zero_s)
            self._table.commit(outcome, rec.LifeBegan(*began))
        self._start(outcome, now)

    def _start(self, outcome: Outcome, now: float) -> None:
        """Order what a managed job needs; order again what was ordered and never seen."""
        table = self._table
        if table.rules is not None:
            outcome.facts.append(ev.JobOpened(table.rules))
        elif self._has_platform and not table.wanted.nodes:
            if not self._spec.size_from_platform:
                self._open(outcome, rules_of(self._spec))
            self._fleet.begin(outcome, now)
            return
        outcome.facts.extend(_found(table))
        if self._has_platform:
            self._fleet.resume(outcome, now)

    def _open(self, outcome: Outcome, rules: m.JobRules) -> None:
        self._table.commit(outcome, rec.RulesSet(rules))
        outcome.facts.append(ev.JobOpened(rules))

    def _attach(self, outcome: Outcome, event: ev.AttachRequested, now: float) -> None:
        attach, table = event.attach, self._table
        refusal = refusal_of(attach, table, managed=self._spec.managed)
        behind = why_behind(attach, table)
        if behind:
            outcome.facts.append(ev.JournalBehind(behind))
            # Admitted agents learn it from the end of the job; only others need the refusal.
            refusal = refusal and m.Refused("fenced", behind)
        if refusal is not None:
            outcome.commands.append(Reply(event.link, event.call, refusal))
            # A node that was given up, and lives: its platform has nothing to say about its end.
            lost = table.by_key.get(attach.agent_key, NOBODY)
            self._fleet.losses.explained(outcome, lost, None, now)
            return
        if table.rules is None:
            self._open(outcome, rules_of_agent(attach, table))
        former = table.by_key.get(attach.ended_key)
        if former is not None and not table.nodes[former].proven:
            # It was given up and has ended its workers: its lease need not be waited for.
            outcome.facts.append(ev.LeaseExpired(former))
        known = table.by_key.get(attach.agent_key)
        node = table.nodes[known] if known is not None else self._admit(outcome, attach)
        self._fleet.orders.ready(node.node_rank, now)
        outcome.commands.append(Bind(node.node_id, event.link))
        welcome = _welcome(
            self._job, self._spec, node, self._generation, self._round, table.masters
        )
        outcome.commands.append(Reply(event.link, event.call, welcome))
        if self._ended is not None:
            outcome.commands.append(Push(node.node_id, _farewell(self._ended)))
        if behind or (self._ended is not None and known is None):
            return
        # One that comes back to a new master after the end may still have to bring its memory to
        # storage: it is there, for who is to write.
        outcome.facts.append(
            ev.NodeReady(
                _member(node, attach),
                Round(attach.round),
                returned=known is not None,
                cold=attach.cold,
                replaces=node.replaces if table.is_live(node.replaces) else NOBODY,
            )
        )
        if not attach.cold:
            self._fleet.departures.make_room(outcome, node)

    def _admit(self, outcome: Outcome, attach: m.Attach) -> NodeState:
        """Give a new agent process its identity, and fence the agent that had its rank."""
        table = self._table
        if attach.node_id >= 0:
            node_id = NodeId(attach.node_id)
            rank = table.nodes[node_id].node_rank
        else:
            node_id = NodeId(table.next_node_id)
            rank = NodeRank(attach.node_rank) if attach.node_rank >= 0 else table.free_rank()
        older = table.live_by_rank.get(rank)
        if older is not None and (older != node_id or table.nodes[older].agent_key):
            known = table.nodes.get(node_id)
            if known is None or known.replaces != older:
                self._fence(outcome, table.nodes[older], node_id)
        record = rec.NodeAdmitted(
            node_id=node_id,
            node_rank=rank,
            incarnation=table.next_incarnation,
            agent_key=attach.agent_key,
            nproc=attach.nproc,
            host=attach.host,
            topology=attach.topology,
            process=attach.process,
            log_dir=attach.log_dir,
        )
        table.commit(outcome, record)
        return table.nodes[node_id]

    def _fence(self, outcome: Outcome, older: NodeState, newer: NodeId) -> None:
        rank = older.node_rank
        why = f"a newer agent has taken the place of node rank {rank}"
        outcome.commands.append(Push(older.node_id, m.Fenced(why)))
        if older.node_id != newer:
            self._table.end(outcome, older, Phase.FAILED, ExitReason.KILLED, why, proven=False)
            outcome.commands.append(Drop(older.node_id))
            if self._spec.managed and self._ended is None:
                outcome.commands.append(RemoveNode(older.node_id))
        else:
            outcome.commands.append(Drop(newer))
            outcome.facts.append(ev.NodeLost(newer, rank, ExitReason.KILLED, why, proven=False))

    def _seen(self, outcome: Outcome, event: ev.NodeSeen, now: float) -> None:
        table, is_final = self._table, event.phase.is_final
        node = table.nodes.get(event.node_id)
        is_over = node is None or (node.phase.is_final and node.proven)
        is_ours = self._has_platform and event.node_id < table.next_node_id
        if is_over and is_ours and not is_final:
            # Its removal, or an order that was overtaken by one, may not have come through.
            outcome.commands.append(RemoveNode(event.node_id))
        if node is None:
            return
        if is_final:
            reason = event.reason or ExitReason.UNKNOWN
            self._fleet.losses.explained(outcome, node.node_id, reason, now)
        if not node.proven and is_final:
            outcome.facts.append(ev.LeaseExpired(node.node_id))
            return
        if event.host and event.host != node.machine:
            table.commit(outcome, rec.NodePlaced(node.node_id, event.host))
        if node.phase.after(event.phase) is node.phase:
            return
        if node.phase.is_final or not is_final:
            record = rec.NodePhaseChanged(node.node_id, event.phase, "", event.message, at_s=now)
            table.commit(outcome, record)
            return
        self._lose(
            outcome,
            node.node_id,
            event.reason or ExitReason.UNKNOWN,
            event.message or f"the platform reports it as {event.phase}",
            now,
            proven=True,
            phase=event.phase,
        )

    def _lose(
        self,
        outcome: Outcome,
        node_id: NodeId,
        reason: ExitReason,
        message: str,
        now: float,
        *,
        proven: bool,
        phase: Phase = Phase.FAILED,
    ) -> None:
        node = self._table.nodes.get(node_id)
        if node is None or node.phase.is_final:
            return
        loss = Loss(
            node,
            reason,
            has_run=node.phase is Phase.RUNNING,
            was_leaving=node_id in self._table.leaving,
            ended_well=phase is Phase.SUCCEEDED,
        )
        self._table.end(outcome, node, phase, reason, message, proven=proven, at_s=now)
        if not proven:
            # It may only be slow: with its stream closed it comes back, and learns where it stands.
            outcome.commands.append(Drop(node_id))
        if self._spec.managed and self._ended is None:
            self._fleet.losses.lost(outcome, loss, now, proven=proven)

    def _stopped(self, outcome: Outcome, node_id: NodeId) -> None:
        """A lost node is now known to have stopped its workers."""
        node = self._table.nodes.get(node_id)
        if node is not None and not node.proven:
            self._table.commit(outcome, rec.NodePhaseChanged(node_id, node.phase))

    def validate(self) -> None:
        self._table.validate()

    def apply(self, record: Record) -> None:
        self._table.apply(record)

    def snapshot(self) -> Iterable[Record]:
        return self._table.snapshot()

    def view(self, now: float) -> list[dict[str, object]]:
        """The table as people see it."""
        return self._table.view(now)

    def name_of(self, node_id: NodeId) -> str:
        """As people ask for it, by its rank; empty if it is not of this table."""
        node = self._table.nodes.get(node_id)
        return "" if node is None else f"node/{node.node_rank}"

    def last_clock(self) -> tuple[str, float]:
        """The monotonic clock of the last master that began, and what it showed at job time 0."""
        return self._table.masters.clock

    def processes(self) -> dict[NodeId, str]:
        """The processes of agents that belong to the job, as far as they said a name."""
        nodes = self._table.nodes.values()
        return {n.node_id: n.process for n in nodes if n.phase is Phase.RUNNING and n.process}

    def wanted(self) -> dict[str, object]:
        """The requested size and state of the job."""
        wanted = self._table.wanted
        return {"nodes": wanted.nodes or self._spec.max_nodes, "suspended": wanted.suspended}


def _found(table: NodeTable) -> Iterator[Event]:
    """Who was part of the job when the last master died."""
    for node in table.nodes.values():
        if node.phase is Phase.RUNNING and node.agent_key:
            yield ev.NodeExpected(node.node_id)
        elif not node.proven:
            # How much of its lease is left is not known: it gets a whole one.
            why = "it was lost before the master restarted"
            yield ev.NodeLost(node.node_id, node.node_rank, ExitReason.LOST, why, proven=False)


def _member(node: NodeState, attach: m.Attach) -> Member:
    return Member(
        node_id=node.node_id,
        incarnation=node.incarnation,
        node_rank=node.node_rank,
        nproc=attach.nproc,
        host=attach.host,
        store_port=attach.store_port,
        hosted_port=attach.hosted_port,
        topology=attach.topology,
        peer_port=attach.peer_port,
        peer_certificate=attach.peer_certificate,
    )


def _welcome(
    job: str,
    spec: JobSpec,
    node: NodeState,
    generation: int,
    round_number: int,
    masters: MasterHistory,
) -> m.Attached:
    return m.Attached(
        job=job,
        node_id=node.node_id,
        node_rank=node.node_rank,
        incarnation=node.incarnation,
        generation=generation,
        beat_s=spec.beat_s,
        lease_s=spec.lease_s,
        round=round_number,
        journal=masters.journal,
        life=masters.present,
    )


def _farewell(end: ev.JobFinished) -> m.JobEnded:
    fields = (end.ok, end.reason, end.cause, end.cause_node_rank)
    return m.JobEnded(*fields, stopped=end.stopped)


def _ids(world: World) -> Iterable[NodeId]:
    return (member.node_id for member in world.members)
