# SPDX-License-Identifier: Apache-2.0
"""Requests, as one table: what each is answered, who may send it, and who answers it.

The agent's relay, the master's service and the simulator decide by this table. A new request is its
message (and its name in the union of its family, in the same file), its row here, the code that
answers it and the method of a client. Which event of the core a request becomes stands above this
package, in core/job/requests.py: by families, so that a new member needs no line there.
"""

from dataclasses import dataclass
from enum import Enum, Flag, auto

from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m


class Sender(Flag):
    """Who may send a request."""

    WORKER = auto()
    """A process of a node, to its agent, which passes on to the master what the vault does not
    answer."""
    AGENT = auto()
    """An agent: to the master, which has admitted it, or to another agent."""
    ANYONE = auto()
    """A process with the token, to the master, whether or not it is an agent: tools, and agents
    that are not admitted yet."""


class Answerer(Enum):
    """Who answers a request."""

    CORE = auto()
    """The core of the master: core/job/requests.py makes an event of it."""
    SERVICE = auto()
    """The master beside its core: master/service.py."""
    VAULT = auto()
    """The vault of the worker's agent: agent/vault/vault.py."""
    PEER = auto()
    """The byte service of another agent: checkpoint/peer_server.py."""


@dataclass(frozen=True, slots=True)
class Method:
    """One request, and the answer that it gets when it is not refused."""

    request: type[m.Message]
    answer: type[m.Message]
    senders: Sender
    answerer: Answerer
    mutates: bool = False
    """Whether repeating it would do something twice: then its idempotency key is remembered."""


_WORKER, _AGENT, _ANYONE = Sender.WORKER, Sender.AGENT, Sender.ANYONE
# Keys, queues and barriers: tools and tests use them without an agent, too. Leases of data go back
# when their node is lost: only workers of admitted nodes get some.
_STORE = _WORKER | _ANYONE
_CORE, _SERVICE = Answerer.CORE, Answerer.SERVICE
_VAULT, _PEER = Answerer.VAULT, Answerer.PEER

METHODS: dict[type[m.Message], Method] = {
    method.request: method
    for method in (
        Method(m.Attach, m.Attached, _ANYONE, _CORE),
        Method(m.WorkersStarted, m.Done, _AGENT, _CORE),
        Method(m.StoreOffered, m.Done, _AGENT, _CORE),
        Method(m.Warmed, m.Done, _AGENT, _CORE),
        Method(m.Beat, m.Done, _AGENT, _SERVICE),
        Method(m.WorkersFailed, m.Done, _AGENT, _CORE),
        Method(m.WorkersDone, m.Done, _AGENT, _CORE),
        Method(m.Leave, m.Done, _AGENT, _CORE),
        Method(m.KvSet, m.Done, _STORE, _CORE, mutates=True),
        Method(m.KvMultiSet, m.Done, _STORE, _CORE, mutates=True),
        Method(m.KvGet, m.Values, _STORE, _CORE),
        Method(m.KvWait, m.Done, _STORE, _CORE),
        Method(m.KvCheck, m.Number, _STORE, _CORE),
        Method(m.KvAdd, m.Number, _STORE, _CORE, mutates=True),
        Method(m.KvCompareSet, m.Value, _STORE, _CORE, mutates=True),
        Method(m.KvAppend, m.Done, _STORE, _CORE, mutates=True),
        Method(m.KvDelete, m.Number, _STORE, _CORE, mutates=True),
        Method(m.KvCount, m.Number, _STORE, _CORE),
        Method(m.KvKeys, m.Keys, _STORE, _CORE),
        Method(m.QueuePush, m.Number, _STORE, _CORE, mutates=True),
        Method(m.QueuePop, m.Value, _STORE, _CORE, mutates=True),
        Method(m.QueueLength, m.Number, _STORE, _CORE),
        Method(m.Barrier, m.Number, _STORE, _CORE, mutates=True),
        Method(c.NodeRestore, c.RestorePlan, _AGENT, _CORE),
        Method(c.PartsLocate, c.PartsLocated, _AGENT, _CORE),
        Method(c.PersistAsk, c.PersistPlan, _AGENT, _CORE),
        Method(c.PartsPersisted, c.PersistState, _AGENT, _CORE),
        Method(c.CommitDone, m.Done, _AGENT, _CORE),
        Method(c.InventoryTaken, m.Done, _AGENT, _CORE),
        Method(c.FlushAsk, c.PersistState, _AGENT, _CORE),
        Method(c.PeersAsk, c.Peers, _AGENT, _CORE),
        Method(c.Replicated, m.Done, _AGENT, _CORE),
        Method(c.CopyFailed, c.Peers, _AGENT, _CORE),
        Method(c.SeriesOpen, m.Done, _WORKER, _VAULT),
        Method(c.SlotReserve, c.SlotsReserved, _WORKER, _VAULT),
        Method(c.SlotAsk, c.SlotGrant, _WORKER, _VAULT),
        Method(c.SlotSealed, m.Done, _WORKER, _VAULT),
        Method(c.SaveFailed, m.Done, _WORKER, _VAULT),
        Method(c.RestoreAsk, c.RestorePlan, _WORKER, _VAULT),
        Method(c.PartsOpen, c.PartsOpened, _WORKER, _VAULT),
        Method(c.PartsClose, m.Done, _WORKER, _VAULT),
        Method(c.PersistWait, c.PersistState, _WORKER, _VAULT),
        Method(c.StepsRemove, m.Done, _WORKER, _VAULT),
        Method(c.PartGet, c.PartBytes, _AGENT, _PEER),
        Method(c.PartPut, c.PartWanted, _AGENT, _PEER),
        Method(d.DatasetOpen, d.DatasetOpened, _WORKER, _CORE),
        Method(d.ShardsTake, d.ShardsTaken, _WORKER, _CORE, mutates=True),
        Method(d.ShardsAdd, m.Done, _WORKER, _CORE),
        Method(d.ShardsGrown, m.Done, _WORKER, _CORE),
        Method(d.DataMarked, m.Done, _AGENT, _CORE),
        Method(m.Observe, m.Observed, _ANYONE, _SERVICE),
        Method(m.HistoryAsk, m.History, _ANYONE, _SERVICE),
        Method(m.StopJob, m.Done, _ANYONE, _CORE),
        Method(m.Parting, m.Done, _AGENT, _SERVICE),
    )
}


def may_send(sender: Sender, body: m.Message) -> bool:
    """Whether `body` is a request, and one that this sender may send."""
    method = METHODS.get(type(body))
    return method is not None and sender in method.senders
