# SPDX-License-Identifier: Apache-2.0
"""The operator at work: watches, and one keeper for each job.

Each job has its own task. An error of one job, even a bug, concerns only that job: its task tries
again after growing pauses, and the other jobs do not notice.
"""

import asyncio
import traceback
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import assert_never

import msgspec

from holdfast.model.errors import HoldfastError
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.answers import Conflict, Rejected
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.events import About, EventLog
from holdfast.platforms.kubernetes.kinds import (
    ELASTICJOBS,
    PODS,
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SECRETS,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kind,
)
from holdfast.platforms.kubernetes.manifest import ElasticJob
from holdfast.platforms.kubernetes.operator import objects
from holdfast.platforms.kubernetes.operator import reconcile as rec
from holdfast.platforms.kubernetes.operator.observed import SELECTOR, Child, MasterPod, Observed
from holdfast.platforms.kubernetes.operator.sight import Key, Sight, read_child
from holdfast.platforms.kubernetes.pauses import Pauses
from holdfast.platforms.kubernetes.pods import Pod
from holdfast.platforms.kubernetes.watching import Listed, follow
from holdfast.runtime.observe import Say, wall_clock

AROUND_MASTERS = (PODS, SERVICES, SERVICE_ACCOUNTS, ROLES, ROLE_BINDINGS, PVCS)
"""The watched kinds, besides the jobs. Secrets are not watched: no client needs to read them."""

LOST = "SecretLost"
"""The reason of an Event about a Secret that a person deleted."""

PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
"""The longest pause between two tries for one job."""


