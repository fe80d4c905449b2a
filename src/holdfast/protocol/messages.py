# SPDX-License-Identifier: Apache-2.0
"""Every message that crosses a process border, as typed structs.

Structs travel as MessagePack arrays that begin with the tag. A field is only ever added at the end
and with a default, so that a newer peer is understood by an older one; golden bytes in tests/wire
hold every message to that. Those about checkpoints are in protocol/checkpoints.py, those about data
in protocol/data.py.
"""

from typing import Annotated

from msgspec import Meta, Struct

from holdfast.protocol.base import Message as Message
from holdfast.protocol.checkpoints import (
    CheckpointAnswer,
    CheckpointCall,
    CheckpointPush,
    PeerAnswer,
    PeerCall,
    Tally,
    VaultCall,
)
from holdfast.protocol.data import DataAnswer, DataCall, DataMarked

VERSION = 1
"""Raised when an older peer could no longer understand us."""


# ---- handshake: the first three frames of every channel -----------------------------------------

NONCE_BYTES = 32
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
"""Of a fixed length, so that the text that a proof is computed over has only one reading."""


class Challenge(Message, frozen=True):
    """Server to client, first frame."""

    version: int
    nonce: Nonce


class Proof(Message, frozen=True):
    """Client to server: proves the token for this challenge, and challenges back."""

    version: int
    nonce: Nonce
    mac: bytes


class Welcome(Message, frozen=True):
    """Server to client: proves the token in its turn."""

    mac: bytes


# ---- answers ------------------------------------------------------------------------------------


class Done(Message, frozen=True):
    """The request took effect and has no other result."""


class Refused(Message, frozen=True):
    """The request did not take effect. `kind` names the reaction: see model.errors."""

    kind: str
    """One of "rejected", "stale", "fenced", "auth", "timeout", "usage"."""
    message: str


class Value(Message, frozen=True):
    value: bytes


class Values(Message, frozen=True):
    values: tuple[bytes, ...]


class Number(Message, frozen=True):
    number: int


class Keys(Message, frozen=True):
    keys: tuple[str, ...]


# ---- agent to master ----------------------------------------------------------------------------


class JobRules(Struct, frozen=True, array_like=True):
    """What the user asked for on the command line: every node of a job must bring the same."""

    min_nodes: int
    max_nodes: int
    node_unit: int
    last_call_s: float
    join_timeout_s: float
    max_restarts: int


class Told(Struct, frozen=True, array_like=True):
    """The last that an agent was told of the master's journal: see the core's master_history.py."""

    journal: str
    life: str
    position: int


class Attach(Message, frozen=True):
    """An agent reports for duty, for the first time or again."""

    agent_key: str
    """Random, drawn once per agent process: an agent that comes back with it is the same one."""
    rules: JobRules
    nproc: int
    host: str
    store_port: int
    round: int = 0
    """The round whose workers run here now; 0 if none do."""
    node_id: int = -1
    """Given by the platform that launched the node; -1 if no platform did."""
    node_rank: int = -1
    """Given by the user; -1 lets the master assign one."""
    incarnation: int = 0
    """What the master called this agent process before; 0 on its first attach."""
    topology: str = ""
    hosted_port: int = 0
    """A port on which a fresh store server listens already; 0 if there is none."""
    cold: bool = False
    """True when the workers would start cold now, and a `Warmed` will follow."""
    peer_port: int = 0
    """Where other agents fetch and leave parts of checkpoints; 0 if nowhere."""
    peer_certificate: str = ""
    """The SHA-256 of the certificate that they find there, in hexadecimal; empty without TLS."""
    told: Told | None = None
    """None as long as no master has said anything."""
    process: str = ""
    """The name of the agent's process (runtime/process_names.py); empty if there is none."""
    ended_key: str = ""
    """The key under which the master gave this process up: the workers of that time have ended."""
    log_dir: str = ""
    """The folder on its host with the output of its workers and its own log."""
    grace_s: float = 0.0
    """How long its workers may take to end; 0: an older agent, which does not say it."""


class Attached(Message, frozen=True):
    job: str
    node_id: int
    node_rank: int
    incarnation: int
    generation: int
    beat_s: float
    lease_s: float
    round: int
    """The round the agent should be running. If it differs from its own, its workers are stale."""
    journal: str = ""
    """Names the master's journal, for as long as it is kept."""
    life: str = ""
    """Names this start of the master."""


