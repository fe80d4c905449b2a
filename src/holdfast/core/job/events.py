# SPDX-License-Identifier: Apache-2.0
"""Everything the master's machines can be told: inputs from the driver, and facts of their own."""

from dataclasses import dataclass

from holdfast.core.kernel import Event
from holdfast.model.checkpoint import Version
from holdfast.model.dataset import Dataset, Piece, Position
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Plan
from holdfast.model.world import Member, World
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointCall
from holdfast.protocol.data import DataCall, DataMarked

# ---- inputs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked(Event):
    """Base of what a node asks or reports: on which link, and under which number there."""

    node_id: NodeId
    link: int
    call: int


@dataclass(frozen=True, slots=True)
class Relayed(Asked):
    """Base of what a worker asks, relayed by its agent, with the key of the request."""

    session: str
    seq: int


@dataclass(frozen=True, slots=True)
class MasterStarted(Event):
    """A master has replayed the journal and begins to serve."""

    nonce: str = ""
    """Random, drawn for this start alone: names that the master makes from it are unique."""
    position: int = 0
    """How many entries the journal had."""
    clock: str = ""
    zero_s: float = 0.0
    """The name of its monotonic clock, and what that showed at job time 0."""


@dataclass(frozen=True, slots=True)
class AttachRequested(Event):
    """An agent's first message on a new link."""

    link: int
    call: int
    attach: m.Attach


@dataclass(frozen=True, slots=True)
class NodeAbsent(Event):
    """The stream of a node broke. It still counts as alive, and may come back."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class LeaveRequested(Asked):
    reason: str


@dataclass(frozen=True, slots=True)
class BeatReceived(Event):
    node_id: NodeId
    beat: m.Beat


@dataclass(frozen=True, slots=True)
class StartReported(Asked):
    """A node's workers of a round run."""

    report: m.WorkersStarted


@dataclass(frozen=True, slots=True)
class StoreOffered(Asked):
    """A node has a store server ready for the next round."""

    port: int


@dataclass(frozen=True, slots=True)
class NodeWarmed(Asked):
    """A node that was cold has prepared its workers."""


@dataclass(frozen=True, slots=True)
class FailureReported(Asked):
    report: m.WorkersFailed


@dataclass(frozen=True, slots=True)
class DoneReported(Asked):
    report: m.WorkersDone


@dataclass(frozen=True, slots=True)
class KvRequested(Relayed):
    """A worker's request, relayed by its agent."""

    body: m.KvCall


@dataclass(frozen=True, slots=True)
class CheckpointRequested(Asked):
    """What an agent asks the checkpoint ledger, or tells it."""

    body: CheckpointCall


@dataclass(frozen=True, slots=True)
class DataRequested(Relayed):
    """What a worker asks the data ledger, relayed by its agent."""

    body: DataCall


@dataclass(frozen=True, slots=True)
class DataMarks(Asked):
    """How far the workers of a node had come in their data when they saved a version."""

    body: DataMarked


@dataclass(frozen=True, slots=True)
class RequestDropped(Event):
    """The worker that asked this has gone, and takes no answer any more."""

    session: str
    seq: int


@dataclass(frozen=True, slots=True)
class NodeSeen(Event):
    """What the platform says of a node."""

    node_id: NodeId
    phase: Phase
    reason: ExitReason | None
    message: str
    host: str = ""
    """The machine that it was put on, as far as the platform says."""


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """A client with the token asked for the end of the job, or its master was told to stop."""

    link: int
    call: int
    reason: str
    stopped: int = 0
    """The signal that stopped the master: the job is not over, and can go on later."""


# ---- facts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobOpened(Event):
    """The first agent brought the rules of the job."""

    rules: m.JobRules


@dataclass(frozen=True, slots=True)
class GenerationRaised(Event):
    """A new master serves; `round` is the world that it found."""

    generation: int
    round: Round


