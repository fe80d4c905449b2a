# SPDX-License-Identifier: Apache-2.0
"""What a master works with besides agents."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.ports.desk import Desk
from holdfast.ports.platform import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """A platform, a desk, both or neither."""

    make_platform: Callable[[Collection[NodeId]], Platform] | None = None
    """Called with the nodes that an earlier master saw on it."""
    make_desk: Callable[[], Desk] | None = None
    begin: Callable[[JobSpec], Awaitable[JobSpec]] | None = None
    """Called before a job begins that the journal does not know yet; may change its rules."""


ALONE = Surroundings()
