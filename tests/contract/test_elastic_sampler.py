# SPDX-License-Identifier: Apache-2.0
"""ElasticDistributedSampler: every sample once per epoch, whatever happens to the world.

Ranks are simulated in one process, by giving each sampler its rank. The weaknesses of the prior
art that are tested here are named where they are.
"""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.model.errors import UsageError
from holdfast.model.permutation import Permutation
from holdfast.torch import ElasticDistributedSampler
from holdfast.torch.data.order import Order

State = dict[str, Any]


class Numbers(Dataset[int]):
    """Sample n is n."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def world(
    size: int, length: int, state: State | None = None, **options: Any
) -> list[ElasticDistributedSampler]:
    samplers = [
        ElasticDistributedSampler(length, num_replicas=size, rank=rank, **options)
        for rank in range(size)
    ]
    for sampler in samplers:
        if state is not None:
            sampler.load_state_dict(state)
    return samplers


def train(
    samplers: list[ElasticDistributedSampler], each: int | None = None
) -> tuple[list[int], State]:
    """Every rank trains so many samples, or all that are left; the samples, and the state."""
    samples: list[int] = []
    for sampler in samplers:
        drawn = list(sampler)
        own = drawn if each is None else drawn[:each]
        sampler.advance(len(own))
        samples += own
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states), "ranks stand at different places"
    return samples, states[0]


# ---- the order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 1000, 10_007])
def test_many_places_at_a_time_give_the_order_of_the_model(length: int) -> None:
    """One definition of an epoch's order, for the ledger of shards and for the sampler."""
    one_by_one = Permutation(length, 7, 3)
    (looked_up,) = Order(length, 7, 3, shuffle=True).lists([range(length)])
    assert looked_up == [one_by_one[place] for place in range(length)]
    assert sorted(looked_up) == list(range(length))


def test_pieces_of_the_order_are_those_of_the_whole() -> None:
    order = Order(100_003, 1, 0, shuffle=True)
    (whole,) = order.lists([range(100_003)])
    pieces = [range(10), range(5, 90_000, 7), range(99_999, 100_003)]
    assert list(order.lists(pieces)) == [whole[p.start : p.stop : p.step] for p in pieces]


def test_a_billion_samples_cost_no_list() -> None:
    (found,) = Order(10**9, 0, 0, shuffle=True).lists([range(999_999_990, 10**9)])
    assert len(set(found)) == 10
    assert all(0 <= sample < 10**9 for sample in found)
    sampler = ElasticDistributedSampler(10**9, num_replicas=3, rank=1)
    assert next(iter(sampler)) == Permutation(10**9, 0, 0)[1]


def test_seed_and_epoch_make_the_order_and_nothing_else() -> None:
    def order(**options: Any) -> list[int]:
        epoch = options.pop("epoch", 0)
        (sampler,) = world(1, 100, **options)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order() == order()
    assert len({tuple(order(seed=seed, epoch=e)) for seed in (0, 1) for e in (0, 1)}) == 4
    assert order(shuffle=False) == list(range(100))
    torch.manual_seed(5)
    assert order() == order(seed=0)


# ---- epochs and resizes -------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_every_sample_once_per_epoch_over_random_resizes(seed: int, drop_last: bool) -> None:
    """Three epochs with a new world after every few samples; only the very end is padded or cut."""
    dice = random.Random(seed)
    length = dice.randint(8, 200)
    state: State | None = None
    seen: dict[int, list[int]] = {}
    worlds: dict[int, int] = {}
    while state is None or state["epoch"] < 3:
        size = dice.randint(1, 8)
        samplers = world(size, length, state, drop_last=drop_last, seed=seed)
        epoch = samplers[0].epoch
        if epoch == 3:
            break
        assert len({len(sampler) for sampler in samplers}) == 1
        samples, state = train(samplers, dice.choice([1, 3, 10, None]))
        seen.setdefault(epoch, []).extend(samples)
        worlds[epoch] = size
    for epoch in range(3):
        times = Counter(seen[epoch])
        extra = sum(times.values()) - length
        # A world that came when fewer samples than its ranks were left has cut them off.
        least = -7 if drop_last else 0
        assert least <= extra < (1 if drop_last else worlds[epoch])
        assert max(times.values()) <= (1 if drop_last else 2)
        if not drop_last:
            assert set(times) == set(range(length))


