# SPDX-License-Identifier: Apache-2.0
"""The data that are read with respect to a Checkpointer's model: their position goes with it."""

from typing import Protocol

from holdfast.core.node.marks import Marks, merged
from holdfast.model.errors import UsageError
from holdfast.runtime.settings import worker_place, worker_settings


class DataSource(Protocol):
    """Data whose position is saved and restored with the model."""

    def marks(self) -> Marks:
        """How far this rank is in every lease that it has, or that ended since it was asked."""

    def restored(self) -> None:
        """The position has jumped to that of the restored model: begin anew from there."""


class Followers:
    """The sources of one Checkpointer."""

    def __init__(self) -> None:
        self._sources: list[DataSource] = []
        self._is_alone = worker_settings() is None
        #: What was said with saves of which it is not known that they were made.
        self._unsaved: Marks = ()

    def add(self, source: DataSource) -> None:
        """UsageError if nobody here could keep the position."""
        world_size = worker_place().world_size
        if self._is_alone and world_size > 1:
            raise UsageError(
                f"The {world_size} processes of this training have no master that deals out data "
                "to them: start it with `holdfast run`, or let the data not follow a Checkpointer."
            )
        self._sources.append(source)

    @property
    def has_any(self) -> bool:
        """Whether positions go with the saves. A process on its own keeps them in its `data`."""
        return bool(self._sources) and not self._is_alone

    def marks(self) -> Marks | None:
        """How far this rank is, with what earlier saves failed to say; None if none follows."""
        if not self.has_any:
            return None
        self._unsaved = merged((self._unsaved, *(source.marks() for source in self._sources)))
        return self._unsaved

    def saved(self) -> None:
        """The agent has what was said last."""
        self._unsaved = ()

    def restored(self) -> None:
        """All ranks agreed on what to begin with, and have it."""
        self._unsaved = ()
        for source in self._sources if self.has_any else ():
            source.restored()
