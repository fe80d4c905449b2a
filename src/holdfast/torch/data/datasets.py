# SPDX-License-Identifier: Apache-2.0
"""torch's DataLoader on DataShards: batches that count when the training gets them.

A DataLoader with worker processes reads ahead, so the samples that its sampler or its dataset has
handed out are not those that the model has seen. `ShardedLoader` keeps the two apart: every batch
comes with its origin in the shards, and is marked as consumed only when the training loop gets it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
    default_collate,
    get_worker_info,
)

from holdfast.client.data.holdings import Claims, Holdings
from holdfast.client.data.ledgers import OwnLedger, connect_ledger
from holdfast.client.data.parts import Part
from holdfast.client.data.reading import Reader
from holdfast.client.data.samples import samples
from holdfast.client.data.shards import DataShards
from holdfast.model.dataset import RANGE
from holdfast.model.errors import UsageError

__all__ = ["ShardedIterableDataset", "ShardedLoader", "ShardedMapDataset", "in_step"]

_END: Any = object()


class Indexed(Protocol):
    """A dataset whose records have numbers."""

    def __getitem__(self, index: int, /) -> Any: ...


class ShardedMapDataset:
    """The records of a dataset by their numbers: DataShards deals numbers, `dataset[n]` is read.

    The recommended way: the training process deals out the numbers, worker processes only read.
    """

    def __init__(self, dataset: Indexed, shards: DataShards) -> None:
        if shards.dataset.kind != RANGE:
            raise UsageError(
                f"{shards.dataset.name!r} has no record numbers: use ShardedIterableDataset"
            )
        self.dataset, self.shards = dataset, shards


class ShardedIterableDataset(IterableDataset[Any]):
    """Samples of data without record numbers: lines of files, streams, listed shards.

    `load` makes a sample of a record number or of a line. For streams and listed shards it gets the
    part, and yields a sample for each of its offsets, in order. Each worker process of the loader
    takes its own parts.
    """

    def __init__(self, shards: DataShards, load: Callable[[Any], Any]) -> None:
        self.shards, self.load = shards, load

    def __iter__(self) -> Iterator[Any]:
        raise UsageError(
            "a ShardedIterableDataset is read through a ShardedLoader: a plain DataLoader would "
            "count samples as consumed before the training has seen them"
        )


class ShardedLoader:
    """A DataLoader over DataShards; `options` are those of torch's.

    for epoch in shards.epochs():
        for batch in loader:
            ...
    """

    def __init__(
        self,
        dataset: ShardedMapDataset | ShardedIterableDataset,
        *,
        batch_size: int,
        wait: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        """With `wait=False` it yields None when there is nothing for this rank now: see in_step."""
        if batch_size < 1:
            raise UsageError(f"a batch has 1 sample at least, not {batch_size}")
        if not options.get("in_order", True):
            raise UsageError("batches that come out of order cannot be counted: leave in_order on")
        for taken in ("sampler", "batch_sampler", "shuffle", "drop_last"):
            if taken in options:
                raise UsageError(f"{taken} has no place here: DataShards decides what is read")
        self.shards, self._waits = dataset.shards, wait
        self._way: _ByNumber | _InParts
        if isinstance(dataset, ShardedMapDataset):
            self._way = _ByNumber(dataset, batch_size, collate_fn, options)
        else:
            self._way = _InParts(dataset, batch_size, collate_fn or default_collate, options)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch, in more than one pass if data come back to this worker."""
        holdings = self.shards.holdings
        epoch = holdings.epoch()
        while True:
            if holdings.has_more(epoch, wait=self._waits):
                yield from self._way.batches(epoch)
            elif self._waits or holdings.epoch() != epoch:
                return
            else:
                yield None


def in_step(batches: Iterable[Any], group: Any = None) -> Iterator[Any]:
    """The batches of this rank, in step with all ranks of the process group.

    It yields None when only other ranks have a batch in this step, and ends on all ranks at once.
    `batches` must not wait: DataShards.batches(..., wait=False) or ShardedLoader(..., wait=False).
    """
    ranks = distributed.get_world_size(group)
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    drawn, is_over = iter(batches), False
    while True:
        batch = _END if is_over else next(drawn, _END)
        is_over = batch is _END
        is_empty = is_over or batch is None or len(batch) == 0
        counts = torch.tensor([not is_empty, is_over], dtype=torch.int64, device=device)
        distributed.all_reduce(counts, group=group)
        having, done = counts.tolist()
        if done == ranks:
            return
        if having:
            yield None if is_empty else batch


class _ByNumber:
    """Draws record numbers in this process; the DataLoader's workers read the records."""

    def __init__(
        self,
        dataset: ShardedMapDataset,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: dict[str, Any],
    ) -> None:
        self._holdings, self._batch_size = dataset.shards.holdings, batch_size
        self._reader: Reader | None = None
        #: The origins of the batches that are under way, in their order.
        self._drawn: deque[Claims] = deque()
        whole: Any = dataset.dataset
        self._loader = DataLoader(
            whole, batch_sampler=_Draws(self._draws), collate_fn=collate_fn, **options
        )

    def _draws(self) -> Iterator[list[int]]:
        assert self._reader is not None
        while True:
            numbers, claims = self._reader.draw(self._batch_size)
            if not claims:
                return
            self._drawn.append(claims)
            yield numbers.tolist()

    def batches(self, epoch: int) -> Iterator[Any]:
        # Never waits: the data it would wait for may be in batches that are not handed out yet.
        self._reader = Reader(self._holdings, epoch, waits=False)
        self._drawn.clear()
        in_hand: Claims = ()
        try:
            loaded = iter(self._loader)
            while (batch := next(loaded, _END)) is not _END:
                claims = self._drawn.popleft()
                if self._holdings.deliver(claims):
                    in_hand = claims
                    yield batch
                    self._holdings.finish(in_hand)
                    self._holdings.report_if_due()
        finally:
            self._holdings.finish(in_hand)
            self._reader.leave()