def test_the_epoch_after_a_resumed_one_is_whole_on_every_rank() -> None:
    """Prior art: the size of the resumed part stayed, and the next epoch failed its own check on
    ranks 1 and 2 of 3 with 60001 samples; or the position was not cleared."""
    _, state = train(world(2, 60_001), each=32)
    assert state["position"] == 64
    samplers = world(3, 60_001, state)
    rest, state = train(samplers)
    assert len(rest) == 59_937 + (-59_937 % 3)
    assert (state["epoch"], state["position"]) == (1, 0)
    for epoch in (1, 2):
        assert [len(sampler) for sampler in samplers] == [20_001] * 3
        samples, state = train(samplers)
        assert set(samples) == set(range(60_001))
        assert state["epoch"] == epoch + 1


def test_the_position_counts_what_was_trained_before_the_resume() -> None:
    """Prior art: 4 ranks train 50 each of 1000, then 2 ranks 50 each: it reports 100 or 200."""
    _, state = train(world(4, 1000), each=50)
    _, state = train(world(2, 1000, state), each=50)
    assert state["position"] == 300


def test_a_remainder_that_does_not_divide_by_the_new_world() -> None:
    """Prior art: its assertion fails (313 against 312 samples)."""
    before, state = train(world(2, 1001), each=32)
    after, _ = train(world(3, 1001, state))
    assert len(after) == 937 + 2
    times = Counter(before + after)
    assert set(times) == set(range(1001))
    assert [sample for sample in times if times[sample] > 1] == before[:1] + before[32:33]


def test_a_completed_epoch_means_the_next_one_and_not_an_empty_one() -> None:
    """Prior art: completed == size gave an epoch without samples."""
    _, state = train(world(2, 10))
    for sampler in world(2, 10, state):
        assert sampler.epoch == 1
        assert len(list(sampler)) == 5


def test_the_end_is_padded_with_the_first_samples_of_the_order() -> None:
    (whole,) = world(1, 10)
    order = list(whole)
    ranks = [list(sampler) for sampler in world(4, 10)]
    assert [rank[-1] for rank in ranks] == [order[8], order[9], order[0], order[1]]
    assert sorted(sample for rank in ranks for sample in rank) == sorted(order + order[:2])


def test_fewer_samples_than_ranks() -> None:
    assert [list(sampler) for sampler in world(5, 2, shuffle=False)] == [[0], [1], [0], [1], [0]]
    with pytest.raises(UsageError, match="2 samples are too few for 5 ranks with drop_last"):
        world(5, 2, drop_last=True)
    with pytest.raises(UsageError, match="0 samples"):
        world(1, 0)


def test_without_torch_distributed_and_without_a_launcher_it_is_one_rank() -> None:
    sampler = ElasticDistributedSampler(Numbers(7))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert sorted(sampler) == list(range(7))


# ---- epochs as torch's users write them ---------------------------------------------------------


def test_set_epoch_keeps_the_position_of_a_resumed_epoch_and_of_no_other() -> None:
    _, state = train(world(2, 20), each=3)
    for sampler in world(1, 20, state):
        sampler.set_epoch(0)
        assert len(list(sampler)) == 14
        sampler.set_epoch(1)
        assert sorted(sampler) == list(range(20))
        sampler.set_epoch(1)
        assert sorted(sampler) == list(range(20)), "it was asked for that epoch once more"


def test_a_loop_that_begins_again_with_epoch_0_after_a_load_is_refused() -> None:
    """Otherwise it would silently train the first epochs again."""
    sampler = ElasticDistributedSampler(20, num_replicas=1, rank=0)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sampler.advance(len(list(sampler)))
    resumed = ElasticDistributedSampler(20, num_replicas=1, rank=0)
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(UsageError, match="epoch 0 is over"):
        resumed.set_epoch(0)


