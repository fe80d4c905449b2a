# SPDX-License-Identifier: Apache-2.0
"""tf.data on DataShards: batches that count when the training gets them.

tf.data reads ahead in its own threads, so the samples that its generator has handed out are not
those that the model has seen. `ShardedDataset` keeps the two apart: it remembers the origin of
every batch in the shards, and marks a batch as consumed only when the training loop gets it.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from holdfast.client.data.holdings import Claims, Holdings
from holdfast.client.data.parts import Part
from holdfast.client.data.samples import samples
from holdfast.client.data.shards import DataShards
from holdfast.model.errors import HoldfastError, UsageError

__all__ = ["ShardedDataset"]


class ShardedDataset:
    """The batches of DataShards, through a tf.data pipeline.

    for epoch in shards.epochs():
        for batch in dataset:
            ...
    """

    def __init__(
        self,
        shards: DataShards,
        read: Callable[[Any], Any],
        *,
        batch_size: int,
        output_signature: Any,
        transform: Callable[..., Any] | None = None,
        prefetch: int = 2,
    ) -> None:
        """`read` makes a sample of a record number or of a line. For streams and listed shards it
        gets the part, and yields the samples from `part.given` to `part.end`.

        `output_signature` describes a sample: a tf.TensorSpec or a structure of them. `transform`
        gets a whole batch as tensors, like the function of `Dataset.map`, on several threads.
        `prefetch`: the number of finished batches that wait for the training.
        """
        if batch_size < 1:
            raise UsageError(f"a batch has 1 sample at least, not {batch_size}")
        self.shards, self._read, self._batch_size = shards, read, batch_size
        self._signature = output_signature
        self._run: _Run | None = None
        dataset = tf.data.Dataset.from_generator(
            self._batches, output_signature=tf.nest.map_structure(_of_batch, output_signature)
        )
        if transform is not None:
            # In order, because a batch is identified by its place in the order.
            dataset = dataset.map(transform, tf.data.AUTOTUNE, deterministic=True)
        self._dataset = dataset.prefetch(prefetch)

    def __iter__(self) -> Iterator[Any]:
        """The batches of the epoch, in more than one run if data come back to this worker."""
        holdings = self.shards.holdings
        epoch = holdings.epoch()
        while holdings.has_more(epoch):
            self._run = run = _Run(holdings, epoch)
            yield from self._counted(run)

    def _counted(self, run: "_Run") -> Iterator[Any]:
        """The batches of one run, each marked as consumed when it is handed out."""
        holdings = self.shards.holdings
        in_hand: Claims = ()
        try:
            for batch in self._dataset:
                claims = run.drawn.popleft()
                if holdings.deliver(claims):
                    in_hand = claims
                    yield batch
                    holdings.finish(in_hand)
                    holdings.report_if_due()
        finally:
            holdings.finish(in_hand)
            run.leave()
        if run.error is not None:
            raise run.error

    def _batches(self) -> Iterator[Any]:
        """tf.data calls this, on its own thread, to begin a run."""
        run = self._run
        assert run is not None
        batch: list[Any] = []
        claims: dict[Part, int] = {}
        try:
            for part, upto, sample in run.samples(self._read):
                batch.append(sample)
                claims[part] = upto
                if len(batch) == self._batch_size:
                    run.drawn.append(list(claims.items()))
                    yield self._stacked(batch)
                    batch, claims = [], {}
        except HoldfastError as error:
            # tf.data would make a text of it. The samples read before it are not lost.
            run.error = error
        if batch:
            run.drawn.append(list(claims.items()))
            yield self._stacked(batch)

    def _stacked(self, batch: list[Any]) -> Any:
        # The type matters: numpy would cut zero bytes off the end of strings.
        return tf.nest.map_structure(
            lambda spec, *values: np.array(values, dtype=spec.dtype.as_numpy_dtype),
            self._signature,
            *batch,
        )


class _Run:
    """One run of the pipeline through the data that this worker can get now."""

    def __init__(self, holdings: Holdings, epoch: int) -> None:
        self.drawn: deque[Claims] = deque()
        """The origins of the batches that are under way, in their order."""
        self.error: HoldfastError | None = None
        """Why the run ended early."""
        self._holdings, self._epoch, self._term = holdings, epoch, holdings.term
        #: tf.data's thread takes parts until the training leaves, which may be at any moment.
        self._lock = threading.Lock()
        self._is_left = False
        self._parts: list[Part] = []

    def samples(self, read: Callable[[Any], Any]) -> Iterator[tuple[Part, int, Any]]:
        """The part of each sample, how far it is consumed with it, and the sample."""
        while (part := self._next_part()) is not None:
            upto, begin, end = part.given, part.given, part.end
            for upto, sample in samples(self._holdings.dataset, part, read):
                if self._is_over():
                    return
                yield part, upto, sample
                if part.is_wanted:
                    self._holdings.share(part, upto)
                if upto >= part.end < end:
                    break  # The tail belongs to another worker now.
            if upto == begin:
                # No line begins in this part: no batch would ever report it.
                self._holdings.finish([(part, part.end)])

    def _is_over(self) -> bool:
        """A run ends when the position jumps: a batch must not mix two positions."""
        return self._is_left or self._term != self._holdings.term

    def _next_part(self) -> Part | None:
        if self._is_over():
            return None
        # Never waits: the data it would wait for may be in batches that are not handed out yet.
        part = self._holdings.next_part(self._epoch, wait=False)
        if part is None:
            return None
        with self._lock:
            if self._is_over():
                self._holdings.put_back([part])
                return None
            self._parts = [known for known in self._parts if known.given < known.end]
            self._parts.append(part)
            return part

    def leave(self) -> None:
        """Leave samples without a delivered batch, and the rest, to the next run."""
        with self._lock:
            self._is_left = True
            self._holdings.put_back(part for part in self._parts if part.given < part.end)


def _of_batch(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Any number of samples: the last batch of an epoch may be smaller."""
    return tf.TensorSpec([None, *spec.shape], spec.dtype)
