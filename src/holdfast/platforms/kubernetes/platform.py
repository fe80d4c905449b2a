# SPDX-License-Identifier: Apache-2.0
"""Nodes as pods: the platform of a job inside a cluster.

A request about a node (that it exists, or that it is gone) is a *wish*. Each wish has its own task,
which works on it until the API server has accepted it, through outages of any length: no node waits
for another. The state of nodes is learned only from a watch.

A pod that ended is kept, so that people can read its log, until a later pod of the same role and
rank has ended too. The rest is deleted with the job, by owner references. A pod whose main
container ended while others run on is deleted: its successor needs the resources that it reserves.
"""

import asyncio
import enum
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import suppress
from typing import Any

from holdfast.model.errors import UsageError
from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Order
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.answers import Conflict, NotFound, Refusal, Unavailable
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.gang import pod_group
from holdfast.platforms.kubernetes.kinds import PODS, SERVICES, Kind
from holdfast.platforms.kubernetes.manifest import ElasticJob
from holdfast.platforms.kubernetes.pauses import Pauses
from holdfast.platforms.kubernetes.pods import Pod, sighting
from holdfast.platforms.kubernetes.render import node_pod, node_service
from holdfast.platforms.kubernetes.watching import Listed, Seen, follow
from holdfast.ports.platform import Sighting
from holdfast.runtime.observe import Level, Say

FORBIDDEN = 403
LOOK_S = 2.0
"""How long the watch may take to report a change after a node's stream broke."""


class _Away(enum.Enum):
    """The wish that a node be gone."""

    REMOVE = enum.auto()
    """Unless it has ended: then its pod is kept for its log."""
    DISCARD = enum.auto()
    """In any case: a later log is kept in its place."""


_Wish = Order | _Away


