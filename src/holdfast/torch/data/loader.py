# SPDX-License-Identifier: Apache-2.0
"""A DataLoader for training in worlds that change their size.

It counts the batches that it hands out, not those that its workers fetch ahead, and moves the
sampler's position accordingly. Batch size and number of workers can be changed while it runs: it
drops what was fetched ahead and starts again at the position. So nothing is polled, and no file is
shared between ranks.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from holdfast.model.errors import UsageError
from holdfast.torch.data.sampler import ElasticDistributedSampler

Batch = TypeVar("Batch")

FOR_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout")
"""Options that torch refuses for a loader without workers."""


@dataclass(frozen=True, slots=True)
class Share:
    """The samples that one rank puts through the model in one pass of a step."""

    places: range
    """Places in the order of the epoch."""
    weight: float
    """The factor for the mean loss of the batch. The mean of these products over the ranks, summed
    over the passes, is the mean loss of all samples of the step."""
    end: int | None
    """The position after the step, if this is its last pass."""


def shares(start: int, end: int, batch_size: int, rank: int, world_size: int) -> list[Share]:
    """One rank's share of the step that trains the places from `start` to before `end`.

    All ranks have the same number of passes. A rank without a sample for a pass takes the first
    sample of the step, with the weight 0, so that it can take part in the collectives of the
    others.
    """
    own = range(start + rank, end, world_size)
    most = -(-(end - start) // world_size)
    passes = -(-most // batch_size)
    found = []
    for number in range(passes):
        places = own[number * batch_size : (number + 1) * batch_size]
        weight = len(places) * world_size / (end - start)
        stop = end if number == passes - 1 else None
        found.append(Share(places or range(start, start + 1), weight, stop))
    return found


class ElasticDataLoader(Generic[Batch]):
    """Batches of one rank. Its state has the sampler's, and the settings changed at run time."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        sampler: ElasticDistributedSampler | None = None,
        num_workers: int = 0,
        **options: Any,
    ) -> None:
        """`batch_size` is that of one rank. `options` are further options of torch's DataLoader.

        With the sampler's `drop_last` an incomplete last batch of all ranks together is left out;
        otherwise the sampler pads the last batch.
        """
        if isinstance(dataset, IterableDataset):
            raise UsageError("an IterableDataset has no order that a sampler could deal")
        if sampler is None:
            sampler = ElasticDistributedSampler(len(dataset))  # type: ignore[arg-type]
        self.sampler = sampler
        self.batch_size = _checked(batch_size, 1, "a batch size")
        self.num_workers = _checked(num_workers, 0, "a number of workers")
        self.global_batch: int | None = None
        """Set by the ElasticTrainer that gives this loader's batches out."""
        self._tuned: dict[str, int] = {}
        self._changes = 0
        self._dataset = dataset
        # Torch's default would draw from the training's random numbers each time it begins.
        self._generator = torch.Generator()
        self._options = {"generator": self._generator, **options}
        self._upcoming = _Upcoming()
        self._fetcher: DataLoader[Batch] | None = None

    def set_batch_size(self, batch_size: int) -> None:
        """Takes effect from the next batch on (of ElasticTrainer: from the next step on).

        Call it at the same batch on every rank, unless ElasticTrainer keeps the global batch.
        """
        self.batch_size = self._tuned["batch_size"] = _checked(batch_size, 1, "a batch size")
        self._changes += 1

    def set_workers(self, num_workers: int) -> None:
        """Takes effect from the next batch on; each rank may have its own number."""
        _checked(num_workers, 0, "a number of workers")
        self.num_workers = self._tuned["num_workers"] = num_workers
        self._changes += 1
        self._fetcher = None

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the rest of the epoch, the same number and size on every rank.

        A batch counts as trained when it is handed out: save after the step that it is for.
        """
        if self.global_batch is not None:
            raise UsageError("these batches have weights: take them from trainer.steps()")
        for share, batch in self._fetched(self._equal_shares):
            assert share.end is not None
            self.trained(share.end)
            yield batch

    def __len__(self) -> int:
        """How many batches are left in this epoch."""
        return self.steps_in(self.sampler.length - self.sampler.position)

    def shares(self) -> Iterator[tuple[Share, Batch]]:
        """This rank's shares of the rest of the epoch, in steps of `global_batch` samples.

        The caller calls `trained` when a step is done.
        """
        return self._fetched(self._weighted_shares)

    def trained(self, end: int) -> None:
        """A step is done; the position is now `end`."""
        self.sampler.seek(self.sampler.epoch, end, self._at_least())

    def steps_in(self, samples: int) -> int:
        """How many steps `samples` samples make."""
        whole, rest = divmod(samples, self._step())
        return whole + (rest > 0 and not self.sampler.drop_last)

    def state_dict(self) -> dict[str, Any]:
        """The same on every rank, except for settings that were changed on it."""
        return {"sampler": self.sampler.state_dict(), "tuned": dict(self._tuned)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was saved. Other settings stay as the script has them."""
        self.sampler.load_state_dict(state_dict["sampler"])
        if "batch_size" in state_dict["tuned"]:
            self.set_batch_size(state_dict["tuned"]["batch_size"])
        if "num_workers" in state_dict["tuned"]:
            self.set_workers(state_dict["tuned"]["num_workers"])
        self._changes += 1
        self._leave_remainder()

    # ---- planning -------------------------------------------------------------------------------

    def _step(self) -> int:
        """How many samples all ranks together train in one step."""
        return self.global_batch or self.batch_size * self.sampler.num_replicas

    def _at_least(self) -> int:
        """The number of samples that a further step of the epoch needs."""
        if not self.sampler.drop_last:
            return 1
        if self.sampler.length < self._step():
            raise UsageError(
                f"drop_last leaves nothing of {self.sampler.length} samples "
                f"in steps of {self._step()}"
            )
        return self._step()

    def _steps(self) -> Iterator[tuple[int, int]]:
        """The positions before and after each step that is left in this epoch."""
        length, step = self.sampler.length, self._step()
        for start in range(self.sampler.position, length - self._at_least() + 1, step):
            yield start, min(start + step, length)

    def _equal_shares(self) -> Iterator[Share]:
        places, size = self.sampler.places(self.sampler.position), self.batch_size
        for number, (_, end) in enumerate(self._steps()):
            yield Share(places[number * size : (number + 1) * size], 1.0, end)

    def _weighted_shares(self) -> Iterator[Share]:
        rank, world_size, size = self.sampler.rank, self.sampler.num_replicas, self.batch_size
        for start, end in self._steps():
            yield from shares(start, end, size, rank, world_size)

    def _leave_remainder(self) -> None:
        """Go to the next epoch if the rest of this one is too short for a step."""
        self.trained(self.sampler.position)

    # ---- fetching -------------------------------------------------------------------------------

    def _fetched(self, plan: Callable[[], Iterator[Share]]) -> Iterator[tuple[Share, Batch]]:
        """The plan with a batch for each share; a change leads to a new plan, between steps."""
        epoch = self.sampler.epoch
        self._leave_remainder()
        while self.sampler.epoch == epoch:
            changes = self._changes
            planned, ahead = itertools.tee(plan())
            self._upcoming.lists = self.sampler.order().lists(share.places for share in ahead)
            self._generator.manual_seed(self._workers_seed())
            for share, batch in zip(planned, self._torch_loader(), strict=True):
                yield share, batch
                if share.end is not None and self._changes != changes:
                    self._leave_remainder()
                    break
            else:
                return

    def _workers_seed(self) -> int:
        """A different seed for each rank and each start, independent of everything before."""
        sampler = self.sampler
        facts = (sampler.seed, sampler.epoch, sampler.position, sampler.rank)
        return hash(facts) % 2**63

    def _torch_loader(self) -> DataLoader[Batch]:
        if self._fetcher is None:
            left_out = () if self.num_workers else FOR_WORKERS
            options = {name: self._options[name] for name in self._options if name not in left_out}
            self._fetcher = DataLoader(
                self._dataset,
                batch_sampler=self._upcoming,
                num_workers=self.num_workers,
                **options,
            )
        return self._fetcher


class _Upcoming(Iterable[list[int]]):
    """The batches that torch's DataLoader must fetch; it asks each time it begins."""

    def __init__(self) -> None:
        self.lists: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.lists


def _checked(number: int, least: int, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{what} is an integer from {least} on, not {number!r}")
    return number
