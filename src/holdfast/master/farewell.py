# SPDX-License-Identifier: Apache-2.0
"""The end of a job: every agent is told, and the master stays until the last has hung up."""

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointCall
from holdfast.runtime.observe import Say

FAREWELL_S = 15.0
"""How long a finished master waits for an agent of which it hears nothing."""

FLUSH_S = 360.0
"""How long it waits for agents that beat, while nothing new reaches storage. Agents give up earlier
by themselves (END_S in agent/agent.py), so what they hold in memory gets there if it can."""


class Farewell:
    """Who is in the job, attached or not: at its end each of them must be told."""

    def __init__(self, now: Callable[[], float], say: Say) -> None:
        self._now = now
        self._say = say
        self._in_job: set[NodeId] = set()
        self._all_gone = asyncio.Event()
        #: When an agent was heard last, and when one got on with its checkpoints; kept at the end.
        self._heard_at = self._moved_at = 0.0
        self._written: dict[NodeId, int] = {}

    def joined(self, node_id: NodeId) -> None:
        self._in_job.add(node_id)

    def left(self, node_id: NodeId) -> None:
        self._in_job.discard(node_id)
        self._moved_at = self._now()
        if not self._in_job:
            self._all_gone.set()

    def heard(self, node_id: NodeId, body: m.AnyMessage) -> None:
        """An agent that has not hung up yet was heard; it may have got on with its checkpoints."""
        self._heard_at = self._now()
        written = 0
        if isinstance(body, m.Beat) and body.checkpoints is not None:
            written = body.checkpoints.written_bytes
        if isinstance(body, CheckpointCall) or written > self._written.get(node_id, 0):
            self._moved_at = self._heard_at
        self._written[node_id] = max(written, self._written.get(node_id, 0))

    def cut_short(self) -> None:
        """A person has no more patience: wait for no agent."""
        self._in_job.clear()
        self._all_gone.set()

    async def wait(self) -> None:
        """Until all hung up: what is in their memory may be on its way to storage."""
        if self._in_job:
            self._all_gone.clear()
        self._heard_at = self._moved_at = self._now()
        while self._in_job:
            left_s = min(self._heard_at + FAREWELL_S, self._moved_at + FLUSH_S) - self._now()
            if left_s <= 0:
                quiet_s = self._now() - self._heard_at
                self._say(
                    f"{len(self._in_job)} agents did not hang up; "
                    f"the last of them was heard {quiet_s:.0f} s ago"
                )
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), left_s)