@dataclass(frozen=True, slots=True)
class NodeOrdered(Event):
    """A node is ordered from the platform, after a pause if its rank keeps failing."""

    node_id: NodeId
    node_rank: NodeRank
    reason: str
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeReady(Event):
    """An attached node stands ready for a world. `round` is what it runs now."""

    member: Member
    round: Round
    returned: bool
    """True for the same agent process on a new link."""
    cold: bool = False
    """True when its workers would start cold: it says so when they no longer would."""
    replaces: NodeId = NodeId(-1)  # noqa: RUF009
    """A node of the same rank that this one replaces: that one goes first."""


@dataclass(frozen=True, slots=True)
class NodeExpected(Event):
    """The node was alive when the last master died, and should come back by itself."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class NodeSilent(Event):
    """Liveness gives the node up: nothing was heard for too long."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class NobodyHeard(Event):
    """No node is heard any more: the master takes itself for cut off, and waits."""

    quiet_s: float


@dataclass(frozen=True, slots=True)
class HeardAgain(Event):
    """The first node is heard after a time in which none was."""

    node_id: NodeId
    quiet_s: float


@dataclass(frozen=True, slots=True)
class NodeLost(Event):
    """The node is no longer part of the job."""

    node_id: NodeId
    node_rank: NodeRank
    reason: ExitReason
    message: str
    proven: bool
    """True when its processes are known to be dead, not only out of reach."""


@dataclass(frozen=True, slots=True)
class LeaseExpired(Event):
    """A node that went silent has by now stopped its workers by itself."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class WorldHurt(Event):
    """A worker of the present round failed, one of its nodes was lost, or all of it hangs."""

    round: Round
    reason: ExitReason
    message: str
    node_rank: NodeRank
    cause: m.FailureInfo | None
    last_step_ago_s: float
    is_everywhere: bool = False
    """Every worker of the world made the mistake that is the cause."""


@dataclass(frozen=True, slots=True)
class FirstStepLate(Event):
    """The workers of a round have made no step in all the time that they have for the first."""

    round: Round
    waited_s: float


@dataclass(frozen=True, slots=True)
class WorldBroken(Event):
    """The verdict on a hurt world: it is over, and the next one may form."""

    round: Round
    reason: str
    node_rank: NodeRank
    last_step_ago_s: float
    by_plan: bool = False
    """Nothing has failed: all its nodes are to go."""
    pause_s: float = 0.0
    """How long the next one must wait, as workers have failed at once in a row this often:"""
    failed_starts: int = 0


@dataclass(frozen=True, slots=True)
class WorldFormed(Event):
    world: World
    reason: str
    planned: bool


@dataclass(frozen=True, slots=True)
class WorldFound(Event):
    """A restarted master found this world in its journal."""

    world: World
    restarts: int
    """How many worlds of this job broke so far."""
    done: bool
    """True when every worker of it had finished."""
    broken: bool = False
    finished: frozenset[NodeId] = frozenset()
    """The nodes whose workers had finished."""


@dataclass(frozen=True, slots=True)
class JournalBehind(Event):
    """An agent knows of something that the journal had and has lost: see master_history.py."""

    reason: str


@dataclass(frozen=True, slots=True)
class WorldStarted(Event):
    """All workers of the round run."""

    round: Round
    how: str
    """How most nodes started theirs."""
    others: str = ""
    """Which nodes did it in another way."""


@dataclass(frozen=True, slots=True)
class WorldDone(Event):
    """Every worker of the round finished with exit code 0."""

    round: Round


@dataclass(frozen=True, slots=True)
class WorkSettled(Event):
    """Every worker finished, and nothing is on its way to storage any more."""

    round: Round


@dataclass(frozen=True, slots=True)
class WorldImpossible(Event):
    """No world formed within the join time-out, or none can form any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobFinished(Event):
    """The end of the job, for whatever reason."""

    ok: bool
    reason: str
    cause: m.FailureInfo | None
    cause_node_rank: int
    stopped: int = 0
    """The signal by which it was stopped from outside; 0: it is over."""


