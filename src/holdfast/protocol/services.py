# SPDX-License-Identifier: Apache-2.0
"""Which request has which answer: the table that servers, clients and tests read."""

from dataclasses import dataclass

from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m


@dataclass(frozen=True, slots=True)
class Method:
    """One request and the answer it gets when it is not refused."""

    request: type[m.Message]
    answer: type[m.Message]
    mutates: bool
    """Whether repeating it would do something twice: then its idempotency key is remembered."""


METHODS: dict[type[m.Message], Method] = {
    method.request: method
    for method in (
        Method(m.Attach, m.Attached, mutates=False),
        Method(m.WorkersStarted, m.Done, mutates=False),
        Method(m.StoreOffered, m.Done, mutates=False),
        Method(m.Warmed, m.Done, mutates=False),
        Method(m.Beat, m.Done, mutates=False),
        Method(m.WorkersFailed, m.Done, mutates=False),
        Method(m.WorkersDone, m.Done, mutates=False),
        Method(m.Leave, m.Done, mutates=False),
        Method(m.KvSet, m.Done, mutates=True),
        Method(m.KvMultiSet, m.Done, mutates=True),
        Method(m.KvGet, m.Values, mutates=False),
        Method(m.KvWait, m.Done, mutates=False),
        Method(m.KvCheck, m.Number, mutates=False),
        Method(m.KvAdd, m.Number, mutates=True),
        Method(m.KvCompareSet, m.Value, mutates=True),
        Method(m.KvAppend, m.Done, mutates=True),
        Method(m.KvDelete, m.Number, mutates=True),
        Method(m.KvCount, m.Number, mutates=False),
        Method(m.KvKeys, m.Keys, mutates=False),
        Method(m.QueuePush, m.Number, mutates=True),
        Method(m.QueuePop, m.Value, mutates=True),
        Method(m.QueueLength, m.Number, mutates=False),
        Method(m.Barrier, m.Number, mutates=True),
        Method(c.NodeRestore, c.RestorePlan, mutates=False),
        Method(c.PartsLocate, c.PartsLocated, mutates=False),
        Method(c.PersistAsk, c.PersistPlan, mutates=False),
        Method(c.PartsPersisted, c.PersistState, mutates=False),
        Method(c.CommitDone, m.Done, mutates=False),
        Method(c.InventoryTaken, m.Done, mutates=False),
        Method(c.FlushAsk, c.PersistState, mutates=False),
        Method(c.PeersAsk, c.Peers, mutates=False),
        Method(c.Replicated, m.Done, mutates=False),
        Method(c.CopyFailed, c.Peers, mutates=False),
        Method(c.SeriesOpen, m.Done, mutates=False),
        Method(c.SlotReserve, c.SlotsReserved, mutates=False),
        Method(c.SlotAsk, c.SlotGrant, mutates=False),
        Method(c.SlotSealed, m.Done, mutates=False),
        Method(c.SaveFailed, m.Done, mutates=False),
        Method(c.RestoreAsk, c.RestorePlan, mutates=False),
        Method(c.PartsOpen, c.PartsOpened, mutates=False),
        Method(c.PartsClose, m.Done, mutates=False),
        Method(c.PersistWait, c.PersistState, mutates=False),
        Method(c.StepsRemove, m.Done, mutates=False),
        Method(c.PartGet, c.PartBytes, mutates=False),
        Method(c.PartPut, c.PartWanted, mutates=False),
        Method(d.DatasetOpen, d.DatasetOpened, mutates=False),
        Method(d.ShardsTake, d.ShardsTaken, mutates=True),
        Method(d.ShardsAdd, m.Done, mutates=False),
        Method(d.ShardsGrown, m.Done, mutates=False),
        Method(d.DataMarked, m.Done, mutates=False),
        Method(m.Observe, m.Observed, mutates=False),
        Method(m.StopJob, m.Done, mutates=False),
        Method(m.Parting, m.Done, mutates=False),
    )
}

FROM_WORKERS: frozenset[type[m.Message]] = frozenset(
    request
    for request in METHODS
    if request.__name__.startswith(("Kv", "Queue", "Shards"))
    or request in (m.Barrier, d.DatasetOpen)
)
"""What an agent relays for its workers; anything else from a worker is refused."""