class Operator:
    """Looks after all jobs of some namespaces, or of the cluster."""

    def __init__(
        self,
        api: Api,
        *,
        namespaces: Sequence[str] = (),
        default_image: str = "",
        say: Say,
        now: Callable[[], float] = wall_clock,
    ) -> None:
        """No `namespaces` means all. `default_image` is for masters of jobs that name no image."""
        self._api = api
        self._namespaces: Sequence[str | None] = namespaces or (None,)
        self._default_image = default_image
        self._say, self._now = say, now
        self._events = EventLog(api, names.OPERATOR_MANAGER, now=now)
        self._sight = Sight()
        self._keepers: dict[Key, _Keeper] = {}
        kinds = (ELASTICJOBS, *AROUND_MASTERS)
        self._unlisted = {(kind, ns) for ns in self._namespaces for kind in kinds}

    def unlisted(self) -> list[str]:
        """The kinds that are not listed yet, in words. The operator does nothing until all are."""
        return sorted(
            f"{kind.plural} in {namespace or 'all namespaces'}"
            for kind, namespace in self._unlisted
        )

    async def run(self) -> None:
        """Work until cancelled."""
        watches = [asyncio.create_task(self._watch(*stream)) for stream in self._unlisted]
        try:
            await asyncio.gather(*watches)
        finally:
            await _end(watches)
            keepers = [keeper.task for keeper in self._keepers.values()]
            self._keepers.clear()
            await _end(keepers)

    async def _watch(self, kind: Kind, namespace: str | None) -> None:
        changes = self._follow_jobs if kind == ELASTICJOBS else self._follow_children
        async with aclosing(changes(kind, namespace)) as keys:
            async for key in keys:
                if key is not None:
                    self._wake(key)
                    continue
                self._unlisted.discard((kind, namespace))
                if not self._unlisted:
                    # Only now can a missing object be told from one that was not seen yet.
                    for keeper in self._keepers.values():
                        keeper.changed.set()

    async def _follow_jobs(
        self, kind: Kind, namespace: str | None
    ) -> AsyncGenerator[Key | None, None]:
        """The keys of jobs that have changed; None when all jobs have been listed."""
        async for seen in follow(self._api, kind, namespace, say=self._say):
            if isinstance(seen, Listed):
                yield None
            elif (key := self._sight.see_job(seen.obj, gone=seen.gone)) is not None:
                yield key

    async def _follow_children(
        self, kind: Kind, namespace: str | None
    ) -> AsyncGenerator[Key | None, None]:
        async for seen in follow(
            self._api, kind, namespace, labels=SELECTOR, type=read_child(kind), say=self._say
        ):
            if isinstance(seen, Listed):
                yield None
            else:
                yield self._sight.see_child(kind, seen.obj, gone=seen.gone)

    # ---- keepers ---------------------------------------------------------------------------------

    def _wake(self, key: Key) -> None:
        """Wake the keeper of this job, if the job exists."""
        uid = self._sight.uid(key)
        keeper = self._keepers.get(key)
        if keeper is not None and keeper.uid != uid:
            keeper.task.cancel()
            del self._keepers[key]
            keeper = None
        if keeper is None and uid:
            keeper = self._keepers[key] = _Keeper(key, uid)
            keeper.task = asyncio.create_task(self._look_after(keeper))
        if keeper is not None and not self._unlisted:
            keeper.changed.set()

    async def _look_after(self, keeper: "_Keeper") -> None:
        """Look after a job until it is gone. An error that `_keep` does not expect is a bug: it
        must end neither the care for this job nor that for other jobs, and people must hear of
        it."""
        while True:
            (bug,) = await asyncio.gather(self._keep(keeper), return_exceptions=True)
            if bug is None:
                return
            pause_s = keeper.pauses.after()
            lines = "".join(traceback.format_exception(bug))
            self._say(f"{keeper}: a bug in the operator; tried again in {pause_s:.1f} s\n{lines}")
            text = f"a bug in the operator, which tries again: {type(bug).__name__}: {bug}"
            telling = self._tell(keeper.about(), rec.Tell("OperatorBug", text, warning=True))
            # The bug may be in the code that writes the Event.
            await asyncio.gather(telling, return_exceptions=True)
            await keeper.pause(pause_s, self._sight)
            keeper.changed.set()

    async def _keep(self, keeper: "_Keeper") -> None:
        """Look at one job whenever something has changed, and act."""
        wait_s: float | None = None
        while True:
            await keeper.wait(wait_s)
            seen = self._sight.observed(keeper.key)
            if seen is None:
                return
            try:
                decision = rec.reconcile(seen, self._now(), default_image=self._default_image)
                await self._perform(seen, decision.actions)
            except HoldfastError as exc:
                await self._failed(seen, exc)
                await keeper.pause(keeper.pauses.after(exc), self._sight)
                wait_s = 0.0
            else:
                keeper.pauses.renew()
                again_at = decision.again_at
                wait_s = None if again_at is None else max(0.0, again_at - self._now())

    async def _failed(self, seen: Observed, exc: HoldfastError) -> None:
        """Log the error; if the server refuses what the job needs, tell the user too."""
        if isinstance(exc, Conflict):
            return  # Another client was faster; the next look shows its change.
        self._say(f"{seen.job.namespace}/{seen.job.name}: {exc}")
        if not isinstance(exc, Rejected):
            return
        try:
            await self._perform(seen, rec.refused(seen, str(exc), self._now()))
        except HoldfastError as more:
            self._say(f"{seen.job.namespace}/{seen.job.name}: {more}")

    # ---- actions ---------------------------------------------------------------------------------

    async def _perform(self, seen: Observed, actions: Sequence[rec.Action]) -> None:
        job, api = seen.job, self._api
        for action in actions:
            match action:
                case rec.Confirm():
                    await self._confirm(seen)
                case rec.Apply(kind, body):
                    await self._apply(kind, body)
                case rec.Create(kind, body):
                    await self._create(kind, body)
                case rec.CreateSecret():
                    await self._create_secret(seen)
                case rec.CheckSecret():
                    await self._check_secret(job)
                case rec.RemovePod(name, uid):
                    await api.delete(PODS, name, job.namespace, uid=uid)
                case rec.StopNodes():
                    await self._stop_nodes(job)
                case rec.WriteStatus():
                    await self._write_status(seen, action)
                case rec.Tell():
                    await self._tell(_about(job.namespace, job.name, job.uid), action)
                case rec.DeleteJob():
                    self._say(f"{job.namespace}/{job.name}: its time after the end is over")
                    await api.delete(ELASTICJOBS, job.name, job.namespace, uid=job.uid)
                case _:
                    assert_never(action)

    async def _confirm(self, seen: Observed) -> None:
        obj = await self._api.get(ELASTICJOBS, seen.job.name, seen.job.namespace)
        if obj["metadata"]["resourceVersion"] != seen.resource_version:
            self._sight.hear_job(obj, seen.resource_version)
            raise Conflict(f"the job {seen.job.name} has changed meanwhile")

    async def _apply(self, kind: Kind, body: dict[str, object]) -> None:
        wanted = msgspec.convert(body, read_child(kind))
        asked_at = self._sight.version(kind, wanted)
        metadata = wanted.metadata
        manager = names.OPERATOR_MANAGER
        obj = await self._api.apply(kind, metadata.name, body, metadata.namespace, manager=manager)
        self._sight.hear_child(kind, msgspec.convert(obj, read_child(kind)), asked_at)

    async def _create(self, kind: Kind, body: dict[str, object]) -> None:
        wanted = msgspec.convert(body, read_child(kind))
        asked_at = self._sight.version(kind, wanted)
        try:
            obj = await self._api.create(kind, body, wanted.metadata.namespace)
        except Conflict:
            return  # It exists; the watch reports it, or has done so.
        made: MasterPod | Child = msgspec.convert(obj, read_child(kind))
        self._say(f"{wanted.metadata.namespace}: {kind.plural} {wanted.metadata.name} is made")
        self._sight.hear_child(kind, made, asked_at)

    async def _create_secret(self, seen: Observed) -> None:
        job = seen.job
        try:
            await self._api.create(SECRETS, objects.secret(job), job.namespace)
        except Conflict:
            return  # Its name has the job's uid: it belongs to this job, and stays as long.
        if rec.has_run(seen):
            text = (
                f"the Secret {names.secret_name(job.name, job.uid)} was deleted, and a new one is "
                "made with another token: nodes that have the old one are refused and replaced"
            )
            await self._tell(_about(job.namespace, job.name, job.uid), rec.Tell(LOST, text, True))

    async def _check_secret(self, job: ElasticJob) -> None:
        try:
            await self._api.create(SECRETS, objects.secret_shell(job), job.namespace, dry_run=True)
        except Conflict:
            return  # It exists.
        master = names.master_name(job.name)
        text = (
            f"the Secret {names.secret_name(job.name, job.uid)} was deleted. The job goes on, but "
            "pods of new nodes cannot start without it. To have a new one made, delete the "
            f"master's pod ({master}-N): the master comes back with another token, and the nodes "
            "that have the old one are replaced"
        )
        await self._tell(_about(job.namespace, job.name, job.uid), rec.Tell(LOST, text, True))

    async def _stop_nodes(self, job: ElasticJob) -> None:
        labels = names.selector(job.name)
        listing = await self._api.list(PODS, job.namespace, labels=labels, type=Pod)
        await asyncio.gather(
            *(
                self._api.delete(PODS, pod.metadata.name, job.namespace, uid=pod.metadata.uid)
                for pod in listing.items
                if pod.is_of(job.uid) and pod.node_id is not None
            )
        )

    async def _write_status(self, seen: Observed, action: rec.WriteStatus) -> None:
        job = seen.job
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {
                "name": job.name,
                "namespace": job.namespace,
                "uid": job.uid,
                # It must not overwrite what the master has written since: Conflict instead.
                "resourceVersion": seen.resource_version,
            },
            "status": action.status,
        }
        obj = await self._api.apply(
            ELASTICJOBS,
            job.name,
            body,
            job.namespace,
            manager=names.OPERATOR_MANAGER,
            subresource="status",
        )
        self._sight.hear_job(obj, seen.resource_version)

    async def _tell(self, about: About, event: rec.Tell) -> None:
        """Write an Event. Events only inform people, so a failed write holds up nothing."""
        self._say(f"{about.namespace}/{about.name}: {event.reason}: {event.text}")
        try:
            await self._events.tell(about, event.reason, event.text, warning=event.warning)
        except HoldfastError as exc:
            self._say(f"{about.namespace}/{about.name}: the Event was not written: {exc}")


class _Keeper:
    """The task of one job, with what wakes it."""

    task: "asyncio.Task[None]"

    def __init__(self, key: Key, uid: str) -> None:
        self.key, self.uid = key, uid
        self.changed = asyncio.Event()
        self.pauses = Pauses(PAUSE_S, PAUSE_MAX_S)

    def __str__(self) -> str:
        return "/".join(self.key)

    def about(self) -> About:
        namespace, name = self.key
        return _about(namespace, name, self.uid)

    async def wait(self, seconds: float | None) -> None:
        """Wait until something changes, or for this time."""
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            pass
        self.changed.clear()

    async def pause(self, seconds: float, sight: Sight) -> None:
        """Wait for this time, or until the manifest changes: the change may be the fix."""
        generation = sight.generation(self.key)
        try:
            async with asyncio.timeout(seconds):
                while sight.generation(self.key) == generation:
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return


def _about(namespace: str, name: str, uid: str) -> About:
    return About(
        api_version=names.API_VERSION,
        kind="ElasticJob",
        name=name,
        namespace=namespace,
        uid=uid,
    )


async def _end(tasks: "Sequence[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
