# SPDX-License-Identifier: Apache-2.0
"""The data loader. Its batch size is changed by a call, not by a file."""

from typing import Any

from torch.utils.data import Dataset

from dlrover import _refused
from holdfast.torch import ElasticDataLoader as HoldfastLoader
from holdfast.torch import ElasticDistributedSampler

__getattr__ = _refused.missing(__name__)


class ElasticDataLoader(HoldfastLoader[Any]):
    """Takes the arguments of torch's DataLoader in their order."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int = 1,
        shuffle: bool = False,
        sampler: ElasticDistributedSampler | None = None,
        *,
        drop_last: bool = False,
        config_file: str | None = None,
        **options: Any,
    ) -> None:
        if config_file is not None:
            _refused.refuse(
                f"{__name__}.ElasticDataLoader(config_file=...)",
                "nothing is tuned through a file; call update_batch_size",
            )
        if sampler is None:
            sampler = ElasticDistributedSampler(
                len(dataset),  # type: ignore[arg-type]
                shuffle=shuffle,
                drop_last=drop_last,
            )
        elif not isinstance(sampler, ElasticDistributedSampler):
            _refused.refuse(
                f"{__name__}.ElasticDataLoader(sampler={type(sampler).__name__})",
                "its position is kept by an ElasticDistributedSampler only",
            )
        super().__init__(dataset, batch_size, sampler=sampler, **options)

    def update_batch_size(self, batch_size: int) -> None:
        """Takes effect from the next batch on; call it on every rank at the same batch."""
        self.set_batch_size(batch_size)

    def get_batch_size(self) -> int:
        return self.batch_size

    def load_config(self, config_file: str | None = None) -> None:
        """Refused: there is no such file."""
        _refused.refuse(
            f"{__name__}.ElasticDataLoader.load_config",
            "nothing is tuned through a file; call update_batch_size",
        )
