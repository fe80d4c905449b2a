# SPDX-License-Identifier: Apache-2.0
"""How far each rank was when it saved: collected until every rank has said it of a version.

Nothing here is durable. Agents hold their call until it is answered, and say it again to a new
master, the oldest first. What a rank says is cumulative over its saves: what it said of a version
that stayed incomplete still holds for the next one, so it is kept until a version is complete.
"""

from holdfast.core.job import events as ev
from holdfast.model.checkpoint import Version
from holdfast.protocol.data import Mark


class VersionState:
    """What is said of one version so far."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.marks: dict[int, tuple[Mark, ...]] = {}
        #: The calls that wait, the newest of each node.
        self.calls: dict[int, ev.DataMarks] = {}


class Marks:
    """The versions of one directory that some ranks have marked, and others not."""

    def __init__(self) -> None:
        self._versions: dict[Version, VersionState] = {}

    def add(self, call: ev.DataMarks) -> bool:
        """Take what a node says; True when every rank has marked the version."""
        body = call.body
        state = self._versions.setdefault(body.version, VersionState(body.world_size))
        state.marks.update(body.marks)
        state.calls[call.node_id] = call
        return len(state.marks) >= state.world_size

    def take(self, version: Version) -> tuple[list[Mark], list[ev.DataMarks], list[ev.DataMarks]]:
        """All marks up to a version that is complete, its calls, and those of older versions."""
        marks: list[Mark] = []
        complete: list[ev.DataMarks] = []
        overtaken: list[ev.DataMarks] = []
        for older in sorted(known for known in self._versions if known <= version):
            state = self._versions.pop(older)
            marks.extend(mark for rank in sorted(state.marks) for mark in state.marks[rank])
            (complete if older == version else overtaken).extend(state.calls.values())
        return marks, complete, overtaken

    def take_all(self) -> list[ev.DataMarks]:
        """Forget everything; returns the calls that waited."""
        calls = [call for state in self._versions.values() for call in state.calls.values()]
        self._versions = {}
        return calls
