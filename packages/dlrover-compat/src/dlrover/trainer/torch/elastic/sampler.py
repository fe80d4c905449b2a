# SPDX-License-Identifier: Apache-2.0
"""The sampler, with the state of DLRover's sampler."""

import logging
from typing import Any

from dlrover import _refused
from holdfast.torch import ElasticDistributedSampler as HoldfastSampler

log = logging.getLogger(__name__)

__getattr__ = _refused.missing(__name__)


class ElasticDistributedSampler(HoldfastSampler):
    """Holdfast's sampler; a script may also count the position itself, in steps."""

    def state_dict(
        self, iter_step: int | None = None, micro_batch_size: int | None = None
    ) -> dict[str, Any]:
        """The position after `iter_step` steps of the epoch; without it, the sampler's own."""
        if iter_step is None or micro_batch_size is None:
            return super().state_dict()
        completed = iter_step * micro_batch_size * self.num_replicas
        return self.facts() | {"epoch": self.epoch, "position": self._within(completed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state. It warns that a state of DLRover has another order of samples."""
        if "completed_num" not in state_dict:
            super().load_state_dict(state_dict)
            return
        position = self._within(state_dict["completed_num"])
        if position and self.shuffle:
            log.warning(
                "this state is DLRover's, whose samples are in another order: of the rest of epoch "
                "%d some samples come again and others not (%s#data-and-trainer)",
                state_dict["epoch"],
                _refused.PAGE,
            )
        state = {"epoch": state_dict["epoch"], "position": position}
        super().load_state_dict(self.facts() | state)

    def _within(self, completed: int) -> int:
        """The position in its epoch: a script may count its steps from the first epoch on."""
        return completed if completed <= self.length else completed % self.length