class _Draws(Sampler[list[int]]):
    """A batch sampler that draws new batches for every pass."""

    def __init__(self, draws: Callable[[], Iterator[list[int]]]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[list[int]]:
        return self._draws()


class _Origin(NamedTuple):
    """The lease that a sample is from. Goes from a worker process to the training process."""

    number: int
    term: int
    begin: int
    end: int


class _Tagged(NamedTuple):
    """A sample, and how far its part is consumed with it."""

    sample: Any
    origin: _Origin
    upto: int


class _InParts:
    """Every worker process takes its own parts; the origins of samples come with the batches."""

    def __init__(
        self,
        dataset: ShardedIterableDataset,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any],
        options: dict[str, Any],
    ) -> None:
        self._holdings = dataset.shards.holdings
        self._has_workers = options.get("num_workers", 0) > 0
        if options.get("persistent_workers"):
            raise UsageError("a ShardedIterableDataset cannot be read by persistent workers")
        if self._has_workers and isinstance(dataset.shards.ledger, OwnLedger):
            raise UsageError(
                "without `holdfast run` worker processes cannot take data on their own: use "
                "num_workers=0 or a ShardedMapDataset"
            )
        self._tagged = _TaggedSamples(self._holdings, dataset.load)
        self._loader = DataLoader(
            self._tagged, batch_size=batch_size, collate_fn=_Collate(collate_fn), **options
        )

    def batches(self, epoch: int) -> Iterator[Any]:
        if self._has_workers:
            self._holdings.give_back_ready()
        self._tagged.epoch = epoch
        adopted: dict[int, Part] = {}
        in_hand: Claims = ()
        loaded: Iterator[Any] = iter(self._loader)
        try:
            while (tagged := next(loaded, None)) is not None:
                batch, uptos = tagged
                claims = self._claims(uptos, adopted)
                if claims and self._holdings.deliver(claims):
                    in_hand = claims
                    yield batch
                    self._holdings.finish(in_hand)
                    self._holdings.report_if_due()
        finally:
            self._holdings.finish(in_hand)
            # The loop ended early: other ranks get the rest of the parts that were begun. The
            # workers give back all further parts when they are told to end, after this.
            self._holdings.release(list(adopted.values()))
            del loaded

    def _claims(self, uptos: dict[_Origin, int], adopted: dict[int, Part]) -> Claims:
        """The claims of a batch; empty if its position is no longer the dataset's."""
        claims: list[tuple[Part, int]] = []
        for origin, upto in uptos.items():
            part = self._holdings.adopt(*origin)
            if part is None:
                return ()
            adopted[origin.number] = part
            claims.append((part, upto))
        for part, upto in claims:
            if upto >= part.end:
                del adopted[part.number]
        return claims


class _Collate:
    """Makes a batch of tagged samples, with how far it goes in each part."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, tagged: list[_Tagged]) -> tuple[Any, dict[_Origin, int]]:
        samples = [one.sample for one in tagged]
        return self._collate_fn(samples), {one.origin: one.upto for one in tagged}


class _TaggedSamples(IterableDataset[_Tagged]):
    """Reads one part after another, in a worker process or in the training process."""

    def __init__(self, holdings: Holdings, load: Callable[[Any], Any]) -> None:
        self.epoch = 0
        self._described, self._load = holdings.dataset, load
        self._holdings: Holdings | None = holdings

    def __getstate__(self) -> dict[str, Any]:
        """For a spawned worker process: what this process holds stays here."""
        return {**self.__dict__, "_holdings": None}

    def __iter__(self) -> Iterator[_Tagged]:
        if get_worker_info() is not None:
            yield from self._in_worker()
        elif self._holdings is not None:
            while (part := self._holdings.next_part(self.epoch, wait=False)) is not None:
                yield from self._samples(self._holdings, part)

    def _in_worker(self) -> Iterator[_Tagged]:
        holdings = Holdings(
            connect_ledger(), self._described, prefetch=1, report_every_s=float("inf")
        )
        taken: list[tuple[int, int]] = []
        try:
            while (part := holdings.next_part(self.epoch, wait=False)) is not None:
                taken.append((part.number, part.begin))
                yield from self._samples(holdings, part)
                holdings.hand_on(part)
        except GeneratorExit:
            # The training has left the loop: it has reported what it got, the rest goes back.
            holdings.give_back_leases(taken)
            raise
        finally:
            holdings.close()

    def _samples(self, holdings: Holdings, part: Part) -> Iterator[_Tagged]:
        origin = _Origin(part.number, part.term, part.begin, part.end)
        upto = part.begin
        for upto, sample in samples(self._described, part, self._load):
            yield _Tagged(sample, origin, upto)
        if upto == part.begin:
            # No line begins in this part: no batch would ever report it.
            holdings.finish([(part, part.end)])
