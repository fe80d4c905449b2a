# SPDX-License-Identifier: Apache-2.0
"""Who is part of the job: admission, incarnations, phases, relaunches and their budgets.

Two agents may claim one node rank: a relaunched pod and its predecessor, or a node started twice.
The newer incarnation wins; the older is told so and stops (it is *fenced*).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Bind, Drop, LaunchNode, Push, RemoveNode, Reply
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, commit
from holdfast.model.errors import UsageError
from holdfast.model.ids import Incarnation, NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.world import Member
from holdfast.protocol import messages as m


@dataclass(slots=True)
class _Node:
    node_id: NodeId
    node_rank: NodeRank
    phase: Phase = Phase.INITIAL
    incarnation: Incarnation = Incarnation(0)
    #: Empty until an agent process was admitted under this id.
    agent_key: str = ""
    nproc: int = 0
    host: str = ""
    topology: str = ""
    #: Whether an ended node is known to have stopped.
    proven: bool = True


class Nodes:
    """The node table."""

    def __init__(self, spec: JobSpec, job: str) -> None:
        self._spec = spec
        self._job = job
        self._rules: m.JobRules | None = None
        self._nodes: dict[NodeId, _Node] = {}
        self._by_key: dict[str, NodeId] = {}
        self._live_by_rank: dict[NodeRank, NodeId] = {}
        self._ended_by_rank: dict[NodeRank, NodeId] = {}
        self._relaunches: dict[tuple[NodeRank, ExitReason], int] = {}
        self._next_node_id = 0
        self._next_incarnation = 1
        #: No rank below this one is free.
        self._rank_hint = 0
        self._ended: ev.JobFinished | None = None
        #: Volatile: what the agents are told when they attach.
        self._generation = 0
        self._round = Round(0)

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Outcome:
        match event:
            case ev.AttachRequested():
                return self._attach(event)
            case ev.NodeSilent():
                return self._lose(event.node_id, ExitReason.LOST, event.reason, proven=False)
            case ev.NodeSeen():
                return self._seen(event)
            case ev.LeaveRequested():
                outcome = self._lose(event.node_id, ExitReason.KILLED, event.reason, proven=True)
                outcome.commands.append(Reply(event.link, event.call, m.Done()))
                return outcome
            case ev.LeaseExpired():
                return self._stopped(event.node_id)
            case ev.GenerationRaised():
                self._generation, self._round = event.generation, event.round
            case ev.WorldFormed():
                self._round, self._generation = event.world.round, event.world.generation
            case ev.MasterStarted():
                return self._start()
            case ev.JobFinished():
                self._ended = event
        return NOTHING

    def deadline(self) -> float | None:
        return None

    def _start(self) -> Outcome:
        """Order what a managed job needs; order again what was ordered and never seen."""
        outcome = Outcome()
        if self._rules is not None:
            outcome.facts.append(ev.JobOpened(self._rules))
        elif self._spec.managed:
            self._open(outcome, rules_of(self._spec))
            for rank in range(self._spec.max_nodes + self._spec.spare_nodes):
                self._order(outcome, NodeRank(rank), "the job starts")
            return outcome
        for node in self._nodes.values():
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

    def _order(self, outcome: Outcome, rank: NodeRank, reason: str) -> None:
        node_id = NodeId(self._next_node_id)
        commit(self, outcome, rec.NodePlanned(node_id, rank))
        outcome.commands.append(LaunchNode(node_id, rank))
        outcome.facts.append(ev.NodeOrdered(node_id, rank, reason))

    def _attach(self, event: ev.AttachRequested) -> Outcome:
        attach, outcome = event.attach, Outcome()
        refusal = self._refusal(attach)
        if refusal is not None:
            outcome.commands.append(Reply(event.link, event.call, refusal))
            return outcome
        if self._rules is None:
            self._open(outcome, attach.rules)
        known = self._by_key.get(attach.agent_key)
        node = self._nodes[known] if known is not None else self._admit(outcome, attach)
        outcome.commands.append(Bind(node.node_id, event.link))
        outcome.commands.append(Reply(event.link, event.call, self._welcome(node)))
        if self._ended is not None:
            outcome.commands.append(Push(node.node_id, _farewell(self._ended)))
            return outcome
        member = Member(
            node_id=node.node_id,
            incarnation=node.incarnation,
            node_rank=node.node_rank,
            nproc=attach.nproc,
            host=attach.host,
            store_port=attach.store_port,
            hosted_port=attach.hosted_port,
            topology=attach.topology,
        )
        fact = ev.NodeReady(member, Round(attach.round), returned=known is not None)
        outcome.facts.append(fact)
        return outcome

    def _refusal(self, attach: m.Attach) -> m.Refused | None:
        """Why this agent cannot be let in; None if it can."""
        if self._rules is not None and attach.rules != self._rules:
            return m.Refused("usage", _differing(self._rules, attach.rules))
        impossible = _impossible(attach)
        if impossible:
            return m.Refused("usage", impossible)
        known = self._by_key.get(attach.agent_key)
        if known is None and attach.incarnation > 0:
            return m.Refused("fenced", "a newer agent has taken this node's place")
        if known is not None and self._nodes[known].phase.is_final:
            node = self._nodes[known]
            successor = self._live_by_rank.get(node.node_rank)
            if self._spec.managed or (successor is not None and attach.node_rank >= 0):
                return m.Refused(
                    "fenced", f"a newer agent has taken the place of node rank {node.node_rank}"
                )
            return m.Refused("stale", "the master had given this node up: it may join anew")
        if known is None and attach.node_id >= 0:
            ordered = self._nodes.get(NodeId(attach.node_id))
            if ordered is None or ordered.phase.is_final:
                return m.Refused("fenced", f"node id {attach.node_id} is no longer wanted")
        return None

    def _admit(self, outcome: Outcome, attach: m.Attach) -> _Node:
        """Give a new agent process its identity, and fence whoever had its rank."""
        if attach.node_id >= 0:
            node_id = NodeId(attach.node_id)
            rank = self._nodes[node_id].node_rank
        else:
            node_id = NodeId(self._next_node_id)
            rank = NodeRank(attach.node_rank) if attach.node_rank >= 0 else self._free_rank()
        older = self._live_by_rank.get(rank)
        if older is not None and (older != node_id or self._nodes[older].agent_key):
            why = f"a newer agent has taken the place of node rank {rank}"
            outcome.commands.append(Push(older, m.Fenced(why)))
            if older != node_id:
                outcome.add(self._lose(older, ExitReason.KILLED, why, proven=False, relaunch=False))
            else:
                outcome.commands.append(Drop(older))
                outcome.facts.append(ev.NodeLost(older, rank, ExitReason.KILLED, why, proven=False))
        commit(
            self,
            outcome,
            rec.NodeAdmitted(
                node_id=node_id,
                node_rank=rank,
                incarnation=self._next_incarnation,
                agent_key=attach.agent_key,
                nproc=attach.nproc,
                host=attach.host,
                topology=attach.topology,
            ),
        )
        return self._nodes[node_id]

    def _free_rank(self) -> NodeRank:
        while NodeRank(self._rank_hint) in self._live_by_rank:
            self._rank_hint += 1
        return NodeRank(self._rank_hint)

    def _welcome(self, node: _Node) -> m.Attached:
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

    def _seen(self, event: ev.NodeSeen) -> Outcome:
        node = self._nodes.get(event.node_id)
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
            proven=True,
            relaunch=not ended_well,
            phase=event.phase,
        )

    def _lose(
        self,
        node_id: NodeId,
        reason: ExitReason,
        message: str,
        *,
        proven: bool,
        relaunch: bool = True,
        phase: Phase = Phase.FAILED,
    ) -> Outcome:
        node = self._nodes.get(node_id)
        outcome = Outcome()
        if node is None or node.phase.is_final:
            return outcome
        commit(self, outcome, rec.NodePhaseChanged(node_id, phase, reason, message, proven))
        outcome.facts.append(ev.NodeLost(node_id, node.node_rank, reason, message, proven))
        if not proven:
            # It may only be slow: with its stream closed it comes back, and learns where it stands.
            outcome.commands.append(Drop(node_id))
        if self._spec.managed and self._ended is None:
            if not proven:
                outcome.commands.append(RemoveNode(node_id))
            if relaunch:
                self._replace(outcome, node.node_rank, reason)
            self._check_minimum(outcome, node.node_rank, reason)
        return outcome

    def _stopped(self, node_id: NodeId) -> Outcome:
        """A lost node is now known to have stopped its workers."""
        node, outcome = self._nodes.get(node_id), Outcome()
        if node is not None and not node.proven:
            commit(self, outcome, rec.NodePhaseChanged(node_id, node.phase))
        return outcome

    def _replace(self, outcome: Outcome, rank: NodeRank, reason: ExitReason) -> None:
        used = self._relaunches.get((rank, reason), 0)
        if used >= self._spec.node_relaunches[reason]:
            return
        commit(self, outcome, rec.RelaunchCounted(rank, reason))
        self._order(outcome, rank, f"node rank {rank} was lost ({reason})")

    def _check_minimum(self, outcome: Outcome, rank: NodeRank, reason: ExitReason) -> None:
        left = len(self._live_by_rank)
        if left < self._spec.min_nodes:
            limit = self._spec.node_relaunches[reason]
            why = (
                f"{left} of at least {self._spec.min_nodes} nodes are left, and node rank {rank} "
                f"has used its {limit} relaunches for the reason {reason!s}"
            )
            outcome.facts.append(ev.WorldImpossible(why))

    # ---- durable state --------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        match record:
            case rec.RulesSet():
                self._rules = record.rules
            case rec.NodePlanned():
                node = _Node(NodeId(record.node_id), NodeRank(record.node_rank))
                self._nodes[node.node_id] = node
                self._live_by_rank[node.node_rank] = node.node_id
                self._next_node_id = max(self._next_node_id, record.node_id + 1)
            case rec.NodeAdmitted():
                self._apply_admitted(record)
            case rec.NodePhaseChanged():
                self._apply_phase(record)
            case rec.RelaunchCounted():
                key = (NodeRank(record.node_rank), ExitReason(record.reason))
                self._relaunches[key] = self._relaunches.get(key, 0) + record.count
            case rec.CountersSet():
                self._next_node_id = record.next_node_id
                self._next_incarnation = record.next_incarnation
            case _:
                raise TypeError(f"{record!r} is not a record of the nodes")

    def _apply_admitted(self, record: rec.NodeAdmitted) -> None:
        node_id = NodeId(record.node_id)
        node = self._nodes.setdefault(node_id, _Node(node_id, NodeRank(record.node_rank)))
        self._by_key.pop(node.agent_key, None)
        node.phase = Phase.RUNNING
        node.node_rank = NodeRank(record.node_rank)
        node.incarnation = Incarnation(record.incarnation)
        node.agent_key = record.agent_key
        node.nproc, node.host, node.topology = record.nproc, record.host, record.topology
        self._by_key[record.agent_key] = node_id
        self._live_by_rank[node.node_rank] = node_id
        self._next_node_id = max(self._next_node_id, record.node_id + 1)
        self._next_incarnation = max(self._next_incarnation, record.incarnation + 1)

    def _apply_phase(self, record: rec.NodePhaseChanged) -> None:
        node = self._nodes[NodeId(record.node_id)]
        was_final = node.phase.is_final
        node.phase, node.proven = Phase(record.phase), record.proven
        if not node.phase.is_final:
            return
        if not was_final and self._live_by_rank.get(node.node_rank) == node.node_id:
            del self._live_by_rank[node.node_rank]
            self._rank_hint = min(self._rank_hint, node.node_rank)
        # Of an ended node only its key matters: whoever still uses it must be turned away. An older
        # one is recognised by the incarnation it brings, so one ended node per rank is enough.
        older = self._ended_by_rank.get(node.node_rank)
        if older is not None and older != node.node_id:
            self._by_key.pop(self._nodes.pop(older).agent_key, None)
        self._ended_by_rank[node.node_rank] = node.node_id

    def snapshot(self) -> Iterable[Record]:
        if self._rules is not None:
            yield rec.RulesSet(self._rules)
        # Ended nodes first: a live one must be the last to claim its rank.
        for node in sorted(self._nodes.values(), key=lambda n: not n.phase.is_final):
            if not node.agent_key:
                yield rec.NodePlanned(node.node_id, node.node_rank)
            else:
                yield rec.NodeAdmitted(
                    node_id=node.node_id,
                    node_rank=node.node_rank,
                    incarnation=node.incarnation,
                    agent_key=node.agent_key,
                    nproc=node.nproc,
                    host=node.host,
                    topology=node.topology,
                )
            if node.phase is not (Phase.RUNNING if node.agent_key else Phase.INITIAL):
                yield rec.NodePhaseChanged(node.node_id, node.phase, proven=node.proven)
        for (rank, reason), count in self._relaunches.items():
            yield rec.RelaunchCounted(rank, reason, count)
        yield rec.CountersSet(self._next_node_id, self._next_incarnation)

    # ---- views ----------------------------------------------------------------------------------

    def view(self) -> list[dict[str, object]]:
        """The table as people see it, live nodes first."""
        rows = sorted(self._nodes.values(), key=lambda n: (n.phase.is_final, n.node_rank))
        return [
            {
                "node_id": node.node_id,
                "node_rank": node.node_rank,
                "incarnation": node.incarnation,
                "phase": str(node.phase),
                "host": node.host,
                "nproc": node.nproc,
            }
            for node in rows
        ]


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


def _differing(ours: m.JobRules, theirs: m.JobRules) -> str:
    differences = ", ".join(
        f"{name} is {getattr(ours, name)}, not {getattr(theirs, name)}"
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    )
    return f"this node was started with other rules than its job: {differences}"


def _impossible(attach: m.Attach) -> str:
    """Why no world could ever form by these rules; empty if one could."""
    rules = attach.rules
    if attach.nproc < 1:
        return f"a node needs at least 1 worker, not {attach.nproc}"
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


def _farewell(end: ev.JobFinished) -> m.JobEnded:
    return m.JobEnded(end.ok, end.reason, end.cause, end.cause_node_rank)
