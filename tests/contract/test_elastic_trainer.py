# SPDX-License-Identifier: Apache-2.0
"""ElasticTrainer: the gradient of one process with the whole global batch, in every world.

Ranks are simulated in one process: each has a model of its own, and their gradients are averaged
as DDP does. tests/integration/test_elastic_training.py does it with real ranks. In the prior art
that could not even be written: the state was one dictionary of the class, and the number of ranks
came from a variable of the environment without which it divided by zero.
"""

import copy
import random
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from holdfast.model.errors import UsageError
from holdfast.torch import ElasticDataLoader, ElasticDistributedSampler, ElasticTrainer
from holdfast.torch.data.loader import shares

State = dict[str, Any]
LENGTH = 53
GLOBAL_BATCH = 8
NUMBERS = torch.Generator().manual_seed(3)
INPUTS = torch.randn(LENGTH, 5, dtype=torch.float64, generator=NUMBERS)
TARGETS = torch.randn(LENGTH, 1, dtype=torch.float64, generator=NUMBERS)
ROWS = torch.arange(LENGTH)


class Rank:
    """One rank with everything that a training script has."""

    def __init__(self, rank: int, world_size: int, batch_size: int, drop_last: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
        ).double()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        dataset = TensorDataset(ROWS, INPUTS, TARGETS)
        sampler = ElasticDistributedSampler(
            dataset, num_replicas=world_size, rank=rank, seed=4, drop_last=drop_last
        )
        self.loader: ElasticDataLoader[Any] = ElasticDataLoader(
            dataset, batch_size, sampler=sampler
        )
        self.trainer = ElasticTrainer(
            self.model, self.optimizer, self.loader, global_batch=GLOBAL_BATCH
        )
        self.trained: list[int] = []
        self.passes = 0

    def gradients(self, batches: Any) -> list[torch.Tensor]:
        for rows, inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
            self.trainer.backward(loss)
            self.trained += rows.tolist()
            self.passes += 1
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def step(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.schedule.step()

    def state(self) -> State:
        parts = (self.model, self.optimizer, self.schedule, self.trainer)
        return {type(part).__name__: part.state_dict() for part in parts}

    def load(self, state: State) -> None:
        for part in (self.model, self.optimizer, self.schedule, self.trainer):
            part.load_state_dict(state[type(part).__name__])  # type: ignore[attr-defined]


History = list[tuple[int, float, list[torch.Tensor]]]
"""Of each step: the epoch, the learning rate and the gradients."""


def train(
    size: int, steps: int, history: History, state: State | None, **options: Any
) -> State | None:
    """A world of this size makes so many steps, or fewer if the epoch ends; rank 1's state."""
    batch_size, drop_last = options.get("batch_size", 3), options.get("drop_last", False)
    ranks = [Rank(rank, size, batch_size, drop_last) for rank in range(size)]
    for rank in ranks:
        if state is not None:
            rank.load(copy.deepcopy(state))  # An optimizer takes tensors as they are.
    epoch = ranks[0].trainer.epoch
    running = [rank.trainer.steps() for rank in ranks]
    for _ in range(steps):
        given = [next(steps_of, None) for steps_of in running]
        if given[0] is None:
            assert all(batches is None for batches in given), "epochs end at different steps"
            break
        of_ranks = [rank.gradients(batches) for rank, batches in zip(ranks, given, strict=True)]
        mean = [torch.stack(gradients).mean(0) for gradients in zip(*of_ranks, strict=True)]
        history.append((epoch, ranks[0].schedule.get_last_lr()[0], mean))
        for rank in ranks:
            rank.step(mean)
        assert len({rank.passes for rank in ranks}) == 1, "ranks would wait for each other"
        assert len({str(rank.trainer.state_dict()) for rank in ranks}) == 1
    return ranks[-1].state()


def alone(epochs: int, drop_last: bool = False) -> History:
    """One process that takes each global batch as a whole, with nothing of ours but the order."""
    rank = Rank(0, 1, 1, drop_last)
    history: History = []
    for epoch in range(epochs):
        sampler = ElasticDistributedSampler(LENGTH, num_replicas=1, rank=0, seed=4)
        sampler.set_epoch(epoch)
        order = list(sampler)
        for start in range(0, LENGTH, GLOBAL_BATCH):
            rows = order[start : start + GLOBAL_BATCH]
            if drop_last and len(rows) < GLOBAL_BATCH:
                break
            rank.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(rank.model(INPUTS[rows]), TARGETS[rows])
            torch.autograd.backward(loss)
            gradients = [parameter.grad.clone() for parameter in rank.model.parameters()]
            history.append((epoch, rank.schedule.get_last_lr()[0], gradients))
            rank.optimizer.step()
            rank.schedule.step()
    return history


def expect_same(history: History, expected: History) -> None:
    assert [epoch for epoch, _, _ in history] == [epoch for epoch, _, _ in expected]
    assert [rate for _, rate, _ in history] == [rate for _, rate, _ in expected]
    for (_, _, found), (_, _, wanted) in zip(history, expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", range(1, 9))
def test_gradients_and_learning_rates_are_those_of_one_process(size: int) -> None:
    """Prior art: 8 batches on 3 ranks (3, 3, 2) gave an unweighted mean; the gradient grew with the
    number of accumulated batches; the learning rate fell with every batch. The last global batch
    here has 5 samples: on 8 ranks some have none, and still take part."""
    history: History = []
    state = train(size, 1000, history, None)
    train(size, 1000, history, state)
    expect_same(history, alone(epochs=2))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_over_random_changes_of_world_and_batch_size(seed: int, drop_last: bool) -> None:
    """Weights, optimizer state, step count and schedule go on over every resize."""
    dice = random.Random(seed)
    history: History = []
    state: State | None = None
    while not history or history[-1][0] < 3:
        state = train(
            dice.randint(1, 8),
            dice.choice([1, 2, 3, 1000]),
            history,
            state,
            batch_size=dice.choice([1, 2, 3, 100]),
            drop_last=drop_last,
        )
    expected = alone(epochs=4, drop_last=drop_last)
    history = [step for step in history if step[0] < 3]
    expect_same(history, expected[: len(history)])
    assert len(history) == 3 * (6 if drop_last else 7)


@pytest.mark.parametrize("size", range(1, 9))
def test_every_step_of_every_world_trains_the_same_samples(size: int) -> None:
    """Each sample with its weight once; what takes part with the weight 0 is not new to a rank."""
    for start, end in ((0, 8), (48, 53), (52, 53)):
        of_ranks = [shares(start, end, 3, rank, size) for rank in range(size)]
        assert len({len(own) for own in of_ranks}) == 1
        weighted = [s for own in of_ranks for s in own if s.weight > 0]
        assert sorted(p for s in weighted for p in s.places) == list(range(start, end))
        assert sum(s.weight for s in weighted) == pytest.approx(size)
        assert all(len(s.places) > 0 for own in of_ranks for s in own)
        assert all([s.end for s in own] == [None] * (len(own) - 1) + [end] for own in of_ranks)


def test_8_single_samples_on_3_ranks_are_3_passes_on_each() -> None:
    """Prior art: 3, 3 and 2 passes, and collectives that do not match."""
    weights = [[s.weight for s in shares(0, 8, 1, rank, 3)] for rank in range(3)]
    assert weights == [[3 / 8] * 3, [3 / 8] * 3, [3 / 8, 3 / 8, 0.0]]


def test_steps_per_epoch_do_not_depend_on_the_world() -> None:
    for size in (1, 3, 8):
        assert Rank(0, size, 3, drop_last=False).trainer.steps_per_epoch == 7
        assert Rank(0, size, 3, drop_last=True).trainer.steps_per_epoch == 6


def test_each_rank_may_have_its_own_batch_size_and_change_it() -> None:
    """It changes nothing but the number of passes: the step has the same samples and weights."""
    rank = Rank(0, 1, 3, drop_last=False)
    history: History = []
    sizes: list[list[int]] = []
    for number, batches in enumerate(rank.trainer.steps()):
        before = len(rank.trained)
        gradients = rank.gradients(batches)
        sizes.append([len(rank.trained) - before, rank.passes])
        history.append((0, rank.schedule.get_last_lr()[0], gradients))
        rank.step(gradients)
        if number == 1:
            rank.loader.set_batch_size(5)
    expect_same(history, alone(epochs=1))
    assert sizes == [[8, 3], [8, 6], [8, 8], [8, 10], [8, 12], [8, 14], [5, 15]]
    assert sorted(rank.trained) == list(range(LENGTH))


# ---- the state is that of the model -------------------------------------------------------------


def test_a_step_counts_from_when_the_optimizer_has_made_it() -> None:
    """A state saved in the middle of a step is the state before it, as is the model."""
    rank = Rank(0, 1, 3, drop_last=False)
    positions = []

    def note() -> None:
        state = rank.trainer.state_dict()
        positions.append((state["step"], state["loader"]["sampler"]["position"]))

    steps = rank.trainer.steps()
    note()
    gradients = rank.gradients(next(steps))
    note()
    rank.step(gradients)
    note()
    batches = next(steps)
    rank.trainer.backward(rank.model(next(batches)[1]).mean())
    note()
    assert positions == [(0, 0), (0, 0), (1, 8), (1, 8)]


def test_a_step_that_a_scaler_skipped_is_used_up() -> None:
    """Its gradients were infinite; the next step takes the next samples."""
    rank = Rank(0, 1, 3, drop_last=False)
    scaler = torch.amp.GradScaler("cpu")
    changed = []
    for batches in rank.trainer.steps():
        before = [parameter.detach().clone() for parameter in rank.model.parameters()]
        for rows, inputs, targets in batches:
            loss = torch.nn.functional.mse_loss(rank.model(inputs), targets)
            if rank.trainer.step == 2:
                loss = loss * float("inf")
            rank.trainer.backward(scaler.scale(loss))
            rank.trained += rows.tolist()
        scaler.step(rank.optimizer)
        scaler.update()
        after = list(rank.model.parameters())
        changed.append(not all(map(torch.equal, before, after)))
    assert changed == [True, True, False, True, True, True, True]
    assert sorted(rank.trained) == list(range(LENGTH))
    assert (rank.trainer.step, rank.trainer.epoch) == (7, 1)


def test_gradients_of_an_abandoned_step_do_not_leak_into_the_next() -> None:
    rank = Rank(0, 1, 3, drop_last=False)
    rank.trainer.backward(rank.model(next(next(rank.trainer.steps()))[1]).sum() * 1000)
    gradients = rank.gradients(next(rank.trainer.steps()))
    expect_same([(0, 0.05, gradients)], alone(epochs=1)[:1])


# ---- what is easy to get wrong is refused -------------------------------------------------------


def test_an_optimizer_step_for_every_batch_is_refused() -> None:
    rank = Rank(0, 1, 3, drop_last=False)
    for _, inputs, _ in next(rank.trainer.steps()):
        rank.trainer.backward(rank.model(inputs).mean())
        with pytest.raises(UsageError, match="after the loop over a step's batches"):
            rank.optimizer.step()
        break


def test_a_loss_that_goes_backward_by_itself_is_refused() -> None:
    rank = Rank(0, 1, 3, drop_last=False)
    batches = next(rank.trainer.steps())
    rank.model(next(batches)[1]).mean().backward()
    with pytest.raises(UsageError, match=r"not given to trainer\.backward"):
        next(batches)


def test_two_backwards_for_one_batch_are_refused() -> None:
    rank = Rank(0, 1, 3, drop_last=False)
    inputs = next(next(rank.trainer.steps()))[1]
    rank.trainer.backward(rank.model(inputs).mean())
    with pytest.raises(UsageError, match="once for each batch"):
        rank.trainer.backward(rank.model(inputs).mean())


def test_a_step_that_is_left_early_is_refused() -> None:
    rank = Rank(0, 1, 3, drop_last=False)
    steps = rank.trainer.steps()
    rank.trainer.backward(rank.model(next(next(steps))[1]).mean())
    with pytest.raises(UsageError, match="left before all its batches"):
        next(steps)


def test_a_model_that_nobody_averages_is_said(caplog: pytest.LogCaptureFixture) -> None:
    Rank(0, 1, 3, drop_last=False)
    assert not caplog.records
    Rank(0, 2, 3, drop_last=False)
    assert "nobody averages its gradients" in caplog.text


def test_batches_that_need_weights_are_not_given_without() -> None:
    rank = Rank(0, 1, 3, drop_last=False)
    with pytest.raises(UsageError, match=r"trainer\.steps\(\)"):
        next(iter(rank.loader))
    with pytest.raises(UsageError, match="at least one sample"):
        ElasticTrainer(rank.model, rank.optimizer, rank.loader, global_batch=0)
