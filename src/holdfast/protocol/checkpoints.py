# SPDX-License-Identifier: Apache-2.0
"""The messages about checkpoints; the rules of protocol/messages.py hold for them too."""

from msgspec import Struct

from holdfast.model.checkpoint import (
    NONE,
    FileEntry,
    Holding,
    Series,
    Shape,
    Stored,
    Version,
)
from holdfast.model.dataset import Position
from holdfast.protocol.base import Message
from holdfast.protocol.data import Mark

# ---- worker to agent, answered by the agent ------------------------------------------------------


class SeriesOpen(Message, frozen=True):
    """A worker will save to this series, or load from it. First of all checkpoint requests."""

    series: Series
    local_rank: int
    rank: int
    world_size: int
    round: int = 0


class SlotReserve(Message, frozen=True):
    """Memory for a part will be needed: set it aside and fault it in, in the background."""

    directory: str
    part: str
    size: int
    """Bytes of a slot's data."""


class SlotsReserved(Message, frozen=True):
    paths: tuple[str, ...]
    """The slots that there are now: a worker that maps them early is faster at the first save."""


class SlotAsk(Message, frozen=True):
    """Where may this part of this step be written? Answered with a slot that is not being read."""

    directory: str
    part: str
    step: int
    size: int
    untouched: tuple[str, ...] = ()
    """Slots whose memory was never used, which makes the first write slow: others are preferred."""
    persist: bool = False
    """True when this step is to go to storage: then a slot on disk is better than none."""


class SlotGrant(Message, frozen=True):
    path: str
    """The slot's file in shared memory, large enough; the worker that writes it maps it."""
    lineage: int
    """What the slot's header must say."""


class SlotSealed(Message, frozen=True):
    """The slot holds the whole part and its header is sealed."""

    directory: str
    part: str
    version: Version
    shape: Shape
    path: str
    persist: bool
    """True when this step is to go to storage."""
    waited_s: float = 0.0
    """How long the training waited for it."""
    follows: bool = False
    """True when a dataset follows this directory: then `marks` counts, even if it is empty."""
    marks: tuple[Mark, ...] = ()
    """How far this rank was in its datasets when it saved; with the rank's own part only."""
    digest: int = -1
    """Over the slot's data, computed during the copy into it; -1: the agent computes it."""


class SaveFailed(Message, frozen=True):
    """A worker could not save a step: the master tells people."""

    directory: str
    step: int
    why: str


class RestoreAsk(Message, frozen=True):
    """All ranks of a round agree on what to restore: each asks until the answer says go.

    A rank that only wants to save gets its lineage in this way too: with `fresh` nothing is
    restored.
    """

    directory: str
    round: int
    local_rank: int
    prepared: Version
    """What this rank has taken into its own memory, verified; NONE if nothing yet."""
    problem: str = ""
    """Why `tried` could not be prepared; empty if it could."""
    tried: Version = NONE
    fresh: bool = False
    step: int = -1
    """Restore this step and no other; -1: the newest."""


class PartsOpen(Message, frozen=True):
    """Make these parts of the version of the last plan readable here, wherever they are now."""

    directory: str
    version: Version
    parts: tuple[str, ...]
    local_rank: int = 0


class OpenedPart(Struct, frozen=True, array_like=True):
    """A part in a slot of this node, verified, and not overwritten before it is closed.

    Memory may change all the same: a worker compares what it takes with the digest.
    """

    asked: str
    part: str
    """The part that it is: another rank's, if the asked one is lost or never existed."""
    path: str
    source: str
    """"memory", "peer", "parity" or "storage"."""
    digest: int = -1
    """The digest of the bytes that a worker takes out of the slot; -1 if it is not known."""


class PartsOpened(Message, frozen=True):
    parts: tuple[OpenedPart, ...]


class PartsClose(Message, frozen=True):
    """The opened parts have been read."""

    directory: str
    local_rank: int = 0
    bad: tuple[str, ...] = ()
    """Parts whose bytes, as this rank took them, are not those that were saved."""


class PersistWait(Message, frozen=True):
    """Answered when nothing of the directory is on its way to storage any more."""

    directory: str
    timeout_s: float


class PersistState(Message, frozen=True):
    committed: Version
    """The newest version that is committed; NONE if none is."""
    problem: str = ""
    """Why a newer version is not committed; empty if there is no such version."""


class StepsRemove(Message, frozen=True):
    """Remove these committed steps from storage, except the newest committed one."""

    directory: str
    steps: tuple[int, ...]


# ---- agent to master ---------------------------------------------------------------