@dataclass(frozen=True, slots=True)
class FirstStepMade(Event):
    """A world trains: one of its nodes has made a step, at this job time."""

    round: Round
    at_s: float


@dataclass(frozen=True, slots=True)
class IncidentClosed(Event):
    """The job steps again after an incident; the stages add up to the recovery time."""

    round: Round
    reason: str
    detect_s: float
    rendezvous_s: float
    restart_s: float
    restore_s: float
    number: int = 0


@dataclass(frozen=True, slots=True)
class RestoreAgreed(Event):
    """Every rank of the round has the same version at hand: NONE if there is nothing."""

    directory: str
    round: Round
    version: Version
    lineage: int
    fresh: bool
    """True when no node wanted to restore anything."""
    notes: tuple[str, ...]
    positions: tuple[Position, ...] = ()
    """How far the data of the directory was when the version was saved."""


@dataclass(frozen=True, slots=True)
class AttemptOpened(Event):
    """A version is on its way to storage."""

    directory: str
    version: Version
    attempt: str
    reason: str


@dataclass(frozen=True, slots=True)
class AttemptFailed(Event):
    """A version will not be on storage; older ones are untouched."""

    directory: str
    version: Version
    attempt: str
    why: str


@dataclass(frozen=True, slots=True)
class CopyFailed(Event):
    """A node could not copy its parts of a version to another node."""

    directory: str
    version: Version
    why: str
    """The reason, with what is done about it."""


@dataclass(frozen=True, slots=True)
class SavesFailed(Event):
    """Workers of a node could not save; told the first time and when the count has doubled."""

    node_id: NodeId
    node_rank: int
    """-1 if it is in no world."""
    failed: int
    step: int
    """The last step that failed."""
    why: str


@dataclass(frozen=True, slots=True)
class CopiesResumed(Event):
    """After copies that failed, a version is safe on other nodes again."""

    directory: str
    version: Version


@dataclass(frozen=True, slots=True)
class CheckpointCommitted(Event):
    """A version is on storage, as a whole and under its name."""

    directory: str
    version: Version
    attempt: str


@dataclass(frozen=True, slots=True)
class DatasetFollows(Event):
    """A dataset's position goes with the checkpoints of this directory."""

    directory: str


@dataclass(frozen=True, slots=True)
class VersionMarked(Event):
    """Every rank has said how far it was in its data when it saved this version."""

    directory: str
    version: Version
    positions: tuple[Position, ...]
    """Of every dataset that follows the directory."""


@dataclass(frozen=True, slots=True)
class DatasetRegistered(Event):
    """A worker opened a dataset for the first time."""

    dataset: Dataset


@dataclass(frozen=True, slots=True)
class DatasetRestored(Event):
    """A dataset is where it was when the restored version was saved."""

    name: str
    epoch: int
    problem: str
    """Why it could not; empty if it could."""


@dataclass(frozen=True, slots=True)
class EpochOver(Event):
    """Every piece of an epoch is consumed or set aside."""

    name: str
    epoch: int
    epochs: int


@dataclass(frozen=True, slots=True)
class PieceSetAside(Event):
    """A piece of a dataset failed in its reader again and again: it will not be read."""

    name: str
    piece: Piece
    attempts: int
    why: str


# ---- what people ask of a running job, and what follows for its nodes ----------------------------


@dataclass(frozen=True, slots=True)
class PlanAsked(Event):
    """A plan asks for a change of the running job; the same plan may come more than once."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanPartAgreed(Event):
    """A plan is carried out; this is its part for another role."""

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
    """These nodes are to go: the next world forms without them."""

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
    """A rank gets no node any more, unless a plan asks for another size."""

    role: str
    node_rank: NodeRank
    why: str