class WorkersStarted(Message, frozen=True):
    """All local workers of the round run; `store_port` is reserved for the next one."""

    round: int
    store_port: int
    how: str
    """"cold", "zygote" or "one-shot"; where they differ, how many started in which way."""
    took_s: float
    last_step_ago_s: float = -1.0
    """How long ago the last step of the round before finished here; -1 if none did."""


class StoreOffered(Message, frozen=True):
    """A store server runs here already, for the next round in case this node leads it."""

    port: int


class Warmed(Message, frozen=True):
    """Workers started here from now on have their modules loaded."""


class Dropped(Message, frozen=True):
    """A relayed request whose worker has gone: no answer is wanted, and Dropped gets none."""

    session: str
    seq: int


class FailureInfo(Struct, frozen=True, array_like=True):
    """How one worker ended."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    reason: str
    """A model.node.ExitReason."""
    message: str
    """What the worker's error file says, or one sentence of ours."""
    traceback: str = ""
    ago_s: float = 0.0
    """How long before this report it ended."""
    last_step_ago_s: float = -1.0
    """How long before this report the node's last step finished; -1 if it never did."""
    alike: int = 0
    """How many workers the node has, if all of them made this mistake before any step; 0: it is no
    mistake, or not all made it. See model.node.is_mistake."""


class WorkersFailed(Message, frozen=True):
    round: int
    failures: tuple[FailureInfo, ...]


class WorkersDone(Message, frozen=True):
    """Every local worker of the round exited with code 0."""

    round: int


class Leave(Message, frozen=True):
    """The agent goes away on purpose and will not come back under this key."""

    reason: str


class Parting(Message, frozen=True):
    """The agent brought to storage what it held, if it could, and hangs up next."""

    doubt: str = ""
    """Why some of it may not be there; empty if the agent knows of nothing."""


class Beat(Message, frozen=True):
    """Liveness, progress and use in one: the only periodic message there is.

    Its answer renews the agent's lease, counted from when the beat was sent.
    """

    round: int
    steps: Annotated[int, Meta(ge=0, le=2**53)]
    """Steps of this node's workers in the round, by optimizer, report or save (the least)."""
    step: int
    """The step number the script reported, -1 if it does not."""
    first_step_ago_s: float
    """How long ago the round's first step finished here; -1 if none has."""
    last_step_ago_s: float
    cpu: float
    """Cores in use by the workers."""
    memory: int
    """Bytes in use by the workers."""
    checkpoints: Tally | None = None
    """None as long as there is nothing to tell."""
    saved_step: int = -1
    """The step that the script last gave to `Checkpointer.save`, -1 if none."""
    warm: bool | None = None
    """Whether workers started here now would find their modules loaded; None if they never do."""
    total_steps: Annotated[int, Meta(ge=0, le=2**53)] = 0
    """Steps that the script wants to make in all, in its own counting; 0 if it does not say."""


# ---- master to agent, pushed --------------------------------------------------------------------


class RunWorld(Message, frozen=True):
    """Run the workers of this round; whatever ran before is over."""

    round: int
    generation: int
    group_rank: int
    group_size: int
    rank_offset: int
    world_size: int
    store_host: str
    store_port: int
    store_hosted: bool
    """True when a server listens there already; false when worker rank 0 has to start it."""
    restarts: int
    """How many worlds of this job failed before this one."""
    reason: str
    """Why this round was formed, in plain words."""
    planned: bool
    """True when the previous world was healthy: its workers may finish what SIGTERM lets them."""


class StopWork(Message, frozen=True):
    """The world is over and the next one is not formed yet: stop the workers and wait."""

    round: int
    reason: str


class Fenced(Message, frozen=True):
    """A newer incarnation has this place: stop the workers and exit."""

    reason: str


class JobEnded(Message, frozen=True):
    ok: bool
    reason: str
    cause: FailureInfo | None = None
    """The first failure, when a worker's failure ended the job."""
    cause_node_rank: int = -1
    stopped: int = 0
    """The signal by which the job was stopped from outside: it can go on later. 0: it is over."""


# ---- key-value store, barriers: worker to agent, relayed to the master --------------------------


class KvSet(Message, frozen=True):
    """`scope` is the round the keys belong to; 0 is the whole job."""

    scope: int
    key: str
    value: bytes


