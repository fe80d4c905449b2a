# SPDX-License-Identifier: Apache-2.0
"""The end of a job: every agent is told, and the master stays until the last has hung up.

Before an agent hangs up it says that it has saved what it held, or why it may not have.
"""

import asyncio
import contextlib
from collections.abc import Callable

from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointCall
from holdfast.runtime.observe import Level, Say

FAREWELL_S = 15.0
"""How long a finished master waits when it hears nothing from any agent."""

FLUSH_S = 360.0
"""How long it waits for agents that beat, while nothing new reaches storage. Agents give up earlier
by themselves (END_S in agent/agent.py), so what they hold in memory gets there if it can. They
begin to save it when their workers have ended, so the grace of the workers comes first."""


class Farewell:
    """The agents in the job, attached or not: at its end the master tells each of them."""

    def __init__(self, now: Callable[[], float], say: Say) -> None:
        self._now = now
        self._say = say
        self._in_job: set[NodeId] = set()
        self._all_gone = asyncio.Event()
        self._is_cut_short = False
        #: When an agent was last heard, and when one last made progress with its checkpoints; kept
        #: at the end.
        self._heard_at = self._moved_at = 0.0
        self._written: dict[NodeId, int] = {}
        #: The longest that an agent gives its workers to end, and when the last of it is over.
        self._grace_s = self._grace_until = 0.0
        #: What agents said before they hung up: why something may not be saved; empty if all is.
        self._words: dict[NodeId, str] = {}
        self._doubts: list[str] = []
        self._is_ending = False

    def gives_grace(self, grace_s: float) -> None:
        """An agent gives its workers this long to end."""
        self._grace_s = max(self._grace_s, grace_s)

    def joined(self, node_id: NodeId) -> None:
        self._in_job.add(node_id)
        self._words.pop(node_id, None)

    def parting(self, node_id: NodeId, doubt: str) -> None:
        """An agent says that it hangs up next."""
        self._words[node_id] = doubt

    @property
    def has_heard_any(self) -> bool:
        """Whether any agent has parted from this master."""
        return bool(self._words)

    def hung_up(self, node_id: NodeId) -> None:
        """A link closed. If its agent had not said so before, the link may only have broken, or the
        agent is dead: the master waits for it as for any silent agent."""
        if node_id in self._words:
            self.left(node_id)

    def left(self, node_id: NodeId) -> None:
        """An agent is gone for good."""
        if self._is_ending and node_id in self._in_job:
            doubt = self._words.get(
                node_id, "an agent went without a word; what it had only in memory may be lost"
            )
            if doubt:
                self._doubts.append(doubt)
        self._in_job.discard(node_id)
        self._moved_at = self._now()
        if not self._in_job:
            self._all_gone.set()

    def heard(self, node_id: NodeId, body: m.AnyMessage) -> None:
        """The master heard an agent that has not hung up yet; its checkpoints may have made
        progress."""
        self._heard_at = self._now()
        written = 0
        if isinstance(body, m.Beat) and body.checkpoints is not None:
            written = body.checkpoints.written_bytes
        if isinstance(body, CheckpointCall) or written > self._written.get(node_id, 0):
            self._moved_at = self._heard_at
        self._written[node_id] = max(written, self._written.get(node_id, 0))

    def cut_short(self) -> None:
        """The user wants to wait no longer: wait for no agent."""
        self._is_cut_short = True
        self._in_job.clear()
        self._all_gone.set()

    def begin(self) -> None:
        """The job is over, and every agent is told so now."""
        self._is_ending = True
        if self._in_job:
            self._all_gone.clear()
        self._heard_at = self._moved_at = self._now()
        self._grace_until = self._heard_at + self._grace_s

    def left_s(self) -> float:
        """How much longer the master waits if it hears nothing else; 0 or less: no longer."""
        moved_at = max(self._moved_at, self._grace_until)
        return min(self._heard_at + FAREWELL_S, moved_at + FLUSH_S) - self._now()

    async def wait(self) -> str:
        """Wait until all agents hung up: what is in their memory may be on its way to storage.

        Returns why some of it may not be there; empty if all agents parted without a doubt.
        """
        self.begin()
        while self._in_job:
            left_s = self.left_s()
            if left_s <= 0:
                quiet_s = self._now() - self._heard_at
                count = len(self._in_job)
                why = (
                    f"{count} {'agent' if count == 1 else 'agents'} did not say that all is saved; "
                    f"the last was heard {quiet_s:.0f} s ago"
                )
                self._say(why, Level.WARNING)
                return why
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), left_s)
        if self._is_cut_short:
            return "the master was told to end at once"
        return "; ".join(dict.fromkeys(self._doubts))
