# SPDX-License-Identifier: Apache-2.0
"""The durable changes of a job. Golden journals in tests/wire keep old ones readable."""

from functools import reduce
from operator import or_

import msgspec
from msgspec import Struct

from holdfast.core.kernel import Record
from holdfast.model.checkpoint import Shape, Version
from holdfast.model.dataset import Dataset, Lease, Piece, Position
from holdfast.model.world import World
from holdfast.protocol import messages as m
from holdfast.protocol.data import Consumed


class RulesSet(Record, frozen=True):
    """The first agent's rules became the job's."""

    rules: m.JobRules


class LifeBegan(Record, frozen=True):
    """A master began to serve."""

    life: str
    after: int
    """How many entries the journal had by then."""
    clock: str = ""
    zero_s: float = 0.0
    """The name of its monotonic clock, and what that showed at job time 0."""


class GenerationSet(Record, frozen=True):
    generation: int


class NodePlanned(Record, frozen=True):
    """A node was ordered from the platform."""

    node_id: int
    node_rank: int
    relaunches: int = 0
    """How often its rank was launched before."""
    memory_mib: int = 0
    cpu_milli: int = 0
    group: int = -1
    replaces: int = -1
    """A node of the same rank that stays until this one is ready."""
    down_since_s: float = -1.0
    """Since when its rank has no agent, whichever nodes were launched meanwhile; -1: not known."""


class NodePlaced(Record, frozen=True):
    """The platform put a node on a machine."""

    node_id: int
    machine: str


class NodeLeaves(Record, frozen=True):
    """A node is to go, and what follows is no failure."""

    node_id: int


class RankWanted(Record, frozen=True):
    """Whether a rank is to have a node. An ordered rank is wanted until this says otherwise."""

    node_rank: int
    is_wanted: bool


class JobSized(Record, frozen=True):
    """What people asked of the job: its size, what new nodes get, and whether it runs at all."""

    nodes: int
    suspended: bool = False
    memory_mib: int = 0
    cpu_milli: int = 0


class PlanSettled(Record, frozen=True):
    """A plan was done, or refused for good; it is not done again."""

    plan_id: str
    ok: bool
    text: str


class HostBlamed(Record, frozen=True):
    """A node failed on a machine, for a reason that may be the machine's."""

    host: str
    weight: int
    at_s: float


class GroupMoved(Record, frozen=True):
    """A group of nodes has another number from now on."""

    group: int
    successor: int


class NodeAdmitted(Record, frozen=True):
    """An agent process took a node rank."""

    node_id: int
    node_rank: int
    incarnation: int
    agent_key: str
    nproc: int
    host: str
    topology: str = ""
    process: str = ""
    """The name of the agent's process; empty if it did not say."""
    log_dir: str = ""
    """Its log folder; empty if it did not say."""


class NodePhaseChanged(Record, frozen=True):
    node_id: int
    phase: str
    reason: str = ""
    message: str = ""
    proven: bool = True
    """False while a lost node may still run somewhere: its lease has not expired."""
    at_s: float = 0.0
    """Since when it has this phase; 0 where that is not used, and in journals of older versions."""


class CountersSet(Record, frozen=True):
    """For snapshots: identities already given out."""

    next_node_id: int
    next_incarnation: int


class RelaunchCounted(Record, frozen=True):
    """One unit of a node rank's budget for a failure class was used (`count` in snapshots)."""

    node_rank: int
    reason: str
    count: int = 1


class RestartCounted(Record, frozen=True):
    """One unit of the job's budget for a class of worker failure was used."""

    reason: str
    count: int = 1
    """0 for a node that was lost to the same cause as another before it."""
    back: float = 0.0
    """Units of it that came back by training since the last time."""
    trained_s: float = 0.0
    """How long the job had trained by then, in all."""
    failed_starts: int = 0
    """How often in a row workers had failed at once, this time included."""


class TrainingBegan(Record, frozen=True):
    """The first step of a world was made, at this job time; -1 in the snapshot of a broken one."""

    at_s: float = -1.0


class WorldAgreed(Record, frozen=True):
    world: World
    reason: str
    planned: bool = False
    restarts: int = 0
    """How many worlds of this job failed before this one."""
    unstopped: tuple[tuple[int, ...], ...] = ()
    """The nodes of each replaced world that may still have been computing, as no node was seen to
    have left it."""


class RoundBroken(Record, frozen=True):
    round: int
    reason: str
    by_plan: bool = False


class NodeDone(Record, frozen=True):
    """The node's workers of the round all finished well."""

    node_id: int
    round: int


