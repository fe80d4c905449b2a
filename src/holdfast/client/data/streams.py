# SPDX-License-Identifier: Apache-2.0
"""StreamShards: training on the records of a stream while it is being written.

reader = NatsReader("nats://broker:4222", ["clicks-0", "clicks-1"])
stream = StreamShards("clicks", reader, shard_size=500, checkpointer=checkpointer)
for records in stream.read(32):
    ...
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from holdfast.client.data.errands import CLOSE_S
from holdfast.client.data.holdings import Holdings
from holdfast.client.data.ledgers import Ledger
from holdfast.client.data.parts import Part
from holdfast.client.data.shards import DataShards, Follows
from holdfast.model.dataset import TRAIN
from holdfast.model.errors import FencedError, HoldfastError, TimedOutError, UsageError
from holdfast.ports import StreamReader
from holdfast.runtime.settings import worker_place

__all__ = ["Record", "StreamShards"]

WATCH_S = 60.0
"""A quiet stream is looked at again after this."""
PATIENCE_S = 0.1
"""How long ranks that step together wait for records before they step without any."""

log = logging.getLogger(__name__)


class Record(NamedTuple):
    """One record of a stream."""

    partition: str
    offset: int
    data: bytes


class StreamShards(DataShards):
    """The records of a stream for this worker: each goes to one worker only.

    A shard is dealt when all its records are written. Rank 0 watches the stream and tells the
    ledger how far that is; the ledger remembers it, whatever dies.
    """

    def __init__(
        self,
        name: str,
        reader: StreamReader,
        *,
        begin: Mapping[str, int] | None = None,
        end: Mapping[str, int] | None = None,
        shard_size: int = 1000,
        task: str = TRAIN,
        checkpointer: Follows | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """`begin`: the first offset of partitions that are not read from their very first record.

        `end`: the offset after the last one of partitions that end. Both must be the same in every
        rank, and again when the training goes on from a checkpoint.
        """
        begins = dict.fromkeys(reader.partitions(), reader.origin)
        ends = dict.fromkeys(reader.partitions())
        for given, known in ((begin or {}, begins), (end or {}, ends)):
            if unknown := given.keys() - known.keys():
                raise UsageError(f"{name!r} has no partition {sorted(unknown)[0]!r}")
            known.update(given)
        super().__init__(
            name,
            partitions={partition: (begins[partition], ends[partition]) for partition in begins},
            grows=True,
            shard_size=shard_size,
            task=task,
            checkpointer=checkpointer,
            ledger=ledger,
        )
        self._reader = reader
        self._is_closed = False
        self._watcher: threading.Thread | None = None
        if worker_place().rank == 0:
            # One process of a world is enough.
            self._watcher = threading.Thread(
                target=self._watch, name=f"holdfast-stream-{name}", daemon=True
            )
            self._watcher.start()

    def read(self, size: int, *, wait: bool = True) -> Iterator[list[Record]]:
        """The records in batches of this size, each from one shard; its last one may be smaller.

        Without an end it goes on for ever. With `wait=False`, for ranks that make every step
        together: an empty batch when there is nothing for this rank now.
        """
        if size < 1:
            raise UsageError(f"a batch has 1 record at least, not {size}")
        holdings = self._here()
        while holdings.epoch() < self.dataset.epochs:
            part = holdings.next_part(0, wait=wait, hold_s=PATIENCE_S)
            if part is not None:
                yield from self._batches(holdings, part, size)
            elif not wait:
                yield []

    def _batches(self, holdings: Holdings, part: Part, size: int) -> Iterator[list[Record]]:
        at, in_hand = part.given, list[tuple[Part, int]]()
        rows = self._reader.read(part.name, at, part.end)
        try:
            while at < part.end:
                rest = islice(rows, min(size, part.end - at))
                records = [Record(part.name, at + n, data) for n, data in enumerate(rest)]
                at += len(records)
                if not holdings.deliver([(part, at)]):
                    return
                in_hand = [(part, at)]
                yield records
                self._here().finish(in_hand)
                holdings.report_if_due()
                if part.is_wanted:
                    holdings.share(part, at)
        finally:
            rows.close()
            holdings.finish(in_hand)
            holdings.put_back([part] if part.given < part.end else [])

    def close(self) -> None:
        """Give back what is not read, and leave the broker: the reader is closed too."""
        self._is_closed = True
        super().close()
        self._reader.close()
        if self._watcher is not None:
            self._watcher.join(CLOSE_S)

    # ---- how far the stream is written ----------------------------------------------------------

    def _watch(self) -> None:
        try:
            self.holdings.open()
            self._tell_growth()
        except FencedError:
            pass  # The world of this process is over: readers are told the same.
        except HoldfastError as error:
            if not self._is_closed:
                self.holdings.abort(error)

    def _tell_growth(self) -> None:
        ends = {extent.name: extent.begin for extent in self.dataset.extents}
        while not self._is_closed and (awaited := self._next_shards(ends)):
            try:
                ends = self._reader.wait_until(awaited, WATCH_S)
            except TimedOutError as late:
                log.warning("%r: %s", self.dataset.name, late)
            else:
                written = [ends[extent.name] for extent in self.dataset.extents]
                self.ledger.grow(self.dataset.name, written)

    def _next_shards(self, ends: Mapping[str, int]) -> dict[str, int]:
        """For each partition, where the next shard ends that is not written to its end."""
        found: dict[str, int] = {}
        for extent in self.dataset.extents:
            written, size = ends[extent.name] - extent.begin, self.dataset.shard_size
            awaited = (max(written, 0) // size + 1) * size
            if extent.size >= 0:
                awaited = min(awaited, extent.size)
            if awaited > written:
                found[extent.name] = extent.begin + awaited
        return found
