# SPDX-License-Identifier: Apache-2.0
"""A sampler for training in worlds that change their size.

An epoch has one order, the same for every rank and every world. The progress of the training in it
is one number: how many samples all ranks together have trained. So any rank's state serves any rank
of any other world.

A DataLoader draws ahead of the training, so the sampler cannot know that number by itself; the
loader must count. ElasticDataLoader and torchdata's StatefulDataLoader do: save their state then.
With a plain DataLoader call `sampler.advance(samples)` after each batch.
"""

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from holdfast.model.errors import UsageError
from holdfast.runtime.settings import worker_place
from holdfast.torch.data.order import AT_ONCE, Order

State = dict[str, Any]


class ElasticDistributedSampler(Sampler[int]):
    """Deals the samples of an epoch to the ranks, from any position on, in any world."""

    def __init__(
        self,
        dataset: Sized | int,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """`dataset` or its length. Rank and world come from torch.distributed or the launcher.

        If the samples do not divide by the ranks, the end of the epoch is padded with the first
        samples of its order or, with `drop_last`, cut off.
        """
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        self.num_replicas, self.rank = _place(num_replicas, rank)
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self._position: int | None = 0
        self._first_epoch = 0
        self._dealt_epoch = -1
        self._is_uncounted = False
        self._was_asked_alone = False
        needed = self.num_replicas if drop_last else 1
        if self.length < needed:
            raise UsageError(
                f"{self.length} samples are too few for {self.num_replicas} ranks"
                f"{' with drop_last' if drop_last else ''}"
            )

    @property
    def position(self) -> int:
        """How many samples of this epoch all ranks together have trained."""
        if self._position is None:
            raise UsageError(
                "the position of the sampler is not known: it was saved by itself while a "
                "DataLoader drew ahead of the training, and nobody called advance()"
            )
        return self._position

    def __iter__(self) -> "SamplerIterator":
        """This rank's samples of the rest of the epoch; of the next epoch if all were dealt."""
        if self.epoch == self._dealt_epoch:
            self.seek(self.epoch + 1, 0)
        self._is_uncounted = False
        return SamplerIterator(self)

    def __len__(self) -> int:
        """How many samples each rank gets from here to the end of the epoch."""
        return len(self.places(self.position))

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch. If it is the present one, the position in it stays."""
        if epoch < self._first_epoch:
            raise UsageError(
                f"the loaded state is in epoch {self._first_epoch}, so epoch {epoch} is over: "
                "begin the loop with range(sampler.epoch, ...)"
            )
        if epoch != self.epoch or epoch == self._dealt_epoch:
            self.seek(epoch, 0)

    def advance(self, samples: int) -> None:
        """This rank, and so every rank, has trained `samples` more samples."""
        if samples < 0:
            raise UsageError(f"a sampler does not go back by {-samples} samples")
        self.seek(self.epoch, self.position + samples * self.num_replicas)

    def seek(self, epoch: int, position: int, at_least: int | None = None) -> None:
        """Set the position. With fewer than `at_least` samples left, go to the next epoch.

        Without `at_least` an epoch is over when there is nothing left to deal.
        """
        if at_least is None:
            at_least = self.num_replicas if self.drop_last else 1
        is_over = self.length - position < at_least
        self.epoch, self._position = (epoch + 1, 0) if is_over else (epoch, position)
        self._dealt_epoch = -1
        self._is_uncounted = False

    def state_dict(self) -> State:
        """The position of the training: the same on every rank, and valid for any world."""
        if self._is_uncounted:
            # StatefulDataLoader asks the sampler and its iterator in turn, and uses the iterator's
            # answer. A caller that asks the sampler twice in a row saves the sampler alone.
            if self._was_asked_alone:
                raise UsageError(
                    "the sampler does not know how much was trained, as a DataLoader draws ahead: "
                    "call sampler.advance(samples) after each batch, or use ElasticDataLoader "
                    "or StatefulDataLoader and save that"
                )
            self._was_asked_alone = True
        position = None if self._is_uncounted else self._position
        return self.facts() | {"epoch": self.epoch, "position": position}

    def facts(self) -> State:
        """The values that an order depends on, besides the epoch."""
        return {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: State) -> None:
        """Go on where a state was saved, in its order: seed and shuffle are those of the state."""
        position, length = state_dict["position"], state_dict["length"]
        if position != 0 and length != self.length:
            raise UsageError(
                f"the state was saved within an epoch of {length} samples, and the dataset has "
                f"{self.length}: the rest of that epoch is not known"
            )
        self.seed, self.shuffle = state_dict["seed"], state_dict["shuffle"]
        self.seek(state_dict["epoch"], position or 0)
        self._first_epoch = self.epoch
        if position is None:
            self._position = None

    def order(self) -> Order:
        """The order of the present epoch."""
        return Order(self.length, self.seed, self.epoch, self.shuffle)

    def places(self, position: int) -> range:
        """This rank's places in the order from a position on; every rank has the same number."""
        left = max(0, self.length - position)
        each = left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)
        first = position + self.rank
        return range(first, first + each * self.num_replicas, self.num_replicas)


class SamplerIterator(Iterator[int]):
    """One rank's samples; its state is how far it has drawn, for loaders that keep count."""

    def __init__(self, sampler: ElasticDistributedSampler) -> None:
        self._sampler = sampler
        self._samples: Iterator[int] | None = None
        self._epoch, self._first, self._drawn = sampler.epoch, 0, 0

    def __iter__(self) -> "SamplerIterator":
        return self

    def __next__(self) -> int:
        sample = next(self._opened(), None)
        if sample is None:
            self._sampler._dealt_epoch = self._epoch
            raise StopIteration
        self._drawn += 1
        return sample

    def state_dict(self) -> State:
        """The position of the training when all drawn samples are trained."""
        self._opened()
        self._sampler._was_asked_alone = False
        places = self._sampler.places(self._first)
        is_dealt = self._drawn >= len(places)
        position = self._sampler.length if is_dealt else self._first + self._drawn * places.step
        return self._sampler.facts() | {"epoch": self._epoch, "position": position}

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from a position. If the epoch was dealt to its end, there is nothing left."""
        self._sampler.load_state_dict(state_dict)
        self._open(state_dict["position"])
        self._epoch = state_dict["epoch"]

    def _opened(self) -> Iterator[int]:
        # Not before the first sample is requested: StatefulDataLoader loads a state before that.
        return self._samples or self._open(self._sampler.position)

    def _open(self, position: int) -> Iterator[int]:
        sampler = self._sampler
        sampler._is_uncounted, sampler._was_asked_alone = True, False
        self._epoch, self._first, self._drawn = sampler.epoch, position, 0
        places = sampler.places(position)
        pieces = (places[i : i + AT_ONCE] for i in range(0, len(places), AT_ONCE))
        self._samples = itertools.chain.from_iterable(sampler.order().lists(pieces))
        return self._samples


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The world's size and the rank: as given, or else from torch or the launcher."""
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            found = dist.get_world_size(), dist.get_rank()
        else:
            place = worker_place()
            found = place.world_size, place.rank
        num_replicas = found[0] if num_replicas is None else num_replicas
        rank = found[1] if rank is None else rank
    if not 0 <= rank < num_replicas:
        raise UsageError(f"rank {rank} is not within a world of {num_replicas}")
    return num_replicas, rank