class JobClosed(Record, frozen=True):
    ok: bool
    reason: str
    cause: m.FailureInfo | None = None
    cause_node_rank: int = -1
    stopped: int = 0
    """The signal by which it was stopped from outside: the next master goes on. 0: it is over."""


class JobContinued(Record, frozen=True):
    """A master goes on with a job that was stopped from outside."""


class KvChanged(Record, frozen=True):
    """Keys got values; the session's answer is kept, so that a repeat gets the same."""

    scope: int
    keys: tuple[str, ...]
    values: tuple[bytes, ...]
    session: str = ""
    seq: int = 0
    answer: m.Answer | None = None


class KvAppended(Record, frozen=True):
    """A key's value got longer; the key was made if it was missing."""

    scope: int
    key: str
    value: bytes
    session: str = ""
    seq: int = 0
    answer: m.Answer | None = None


class KvDropped(Record, frozen=True):
    scope: int
    key: str
    session: str = ""
    seq: int = 0
    answer: m.Answer | None = None


class QueueChanged(Record, frozen=True):
    """An element was pushed to the back (`value`) or the front one was taken (None)."""

    scope: int
    key: str
    value: bytes | None
    session: str = ""
    seq: int = 0
    answer: m.Answer | None = None


class SessionRemembered(Record, frozen=True):
    """For snapshots: the last answer to a mutating request of a session."""

    scope: int
    session: str
    seq: int
    answer: m.Answer


class BarrierReleased(Record, frozen=True):
    """All members arrived; each participant's session is remembered with the answer."""

    scope: int
    name: str
    generation: int
    sessions: tuple[tuple[str, int], ...] = ()


class ScopesDropped(Record, frozen=True):
    """Keys, queues, barriers and sessions of rounds before `before` are forgotten."""

    before: int
    nodes: int = 0
    """How many nodes the world of round `before` has."""


class TimeSpent(Record, frozen=True):
    """Seconds attributed to one use of the job's time."""

    use: str
    seconds: float
    until_s: float


class StepsSeen(Record, frozen=True):
    """Progress as last heard: kept at stage changes, not at every beat."""

    step: int
    steps_total: int
    step_price_s: float = 0.0
    """How long a step took, for the price of steps that are done again."""


class StageEntered(Record, frozen=True):
    """What the time is spent on from now on, in which round: a restarted master goes on in it."""

    use: str
    round: int


class IncidentNoted(Record, frozen=True):
    """An incident and the time its stages took; -1 while a stage is not over."""

    number: int
    round: int
    at_s: float
    reason: str
    node_rank: int
    detect_s: float = -1.0
    rendezvous_s: float = -1.0
    restart_s: float = -1.0
    restore_s: float = -1.0
    estimated: bool = False
    """True while the last step before the incident is only known from a beat."""
    import_s: float = -1.0
    """Of `restore_s`: until the workers of every node asked for a checkpoint; -1 if not known."""
    load_s: float = -1.0
    """Of `restore_s`: from there until all had it at hand."""
    late_s: float = -1.0
    """How long the round had been without a first step; -1 for an incident that ended a round."""


class PatienceSet(Record, frozen=True):
    """How long the job may go without a step before it counts as hung, and what decides that."""

    first_step_at: float = -1.0
    longest_pause_s: float = 0.0
    """The longest pause between two steps that ended by itself."""
    allowed_s: float = 0.0
    """What is allowed at the place of the last hang; 0 when the job has come past it."""
    hung_step: int = -1
    """The last step before the hang by the script's own count, -1 if it has none."""
    hung_after: int = 0
    """How many steps of the round came before the hang."""
    was_late: bool = False
    """Whether a round was restarted for want of a first step, and none has been made since."""


class CheckpointCommitted(Record, frozen=True):
    """All parts of one attempt are on storage, and the checkpoint has its name."""

    directory: str
    version: Version
    attempt: str
    shape: Shape


class LineageSet(Record, frozen=True):
    """The ranks of a round agreed on what to restore; what they save is of this lineage.

    Kept with what was agreed, so that a node that missed the answer gets the same one again.
    """

    directory: str
    lineage: int
    round: int
    version: Version
    shape: Shape


class VersionPositioned(Record, frozen=True):
    """How far the datasets that follow a directory were when a version was saved."""

    directory: str
    version: Version
    positions: tuple[Position, ...]
    dropped: tuple[Version, ...] = ()
    """Versions that cannot be restored any more: their positions are forgotten."""


class DatasetRegistered(Record, frozen=True):
    dataset: Dataset


class ShardsReported(Record, frozen=True):
    """A worker came this far in its leases."""

    name: str
    consumed: tuple[Consumed, ...]