class KubernetesPlatform:
    """Makes, removes and watches the pods of one job's nodes."""

    def __init__(
        self, api: Api, job: ElasticJob, *, known: Collection[NodeId] = (), say: Say
    ) -> None:
        """`known` are nodes that an earlier master has seen: those without a pod are gone."""
        self._api = api
        self._job = job
        self._say = say
        self._sightings: asyncio.Queue[Sighting | None] = asyncio.Queue()
        self._told: dict[NodeId, Sighting] = {}
        #: The job's pods, as the watch saw them last.
        self._pods: dict[NodeId, Pod] = {}
        self._known = set(known)
        self._follower: asyncio.Task[None] | None = None
        #: Runs from the moment a node's stream broke until the watch reports anything.
        self._look: asyncio.TimerHandle | None = None
        self._wishes: dict[NodeId, _Wish] = {}
        self._errands: dict[NodeId, asyncio.Task[None]] = {}
        #: Set when a pausing task of a wish has a reason to go on.
        self._wakes: dict[NodeId, asyncio.Event] = {}
        #: Nodes that must never come back, whatever was under way when they were removed.
        self._removed: set[NodeId] = set()
        #: By role and rank: the last node that ended.
        self._ended: dict[tuple[str, str], NodeId] = {}
        self._gang: Mapping[str, Any] | None = None
        self._gang_lock = asyncio.Lock()
        #: Nodes whose wishes failed at the last try.
        self._undone: set[NodeId] = set()

    async def launch(self, order: Order) -> None:
        if order.node_id not in self._removed:
            self._known.discard(order.node_id)
            self._wish(order.node_id, order)

    async def remove(self, node_id: NodeId) -> None:
        self._removed.add(node_id)
        self._wish(node_id, _Away.REMOVE)

    async def watch(self) -> AsyncIterator[Sighting]:
        """All pods of the job, then every change that matters for a node."""
        self._told.clear()
        self._follow_from_a_listing()
        try:
            while (seen := await self._sightings.get()) is not None:
                yield seen
            if self._follower is not None:
                await self._follower
        finally:
            self._stop_following()

    def look_again(self) -> None:
        if self._look is None and self._follower is not None:
            loop = asyncio.get_running_loop()
            self._look = loop.call_later(LOOK_S, self._follow_from_a_listing)

    async def close(self) -> None:
        """Give up what is under way; pods stay. The caller closes the API client."""
        tasks = list(self._errands.values())
        if self._follower is not None:
            tasks.append(self._follower)
        self._stop_following()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- what is seen ----------------------------------------------------------------------------

    def _follow_from_a_listing(self) -> None:
        """Begin to follow, or go on with a new connection, and report pods that went meanwhile."""
        self._stop_following()
        self._known.update(self._pods)
        self._pods.clear()
        follower = self._follower = asyncio.create_task(self._follow())
        follower.add_done_callback(self._follower_ended)

    def _stop_following(self) -> None:
        self._is_heard()
        follower, self._follower = self._follower, None
        if follower is not None:
            follower.cancel()

    def _follower_ended(self, follower: asyncio.Task[None]) -> None:
        if follower is self._follower:
            self._sightings.put_nowait(None)

    def _is_heard(self) -> None:
        """The watch works: it will report all other changes by itself."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    async def _follow(self) -> None:
        selector, namespace = names.selector(self._job.name), self._job.namespace
        changes = follow(self._api, PODS, namespace, labels=selector, type=Pod, say=self._say)
        async for change in changes:
            self._take_in(change)

    def _take_in(self, change: Seen[Pod] | Listed) -> None:
        self._is_heard()
        if isinstance(change, Listed):
            self._take_in_listing()
            return
        pod = change.obj
        node_id = pod.node_id
        if node_id is None:
            return
        if change.gone and node_id in self._wakes:
            # It may have blocked the name: a pod of an older job of this name.
            self._wakes[node_id].set()
        if not pod.is_of(self._job.uid):
            return
        self._known.discard(node_id)
        seen = sighting(pod, gone=change.gone)
        if seen is not None:
            self._tell(seen)
        if isinstance(self._wishes.get(node_id), Order):
            # The server has made it, whether its answer arrived or not.
            del self._wishes[node_id]
            self._wakes[node_id].set()
        if change.gone:
            # A node lives once: requests under way must not bring it back.
            self._removed.add(node_id)
            self._pods.pop(node_id, None)
            return
        self._pods[node_id] = pod
        if pod.is_over:
            self._keep_last_log(node_id, pod)
        elif not pod.is_leaving and (pod.is_held_up or node_id in self._removed):
            # Removed: its pod was being made then, and the outcome was unknown.
            self._wish(node_id, _Away.REMOVE)

    def _take_in_listing(self) -> None:
        """Nodes that an earlier master has seen and that a whole listing lacks are gone."""
        for node_id in sorted(self._known - self._wishes.keys()):
            self._see(node_id, Phase.GONE, ExitReason.KILLED, "its pod was gone when we looked")
        self._known.clear()

    def _keep_last_log(self, node_id: NodeId, pod: Pod) -> None:
        last = self._ended.get(pod.slot, node_id)
        self._ended[pod.slot] = max(last, node_id)
        older = min(last, node_id)
        if older != self._ended[pod.slot] and older in self._pods:
            self._wish(older, _Away.DISCARD)

    def _see(self, node_id: NodeId, phase: Phase, reason: ExitReason | None, message: str) -> None:
        self._tell(Sighting(node_id=node_id, phase=phase, reason=reason, message=message))

    def _tell(self, seen: Sighting) -> None:
        """Report a change, if it is one for the node: most changes of a pod are not."""
        if self._told.get(seen.node_id) != seen:
            self._told[seen.node_id] = seen
            self._sightings.put_nowait(seen)
        if seen.phase is Phase.GONE:
            del self._told[seen.node_id]

    # ---- what is wished --------------------------------------------------------------------------

    def _wish(self, node_id: NodeId, wish: _Wish) -> None:
        self._wishes[node_id] = wish
        if node_id in self._errands:
            self._wakes[node_id].set()
            return
        self._wakes[node_id] = asyncio.Event()
        self._errands[node_id] = asyncio.create_task(self._fulfil(node_id))

    async def _fulfil(self, node_id: NodeId) -> None:
        """Work on the newest wish for this node until there is none."""
        wake, pauses = self._wakes[node_id], Pauses()
        try:
            while (wish := self._wishes.get(node_id)) is not None:
                wake.clear()
                error: Exception | None = None
                try:
                    is_done = await self._try(node_id, wish)
                    self._undone.discard(node_id)
                except (Unavailable, Refusal) as exc:
                    is_done, error = False, exc
                    if not self._undone:
                        self._say(
                            f"{exc}; pods are made and removed as soon as that is possible",
                            Level.WARNING,
                        )
                    self._undone.add(node_id)
                if not is_done:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(wake.wait(), pauses.after(error))
                elif self._wishes.get(node_id) is wish:
                    del self._wishes[node_id]
        finally:
            self._undone.discard(node_id)
            del self._errands[node_id], self._wakes[node_id]

    async def _try(self, node_id: NodeId, wish: _Wish) -> bool:
        """One attempt; whether nothing is left to do."""
        if isinstance(wish, Order):
            return await self._make(wish)
        await self._take_away(node_id, even_its_log=wish is _Away.DISCARD)
        return True

    async def _make(self, order: Order) -> bool:
        job = self._job
        try:
            pod, service = node_pod(job, order), node_service(job, order)
            await self._gather_gang(order)
            if service is not None:
                await self._apply(SERVICES, service)
            # Not server-side apply: an existing pod cannot become another one, so there is nothing
            # to apply to it; docs/kubernetes.md says what else it would break.
            await self._api.create(PODS, pod, job.namespace, strict=True)
        except Conflict:
            return await self._is_there(order, pod["metadata"]["name"])
        except UsageError as exc:
            self._see(order.node_id, Phase.FAILED, ExitReason.ERROR, str(exc))
        except Refusal as exc:
            if exc.status == FORBIDDEN or isinstance(exc, NotFound):
                # People can add a missing quota, right, priority class or namespace at any time.
                self._see(order.node_id, Phase.PENDING, None, f"its pod cannot be made yet: {exc}")
                return False
            why = f"its pod cannot be made: {exc}"
            self._see(order.node_id, Phase.FAILED, ExitReason.ERROR, why)
        return True

    async def _is_there(self, order: Order, name: str) -> bool:
        """Whether the pod of that name is this node's: an earlier try may have made it."""
        try:
            pod = await self._api.get(PODS, name, self._job.namespace, type=Pod)
        except NotFound:
            return False
        if pod.is_of(self._job.uid):
            # A master whose journal was lost gives this id again. Earlier reports about the pod
            # were about a node that this master did not know.
            self._told.pop(order.node_id, None)
            if (seen := sighting(pod)) is not None:
                self._tell(seen)
            return True
        why = f"it waits until the pod {name} of an earlier job of this name is gone"
        self._see(order.node_id, Phase.PENDING, None, why)
        return False

    async def _take_away(self, node_id: NodeId, *, even_its_log: bool) -> None:
        pods = [self._pods[node_id]] if node_id in self._pods else await self._look_up(node_id)
        if not pods:
            self._see(node_id, Phase.GONE, ExitReason.KILLED, "it was removed and has no pod")
        for pod in pods:
            if pod.is_leaving or (pod.is_over and not even_its_log):
                continue
            meta = pod.metadata
            await self._api.delete(PODS, meta.name, self._job.namespace, uid=meta.uid)

    async def _look_up(self, node_id: NodeId) -> list[Pod]:
        """The pods of a node that the watch has not reported yet."""
        labels = f"{names.selector(self._job.name)},{names.NODE_ID_LABEL}={node_id}"
        found = await self._api.list(PODS, self._job.namespace, labels=labels, type=Pod)
        return [pod for pod in found.items if pod.is_of(self._job.uid) and pod.node_id == node_id]

    async def _gather_gang(self, order: Order) -> None:
        """Tell the scheduler how many nodes belong together, whenever that has changed."""
        group = pod_group(self._job, order)
        async with self._gang_lock:
            if group is None or group == self._gang:
                return
            api_group, version = group["apiVersion"].split("/")
            try:
                await self._apply(Kind(api_group, version, "podgroups"), group)
            except Refusal as exc:
                self._say(
                    f"the gang scheduler cannot be told about the job's pods: {exc}", Level.WARNING
                )
            self._gang = group

    async def _apply(self, kind: Kind, body: Mapping[str, Any]) -> None:
        name, namespace = body["metadata"]["name"], self._job.namespace
        await self._api.apply(kind, name, body, namespace, manager=names.MASTER_MANAGER)
