# SPDX-License-Identifier: Apache-2.0
"""Data that follow a Checkpointer's model: their position is saved and restored with it."""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from holdfast.core.node.marks import Marks, merged
from holdfast.model.errors import UsageError
from holdfast.runtime.settings import worker_place, worker_settings

log = logging.getLogger(__name__)


class DataSource(Protocol):
    """Data whose position is saved and restored with the model."""

    def marks(self) -> Marks:
        """This rank's position in every lease that it has, or that ended since the last call."""

    def restored(self) -> None:
        """The position has jumped to that of the restored model: start again from there."""

    def state_dict(self) -> dict[str, Any]:
        """Its "name", and, in a process without an agent, its position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Followers:
    """The sources of one Checkpointer."""

    def __init__(self) -> None:
        self._sources: list[DataSource] = []
        self._is_alone = worker_settings() is None
        #: Marks that went with saves which are not known to be made.
        self._unsaved: Marks = ()

    def add(self, source: DataSource) -> None:
        """Add a source. UsageError if no process could keep its position."""
        world_size = worker_place().world_size
        if self._is_alone and world_size > 1:
            raise UsageError(
                f"The {world_size} processes of this training have no master that deals out data "
                "to them: start it with `holdfast run`, or let the data not follow a Checkpointer."
            )
        self._sources.append(source)

    @property
    def has_any(self) -> bool:
        """Whether positions go with the commits. Without an agent they are in the saved state."""
        return bool(self._sources) and not self._is_alone

    def marks(self) -> Marks | None:
        """This rank's positions, with those of saves that failed; None if no data follow."""
        if not self.has_any:
            return None
        self._unsaved = merged((self._unsaved, *(source.marks() for source in self._sources)))
        return self._unsaved

    def saved(self) -> None:
        """The agent has the marks of the last call."""
        self._unsaved = ()

    def own_positions(self) -> list[dict[str, Any]]:
        """The data positions of a process without an agent: part of the state that it saves."""
        return [source.state_dict() for source in self._sources] if self._is_alone else []

    def expect_own_state(self) -> None:
        """UsageError if positions would be lost, because the state is not saved by `save`."""
        if self._is_alone and self._sources:
            raise UsageError(
                "Data follow this Checkpointer, and in a process on its own only save() and load() "
                "keep their position: use these, or start it with `holdfast run`."
            )

    def own_restored(self, step: int, positions: object) -> None:
        """A process without an agent has loaded a step: move its data to their positions then."""
        known = {one["name"]: one for one in positions} if isinstance(positions, list) else {}
        for source in self._sources if self._is_alone else ():
            name = source.state_dict()["name"]
            if name in known:
                source.load_state_dict(known[name])
            else:
                log.warning("step %d does not say where the data %r were: they stay", step, name)

    def restored(self) -> None:
        """All ranks have agreed on a state to begin with, and have it."""
        self._unsaved = ()
        for source in self._sources if self.has_any else ():
            source.restored()
