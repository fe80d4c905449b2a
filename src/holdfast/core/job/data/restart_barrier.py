# SPDX-License-Identifier: Apache-2.0
"""After a master's restart no sample is dealt before every node of its world is back.

If the journal is behind (master_history.py), some nodes know: those that trained on what the
journal has forgotten. Before the master has heard all nodes, it could deal the same samples again,
to a rank that steps together with theirs. A node that does not come back is given up, and its world
with it.
"""

from holdfast.core.job import events as ev


class RestartBarrier:
    """The missing nodes, and the requests that wait for them. Nothing here is durable."""

    def __init__(self) -> None:
        self._missing: set[int] = set()
        self._held: list[ev.DataRequested] = []

    def begin(self, found: ev.WorldFound) -> None:
        """The master found a world and has heard no node of it. Finished nodes need not return."""
        if not found.broken:
            members = (member.node_id for member in found.world.members)
            self._missing = {node_id for node_id in members if node_id not in found.finished}

    def holds(self, request: ev.DataRequested) -> bool:
        """Whether the request has to wait; then it is kept here."""
        if self._missing:
            self._held.append(request)
        return bool(self._missing)

    def drop(self, session: str, seq: int) -> None:
        """The answer is not wanted any more."""
        self._held = [held for held in self._held if (held.session, held.seq) != (session, seq)]

    def came(self, node_id: int) -> list[ev.DataRequested]:
        """A node is here; returns the requests that can be answered now."""
        self._missing.discard(node_id)
        return [] if self._missing else self.end()

    def end(self) -> list[ev.DataRequested]:
        """The next world has formed; returns the requests that can be answered now."""
        self._missing.clear()
        held, self._held = self._held, []
        return held
