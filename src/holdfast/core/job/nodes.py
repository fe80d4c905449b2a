# SPDX-License-Identifier: Apache-2.0
"""Who is part of the job: admission, incarnations, phases, relaunches and their budgets.

Two agents may claim one node rank: a relaunched pod and its predecessor, or a node started twice.
The newer incarnation wins; the older is told so and stops (it is *fenced*).

A node that the platform could not start says nothing about the job: it uses up no budget. Its rank
is launched again, with longer and longer pauses, for as long as the job lasts; a job that gets no
world for want of nodes ends after `join_timeout_s`.
"""

from collections.abc import Iterable

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Bind, Drop, LaunchNode, Push, RemoveNode, Reply
from holdfast.core.job.launch_queue import LaunchQueue
from holdfast.core.job.node_table import NodeState, NodeTable
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, Tick, commit
from holdfast.model.errors import UsageError
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import OF_THE_PROGRAM, ExitReason, Phase
from holdfast.model.world import Member
from holdfast.protocol import messages as m

NPROC_MAX = 2**20
"""More is a mistake; and the sum over all nodes must fit into the 64 bits of a frame."""


class Nodes:
    """The node table."""

    def __init__(self, spec: JobSpec, job: str) -> None:
        self._spec = spec
        self._job = job
        self._table = NodeTable()
        self._launches = LaunchQueue()
        self._ended: ev.JobFinished | None = None
        #: Volatile: what the agents are told when they attach.
        self._generation = 0
        self._round = Round(0)

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Outcome:
        match event:
            case ev.AttachRequested():
                return self._attach(event, now)
            case ev.NodeSilent():
                return self._lose(event.node_id, ExitReason.LOST, event.reason, now, proven=False)
            case ev.NodeSeen():
                return self._seen(event, now)
            case ev.LeaveRequested():
                why = event.reason
                outcome = self._lose(event.node_id, ExitReason.KILLED, why, now, proven=True)
                outcome.commands.append(Reply(event.link, event.call, m.Done()))
                return outcome
            case ev.LeaseExpired():
                return self._stopped(event.node_id)
            case ev.GenerationRaised():
                self._generation, self._round = event.generation, event.round
            case ev.WorldFormed():
                self._round, self._generation = event.world.round, event.world.generation
            case ev.MasterStarted():
                return self._start(now)
            case Tick():
                return self._launch_due(now)
            case ev.JobFinished():
                self._ended = event
                self._launches.clear()
        return NOTHING

    def deadline(self) -> float | None:
        return self._launches.deadline()

    def _start(self, now: float) -> Outcome:
        """Order what a managed job needs; order again what was ordered and never seen."""
        outcome = Outcome()
        if self._table.rules is not None:
            outcome.facts.append(ev.JobOpened(self._table.rules))
        elif self._spec.managed:
            self._open(outcome, rules_of(self._spec))
            for rank in range(self._spec.max_nodes + self._spec.spare_nodes):
                self._order(outcome, NodeRank(rank), "the job starts", now)
            return outcome
        for node in self._table.nodes.values():
            if node.phase is Phase.RUNNING and node.agent_key:
                outcome.facts.append(ev.NodeExpected(node.node_id))
            elif not node.proven:
                # Nobody knows how much of its lease is left: it gets a whole one.
                why = "it was lost before the master restarted"
                fact = ev.NodeLost(node.node_id, node.node_rank, ExitReason.LOST, why, proven=False)
                outcome.facts.append(fact)
            elif self._spec.managed and node.phase is Phase.INITIAL:
                outcome.commands.append(LaunchNode(node.node_id, node.node_rank))
        return outcome

    def _open(self, outcome: Outcome, rules: m.JobRules) -> None:
        commit(self, outcome, rec.RulesSet(rules))
        outcome.facts.append(ev.JobOpened(rules))

    def _order(
        self, outcome: Outcome, rank: NodeRank, reason: str, now: float, pause_s: float = 0.0
    ) -> None:
        node_id = NodeId(self._table.next_node_id)
        commit(self, outcome, rec.NodePlanned(node_id, rank))
        outcome.facts.append(ev.NodeOrdered(node_id, rank, reason, pause_s))
        self._launches.put(node_id, now + pause_s)
        outcome.add(self._launch_due(now))

    def _launch_due(self, now: float) -> Outcome:
        outcome = Outcome()
        for node_id in self._launches.take_due(now):
            node = self._table.nodes.get(node_id)
            if node is not None and node.phase is Phase.INITIAL:
                outcome.commands.append(LaunchNode(node_id, node.node_rank))
        return outcome

    def _attach(self, event: ev.AttachRequested, now: float) -> Outcome:
        attach, outcome = event.attach, Outcome()
        refusal = _refusal(attach, self._table, managed=self._spec.managed)
        if refusal is not None:
            outcome.commands.append(Reply(event.link, event.call, refusal))
            return outcome
        if self._table.rules is None:
            self._open(outcome, attach.rules)
        known = self._table.by_key.get(attach.agent_key)
        node = self._table.nodes[known] if known is not None else self._admit(outcome, attach, now)
        self._launches.ready(node.node_rank, now)
        outcome.commands.append(Bind(node.node_id, event.link))
        outcome.commands.append(Reply(event.link, event.call, self._welcome(node)))
        if self._ended is not None:
            outcome.commands.append(Push(node.node_id, _farewell(self._ended)))
            return outcome
        member = _member(node, attach)
        fact = ev.NodeReady(
            member, Round(attach.round), returned=known is not None, cold=attach.cold
        )
        outcome.facts.append(fact)
        return outcome

    def _admit(self, outcome: Outcome, attach: m.Attach, now: float) -> NodeState:
        """Give a new agent process its identity, and fence whoever had its rank."""
        if attach.node_id >= 0:
            node_id = NodeId(attach.node_id)
            rank = self._table.nodes[node_id].node_rank
        else:
            node_id = NodeId(self._table.next_node_id)
            rank = NodeRank(attach.node_rank) if attach.node_rank >= 0 else self._table.free_rank()
        older = self._table.live_by_rank.get(rank)
        if older is not None and (older != node_id or self._table.nodes[older].agent_key):
            why = f"a newer agent has taken the place of node rank {rank}"
            outcome.commands.append(Push(older, m.Fenced(why)))
            if older != node_id:
                outcome.add(
                    self._lose(older, ExitReason.KILLED, why, now, proven=False, relaunch=False)
                )
            else:
                outcome.commands.append(Drop(older))
                outcome.facts.append(ev.NodeLost(older, rank, ExitReason.KILLED, why, proven=False))
        commit(
            self,
            outcome,
            rec.NodeAdmitted(
                node_id=node_id,
                node_rank=rank,
                incarnation=self._table.next_incarnation,
                agent_key=attach.agent_key,
                nproc=attach.nproc,
                host=attach.host,
                topology=attach.topology,
            ),
        )
        return self._table.nodes[node_id]

    def _welcome(self, node: NodeState) -> m.Attached:
        return m.Attached(
            job=self._job,
            node_id=node.node_id,
            node_rank=node.node_rank,
            incarnation=node.incarnation,
            generation=self._generation,
            beat_s=self._spec.beat_s,
            lease_s=self._spec.lease_s,
            round=self._round,
        )

    def _seen(self, event: ev.NodeSeen, now: float) -> Outcome:
        node = self._table.nodes.get(event.node_id)
        if node is not None and not node.proven and event.phase.is_final:
            return Outcome(facts=[ev.LeaseExpired(node.node_id)])
        if node is None or node.phase.after(event.phase) is node.phase:
            return NOTHING
        if node.phase.is_final or not event.phase.is_final:
            outcome = Outcome()
            commit(self, outcome, rec.NodePhaseChanged(node.node_id, event.phase))
            return outcome
        reason = event.reason or ExitReason.UNKNOWN
        # A node that ended well before its job did has left by itself: nothing to replace.
        ended_well = event.phase is Phase.SUCCEEDED
        return self._lose(
            node.node_id,
            reason,
            event.message or f"the platform reports it as {event.phase}",
            now,
            proven=True,
            relaunch=not ended_well,
            phase=event.phase,
        )

    def _lose(
        self,
        node_id: NodeId,
        reason: ExitReason,
        message: str,
        now: float,
        *,
        proven: bool,
        relaunch: bool = True,
        phase: Phase = Phase.FAILED,
    ) -> Outcome:
        node = self._table.nodes.get(node_id)
        outcome = Outcome()
        if node is None or node.phase.is_final:
            return outcome
        has_run = node.phase is Phase.RUNNING
        commit(self, outcome, rec.NodePhaseChanged(node_id, phase, reason, message, proven))
        outcome.facts.append(ev.NodeLost(node_id, node.node_rank, reason, message, proven))
        if not proven:
            # It may only be slow: with its stream closed it comes back, and learns where it stands.
            outcome.commands.append(Drop(node_id))
        if self._spec.managed and self._ended is None:
            if not proven:
                outcome.commands.append(RemoveNode(node_id))
            if relaunch:
                # What the program itself did wrong counts, even if nobody saw it run.
                counts = has_run or reason in OF_THE_PROGRAM
                self._replace(outcome, node.node_rank, reason, now, counts=counts)
            self._check_minimum(outcome, node.node_rank, reason)
        return outcome

    def _stopped(self, node_id: NodeId) -> Outcome:
        """A lost node is now known to have stopped its workers."""
        node, outcome = self._table.nodes.get(node_id), Outcome()
        if node is not None and not node.proven:
            commit(self, outcome, rec.NodePhaseChanged(node_id, node.phase))
        return outcome

    def _replace(
        self, outcome: Outcome, rank: NodeRank, reason: ExitReason, now: float, *, counts: bool
    ) -> None:
        if counts:
            used = self._table.relaunches.get((rank, reason), 0)
            if used >= self._spec.node_relaunches[reason]:
                return
            commit(self, outcome, rec.RelaunchCounted(rank, reason))
        pause_s = self._launches.pause_s(rank, now)
        self._order(outcome, rank, f"node rank {rank} was lost ({reason})", now, pause_s)

    def _check_minimum(self, outcome: Outcome, rank: NodeRank, reason: ExitReason) -> None:
        left = len(self._table.live_by_rank)
        if left < self._spec.min_nodes:
            limit = self._spec.node_relaunches[reason]
            why = (
                f"{left} of at least {self._spec.min_nodes} nodes are left, and node rank {rank} "
                f"has used its {limit} relaunches for the reason {reason!s}"
            )
            outcome.facts.append(ev.WorldImpossible(why))

    def apply(self, record: Record) -> None:
        self._table.apply(record)

    def snapshot(self) -> Iterable[Record]:
        return self._table.snapshot()

    def view(self) -> list[dict[str, object]]:
        """The table as people see it."""
        return self._table.view()