def test_without_set_epoch_the_next_iteration_is_the_next_epoch() -> None:
    (sampler,) = world(1, 50)
    orders = [list(sampler) for _ in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert [sorted(order) for order in orders] == [list(range(50))] * 3


def test_a_state_of_another_dataset_is_refused_within_an_epoch() -> None:
    _, state = train(world(2, 20), each=3)
    with pytest.raises(UsageError, match="within an epoch of 20 samples, and the dataset has 21"):
        world(2, 21, state)
    _, state = train(world(2, 20))
    assert [len(list(sampler)) for sampler in world(3, 21, state)] == [7, 7, 7]


def test_the_order_of_the_state_goes_on_whatever_the_script_says() -> None:
    before, state = train(world(2, 20, seed=5), each=3)
    after, _ = train(world(2, 20, state, seed=6))
    assert sorted(before + after) == list(range(20))


# ---- loaders that draw ahead --------------------------------------------------------------------


def test_a_plain_loader_that_draws_ahead_needs_advance() -> None:
    """Prior art: what was drawn ahead of the training was lost, or the user's arithmetic wrong."""
    sampler = ElasticDistributedSampler(100, num_replicas=2, rank=0)
    loader = DataLoader(Numbers(100), batch_size=4, sampler=sampler, num_workers=1)
    for number, batch in enumerate(loader, start=1):
        sampler.advance(len(batch))
        assert sampler.state_dict()["position"] == 8 * number
        if number == 3:
            break


def test_saving_the_sampler_alone_without_advance_is_found_out() -> None:
    """At the second save at the latest, and a state from before that is not taken for good."""
    sampler = ElasticDistributedSampler(100, num_replicas=2, rank=0)
    drawn = iter(DataLoader(Numbers(100), batch_size=4, sampler=sampler))
    next(drawn)
    state = sampler.state_dict()
    with pytest.raises(UsageError, match=r"call sampler\.advance"):
        sampler.state_dict()
    sampler.load_state_dict(state)
    with pytest.raises(UsageError, match="position of the sampler is not known"):
        next(iter(sampler))


def stateful(size: int, workers: int, states: list[State] | None = None) -> list[Any]:
    loaders = []
    for rank in range(size):
        sampler = ElasticDistributedSampler(101, num_replicas=size, rank=rank)
        loader: StatefulDataLoader[int] = StatefulDataLoader(
            Numbers(101), batch_size=4, sampler=sampler, num_workers=workers
        )
        if states is not None:
            loader.load_state_dict(states[rank % len(states)])
        loaders.append(loader)
    return loaders


def some(batches: Iterator[torch.Tensor], count: int) -> list[int]:
    return [sample for _ in range(count) for sample in next(batches).tolist()]


@pytest.mark.parametrize("workers", [0, 1])
def test_stateful_data_loader_resumes_in_a_world_of_another_size(workers: int) -> None:
    """What its workers fetched ahead is neither lost nor trained twice."""
    seen: list[int] = []
    loaders = stateful(2, workers)
    for loader in loaders:
        seen += some(iter(loader), 5)
    states = [loader.state_dict() for loader in loaders]
    loaders = stateful(3, workers, states)
    for loader in loaders:
        seen += [sample for batch in loader for sample in batch.tolist()]
    assert set(seen) == set(range(101))
    assert len(seen) == 40 + 63  # 61 are left, and padded to a multiple of 3.
    for loader in loaders:
        assert sum(len(batch) for batch in loader) == 34, "the next epoch is not whole"


def test_stateful_data_loader_that_was_saved_at_the_end_of_an_epoch() -> None:
    (loader,) = stateful(1, 0)
    batches = iter(loader)
    some(batches, 26)
    after_last_batch = loader.state_dict()
    assert next(batches, None) is None
    after_end = loader.state_dict()
    (resumed,) = stateful(1, 0, [after_last_batch])
    assert [len(list(resumed)), len(list(resumed))] == [0, 26], "epoch 0 is over, then comes 1"
    (resumed,) = stateful(1, 0, [after_end])
    epoch_1 = [sample for batch in resumed for sample in batch.tolist()]
    assert epoch_1 == [Permutation(101, 0, 1)[place] for place in range(101)]