class ShardsLeased(Record, frozen=True):
    """A worker was given pieces; its session's answer is kept, so that a repeat gets the same.

    Most requests report and take at once: what was reported before the take is in here too.
    """

    name: str
    node_id: int
    scope: int
    leases: tuple[Lease, ...]
    from_open: int = 0
    """How many of them, from the first on, had been cut before and came back."""
    session: str = ""
    seq: int = 0
    consumed: tuple[Consumed, ...] = ()
    """As in ShardsReported, and true before the pieces were given."""


class LeasesReturned(Record, frozen=True):
    """What rounds before `before`, or a lost node, had not consumed goes back.

    Leases of datasets that follow a checkpoint do not: they go back with it.
    """

    before: int = 0
    node_id: int = -1


class ShardsListed(Record, frozen=True):
    """The user named shards; `first` were named before."""

    name: str
    first: int
    shards: tuple[tuple[str, int], ...]
    is_last: bool = False


class StreamGrown(Record, frozen=True):
    """The partitions of a stream are written up to these offsets, at least."""

    name: str
    ends: tuple[int, ...]


class MarksFolded(Record, frozen=True):
    """Every rank has said how far it was when it saved this version: name, lease, upto."""

    directory: str
    version: Version
    marks: tuple[tuple[str, int, int], ...] = ()


class PositionsAdopted(Record, frozen=True):
    """The model of a directory was restored, and its data with it."""

    directory: str
    lineage: int
    positions: tuple[Position, ...] = ()
    round: int = 0


class LeaseKept(Struct, frozen=True, array_like=True):
    """For snapshots: one lease."""

    number: int
    piece: Piece
    node_id: int
    scope: int
    failures: int
    reported: int
    marked: int
    is_live: bool


class DatasetKept(Record, frozen=True):
    """For snapshots: everything about one dataset."""

    dataset: Dataset
    term: int
    position: Position
    """Without what is in leases; with the names of all listed shards."""
    next_lease: int
    leases: tuple[LeaseKept, ...] = ()
    failures: tuple[tuple[Piece, int], ...] = ()
    """How often pieces that are open have failed."""
    reasons: tuple[str, ...] = ()
    """Why each piece that is set aside was."""
    problem: str = ""
    round: int = -1
    ends: tuple[int, ...] = ()
    """How far the partitions of a stream that grows are written."""


class AnswerKept(Record, frozen=True):
    """For snapshots: the last leases that a session was given."""

    session: str
    seq: int
    name: str
    node_id: int
    scope: int
    leases: tuple[Lease, ...]


# ---- nodes without agents -----------------------------------------------------------------------


class RoleNodePlanned(Record, frozen=True):
    """A node without an agent was ordered from the platform."""

    node_id: int
    role: str
    node_rank: int
    relaunches: int = 0
    """How often its rank was launched before."""
    memory_mib: int = 0
    cpu_milli: int = 0
    at_s: float = 0.0
    down_since_s: float = -1.0
    """Since when its rank does not run, whichever nodes were launched meanwhile; -1: not known."""


class RoleNodeChanged(Record, frozen=True):
    """What the platform saw of a node, or that the node is to go."""

    node_id: int
    phase: str
    machine: str = ""
    message: str = ""
    leaves: bool = False


class RoleRankSet(Record, frozen=True):
    """Whether a rank is to have a node, and whether it is not launched again any more."""

    role: str
    node_rank: int
    is_wanted: bool
    is_given_up: bool = False


class RoleRelaunched(Record, frozen=True):
    """One unit of a rank's budget for a failure class was used (`count` in snapshots)."""

    role: str
    node_rank: int
    reason: str
    count: int = 1


class RoleAsked(Record, frozen=True):
    """What the nodes of a role get when launched from now on; 0 for the job's description."""

    role: str
    memory_mib: int
    cpu_milli: int


class RolePlanSettled(Record, frozen=True):
    """A plan for a role was done, or refused for good; it is not done again."""

    plan_id: str
    ok: bool
    text: str


class RolesSet(Record, frozen=True):
    """The nodes of all roles were ordered once; since then they may have been suspended."""

    is_suspended: bool = False
    next_node_id: int = 0


KINDS: tuple[type[Record], ...] = tuple(
    kind
    for kind in globals().values()
    if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
)
"""Every class above. Each machine declares which of them are its own (`OWNS`)."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(reduce(or_, KINDS))


def encode_record(record: Record) -> bytes:
    """The bytes that go into the journal."""
    return _encoder.encode(record)


def decode_record(payload: bytes) -> Record:
    """A record from the journal; msgspec.DecodeError if it is none of ours."""
    return _decoder.decode(payload)
