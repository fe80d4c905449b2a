# SPDX-License-Identifier: Apache-2.0
"""What happens in a job, as Kubernetes Events: what people want to know, and not too much of it."""

import asyncio
from collections.abc import Callable

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.events import About, EventLog
from holdfast.platforms.kubernetes.manifest import ElasticJob
from holdfast.platforms.kubernetes.outbox import Outbox

NEWS = {
    "GenerationRaised": False,
    "NodeLost": True,
    "MemoryRaised": False,
    "HostAvoided": True,
    "GroupMoved": True,
    "RankGivenUp": True,
    "WorldFormed": False,
    "WorldBroken": True,
    "FirstStepLate": True,
    "IncidentClosed": False,
    "RestoreAgreed": False,
    "AttemptFailed": True,
    "CopyFailed": True,
    "SavesFailed": True,
    "CopiesResumed": False,
    "DatasetRestored": False,
    "PieceSetAside": True,
    "JobSuspended": False,
    "JobResumed": False,
    "JobSucceeded": False,
    "JobFailed": True,
}
"""The stories that become Events, and whether each is a warning. The others are in the log."""

ALWAYS = frozenset({"JobSuspended", "JobResumed", "JobSucceeded", "JobFailed"})
EVENTS_AT_ONCE = 25
EVENT_EVERY_S = 5.0
"""A thousand nodes that are lost together must not make a thousand Events: after the first few
there is one in this time, and it says how many were left out."""


class News:
    """Makes the Events of one job."""

    def __init__(
        self, api: Api, job: ElasticJob, outbox: Outbox, wall: Callable[[], float]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox
        self._events = EventLog(api, names.MASTER_MANAGER, now=wall)
        self._about = About(
            api_version=names.API_VERSION,
            kind="ElasticJob",
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
        )
        self._may_tell, self._counted_at = float(EVENTS_AT_ONCE), self._loop.time()
        self._left_out = self._told = 0

    def tell(self, kind: str, text: str) -> None:
        """Make an Event of a story, if it is one of NEWS and there were not too many."""
        if kind not in NEWS:
            return
        now = self._loop.time()
        earned = (now - self._counted_at) / EVENT_EVERY_S
        self._may_tell, self._counted_at = min(EVENTS_AT_ONCE, self._may_tell + earned), now
        if self._may_tell < 1 and kind not in ALWAYS:
            self._left_out += 1
            return
        self._may_tell = max(0.0, self._may_tell - 1)
        if self._left_out:
            text = f"{text} ({self._left_out} more Events were left out)"
            self._left_out = 0
        self.put(kind, text, is_warning=NEWS[kind])

    def put(self, kind: str, text: str, *, is_warning: bool) -> None:
        """Make an Event in any case."""
        self._told += 1

        async def write() -> None:
            await self._events.tell(self._about, kind, text, warning=is_warning)

        self._outbox.put(f"Event {self._told}", write)