def rules_of(spec: JobSpec) -> m.JobRules:
    """The part of a spec that every node of the job must agree on."""
    return m.JobRules(
        min_nodes=spec.min_nodes,
        max_nodes=spec.max_nodes,
        node_unit=spec.node_unit,
        last_call_s=spec.last_call_s,
        join_timeout_s=spec.join_timeout_s,
        max_restarts=spec.worker_restarts[ExitReason.ERROR],
    )


def _refusal(attach: m.Attach, table: NodeTable, *, managed: bool) -> m.Refused | None:
    """Why this agent cannot be let in; None if it can."""
    if table.rules is not None and attach.rules != table.rules:
        return m.Refused("usage", _differing(table.rules, attach.rules))
    if not 1 <= attach.nproc <= NPROC_MAX:
        bound = "needs at least 1 worker" if attach.nproc < 1 else f"has at most {NPROC_MAX}"
        return m.Refused("usage", f"a node {bound}, not {attach.nproc}")
    if table.rules is None and (impossible := _impossible(attach.rules)):
        return m.Refused("usage", impossible)
    return _fenced(attach, table, managed=managed)


def _differing(ours: m.JobRules, theirs: m.JobRules) -> str:
    differences = ", ".join(
        f"{name} is {getattr(ours, name)}, not {getattr(theirs, name)}"
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )
    return f"this node was started with other rules than its job: {differences}"