class KvMultiSet(Message, frozen=True):
    scope: int
    keys: tuple[str, ...]
    values: tuple[bytes, ...]


class KvGet(Message, frozen=True):
    """Answered once every key exists: the values in the order asked for."""

    scope: int
    keys: tuple[str, ...]
    timeout_s: float


class KvWait(Message, frozen=True):
    scope: int
    keys: tuple[str, ...]
    timeout_s: float


class KvCheck(Message, frozen=True):
    scope: int
    keys: tuple[str, ...]


class KvAdd(Message, frozen=True):
    scope: int
    key: str
    amount: int


class KvCompareSet(Message, frozen=True):
    """Sets `desired` if the key holds `expected`, or if it is missing and `expected` is empty."""

    scope: int
    key: str
    expected: bytes
    desired: bytes


class KvAppend(Message, frozen=True):
    scope: int
    key: str
    value: bytes


class KvDelete(Message, frozen=True):
    scope: int
    key: str


class KvCount(Message, frozen=True):
    scope: int


class KvKeys(Message, frozen=True):
    scope: int


class QueuePush(Message, frozen=True):
    scope: int
    key: str
    value: bytes


class QueuePop(Message, frozen=True):
    """Waits for an element for at most `timeout_s`; 0 answers at once."""

    scope: int
    key: str
    timeout_s: float


class QueueLength(Message, frozen=True):
    scope: int
    key: str


class Barrier(Message, frozen=True):
    """Answered with the barrier's generation once `size` members have arrived.

    The same name can be used again at once: the next arrival opens the next generation.
    `size` 0 means every node of the scope: of the round's world, or of the whole job.
    """

    scope: int
    name: str
    member: str
    size: int
    timeout_s: float


# ---- observers ----------------------------------------------------------------------------------


class Observe(Message, frozen=True):
    """Answered with the job's state as JSON; with `follow`, stories are pushed from then on."""

    follow: bool


class Observed(Message, frozen=True):
    state: bytes
    """JSON, the same as /api/v1/job."""


class Story(Message, frozen=True):
    """One fact in plain words, pushed to observers."""

    at_s: float
    kind: str
    text: str
    fields: dict[str, str | int | float]


class HistoryAsk(Message, frozen=True):
    """Ask what was told of one entity: "node/3", "ps/0", "round/7", "step/100", "dataset/train"."""

    entity: str


class History(Message, frozen=True):
    stories: tuple[Story, ...]
    """Oldest first. The master keeps the newest of each entity, since it began to serve."""
    entities: tuple[str, ...] = ()
    """Where there is no story: of what there are some, the newest first."""


LAST_WORD = "LastWord"
"""The kind of the story that a master tells when every node has hung up, right before it ends. Its
text is empty, or why not all of them may have saved."""


class StopJob(Message, frozen=True):
    """Ask the master to end the job."""

    reason: str


KvCall = (
    KvSet
    | KvMultiSet
    | KvGet
    | KvWait
    | KvCheck
    | KvAdd
    | KvCompareSet
    | KvAppend
    | KvDelete
    | KvCount
    | KvKeys
    | QueuePush
    | QueuePop
    | QueueLength
    | Barrier
)
"""What a worker may ask, and an agent relays."""

AgentCall = Attach | WorkersStarted | StoreOffered | Warmed | WorkersFailed | WorkersDone | Leave
Call = (
    KvCall
    | AgentCall
    | CheckpointCall
    | VaultCall
    | PeerCall
    | DataCall
    | DataMarked
    | Beat
    | Observe
    | HistoryAsk
    | StopJob
    | Parting
)
Answer = (
    Done
    | Refused
    | Value
    | Values
    | Number
    | Keys
    | Attached
    | Observed
    | History
    | CheckpointAnswer
    | PeerAnswer
    | DataAnswer
)
Push = RunWorld | StopWork | Fenced | JobEnded | Story | CheckpointPush
Handshake = Challenge | Proof | Welcome
AnyMessage = Call | Dropped | Answer | Push | Handshake


class Frame(Struct, frozen=True, array_like=True):
    """What one frame holds.

    `call` numbers a request on its connection and marks its answer; 0 is a message without one.
    `session` and `seq` are the idempotency key of a relayed request: the same pair is the same
    request, however often it arrives.
    `position` is how far the sending master's journal was; 0 from every other sender.
    """

    call: int
    body: AnyMessage
    session: str = ""
    seq: int = 0
    position: int = 0
