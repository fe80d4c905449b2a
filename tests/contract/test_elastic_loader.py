# SPDX-License-Identifier: Apache-2.0
"""ElasticDataLoader: what it hands out counts, and it can be changed while it runs."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast.model.errors import UsageError
from holdfast.torch import ElasticDataLoader, ElasticDistributedSampler

State = dict[str, Any]
Loader = ElasticDataLoader[torch.Tensor]


class Numbers(Dataset[int]):
    """Sample n is n."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def world(
    size: int, length: int, batch_size: int, state: State | None = None, **options: Any
) -> list[Loader]:
    drop_last = options.pop("drop_last", False)
    loaders = []
    for rank in range(size):
        sampler = ElasticDistributedSampler(
            length, num_replicas=size, rank=rank, drop_last=drop_last
        )
        loader: Loader = ElasticDataLoader(Numbers(length), batch_size, sampler=sampler, **options)
        if state is not None:
            loader.load_state_dict(state)
        loaders.append(loader)
    return loaders


def train(loaders: list[Loader], batches: int) -> tuple[list[int], State]:
    """Every rank takes so many batches, or fewer if the epoch ends; the samples, and the state."""
    samples: list[int] = []
    counts = set()
    for loader in loaders:
        taken = 0
        for batch in loader:
            samples += batch.tolist()
            taken += 1
            if taken == batches:
                break
        counts.add(taken)
    assert len(counts) == 1, "ranks would wait for each other"
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return samples, states[0]


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_once_per_epoch_over_random_worlds_and_batch_sizes(seed: int) -> None:
    dice = random.Random(seed)
    length = dice.randint(5, 150)
    state: State | None = None
    seen: dict[int, list[int]] = {}
    epoch = 0
    while epoch < 3:
        loaders = world(dice.randint(1, 8), length, dice.randint(1, 9), state)
        samples, state = train(loaders, dice.choice([1, 2, 5, 1000]))
        seen.setdefault(epoch, []).extend(samples)
        epoch = state["sampler"]["epoch"]
    for samples in seen.values():
        assert set(samples) == set(range(length))
        assert len(samples) < length + 8, "more than the end was padded"


@pytest.mark.parametrize("seed", range(10))
def test_drop_last_leaves_out_the_end_and_doubles_nothing(seed: int) -> None:
    dice = random.Random(seed)
    loaders = world(dice.randint(1, 4), 100, dice.randint(1, 9), drop_last=True)
    first, state = train(loaders, 2)
    loaders = world(dice.randint(1, 4), 100, dice.randint(1, 9), state, drop_last=True)
    step = loaders[0].batch_size * len(loaders)
    rest, state = train(loaders, 1000)
    assert len(rest) == (100 - len(first)) // step * step
    assert max(Counter(first + rest).values()) == 1
    assert (state["sampler"]["epoch"], state["sampler"]["position"]) == (1, 0)


def test_a_remainder_too_small_for_the_new_world_is_over_when_it_is_loaded() -> None:
    """Not an epoch without batches, nor one more than the user's loop wants."""
    _, state = train(world(1, 100, 10, drop_last=True), 9)
    for loader in world(4, 100, 10, state, drop_last=True):
        assert loader.sampler.epoch == 1
        assert len(loader) == len(list(loader)) == 2
    with pytest.raises(UsageError, match="nothing of 100 samples in steps of 120"):
        train(world(4, 100, 30, drop_last=True), 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_counts_batches_handed_out_and_not_those_fetched_ahead(workers: int) -> None:
    """Two workers fetch four batches ahead; they are neither lost nor trained twice."""
    first, state = train(world(1, 60, 4, num_workers=workers), 3)
    assert state["sampler"]["position"] == 12
    rest, _ = train(world(1, 60, 4, state, num_workers=workers), 1000)
    assert sorted(first + rest) == list(range(60))


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}])
def test_batch_size_and_workers_change_at_the_next_batch(options: dict[str, Any]) -> None:
    (loader,) = world(1, 60, 4, num_workers=1, **options)
    sizes: list[int] = []
    samples: list[int] = []
    for batch in loader:
        sizes.append(len(batch))
        samples += batch.tolist()
        if len(sizes) == 2:
            loader.set_batch_size(10)
        if len(sizes) == 4:
            loader.set_workers(2)
        if len(sizes) == 6:
            loader.set_workers(0)
    assert sizes == [4, 4, 10, 10, 10, 10, 10, 2]
    assert sorted(samples) == list(range(60))
    assert loader.sampler.epoch == 1
    assert sorted(n for batch in loader for n in batch.tolist()) == list(range(60))


def test_a_tuned_batch_size_survives_the_restart() -> None:
    """Prior art: on start the initial size of the script overwrote the tuned one."""
    (loader,) = world(1, 60, 4)
    loader.set_batch_size(10)
    (resumed,) = world(1, 60, 4, loader.state_dict())
    assert resumed.batch_size == 10
    assert [len(batch) for batch in resumed] == [10] * 6


def test_a_batch_size_that_nobody_tuned_is_that_of_the_script() -> None:
    _, state = train(world(1, 60, 4), 5)
    (resumed,) = world(1, 60, 8, state, num_workers=0)
    assert [len(batch) for batch in resumed] == [8] * 5


def test_ranks_are_tuned_by_themselves() -> None:
    """Prior art: one file for all ranks of a machine, rewritten without a lock and read again at
    every step. Here a change of one loader is in its own state and nowhere else."""
    first, second = world(2, 60, 4)
    first.set_batch_size(7)
    assert (first.batch_size, second.batch_size) == (7, 4)
    assert second.state_dict()["tuned"] == {}


def test_it_draws_nothing_from_the_random_numbers_of_the_training() -> None:
    """Otherwise a resumed training, which begins in the middle, would have others."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    (loader,) = world(1, 60, 4)
    train([loader], 3)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_nonsense_is_refused(wrong: Any) -> None:
    (loader,) = world(1, 60, 4)
    with pytest.raises(UsageError, match="a batch size is an integer from 1 on"):
        loader.set_batch_size(wrong)
    if wrong != 0:
        with pytest.raises(UsageError, match="a number of workers is an integer from 0 on"):
            loader.set_workers(wrong)


def test_a_dataset_without_indices_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(UsageError, match="IterableDataset"):
        ElasticDataLoader(Stream(), 4)