def _impossible(rules: m.JobRules) -> str:
    """Why no world could ever form by these rules; empty if one could."""
    try:
        JobSpec(
            min_nodes=rules.min_nodes, max_nodes=rules.max_nodes, node_unit=rules.node_unit
        ).validate()
    except UsageError as exc:
        return str(exc)
    largest = rules.max_nodes - rules.max_nodes % rules.node_unit
    if largest < rules.min_nodes:
        return (
            f"no multiple of the node unit {rules.node_unit} lies between min nodes "
            f"{rules.min_nodes} and max nodes {rules.max_nodes}: no world could ever form"
        )
    return ""


def _fenced(attach: m.Attach, table: NodeTable, *, managed: bool) -> m.Refused | None:
    """Whether the job has gone on without this agent; None if it may come in."""
    known = table.by_key.get(attach.agent_key)
    if known is None and attach.incarnation > 0:
        return m.Refused("fenced", "a newer agent has taken this node's place")
    if known is not None and table.nodes[known].phase.is_final:
        node = table.nodes[known]
        successor = table.live_by_rank.get(node.node_rank)
        if managed or (successor is not None and attach.node_rank >= 0):
            return m.Refused(
                "fenced", f"a newer agent has taken the place of node rank {node.node_rank}"
            )
        return m.Refused("stale", "the master had given this node up: it may join anew")
    if known is None and attach.node_id >= 0:
        ordered = table.nodes.get(NodeId(attach.node_id))
        if ordered is None or ordered.phase.is_final:
            return m.Refused("fenced", f"node id {attach.node_id} is no longer wanted")
    return None


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


def _farewell(end: ev.JobFinished) -> m.JobEnded:
    return m.JobEnded(end.ok, end.reason, end.cause, end.cause_node_rank)
