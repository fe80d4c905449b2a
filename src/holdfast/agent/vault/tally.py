# SPDX-License-Identifier: Apache-2.0
"""What became of the checkpoints on this node, in numbers: for the beats, and so for Prometheus."""

import asyncio
from collections import Counter

from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import Version
from holdfast.protocol.checkpoints import Tally

WHY_MAX = 300
"""How much of a reason travels in every beat."""


class TallyBook:
    """Counts from the start of the agent on."""

    def __init__(self) -> None:
        self._now = asyncio.get_running_loop().time
        self._saves = 0
        self._waited_s = 0.0
        #: Of versions that not all workers of this node have sealed: the longest wait.
        self._waits: dict[Version, float] = {}
        self._directory, self._step, self._saved_at = "", -1, 0.0
        self._restored: Counter[str] = Counter()
        self._written_s = 0.0
        self._failed, self._failed_step, self._failed_why = 0, -1, ""
        self.written_bytes = 0

    def sealed(self, version: Version, waited_s: float) -> None:
        """A worker has sealed a part; the training waited `waited_s` for it."""
        self._waits[version] = max(waited_s, self._waits.get(version, 0.0))

    def saved(
        self, directory: str, step: SavedStep, *, is_first_node: bool, is_in_memory: bool = True
    ) -> None:
        """All workers of this node have sealed the step. The first node of a world counts its
        saves.

        A step that went through the disk is not in memory: it counts once it reaches storage.
        """
        if is_in_memory:
            self._directory = directory
            self._step, self._saved_at = step.version.step, self._now()
        if is_in_memory and is_first_node:
            self._saves += 1
            self._waited_s += self._waits.get(step.version, 0.0)
        self._waits = {v: waited_s for v, waited_s in self._waits.items() if v > step.version}

    def went_back(self, directory: str, version: Version) -> None:
        """All ranks go on from this version: what was saved after it can no longer be restored."""
        if directory == self._directory:
            self._step = min(self._step, version.step)

    def failed(self, step: int, why: str) -> None:
        """A worker could not save a step; other workers of this node may report the same."""
        if step != self._failed_step:
            self._failed += 1
        self._failed_step, self._failed_why = step, why[:WHY_MAX]

    def moved(self, size: int) -> None:
        """This many bytes of a part have gone to storage."""
        self.written_bytes += size

    def written(self, seconds: float) -> None:
        """A part is on storage; writing it took `seconds`."""
        self._written_s += seconds

    def restored(self, source: str) -> None:
        """A part was made readable for workers: from "memory", "peer", "parity" or "storage"."""
        self._restored[source] += 1

    def read(self) -> Tally | None:
        """The numbers now; None if there is nothing to tell."""
        if not (self._directory or self.written_bytes or self._restored or self._failed):
            return None
        return Tally(
            saves=self._saves,
            waited_s=self._waited_s,
            step=self._step,
            age_s=self._now() - self._saved_at,
            written_bytes=self.written_bytes,
            written_s=self._written_s,
            restored=dict(self._restored),
            failed=self._failed,
            failed_step=self._failed_step,
            failed_why=self._failed_why,
        )
