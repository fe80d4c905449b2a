# SPDX-License-Identifier: Apache-2.0
"""The durable part of `nodes`: the table itself, and how records change it."""

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.job import records as rec
from holdfast.core.kernel import Record
from holdfast.model.ids import Incarnation, NodeId, NodeRank
from holdfast.model.node import ExitReason, Phase
from holdfast.protocol import messages as m

_NEVER_MET = Incarnation(0)


@dataclass(slots=True)
class NodeState:
    """What is known of one node id."""

    node_id: NodeId
    node_rank: NodeRank
    phase: Phase = Phase.INITIAL
    incarnation: Incarnation = _NEVER_MET
    #: Empty until an agent process was admitted under this id.
    agent_key: str = ""
    nproc: int = 0
    host: str = ""
    topology: str = ""
    #: Whether an ended node is known to have stopped.
    proven: bool = True


class NodeTable:
    """Every node that matters, by id, by rank and by agent key."""

    def __init__(self) -> None:
        self.rules: m.JobRules | None = None
        self.nodes: dict[NodeId, NodeState] = {}
        self.by_key: dict[str, NodeId] = {}
        self.live_by_rank: dict[NodeRank, NodeId] = {}
        self.ended_by_rank: dict[NodeRank, NodeId] = {}
        self.relaunches: dict[tuple[NodeRank, ExitReason], int] = {}
        self.next_node_id = 0
        self.next_incarnation = 1
        #: No rank below this one is free.
        self.rank_hint = 0

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
                node = NodeState(NodeId(record.node_id), NodeRank(record.node_rank))
                self.nodes[node.node_id] = node
                self.live_by_rank[node.node_rank] = node.node_id
                self.next_node_id = max(self.next_node_id, record.node_id + 1)
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
            case _:
                raise TypeError(f"{record!r} is not a record of the nodes")

    def _apply_admitted(self, record: rec.NodeAdmitted) -> None:
        node_id = NodeId(record.node_id)
        node = self.nodes.setdefault(node_id, NodeState(node_id, NodeRank(record.node_rank)))
        self.by_key.pop(node.agent_key, None)
        node.phase = Phase.RUNNING
        node.node_rank = NodeRank(record.node_rank)
        node.incarnation = Incarnation(record.incarnation)
        node.agent_key = record.agent_key
        node.nproc, node.host, node.topology = record.nproc, record.host, record.topology
        self.by_key[record.agent_key] = node_id
        self.live_by_rank[node.node_rank] = node_id
        self.next_node_id = max(self.next_node_id, record.node_id + 1)
        self.next_incarnation = max(self.next_incarnation, record.incarnation + 1)

    def _apply_phase(self, record: rec.NodePhaseChanged) -> None:
        node = self.nodes[NodeId(record.node_id)]
        was_final = node.phase.is_final
        node.phase, node.proven = Phase(record.phase), record.proven
        if not node.phase.is_final:
            return
        if not was_final and self.live_by_rank.get(node.node_rank) == node.node_id:
            del self.live_by_rank[node.node_rank]
            self.rank_hint = min(self.rank_hint, node.node_rank)
        # Of an ended node only its key matters: whoever still uses it must be turned away. An older
        # one is recognised by the incarnation it brings, so one ended node per rank is enough;
        # unless an older one may still run.
        known = self.ended_by_rank.get(node.node_rank, node.node_id)
        older, newest = sorted((known, node.node_id))
        self.ended_by_rank[node.node_rank] = newest
        if older != newest and self.nodes[older].proven:
            self.by_key.pop(self.nodes.pop(older).agent_key, None)

    def snapshot(self) -> Iterable[Record]:
        if self.rules is not None:
            yield rec.RulesSet(self.rules)
        # Ended nodes first: a live one must be the last to claim its rank.
        for node in sorted(self.nodes.values(), key=lambda n: not n.phase.is_final):
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
        for (rank, reason), count in self.relaunches.items():
            yield rec.RelaunchCounted(rank, reason, count)
        yield rec.CountersSet(self.next_node_id, self.next_incarnation)

    def view(self) -> list[dict[str, object]]:
        """The table as people see it, live nodes first."""
        rows = sorted(self.nodes.values(), key=lambda n: (n.phase.is_final, n.node_rank))
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
