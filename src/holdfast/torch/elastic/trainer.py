# SPDX-License-Identifier: Apache-2.0
"""Keeps the global batch of a training fixed while its world changes size.

for batches in trainer.steps():                 # the optimizer steps left in this epoch
    for inputs, targets in batches:             # this rank's batches of one step
        trainer.backward(loss_of(model(inputs), targets))
    optimizer.step()

Each step trains the same samples in every world: they are dealt to the ranks, each rank's share is
cut into batches that fit into its memory, and gradients add up over them. Each batch is weighted by
its samples, so that the gradient is that of one process with the whole global batch.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

import torch

from holdfast.model.errors import UsageError
from holdfast.torch.data.loader import Batch, ElasticDataLoader, Share

log = logging.getLogger(__name__)


class ElasticTrainer(Generic[Batch]):
    """Gives out a step's batches, weights their losses, and synchronises gradients once.

    Its state contains the loader's and the sampler's, and always fits the model: a step counts from
    the moment the optimizer has made it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: ElasticDataLoader[Batch],
        *,
        global_batch: int,
    ) -> None:
        """`model`: in DDP or FSDP, or bare; then the user averages gradients over several ranks.

        `global_batch` is how many samples all ranks together train in one optimizer step.
        """
        if global_batch < 1:
            raise UsageError(f"a global batch has at least one sample, not {global_batch}")
        world_size = loader.sampler.num_replicas
        if world_size > 1 and not hasattr(model, "no_sync") and not _is_fsdp2(model):
            log.warning("the model is not in DDP or FSDP: nobody averages its gradients over ranks")
        self.step = 0
        """How many steps were made, in all epochs and worlds."""
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        loader.global_batch = global_batch
        self._due: Share | None = None  # Given out, and waiting for its backward().
        self._is_open = False  # True until all batches of the step had their backward().
        self._end: int | None = None  # The position after a complete step, until it is counted.
        optimizer.register_step_pre_hook(self._before_optimizer)
        optimizer.register_step_post_hook(self._after_optimizer)

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._loader.sampler.epoch

    @property
    def steps_per_epoch(self) -> int:
        """The same in every world."""
        return self._loader.steps_in(self._loader.sampler.length)

    def steps(self) -> Iterator[Iterator[Batch]]:
        """The steps that are left in this epoch; gradients are cleared when a step begins."""
        self._count()
        self._due, self._is_open = None, False
        dealt = self._loader.shares()
        for share, batch in dealt:
            self._optimizer.zero_grad()
            self._is_open = True
            yield self._batches(share, batch, dealt)
            if self._is_open:
                raise UsageError(
                    "a step was left before all its batches were through backward(): "
                    "go through all of them before the next step"
                )
            # Even if the optimizer has not made it (a scaler may skip one), its samples are used.
            self._count()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a batch's loss, which is the mean over the samples of the batch."""
        share, self._due = self._due, None
        if share is None:
            raise UsageError("backward() is called once for each batch of trainer.steps()")
        torch.autograd.backward(loss * share.weight)
        if share.end is not None:
            self._is_open, self._end = False, share.end

    def state_dict(self) -> dict[str, Any]:
        """A state that is valid for every rank of every world."""
        return {"step": self.step, "loader": self._loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after a saved step."""
        self.step = state_dict["step"]
        self._end = None
        self._loader.load_state_dict(state_dict["loader"])

    def _batches(
        self, share: Share, batch: Batch, dealt: Iterator[tuple[Share, Batch]]
    ) -> Iterator[Batch]:
        """The batches of one step; the first is given."""
        while True:
            self._due = share
            with self._synchronised(share.end is not None):
                yield batch
            self._refuse_due()
            if share.end is not None:
                return
            share, batch = next(dealt)

    def _refuse_due(self) -> None:
        if self._due is not None:
            raise UsageError("the batch before was not given to trainer.backward()")

    def _synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        """Ranks exchange gradients only in the last pass of a step."""
        model: Any = self._model
        if _is_fsdp2(model):
            model.set_requires_gradient_sync(is_last)
        elif hasattr(model, "no_sync") and not is_last:  # DDP and FSDP1.
            found: AbstractContextManager[Any] = model.no_sync()
            return found
        return nullcontext()

    def _before_optimizer(self, *_: Any) -> None:
        if self._is_open:
            raise UsageError(
                "optimizer.step() comes after the loop over a step's batches, not inside it"
            )

    def _after_optimizer(self, *_: Any) -> None:
        self._count()

    def _count(self) -> None:
        """A complete step, if there is one, is part of the model now."""
        if self._end is not None:
            self._loader.trained(self._end)
            self._end = None
            self.step += 1


def _is_fsdp2(model: torch.nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")
