# SPDX-License-Identifier: Apache-2.0
"""Ray Data reads and transforms, the ledger deals out: each shard is a small Ray dataset.

Ray Data plans all its reading ahead and repeats what failed, so it cannot say which samples a model
has seen. Here every worker takes one shard after another from the ledger, when it needs the next,
and only the work on that shard goes to the Ray cluster. What Ray reads ahead does not count.
"""

from collections.abc import Callable, Iterator
from typing import Any

import ray.data

from holdfast.client.data import DataShards, Part
from holdfast.model.dataset import LISTED
from holdfast.model.errors import UsageError

__all__ = ["Batch", "ray_batches"]

Batch = dict[str, Any]
"""Columns by name, as numpy arrays."""
Rows = Callable[[Part], ray.data.Dataset]


def ray_batches(
    shards: DataShards, rows: Rows, batch_size: int, *, wait: bool = True
) -> Iterator[Batch | None]:
    """The batches of the epoch; the last one of a shard may be smaller.

    `rows` makes the Ray dataset of a whole listed shard: a row for each sample, in the same order
    whenever it is made. With `wait=False`, for ranks that make every step together, it yields None
    when there is nothing for this rank now.
    """
    if shards.dataset.kind != LISTED:
        raise UsageError(f"{shards.dataset.name!r} has no listed shards, which Ray Data could read")
    holdings = shards.holdings
    epoch = holdings.epoch()
    while True:
        part = holdings.next_part(epoch, wait=wait)
        if part is not None:
            yield from _counted(shards, part, _batches(part, rows, batch_size))
        elif wait or holdings.epoch() != epoch:
            return
        else:
            yield None


def _counted(
    shards: DataShards, part: Part, batches: Iterator[tuple[int, Batch]]
) -> Iterator[Batch]:
    """Report each batch as consumed when it is handed out, and as finished after that."""
    holdings = shards.holdings
    try:
        for upto, batch in batches:
            if not holdings.deliver([(part, upto)]):
                return  # The position jumped: this batch is not the next one any more.
            yield batch
            holdings.finish([(part, upto)])
            holdings.report_if_due()
            if part.is_wanted:
                holdings.share(part, upto)
    finally:
        holdings.finish([(part, part.given)])
        holdings.put_back([part] if part.given < part.end else [])


def _batches(part: Part, rows: Rows, batch_size: int) -> Iterator[tuple[int, Batch]]:
    """The rest of a part, batch by batch, each with the position up to which it is consumed."""
    begin, upto = part.given, 0
    dataset = rows(part)
    # A sample is identified by its place in the shard; another reader of the rest relies on that.
    dataset.context.execution_options.preserve_order = True
    for batch in dataset.limit(part.end).iter_batches(batch_size=batch_size, batch_format="numpy"):
        first, upto = upto, min(part.end, upto + len(next(iter(batch.values()))))
        if upto > begin:
            rest = slice(max(0, begin - first), upto - first)
            yield upto, {name: column[rest] for name, column in batch.items()}
        if upto == part.end:
            return
    if upto < part.end:
        raise UsageError(f"the Ray dataset of {part} has {upto} rows only")