class Tally(Struct, frozen=True, array_like=True):
    """What became of the checkpoints on a node since its agent started. It travels in beats."""

    saves: int
    """Steps saved to memory while this node was the first of its world: all nodes saved them."""
    waited_s: float
    """How long the training waited for those."""
    step: int
    """The newest step in the memory of this node; -1 if there is none."""
    age_s: float
    """How long ago it was saved."""
    written_bytes: int
    """To storage."""
    written_s: float
    restored: dict[str, int]
    """Parts made readable for workers: from "memory", "peer", "parity" or "storage"."""
    failed: int = 0
    """Steps that a worker of this node was to save and could not."""
    failed_step: int = -1
    """The last step that failed."""
    failed_why: str = ""


class BadCopy(Struct, frozen=True, array_like=True):
    """A copy that turned out to be unreadable or damaged."""

    version: Version
    part: str
    node_id: int
    """Whose memory it was in; -1 for storage."""
    why: str


class NodeRestore(Message, frozen=True):
    """What this node holds, what it has prepared and what turned out bad.

    Held until every node of the round has asked; answered with a RestorePlan. Everything that the
    ledger needs is in it, so that a new master can answer it as well as the old one.
    """

    directory: str
    round: int
    holdings: tuple[Holding, ...]
    stored: tuple[Stored, ...]
    """What is committed on storage; only the node of rank 0 looks. Positions of data are in the
    entry of the prepared version alone: a step is always prepared before it is agreed on."""
    prepared: Version
    wants: tuple[str, ...]
    """The parts that the answer locates."""
    bad: tuple[BadCopy, ...] = ()
    fresh: bool = False
    step: int = -1
    breakpoint: bool = True
    lineage: int = -1
    """The lineage that the last agreement of this round gave this node; -1 before the first. A node
    that asks with a lower one than the others have has missed the answer that they got."""
    mixed: bool = False
    """Whether its ranks have different versions at hand. Then no rank may go on yet, not even with
    nothing, because a rank of this node has something."""


class Source(Struct, frozen=True, array_like=True):
    """Where a part is."""

    asked: str
    part: str
    kind: str
    """"memory" (of this node), "peer", "parity" or "storage"."""
    node_id: int = -1
    address: str = ""
    """The peer's byte service, as in `Peer`."""
    digest: int = -1
    """The digest that the bytes must have; -1 if it has not been computed yet."""
    length: int = 0


class RestorePlan(Message, frozen=True):
    version: Version
    """What every rank restores; NONE: there is nothing, start from the beginning."""
    shape: Shape
    go: bool
    """True when every rank has this version at hand: read it now."""
    lineage: int
    """What this world stamps on what it saves (valid with `go`)."""
    sources: tuple[Source, ...] = ()
    failures_per_s: float = 0.0
    """How often worlds of this job broke, for a save policy that chooses its interval by it."""
    notes: tuple[str, ...] = ()
    """What was lost or passed over, in plain words."""
    follows: bool = False
    """True when a dataset follows this directory: then every node says with every save how far its
    ranks are (DataMarked), even if they read nothing."""


class PartsLocate(Message, frozen=True):
    """Where are these parts of this version? Answered with PartsLocated."""

    directory: str
    version: Version
    parts: tuple[str, ...]


class PartsLocated(Message, frozen=True):
    sources: tuple[Source, ...]


class PersistAsk(Message, frozen=True):
    """This node holds these parts of a step that is to go to storage.

    Held until it is this step's turn; answered with PersistPlan, or refused.
    """

    directory: str
    round: int
    version: Version
    shape: Shape
    parts: tuple[str, ...]


class PersistPlan(Message, frozen=True):
    attempt: str
    """Names this try and nothing else, ever: the temporary directory is called after it."""
    parts: tuple[str, ...]
    """The parts that this node writes: of several nodes that hold a part, one writes it."""


class PartsPersisted(Message, frozen=True):
    """These parts are on storage, synced; or, with a problem, they will not be.

    Held until the attempt is committed (PersistState) or given up (Refused).
    """

    directory: str
    version: Version
    shape: Shape
    attempt: str
    parts: tuple[str, ...]
    files: tuple[FileEntry, ...]
    problem: str = ""


class CommitDone(Message, frozen=True):
    """The manifest is written and the checkpoint has its name; or, with a problem, it has not."""

    directory: str
    version: Version
    attempt: str
    problem: str = ""


class Writing(Struct, frozen=True, array_like=True):
    """Parts that a node writes to storage, or has written without knowing the attempt's outcome."""

    attempt: str
    parts: tuple[str, ...]


class InventoryTaken(Message, frozen=True):
    """The answer to InventoryWanted."""

    directory: str
    number: int
    holdings: tuple[Holding, ...]
    writing: tuple[Writing, ...] | None = None
    """None from agents that do not report it: they may be writing anything that they hold."""


