# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events: what happened, in words, where `kubectl describe` shows it.

A repeated message is one Event with a higher count, also after a restart: the Event's name is made
from its text. The right to read Events is not needed.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.platforms.kubernetes.api import EVENTS, Api, Conflict, NotFound
from holdfast.platforms.kubernetes.times import stamp
from holdfast.runtime.observe import wall_clock

TEXT_MAX = 1000
"""Kubernetes takes 1,024 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The object that an Event is about."""

    api_version: str
    kind: str
    name: str
    namespace: str
    uid: str


class EventLog:
    """Writes Events in the name of one component."""

    def __init__(self, api: Api, component: str, *, now: Callable[[], float] = wall_clock) -> None:
        self._api = api
        self._component = component
        self._now = now

    async def tell(self, about: About, reason: str, text: str, *, warning: bool = False) -> None:
        """Make an Event, or raise its count. `reason` is one word. Raises the errors of the Api."""
        text = text[:TEXT_MAX]
        said = "\n".join((about.uid, self._component, reason, text))
        name = f"{about.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        time = stamp(self._now())
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": about.namespace},
            "involvedObject": {
                "apiVersion": about.api_version,
                "kind": about.kind,
                "name": about.name,
                "namespace": about.namespace,
                "uid": about.uid,
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": text,
            "source": {"component": self._component},
            "reportingComponent": self._component,
            "reportingInstance": self._component,
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
        try:
            await self._api.create(EVENTS, event, about.namespace)
        except Conflict:
            await self._repeat(name, about.namespace, time)

    async def _repeat(self, name: str, namespace: str, time: str) -> None:
        try:
            # Without the right to read, only the answer to a patch shows the count.
            seen = await self._api.patch(EVENTS, name, {"lastTimestamp": time}, namespace)
            count = int(seen.get("count") or 1) + 1
            await self._api.patch(EVENTS, name, {"count": count}, namespace)
        except NotFound:
            return  # The Event expired at this moment, as all Events do after an hour.
