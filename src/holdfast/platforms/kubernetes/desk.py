# SPDX-License-Identifier: Apache-2.0
"""The desk on Kubernetes: the ElasticJob's spec and ScalePlans come in, status and Events go out.

The desk passes on only what has changed in the spec: a ScalePlan may have given the job another
size since, and a later change of another field must not undo that. So what the job follows is part
of the status (`status.observed`), where the next master finds it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from holdfast.model.order import Plan
from holdfast.model.resources import Limits
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.difference import REFUSED, difference, still_refused
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, SCALEPLANS
from holdfast.platforms.kubernetes.manifest import ElasticJob, read_job
from holdfast.platforms.kubernetes.news import News
from holdfast.platforms.kubernetes.outbox import Outbox
from holdfast.platforms.kubernetes.plain_roles import sizes
from holdfast.platforms.kubernetes.scaleplan import ScalePlan, read_plan
from holdfast.platforms.kubernetes.status import status_of
from holdfast.platforms.kubernetes.times import stamp
from holdfast.platforms.kubernetes.watching import Listed, Seen, follow
from holdfast.runtime.observe import Level, Say, wall_clock

FLUSH_S = 20.0
"""How long a master that ends tries to write the end of the job. Its journal has it too, and the
next master that is started for the job writes it again."""


@dataclass(slots=True)
class _Asked:
    """A ScalePlan, or a changed spec, with plans that are not answered yet."""

    waits_for: set[str]
    name: str = ""
    """The name of the ScalePlan."""
    observed: Mapping[str, Any] | None = None
    """What the job follows once the spec is answered."""
    is_first: bool = False
    """True for the spec with which the job began: that the job follows it is no news."""
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The sizes of roles, by the id of the plan that asks for them."""
    refused: dict[str, int] = field(default_factory=dict)
    """The refused ones of these sizes, by role."""
    refusals: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """Descriptions of what was done."""
    notes: tuple[str, ...] = ()
    """Notes on fields that have no effect."""

    def summary(self) -> str:
        """What became of it, in words."""
        told = "; ".join(self.refusals or self.texts) or "nothing had to change"
        if self.refusals and self.texts:
            told += f". Done all the same: {'; '.join(self.texts)}"
        return "; note: ".join((told, *self.notes))


