# SPDX-License-Identifier: Apache-2.0
"""Shards of a dataset from the job's ledger, reported by the script itself."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dlrover import _refused
from holdfast.client.data import DataShards, Part
from holdfast.client.data.ledgers import OwnLedger
from holdfast.client.data.parts import records

__getattr__ = _refused.missing(__name__)


@dataclass(frozen=True)
class Shard:
    """The records from `start` to before `end`; or, shuffled by record, the listed ones."""

    name: str
    start: int
    end: int
    record_indices: list[int] = field(default_factory=list)


class ShardingClient(_refused.Named):
    """Takes shards one by one; a record is done when it is reported.

    At the end of an epoch, records that this process has fetched and not reported count as done
    when it asks for more: the next epoch begins when this one is over.
    """

    def __init__(
        self,
        dataset_name: str,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        task_type: str = "training",
        num_minibatches_per_shard: int = 10,
        storage_type: str = "",
    ) -> None:
        if task_type.lower() != "training":
            _refused.refuse(
                f"{__name__}.ShardingClient(task_type={task_type!r})",
                "shards are of one kind, for training",
            )
        if storage_type not in ("", "table", "text"):
            _refused.refuse(
                f"{__name__}.ShardingClient(storage_type={storage_type!r})",
                "use holdfast.client.data.StreamShards for a stream",
            )
        order = "samples" if storage_type == "text" else "shards"
        self._batch_size, self._size, self._epochs = batch_size, dataset_size, num_epochs
        self.shards = DataShards(
            dataset_name,
            size=dataset_size,
            shard_size=batch_size * num_minibatches_per_shard,
            epochs=num_epochs,
            shuffle=order if shuffle else "none",
        )
        """Holdfast's own object, for features beyond this interface."""
        self._pending: deque[Part] = deque()

    def fetch_shard(self) -> Shard | None:
        """The next shard for this process; None when all epochs are over."""
        part = self._next_part()
        if part is None:
            return None
        self._pending.append(part)
        dataset, indices = self.shards.dataset, list[int]()
        if dataset.shuffle == "samples":
            indices = records(dataset, part.epoch, part.begin, part.end).tolist()
        return Shard(dataset.name, part.begin, part.end, indices)

    def _next_part(self) -> Part | None:
        holdings = self.shards.holdings
        for epoch in self.shards.epochs():
            part = holdings.next_part(epoch, wait=not self._pending)
            if part is None and self._pending:
                holdings.finish([(pending, pending.end) for pending in self._pending])
                self._pending.clear()
                part = holdings.next_part(epoch, wait=True)
            if part is not None:
                return part
        return None

    def report_batch_done(
        self,
        batch_size: int | None = None,
        err_msg: str = "",
        task_ids: Sequence[int] = (),
    ) -> bool:
        """Report `batch_size` records as done, in the order in which they were fetched.

        Returns whether that completed a shard. With `err_msg` the rest of the oldest shard has
        failed, and another worker tries it.
        """
        if task_ids:
            _refused.refuse(
                f"{__name__}.ShardingClient.report_batch_done(task_ids=...)",
                "shards are reported in the order in which they were fetched",
            )
        if err_msg and self._pending:
            self.shards.failed(self._pending.popleft(), err_msg)
            return False
        left, is_completed = batch_size or self._batch_size, False
        while self._pending and left > 0:
            part = self._pending[0]
            upto = min(part.end, part.given + left)
            left -= upto - part.given
            self.shards.holdings.finish([(part, upto)])
            if upto == part.end:
                self._pending.popleft()
                is_completed = True
        self.shards.holdings.report_if_due()
        return is_completed

    def get_shard_checkpoint(self) -> str:
        """The data position, in a process without an agent."""
        self._expect_own("get_shard_checkpoint")
        return json.dumps(self.shards.state_dict())

    def restore_shard_from_checkpoint(self, checkpoint: str) -> None:
        """Go back to a saved position."""
        self._expect_own("restore_shard_from_checkpoint")
        self._pending.clear()
        self.shards.load_state_dict(json.loads(checkpoint))

    def reset_dataset(self) -> None:
        """Refused."""
        _refused.refuse(
            f"{__name__}.ShardingClient.reset_dataset", "make a client with another dataset name"
        )

    def get_current_epoch(self) -> int:
        return self.shards.holdings.epoch()

    def get_minibatch_count_per_epoch(self) -> int:
        return self._size // self._batch_size

    def get_total_sample_num(self) -> int:
        return self._size * self._epochs

    def close(self) -> None:
        """Give back the records that are not done."""
        self.shards.close()

    def _expect_own(self, method: str) -> None:
        if not isinstance(self.shards.ledger, OwnLedger):
            _refused.refuse(
                f"{__name__}.ShardingClient.{method} under `holdfast run`",
                "the master keeps the position; DataShards(checkpointer=...) ties it to the model",
            )


class IndexShardingClient(ShardingClient):
    """Gives out record numbers one by one."""

    def __init__(
        self,
        dataset_name: str,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        task_type: str = "training",
        num_minibatches_per_shard: int = 10,
        storage_type: str = "",
        num_workers: int = 1,
    ) -> None:
        # `num_workers` was how many end marks a queue needs; here there is no queue.
        super().__init__(
            dataset_name,
            batch_size,
            num_epochs,
            dataset_size,
            shuffle,
            task_type,
            num_minibatches_per_shard,
            storage_type,
        )
        self._indices: Iterator[int] = iter(())

    def fetch_sample_index(self) -> int:
        """The next record number; StopIteration when all epochs are over."""
        index = next(self._indices, None)
        if index is None:
            shard = self.fetch_shard()
            if shard is None:
                raise StopIteration
            self._indices = iter(shard.record_indices or range(shard.start, shard.end))
            index = next(self._indices)
        return index
