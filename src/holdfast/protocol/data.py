# SPDX-License-Identifier: Apache-2.0
"""The messages about data; the rules of protocol/messages.py hold for them too."""

from msgspec import Struct

from holdfast.model.checkpoint import Version
from holdfast.model.dataset import Dataset, Lease, Position
from holdfast.protocol.base import Message

# ---- worker to master, relayed by the agent ------------------------------------------------------


class DatasetOpen(Message, frozen=True):
    """This worker will read from this dataset. The first one registers it.

    Answered with DatasetOpened; refused if it is registered with other parameters.
    """

    scope: int
    """The round of the worker; 0 outside of a world. Requests of an older round are fenced."""
    dataset: Dataset


class DatasetOpened(Message, frozen=True):
    position: Position
    term: int
    """Rises whenever the position jumps: leases of an older term are worth nothing."""


class Consumed(Struct, frozen=True, array_like=True):
    """How far a worker has come in its lease."""

    lease: int
    upto: int
    """Everything in the piece before this is consumed. At the piece's end the lease is over."""
    problem: str = ""
    """Why the rest of it could not be read: another worker gets it, or it is set aside."""
    returned: bool = False
    """True: the rest goes back, nothing is wrong with it."""
    end: int = -1
    """The worker will stop here, below the end of its piece: the tail goes back. -1: it will not.
    A worker that says this never reads beyond it again; saying it twice changes nothing."""


class ShardsTake(Message, frozen=True):
    """Report what was consumed, and ask for pieces of an epoch.

    Answered with ShardsTaken: at once when there is a piece, when the epoch is over, or when
    nothing was asked for; otherwise held until a piece comes back or the epoch is over.
    """

    scope: int
    name: str
    term: int
    epoch: int
    want: int
    """How many pieces at most; 0: this is a report only."""
    consumed: tuple[Consumed, ...] = ()
    """Since the last report, cumulative per lease: saying it twice changes nothing."""
    timeout_s: float = 60.0
    """After this, an answer with nothing in it."""
    is_idle: bool = False
    """True: the asker has nothing left to read, even if it does not wait."""


class ShardsTaken(Message, frozen=True):
    leases: tuple[Lease, ...]
    is_over: bool = False
    """True: every piece of the epoch is consumed or set aside, and none can come back."""
    wanted: tuple[int, ...] = ()
    """Leases that others wait for: give back what is not begun, or the tail of what is, soon."""


class ShardsAdd(Message, frozen=True):
    """Name more shards of a listed dataset."""

    scope: int
    name: str
    first: int
    """How many were named before these: saying it twice changes nothing."""
    shards: tuple[tuple[str, int], ...]
    """What each is called, and how many samples it has."""
    is_last: bool = False


class ShardsGrown(Message, frozen=True):
    """How far the partitions of a stream that grows are written."""

    scope: int
    name: str
    ends: tuple[int, ...]
    """The offset after the last record of each, in the dataset's order. What is known to be written
    stays so: saying it twice, or late, changes nothing."""


# ---- agent to master -----------------------------------------------------------------------------


class Mark(Struct, frozen=True, array_like=True):
    """How far one rank had come in one dataset when it saved."""

    name: str
    term: int
    consumed: tuple[Consumed, ...]
    """Of every lease that it had or that ended since its last save: cumulative."""


class DataMarked(Message, frozen=True):
    """What the ranks of a node had consumed when they saved a version.

    Held until every rank of the world has said it (Done): from then on the version has a position.
    Refused when the round is over.
    """

    directory: str
    round: int
    version: Version
    marks: dict[int, tuple[Mark, ...]]
    """By rank."""
    world_size: int
    held: tuple[Version, ...] = ()
    """Every version that this node holds some of in memory: positions of other versions are not
    needed any more."""


DataCall = DatasetOpen | ShardsTake | ShardsAdd | ShardsGrown
"""What a worker asks the ledger of shards."""
DataAnswer = DatasetOpened | ShardsTaken
