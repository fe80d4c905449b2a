# SPDX-License-Identifier: Apache-2.0
"""Agents on the master's own machine: the kernel knows whether their processes have ended.

An agent's workers end with it, by the kernel and by its guardian. So the master need not wait for
the lease of a node whose process is gone, as after a launcher was killed and started again.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase
from holdfast.runtime.process_names import Whereabouts, look_for, pid_of


class Neighbours:
    """Tells the core of nodes whose processes on this machine have ended."""

    def __init__(
        self, processes: Callable[[], Mapping[NodeId, str]], feed: Callable[[Event], None]
    ) -> None:
        """`processes`: the names of the agents that belong to the job, as far as they said one."""
        self._processes = processes
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._pidfds: dict[NodeId, int] = {}

    def look(self, *, follow: bool = False) -> None:
        """Tell the core of agents that have ended; with `follow` also of those that end from now
        on."""
        for node_id, name in list(self._processes().items()):
            where = look_for(name)
            if where is Whereabouts.GONE:
                self._gone(node_id)
            elif where is Whereabouts.ALIVE and follow and node_id not in self._pidfds:
                self._follow(node_id, pid_of(name))

    def close(self) -> None:
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()

    def _follow(self, node_id: NodeId, pid: int) -> None:
        with suppress(ProcessLookupError):
            pidfd = self._pidfds[node_id] = os.pidfd_open(pid)
            self._loop.add_reader(pidfd, self._ended, node_id)
            return
        self._gone(node_id)

    def _ended(self, node_id: NodeId) -> None:
        pidfd = self._pidfds.pop(node_id)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        self._gone(node_id)

    def _gone(self, node_id: NodeId) -> None:
        self._feed(ev.NodeSeen(node_id, Phase.FAILED, ExitReason.LOST, "its process is gone"))
