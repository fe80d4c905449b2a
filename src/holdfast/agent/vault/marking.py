# SPDX-License-Identifier: Apache-2.0
"""Tells the master how far the data of this node's ranks were at each version that they saved.

No worker waits for it. What the master has not confirmed is sent again with the next version.
"""

import asyncio
from itertools import pairwise

from holdfast.agent.vault.means import Means
from holdfast.agent.vault.memory import Memory
from holdfast.core.node.marks import Marks, merged
from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import Version
from holdfast.model.errors import FencedError
from holdfast.protocol import messages as m
from holdfast.protocol.data import DataMarked


class Marking:
    """The marks of one series that are on their way."""

    def __init__(self, means: Means, memory: Memory, directory: str) -> None:
        self._means = means
        self._memory = memory
        self._directory = directory
        #: What was sent with each version and is not confirmed, oldest first.
        self._said: dict[Version, dict[int, Marks]] = {}
        self._telling: dict[Version, asyncio.Task[None]] = {}

    def begin_round(self) -> None:
        """Repeat nothing of the previous round; what was sent may still arrive."""
        self._said.clear()
        self._telling.clear()

    def saved(self, step: SavedStep, round: int) -> None:
        """All ranks of this node have saved a version: say how far they were."""
        held = {one.meta.version for one in self._memory.held(self._directory)}
        self._said[step.version] = dict(step.marks)
        self._forget_all_but(held)
        marks = {rank: self._of_rank(rank) for rank in step.marks}
        world_size, known = step.shape.world_size, tuple(sorted(held))
        body = DataMarked(self._directory, round, step.version, marks, world_size, known)
        what = f"the data of step {step.version.step} have no position"
        self._telling[step.version] = self._means.spawn(self._tell(body), what)

    def _of_rank(self, rank: int) -> Marks:
        return merged(said.get(rank, ()) for said in self._said.values())

    def _forget_all_but(self, held: set[Version]) -> None:
        """Drop versions that can no longer be restored: they need no position, and the next version
        includes their marks.

        So little is outstanding, however long the master is away.
        """
        for older, newer in list(pairwise(self._said)):
            if older not in held:
                self._telling.pop(older).cancel()
                said, later = self._said.pop(older), self._said[newer]
                for rank, marks in said.items():
                    later[rank] = merged((marks, later.get(rank, ())))

    async def _tell(self, body: DataMarked) -> None:
        try:
            await self._means.ask(body, m.Done)
        except FencedError:
            return  # The round is over.
        for version in [one for one in self._said if one <= body.version]:
            self._said.pop(version)
            self._telling.pop(version)