class FlushAsk(Message, frozen=True):
    """This node must go soon: bring the newest complete version to storage first.

    Held until it is committed (PersistState), or refused when there is nothing to bring or no way.
    """

    directory: str
    holdings: tuple[Holding, ...]
    committed: Version


class PeersAsk(Message, frozen=True):
    """Which nodes keep copies for this one in this round?"""

    round: int
    replicas: int
    parity: int


class Peer(Struct, frozen=True, array_like=True):
    node_id: int
    address: str
    """"HOST:PORT"; under TLS "HOST:PORT#FINGERPRINT": only the certificate with this SHA-256 is
    accepted there. They are one word so that no code has the address without the fingerprint."""
    first_rank: int = 0
    """The ranks of a node follow each other from this one on; parity blocks are named by them."""
    nproc: int = 0


class Peers(Message, frozen=True):
    peers: tuple[Peer, ...]
    """Replicas: each of them gets a copy. Parity: the whole group in order, this node included."""


class Replicated(Message, frozen=True):
    """This node's parts of a version are on other nodes.

    Held until every node of the round says the same (Done): then the version is safe, and older
    ones may go. Refused when that will not happen.
    """

    directory: str
    round: int
    version: Version


class CopyFailed(Message, frozen=True):
    """A copy of this node's parts did not get through.

    Answered with Peers: the nodes that get this node's copies from now on. If it is empty, the node
    goes on without copies.
    """

    directory: str
    round: int
    version: Version
    problem: str
    peer: int = -1
    """The node id of the peer that it failed with; -1: no peer is to blame."""
    replicas: int = 0
    """How many peers are wanted; 0: no other peer would do."""


# ---- master to agent, pushed -------------------------------------------------------


class InventoryWanted(Message, frozen=True):
    directory: str
    number: int


class PersistOrder(Message, frozen=True):
    """Write these parts of a version that you hold; report with PartsPersisted."""

    directory: str
    version: Version
    shape: Shape
    attempt: str
    parts: tuple[str, ...]
    reason: str


class CommitOrder(Message, frozen=True):
    """All parts are on storage: write the manifest and give the checkpoint its name."""

    directory: str
    version: Version
    shape: Shape
    attempt: str
    files: tuple[FileEntry, ...]
    positions: tuple[Position, ...] = ()
    """Of the datasets that follow the directory: they go into the manifest."""


# ---- agent to agent ----------------------------------------------------------------
# After one of these and its answer, `size` raw bytes follow on the connection.


class PartGet(Message, frozen=True):
    """Send the slot image of a part from `offset` on. Answered with PartBytes."""

    directory: str
    version: Version
    part: str
    parity: bool = False
    offset: int = 0
    size: int = -1
    """-1: all that follow."""


class PartBytes(Message, frozen=True):
    holding: Holding
    size: int
    """How many raw bytes follow."""
    total: int
    """The size of the whole image."""
    meta_digest: int = -1
    """Over the image behind the data; the data's own digest is in the holding."""


class PartPut(Message, frozen=True):
    """Keep this part for me. Answered with PartWanted, or refused for want of room."""

    directory: str
    round: int
    holding: Holding
    total: int
    meta_digest: int = -1
    """Over the image behind the data; the data's own digest is in the holding."""
    block: str = ""
    """For parity: the block that a stripe of the image is for (see model/parity.py), and only that
    stripe follows; empty: the whole image."""
    stripe_digest: int = -1
    """For parity: over the stripe that follows."""
    safe: Version = NONE
    """The newest version that is safe: copies of it must not be dropped to make room for this."""


class PartWanted(Message, frozen=True):
    """The bytes from `offset` on are wanted: what came before a broken connection is kept."""

    offset: int


CheckpointCall = (
    NodeRestore
    | PartsLocate
    | PersistAsk
    | PartsPersisted
    | CommitDone
    | InventoryTaken
    | FlushAsk
    | PeersAsk
    | Replicated
    | CopyFailed
)
"""What an agent asks the ledger of checkpoints."""

VaultCall = (
    SeriesOpen
    | SlotReserve
    | SlotAsk
    | SlotSealed
    | SaveFailed
    | RestoreAsk
    | PartsOpen
    | PartsClose
    | PersistWait
    | StepsRemove
)
"""What a worker asks its agent about checkpoints; the agent relays none of it as it is."""

PeerCall = PartGet | PartPut
PeerAnswer = PartBytes | PartWanted
CheckpointAnswer = (
    SlotsReserved
    | SlotGrant
    | RestorePlan
    | PartsOpened
    | PersistState
    | PartsLocated
    | PersistPlan
    | Peers
)
CheckpointPush = InventoryWanted | PersistOrder | CommitOrder
