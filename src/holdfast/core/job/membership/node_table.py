# SPDX-License-Identifier: Apache-2.0
"""The durable part of `nodes`: the table itself, and how records change it."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.membership.desired import Desired
from holdfast.core.job.membership.failed_hosts import FailedHosts
from holdfast.core.job.membership.master_history import MasterHistory
from holdfast.core.job.membership.waiting_times import WaitingTimes
from holdfast.core.job.pace import Pace
from holdfast.core.kernel import Outcome, Record
from holdfast.model.ids import Incarnation, NodeId, NodeRank
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER
from holdfast.protocol import messages as m

_NEVER_MET = Incarnation(0)
NOBODY = NodeId(-1)


@dataclass(slots=True)
class NodeState:
    """What is known of one node id."""

    node_id: NodeId
    node_rank: NodeRank
    phase: Phase = Phase.INITIAL
    #: Since when it is in this phase; 0: not known.
    phase_at_s: float = 0.0
    incarnation: Incarnation = _NEVER_MET
    #: Empty until an agent process was admitted under this id.
    agent_key: str = ""
    nproc: int = 0
    host: str = ""
    topology: str = ""
    #: The name of the agent's process, if it said one.
    process: str = ""
    #: Whether an ended node is known to have stopped.
    proven: bool = True
    #: Why it ended, or what the platform says of it.
    message: str = ""
    #: The machine that the platform put it on.
    machine: str = ""
    #: Whether the platform was asked for it, and with what.
    is_ordered: bool = False
    relaunches: int = 0
    memory_mib: int = 0
    cpu_milli: int = 0
    group: int = -1
    replaces: NodeId = NOBODY
    #: Since when its rank has no agent, as long as it has none itself; -1: not known.
    down_since_s: float = -1.0
    #: On its host: the output of its workers.
    log_dir: str = ""
    #: Volatile: its last beat, and when it came; None as long as this master has had none.
    beat: m.Beat | None = None
    beat_at: float = 0.0
    pace: Pace = field(default_factory=Pace)

    def plan(self) -> rec.NodePlanned:
        """Its order."""
        return rec.NodePlanned(
            node_id=self.node_id,
            node_rank=self.node_rank,
            relaunches=self.relaunches,
            memory_mib=self.memory_mib,
            cpu_milli=self.cpu_milli,
            group=self.group,
            replaces=self.replaces,
            down_since_s=self.down_since_s,
        )

    def admission(self) -> rec.NodeAdmitted:
        """Who took this node id."""
        return rec.NodeAdmitted(
            node_id=self.node_id,
            node_rank=self.node_rank,
            incarnation=self.incarnation,
            agent_key=self.agent_key,
            nproc=self.nproc,
            host=self.host,
            topology=self.topology,
            process=self.process,
            log_dir=self.log_dir,
        )

    def heard(self, beat: m.Beat, now: float) -> None:
        """A beat came."""
        if self.beat is None or beat.round != self.beat.round:
            self.pace = Pace()
        if beat.steps > 0:
            self.pace.heard(beat.steps, now - beat.last_step_ago_s)
        self.beat, self.beat_at = beat, now

    def view(self, now: float) -> dict[str, object]:
        """As people see it."""
        beat = self.beat if self.phase is Phase.RUNNING else None
        per_s = None if beat is None else self.pace.per_s(now)
        return {
            "node_id": self.node_id,
            "node_rank": self.node_rank,
            "role": WORKER,
            "incarnation": self.incarnation,
            "phase": str(self.phase),
            "host": self.host,
            "nproc": self.nproc,
            "machine": self.machine,
            "relaunches": self.relaunches,
            "memory_mib": self.memory_mib,
            "message": self.message,
            "warm": None if beat is None else beat.warm,
            "cpu": None if beat is None else round(beat.cpu, 2),
            "memory_bytes": None if beat is None else beat.memory,
            "steps_per_s": None if per_s is None else round(per_s, 4),
            "beat_age_s": None if beat is None else round(now - self.beat_at, 3),
            "log_dir": self.log_dir,
        }


class NodeTable:
    """Every node that matters, by id, by rank and by agent key."""

    def __init__(self, first_node_id: int = 0) -> None:
        self.rules: m.JobRules | None = None
        self.nodes: dict[NodeId, NodeState] = {}
        self.by_key: dict[str, NodeId] = {}
        self.live_by_rank: dict[NodeRank, NodeId] = {}
        self.ended_by_rank: dict[NodeRank, NodeId] = {}
        self.relaunches: dict[tuple[NodeRank, ExitReason], int] = {}
        self.next_node_id = first_node_id
        self.next_incarnation = 1
        #: No rank below this one is free.
        self.rank_hint = 0
        #: Live nodes that are to go, in that order.
        self.leaving: dict[NodeId, None] = {}
        #: Live nodes that the platform has no place for yet, and since when: longest first.
        self.pending: dict[NodeId, float] = {}
        #: Live nodes that were ordered and have no agent yet: since when their ranks have none, and
        #: since when those of them that the platform runs do.
        self.down = WaitingTimes()
        self.mute = WaitingTimes()
        #: By node: the one that was ordered to take its place.
        self._successors: dict[NodeId, NodeId] = {}
        #: Where nodes of this job are or were: how many that are still in the table.
        self.machines: Counter[str] = Counter()
        self.wanted = Desired()
        self.hosts = FailedHosts()
        self.masters = MasterHistory()

    def commit(self, outcome: Outcome, record: Record) -> None:
        """Make a record true and durable."""
        self.apply(record)
        outcome.records.append(record)

    def end(
        self,
        outcome: Outcome,
        node: NodeState,
        phase: Phase,
        reason: ExitReason,
        message: str,
        *,
        proven: bool,
        at_s: float = 0.0,
    ) -> None:
        """Write down that a node is no longer part of the job, and say so."""
        record = rec.NodePhaseChanged(node.node_id, phase, reason, message, proven, at_s)
        self.commit(outcome, record)
        lost = ev.NodeLost(node.node_id, node.node_rank, reason, message, proven)
        outcome.facts.append(lost)

    @property
    def staying(self) -> int:
        """How many ranks have a node that is not about to go."""
        nodes = (self.nodes[node_id] for node_id in self.leaving)
        going = sum(self.live_by_rank[node.node_rank] == node.node_id for node in nodes)
        return len(self.live_by_rank) - going

    def vacant(self) -> Iterator[NodeState]:
        """Of every rank that is wanted and has no node: the last that it had."""
        for rank in sorted(self.wanted.ranks - self.live_by_rank.keys()):
            if rank in self.ended_by_rank:
                yield self.nodes[self.ended_by_rank[rank]]

    def free_rank(self) -> NodeRank:
        """The lowest rank that no live node has."""
        while NodeRank(self.rank_hint) in self.live_by_rank:
            self.rank_hint += 1
        return NodeRank(self.rank_hint)

    def apply(self, record: Record) -> None:
        match record:
            case rec.RulesSet():
                self.rules = record.rules
            case rec.NodePlanned():
                self._apply_planned(record)
            case rec.NodeAdmitted():
                self._apply_admitted(record)
            case rec.NodePhaseChanged():
                self._apply_phase(record)
            case rec.RelaunchCounted():
                key = (NodeRank(record.node_rank), ExitReason(record.reason))
                self.relaunches[key] = self.relaunches.get(key, 0) + record.count
            case rec.CountersSet():
                self.next_node_id = record.next_node_id
                self.next_incarnation = record.next_incarnation
            case rec.NodePlaced():
                self._apply_placed(record)
            case rec.NodeLeaves():
                self.leaving[NodeId(record.node_id)] = None
            case rec.HostBlamed():
                self.hosts.apply(record)
            case rec.LifeBegan():
                self.masters.apply(record)
            case _:
                self.wanted.apply(record)

    def _apply_planned(self, record: rec.NodePlanned) -> None:
        node = NodeState(
            NodeId(record.node_id),
            NodeRank(record.node_rank),
            is_ordered=True,
            relaunches=record.relaunches,
            memory_mib=record.memory_mib,
            cpu_milli=record.cpu_milli,
            group=record.group,
            replaces=NodeId(record.replaces),
            down_since_s=record.down_since_s,
        )
        self.nodes[node.node_id] = node
        self.down.begin(node.node_id, node.down_since_s)
        if self.is_live(node.replaces):
            self._successors[node.replaces] = node.node_id
        else:
            self.live_by_rank[node.node_rank] = node.node_id
        self.wanted.ranks.add(node.node_rank)
        self.next_node_id = max(self.next_node_id, record.node_id + 1)

    def _apply_placed(self, record: rec.NodePlaced) -> None:
        node = self.nodes[NodeId(record.node_id)]
        self._forget_machine(node)
        node.machine = record.machine
        self.machines[node.machine] += 1

    def _forget_machine(self, node: NodeState) -> None:
        self.machines[node.machine] -= 1
        if self.machines[node.machine] <= 0:
            del self.machines[node.machine]

    def is_live(self, node_id: NodeId) -> bool:
        """Whether the node is part of the job."""
        return node_id in self.nodes and not self.nodes[node_id].phase.is_final

    def successor(self, node: NodeState) -> NodeState | None:
        """The node that was ordered to take this one's place, if it lives."""
        other = self._successors.get(node.node_id, NOBODY)
        return self.nodes[other] if self.is_live(other) else None

    def _apply_admitted(self, record: rec.NodeAdmitted) -> None:
        node_id = NodeId(record.node_id)
        node = self.nodes.setdefault(node_id, NodeState(node_id, NodeRank(record.node_rank)))
        self.by_key.pop(node.agent_key, None)
        node.phase = Phase.RUNNING
        self._waits_no_more(node_id)
        node.node_rank = NodeRank(record.node_rank)
        node.incarnation = Incarnation(record.incarnation)
        node.agent_key = record.agent_key
        node.nproc, node.host, node.topology = record.nproc, record.host, record.topology
        node.process, node.log_dir = record.process, record.log_dir
        node.beat = None
        self.by_key[record.agent_key] = node_id
        self.live_by_rank[node.node_rank] = node_id
        self.next_node_id = max(self.next_node_id, record.node_id + 1)
        self.next_incarnation = max(self.next_incarnation, record.incarnation + 1)

    def _apply_phase(self, record: rec.NodePhaseChanged) -> None:
        node = self.nodes[NodeId(record.node_id)]
        was_final = node.phase.is_final
        if not was_final and node.phase != record.phase:
            node.phase_at_s = record.at_s
        node.phase, node.proven = Phase(record.phase), record.proven
        self.pending.pop(node.node_id, None)
        if node.phase is Phase.PENDING:
            self.pending[node.node_id] = record.at_s
        if node.phase is Phase.RUNNING and not node.agent_key and record.at_s:
            self.mute.begin(node.node_id, record.at_s)
        node.message = record.message or node.message
        if not node.phase.is_final:
            return
        self._waits_no_more(node.node_id)
        self.leaving.pop(node.node_id, None)
        self._successors.pop(node.replaces, None)
        if not was_final and self.live_by_rank.get(node.node_rank) == node.node_id:
            self._vacate(node)
        # Only the key of an ended node matters: an agent that still uses it is refused. An older
        # one is recognised by the incarnation it brings, so one ended node per rank is enough;
        # unless an older one may still run.
        known = self.ended_by_rank.get(node.node_rank, node.node_id)
        older, newest = sorted((known, node.node_id))
        self.ended_by_rank[node.node_rank] = newest
        if older != newest and self.nodes[older].proven:
            self._forget_machine(self.nodes[older])
            self.by_key.pop(self.nodes.pop(older).agent_key, None)

    def _vacate(self, node: NodeState) -> None:
        """A rank loses its node; if two were to change places, the other has it now."""
        del self.live_by_rank[node.node_rank]
        self.rank_hint = min(self.rank_hint, node.node_rank)
        other = self.nodes[node.replaces] if self.is_live(node.replaces) else self.successor(node)
        if other is not None:
            self.live_by_rank[node.node_rank] = other.node_id
            if not other.agent_key and node.agent_key and node.phase_at_s:
                other.down_since_s = node.phase_at_s
                self.down.begin(other.node_id, other.down_since_s)

    def _waits_no_more(self, node_id: NodeId) -> None:
        """Its agent has come, or it has ended."""
        self.pending.pop(node_id, None)
        self.down.end(node_id)
        self.mute.end(node_id)

    def validate(self) -> None:
        """Every index agrees with the nodes, and one rank has one node, or two that change."""
        for node_id, node in self.nodes.items():
            assert node.node_id == node_id < self.next_node_id, node
            assert node.incarnation < self.next_incarnation, node
            if not node.phase.is_final:
                holder = self.nodes[self.live_by_rank[node.node_rank]]
                is_known = holder is node or holder.node_id == node.replaces
                assert is_known or node.node_id == holder.replaces, (node, holder)
        for rank, node_id in self.live_by_rank.items():
            assert self.is_live(node_id), (rank, node_id)
            assert self.nodes[node_id].node_rank == rank, (rank, node_id)
        for rank, node_id in self.ended_by_rank.items():
            assert self.nodes[node_id].phase.is_final, (rank, node_id)
        for key, node_id in self.by_key.items():
            assert self.nodes[node_id].agent_key == key, (key, node_id)
        assert all(map(self.is_live, self.leaving)), self.leaving
        assert all(self.nodes[one].phase is Phase.PENDING for one in self.pending), self.pending
        machines = Counter(node.machine for node in self.nodes.values() if node.machine)
        assert machines == self.machines, (machines, self.machines)

    def snapshot(self) -> Iterable[Record]:
        if self.rules is not None:
            yield rec.RulesSet(self.rules)
        # Ended nodes first: a live one must be the last to claim its rank.
        planned = []
        for node in sorted(self.nodes.values(), key=lambda n: not n.phase.is_final):
            if node.is_ordered:
                planned.append(node.node_rank)
                yield node.plan()
            if node.agent_key:
                yield node.admission()
            if node.machine:
                yield rec.NodePlaced(node.node_id, node.machine)
            begun = Phase.RUNNING if node.agent_key else Phase.INITIAL
            if node.phase not in (begun, Phase.PENDING):
                yield rec.NodePhaseChanged(
                    node.node_id,
                    node.phase,
                    message=node.message,
                    proven=node.proven,
                    at_s=node.phase_at_s,
                )
        for node_id, since in self.pending.items():
            message = self.nodes[node_id].message
            yield rec.NodePhaseChanged(node_id, Phase.PENDING, message=message, at_s=since)
        for node_id in self.leaving:
            yield rec.NodeLeaves(node_id)
        for (rank, reason), count in self.relaunches.items():
            yield rec.RelaunchCounted(rank, reason, count)
        yield rec.CountersSet(self.next_node_id, self.next_incarnation)
        yield from self.wanted.snapshot(planned)
        yield from self.hosts.snapshot()
        yield from self.masters.snapshot()

    def view(self, now: float) -> list[dict[str, object]]:
        """The table as people see it, live nodes first."""
        rows = sorted(self.nodes.values(), key=lambda n: (n.phase.is_final, n.node_rank))
        return [node.view(now) for node in rows]