class KubernetesDesk:
    """Speaks to people through the objects of one job."""

    def __init__(
        self,
        api: Api,
        job: ElasticJob,
        status: Mapping[str, Any],
        *,
        say: Say,
        wall: Callable[[], float] = wall_clock,
    ) -> None:
        """`status` is the ElasticJob's present one, from an earlier master or the operator."""
        self._api, self._job = api, job
        self._say, self._wall = say, wall
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(say)
        self._status = dict(status)
        #: The status written last, without the time of writing.
        self._written: dict[str, Any] = {}
        self._view: Mapping[str, object] | None = None
        self._observed = _known(status.get("observed") or {}, job)
        #: The newest spec that arrived while an earlier one was not answered.
        self._next_spec: Mapping[str, Any] | None = None
        self._queue: asyncio.Queue[Plan | None] = asyncio.Queue()
        self._generation = -1
        #: From then on the desk writes nothing: there may be another job of the same name.
        self._is_deleted = False
        #: Uids of the ScalePlans whose plans were passed on.
        self._told: set[str] = set()
        #: Plans that are not answered yet, by plan id.
        self._asked: dict[str, _Asked] = {}
        self._news = News(api, job, self._outbox, wall)

    # ---- plans in -------------------------------------------------------------------------------

    async def plans(self) -> AsyncIterator[Plan]:
        """The plans of the spec and the ScalePlans; ends when the ElasticJob is deleted."""
        readers = {
            asyncio.create_task(self._follow_job()),
            asyncio.create_task(self._follow_plans()),
        }
        taking = asyncio.create_task(self._queue.get())
        try:
            while True:
                done, _ = await asyncio.wait(
                    {taking, *readers}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done & readers:
                    # A reader follows forever: if it has ended, it has an error for the caller.
                    readers.discard(task)
                    task.result()
                if taking in done:
                    plan = taking.result()
                    if plan is None:
                        return
                    taking = asyncio.create_task(self._queue.get())
                    yield plan
        finally:
            for task in (taking, *readers):
                task.cancel()
            await asyncio.gather(taking, *readers, return_exceptions=True)

    async def _follow_job(self) -> None:
        own = f"metadata.name={self._job.name}"
        namespace = self._job.namespace
        async for seen in follow(self._api, ELASTICJOBS, namespace, fields=own, say=self._say):
            if isinstance(seen, Listed):
                is_deleted = not seen.names
            else:
                is_deleted = seen.gone or seen.meta.uid != self._job.uid
            if is_deleted:
                self._is_deleted = True
                self._queue.put_nowait(None)
            elif isinstance(seen, Seen):
                self._take_spec(seen.obj)

    def _take_spec(self, obj: Mapping[str, Any]) -> None:
        """Ask for what the spec changes, once the spec before it is answered: until then it is
        unknown what the job follows, and so what the change is. Of waiting specs only the newest
        counts."""
        if any(asked.observed is not None for asked in self._asked.values()):
            self._next_spec = obj
            return
        for plan in self._changes(obj):
            self._queue.put_nowait(plan)

    def _changes(self, obj: Mapping[str, Any]) -> list[Plan]:
        """The plans for those parts of a spec that were not asked for before."""
        job, problems = read_job(obj)
        if job.generation == self._generation:
            return []
        self._generation = job.generation
        fatal = [str(one) for one in problems if one.fatal and not one.at_start_only]
        if fatal:
            # The operator reports it in a condition; the job goes on as it is.
            self._say(f"the changed spec is not followed: {'; '.join(fatal)}", Level.WARNING)
            return []
        observed = {
            "generation": job.generation,
            "replicas": sizes(job),
            "suspend": job.suspend,
            "limits": _set_fields(job.resource_limits),
        }
        plans = difference(self._observed, observed)
        observed |= _refused(still_refused(self._observed, observed, plans))
        if not plans:
            self._observed = observed
            self._put_status()
        ids = {plan.plan_id for plan in plans}
        asked = _Asked(ids, observed=observed, is_first=not self._observed)
        asked.sizes = {
            plan.plan_id: {plan.role: plan.nodes} for plan in plans if plan.nodes is not None
        }
        self._asked.update(dict.fromkeys(asked.waits_for, asked))
        return plans

    async def _follow_plans(self) -> None:
        # A listing has no order: ScalePlans that come together are sorted by their creation.
        batch: list[ScalePlan] = []

        def take() -> None:
            for one in sorted(batch, key=lambda one: (one.created, one.name)):
                self._queue.put_nowait(one.plan)
            batch.clear()

        namespace = self._job.namespace
        async for seen in follow(self._api, SCALEPLANS, namespace, say=self._say):
            if isinstance(seen, Listed) or seen.gone:
                continue
            plan, problems = read_plan(seen.obj)
            if plan.job != self._job.name or plan.finished or plan.uid in self._told:
                continue
            self._told.add(plan.uid)
            asked = _Asked({plan.plan.plan_id} if plan.plan else set(), plan.name)
            asked.notes = tuple(str(problem) for problem in problems if not problem.fatal)
            if plan.plan is None:
                fatal = [str(problem) for problem in problems if problem.fatal]
                asked.refusals = fatal or ["it asks for nothing"]
                self._settle(plan.uid, asked)
                continue
            self._asked.update(dict.fromkeys(asked.waits_for, asked))
            if not batch:
                # Runs when `follow` waits for the server again: the whole listing is here by then.
                self._loop.call_soon(take)
            batch.append(plan)

    # ---- answers, status and Events out ---------------------------------------------------------

    async def answer(self, plan_id: str, *, ok: bool, text: str) -> None:
        """Write it into the ScalePlan's status, or report that the job follows the new spec."""
        asked = self._asked.pop(plan_id, None)
        if asked is None:
            return
        asked.waits_for.discard(plan_id)
        (asked.texts if ok else asked.refusals).append(text)
        if not ok:
            asked.refused |= asked.sizes.get(plan_id, {})
        if not asked.waits_for:
            self._settle(plan_id, asked)

    def _settle(self, key: str, asked: _Asked) -> None:
        """All plans of a ScalePlan or spec are answered: report it."""
        what = f"ScalePlan {asked.name}" if asked.name else "the changed spec"
        if asked.refusals:
            self._news.put("PlanRefused", f"{what} is refused: {asked.summary()}", is_warning=True)
        elif not asked.is_first:
            self._news.put("PlanDone", f"{what} is done: {asked.summary()}", is_warning=False)
        if asked.observed is None:
            self._put_answer(key, asked)
        else:
            # A refused change too: the Event says why, and `difference` says when to ask again.
            refused = {**asked.observed.get(REFUSED, {}), **asked.refused}
            self._observed = {**asked.observed, **_refused(refused)}
            self._put_status()
            waiting, self._next_spec = self._next_spec, None
            if waiting is not None:
                self._take_spec(waiting)

    def _put_answer(self, key: str, asked: _Asked) -> None:
        phase = "Failed" if asked.refusals else "Succeeded"
        status = {
            "phase": phase,
            "message": asked.summary(),
            "finishTime": stamp(self._wall()),
        }
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "ScalePlan",
            "metadata": {"name": asked.name, "namespace": self._job.namespace},
            "status": status,
        }

        async def write() -> None:
            await self._api.apply(
                SCALEPLANS,
                asked.name,
                body,
                self._job.namespace,
                manager=names.MASTER_MANAGER,
                subresource="status",
            )

        self._outbox.put(f"answer to ScalePlan {asked.name} ({key})", write)

    async def show(self, view: Mapping[str, object]) -> None:
        """Write the view into the ElasticJob's status, if that changes the status."""
        self._view = view
        self._put_status()

    def _put_status(self) -> None:
        if self._view is not None:
            self._outbox.put("status of the ElasticJob", self._write_status)

    async def _write_status(self) -> None:
        assert self._view is not None
        status = status_of(self._view, self._status, stamp(self._wall()), self._observed)
        said = {name: value for name, value in status.items() if name != "lastReconcileTime"}
        if said == self._written or self._is_deleted:
            return
        body = {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": self._job.name, "namespace": self._job.namespace},
            "status": status,
        }
        await self._api.apply(
            ELASTICJOBS,
            self._job.name,
            body,
            self._job.namespace,
            manager=names.MASTER_MANAGER,
            subresource="status",
        )
        self._status, self._written = status, said

    async def tell(self, kind: str, text: str) -> None:
        """Make an Event of a story, if people want to see it in `kubectl describe`."""
        self._news.tell(kind, text)

    async def close(self) -> None:
        """Finish the waiting writes, within FLUSH_S."""
        if not await self._outbox.close(FLUSH_S):
            self._say(f"not everything could be written within {FLUSH_S:g} s", Level.WARNING)


def _known(observed: Mapping[str, Any], job: ElasticJob) -> Mapping[str, Any]:
    """What the job certainly follows, from what the previous master was able to write.

    That master may have followed a later spec too, without writing it. So the desk asks again
    whether the job is suspended, whatever the value is. It does not ask for the sizes again: a
    later ScalePlan may have changed them.
    """
    if observed.get("generation") == job.generation:
        return observed
    return {name: value for name, value in observed.items() if name != "suspend"}


def _refused(sizes: Mapping[str, int]) -> dict[str, Mapping[str, int]]:
    """The refused sizes as a part of what the job follows."""
    return {REFUSED: sizes} if sizes else {}


def _set_fields(limits: Limits) -> dict[str, int]:
    """Only the limits that are set: a status has no null."""
    every = asdict(limits)
    return {name: most for name, most in every.items() if most is not None}
