# SPDX-License-Identifier: Apache-2.0
"""What a master does before it serves: find its ElasticJob, and remove nodes it knows nothing of.

A master whose state is lost (its volume was an emptyDir, or is gone) finds nodes that it knows
nothing about. They belong to a world of which the master has no record: it removes them, and the
job starts again from its checkpoints on storage. The master serves no agent before they are gone,
or have stopped their workers by themselves because no master renewed their leases: there are never
two worlds.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from holdfast.model.errors import UsageError
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.answers import NotFound, Unavailable
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS, PODS
from holdfast.platforms.kubernetes.manifest import ElasticJob, read_job
from holdfast.platforms.kubernetes.pauses import Pauses
from holdfast.platforms.kubernetes.watching import Listed, follow
from holdfast.runtime.observe import Say

T = TypeVar("T")


async def own_job(
    api: Api, name: str, namespace: str, say: Say
) -> tuple[ElasticJob, Mapping[str, Any]]:
    """The job from its current manifest, and its status; UsageError if the job cannot be run."""
    try:
        obj = await _patiently(lambda: api.get(ELASTICJOBS, name, namespace), say)
    except NotFound:
        raise UsageError(f"there is no ElasticJob {name} in the namespace {namespace}") from None
    job, problems = read_job(obj)
    # The journal has the job's size, and the core keeps the limits of a job that begins again.
    fatal = [str(one) for one in problems if one.fatal and not one.at_start_only]
    if fatal:
        raise UsageError(f"the ElasticJob {name} cannot be run: {'; '.join(fatal)}")
    return job, obj.get("status") or {}


async def clear_away(api: Api, job: ElasticJob, *, lease_s: float, say: Say) -> int:
    """Remove the nodes of a master whose state is lost; returns the first free node id.

    After `lease_s` without a master every agent has stopped its workers by itself, so this takes no
    longer than that.
    """
    selector = f"{names.selector(job.name)},{names.ROLE_LABEL}!={names.MASTER_ROLE}"
    listing = await _patiently(lambda: api.list(PODS, job.namespace, labels=selector), say)
    # Pods of an earlier job of the same name go by themselves; their ids count as taken until then.
    ours = {pod["metadata"]["uid"]: pod for pod in listing.items if _is_owned(pod, job.uid)}
    if ours:
        say(
            f"the state of the job is lost, and {len(ours)} nodes of it are left: they are "
            "removed, and the job starts anew from its checkpoints on storage"
        )
        await asyncio.gather(*(_remove(api, pod, say) for pod in ours.values()))
        await _gone(api, job.namespace, selector, set(ours), lease_s, say)
    return 1 + max((_node_id(pod) for pod in listing.items), default=-1)


async def _remove(api: Api, pod: Mapping[str, Any], say: Say) -> None:
    meta = pod["metadata"]
    await _patiently(
        lambda: api.delete(PODS, meta["name"], meta["namespace"], uid=meta["uid"]), say
    )


async def _gone(
    api: Api, namespace: str, selector: str, uids: set[str], lease_s: float, say: Say
) -> None:
    """Wait until none of these pods is left, or none of them can compute any more."""
    here: set[str] = set()
    try:
        async with asyncio.timeout(lease_s):
            async for seen in follow(api, PODS, namespace, labels=selector, say=say):
                if isinstance(seen, Listed):
                    uids &= here
                elif seen.gone:
                    uids.discard(seen.obj["metadata"]["uid"])
                else:
                    here.add(seen.obj["metadata"]["uid"])
                    continue
                if not uids:
                    return
    except TimeoutError:
        say(f"{len(uids)} of them are not gone after {lease_s:g} s; their leases have ended by now")


def _is_owned(pod: Mapping[str, Any], uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences", ())
    return any(owner["uid"] == uid for owner in owners)


def _node_id(pod: Mapping[str, Any]) -> int:
    label = pod["metadata"].get("labels", {}).get(names.NODE_ID_LABEL, "")
    return int(label) if label.isdecimal() else -1


async def _patiently(ask: Callable[[], Awaitable[T]], say: Say) -> T:
    """Repeat the request until the server answers."""
    pauses = Pauses()
    while True:
        try:
            return await ask()
        except Unavailable as exc:
            if pauses.failures == 0:
                say(f"{exc}; trying again until it answers")
            await asyncio.sleep(pauses.after(exc))
