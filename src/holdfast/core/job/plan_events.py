# SPDX-License-Identifier: Apache-2.0
"""What people ask of a running job, and what follows for its nodes. A part of events.py."""

from dataclasses import dataclass

from holdfast.core.kernel import Event
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import ExitReason
from holdfast.model.order import Plan
from holdfast.protocol import messages as m


@dataclass(frozen=True, slots=True)
class PlanAsked(Event):
    """Somebody asks for a change of the running job; a plan may be told more than once."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanPartAgreed(Event):
    """A plan is carried out, of which this is the part for another role."""

    part: Plan


@dataclass(frozen=True, slots=True)
class RulesChanged(Event):
    """A plan changed the size of the job."""

    rules: m.JobRules


@dataclass(frozen=True, slots=True)
class PlanSettled(Event):
    """What became of a plan: it is done, or why it cannot be."""

    plan_id: str
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class JobSuspended(Event):
    """Every node goes, and the job waits."""


@dataclass(frozen=True, slots=True)
class JobResumed(Event):
    """The nodes are ordered again."""

    stopped: str = ""
    """How the job was stopped from outside before; empty: it was suspended."""


@dataclass(frozen=True, slots=True)
class JoinClockSet(Event):
    """Whether the time-out for a world counts: not while the job is suspended, nor while its
    platform has no place for a node."""

    runs: bool


@dataclass(frozen=True, slots=True)
class NodesLeaving(Event):
    """These nodes shall go: the next world forms without them."""

    node_ids: tuple[NodeId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryRaised(Event):
    """A node that was out of memory is launched again with more."""

    node_rank: NodeRank
    before_mib: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class HostAvoided(Event):
    """No node is put on this machine any more if there are others."""

    host: str
    reason: ExitReason


@dataclass(frozen=True, slots=True)
class GroupMoved(Event):
    """A whole group of nodes is launched again under another number."""

    group: int
    successor: int
    nodes: int


@dataclass(frozen=True, slots=True)
class RankGivenUp(Event):
    """A rank gets no node any more, unless somebody asks for another size."""

    role: str
    node_rank: NodeRank
    why: str
