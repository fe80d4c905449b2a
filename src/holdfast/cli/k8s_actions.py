# SPDX-License-Identifier: Apache-2.0
"""The subcommands of `holdfast k8s` that need a cluster."""

import argparse
import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import uvloop

from holdfast.cli import k8s_logs, k8s_manifests, k8s_show
from holdfast.model.errors import RejectedError, TimedOutError, UsageError
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import (
    ELASTICJOBS,
    EVENTS,
    PODS,
    Api,
    Conflict,
    NotFound,
)
from holdfast.platforms.kubernetes.config import Access
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.pods import Pod
from holdfast.platforms.kubernetes.status import FINAL, RUNNING, SUCCEEDED, SUSPENDED
from holdfast.platforms.kubernetes.watching import Seen, follow
from holdfast.runtime.observe import sayer

Action = Callable[[Api, str, argparse.Namespace], Awaitable[int]]


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand of the arguments; returns the exit code."""
    access = Access.find(arguments.kubeconfig, arguments.context)
    namespace = arguments.namespace or access.namespace

    async def act() -> int:
        api = Api(access)
        try:
            return await _ACTIONS[arguments.action](api, namespace, arguments)
        finally:
            await api.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(act())


# ---- submit --------------------------------------------------------------------------------------


async def _submit(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    documents = k8s_manifests.read(arguments.files)
    for document in documents:
        if arguments.namespace and document.namespace not in ("", arguments.namespace):
            raise UsageError(
                f"{document.title} says that its namespace is {document.namespace}, "
                f"not {arguments.namespace}"
            )
    jobs = []
    for document in documents:
        where = document.namespace or namespace
        created = await _create(api, document, where)
        print(f"{document.title} created in the namespace {where}", flush=True)
        if document.kind is ELASTICJOBS:
            jobs.append(created["metadata"])
    if not arguments.wait:
        return 0
    ended_well = await _wait(api, jobs, arguments.timeout)
    return 0 if ended_well else 1


async def _create(api: Api, document: k8s_manifests.Document, namespace: str) -> dict[str, Any]:
    try:
        return await api.create(document.kind, document.obj, namespace, strict=True)
    except Conflict as exc:
        raise RejectedError(
            f"there is {document.title} in the namespace {namespace} already: "
            "delete it first, or give this one another name"
        ) from exc
    except NotFound as exc:
        raise RejectedError(
            f"{document.title} cannot be created: there is no namespace {namespace}, "
            f"or Holdfast is not installed in this cluster ({exc})"
        ) from exc


async def _wait(api: Api, jobs: Sequence[dict[str, Any]], timeout_s: float | None) -> bool:
    """Wait for the end of all jobs; whether all of them ended well."""
    waits = [_end_of(api, job["namespace"], job["name"], job["uid"]) for job in jobs]
    try:
        async with asyncio.timeout(timeout_s):
            return all(await asyncio.gather(*waits))
    except TimeoutError as exc:
        raise TimedOutError(f"the jobs are not over after {timeout_s:g} s; they go on") from exc


async def _end_of(api: Api, namespace: str, name: str, uid: str) -> bool:
    """Print the state of the job until it is over; True if it ended well."""
    async with aclosing(_told(api, namespace, name, uid)) as statuses:
        async for status in statuses:
            if status.get("phase") in FINAL or k8s_show.is_malformed(status):
                return bool(status.get("phase") == SUCCEEDED)
    return False


async def _told(
    api: Api, namespace: str, name: str, uid: str
) -> AsyncGenerator[dict[str, Any], None]:
    """The job's status, now and after each change, until its deletion. Prints each message once."""
    said, is_there = "", False
    one = f"metadata.name={name}"
    changes = follow(api, ELASTICJOBS, namespace, fields=one, say=sayer("k8s"))
    async with aclosing(changes):
        async for change in changes:
            if isinstance(change, Seen) and change.meta.uid == uid:
                is_there = not change.gone
            elif isinstance(change, Seen):
                continue
            if not is_there:
                print(f"elasticjob/{name} was deleted", flush=True)
                return
            if isinstance(change, Seen):
                status = change.obj.get("status") or {}
                line = k8s_show.line_of(name, status)
                if line != said:
                    print(line, flush=True)
                    said = line
                yield status


# ---- looking -------------------------------------------------------------------------------------


async def _status(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    if not arguments.job:
        jobs = (await _listed(api, namespace)).items
        k8s_show.print_jobs(jobs, namespace, as_json=arguments.json)
        return 0
    job = await _get(api, arguments.job, namespace)
    uid = job["metadata"]["uid"]
    found = await api.list(PODS, namespace, labels=names.selector(arguments.job), type=Pod)
    events = await api.list(EVENTS, namespace, fields=f"involvedObject.uid={uid}")
    pods = [pod for pod in found.items if pod.is_of(uid)]
    k8s_show.print_job(job, pods, events.items, as_json=arguments.json)
    return 0


async def _logs(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    job = await _get(api, arguments.job, namespace)
    return await k8s_logs.logs(api, namespace, job, arguments)


# ---- changing ------------------------------------------------------------------------------------


async def _scale(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    job = await _get(api, arguments.job, namespace)
    roles = job["spec"]["replicaSpecs"]
    role, nodes = arguments.role, arguments.replicas
    if role not in roles or role in (names.MASTER_ROLE, "master"):
        raise UsageError(f"the job {arguments.job} has no nodes of the role {role}")
    _refuse_if_over(arguments.job, job.get("status") or {})
    before = roles[role].get("replicas", 1)
    changed = copy.deepcopy(job)
    changed["spec"]["replicaSpecs"][role]["replicas"] = nodes
    mistakes = [str(problem) for problem in read_job(changed)[1] if problem.fatal]
    if mistakes:
        raise UsageError("; ".join(mistakes))
    patch = {"spec": {"replicaSpecs": {role: {"replicas": nodes}}}}
    await api.patch(ELASTICJOBS, arguments.job, patch, namespace)
    print(f"elasticjob/{arguments.job}: {role} {before} -> {nodes}")
    return 0


async def _suspend(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    return await _set_suspend(api, namespace, arguments, suspend=True)


async def _resume(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    return await _set_suspend(api, namespace, arguments, suspend=False)


async def _set_suspend(
    api: Api, namespace: str, arguments: argparse.Namespace, *, suspend: bool
) -> int:
    name, timeout_s = arguments.job, arguments.timeout
    job = await _get(api, name, namespace)
    _refuse_if_over(name, job.get("status") or {})
    changed = await api.patch(ELASTICJOBS, name, {"spec": {"suspend": suspend}}, namespace)
    what = "to be suspended" if suspend else "to go on"
    print(f"elasticjob/{name} is {what}", flush=True)
    if arguments.no_wait:
        return 0
    meta = changed["metadata"]
    is_so = _is_suspended if suspend else _is_resumed
    try:
        async with (
            asyncio.timeout(timeout_s),
            aclosing(_told(api, namespace, name, meta["uid"])) as statuses,
        ):
            async for status in statuses:
                _refuse_if_over(name, status)
                if k8s_show.is_malformed(status):
                    return 1
                # Until the job follows the new spec, the status is about the old one.
                observed = (status.get("observed") or {}).get("generation", meta["generation"])
                if observed >= meta["generation"] and is_so(status):
                    return 0
        return 1
    except TimeoutError as exc:
        raise TimedOutError(
            f"after {timeout_s:g} s elasticjob/{name} is still {what}; the cluster works on it"
        ) from exc


def _is_suspended(status: Mapping[str, Any]) -> bool:
    """Whether all nodes of the job are gone."""
    counts = (status.get("replicaStatuses") or {}).values()
    return status.get("phase") == SUSPENDED and not any(count.get("active") for count in counts)


def _is_resumed(status: Mapping[str, Any]) -> bool:
    return status.get("phase") == RUNNING


def _refuse_if_over(name: str, status: Mapping[str, Any]) -> None:
    phase = status.get("phase")
    if phase in FINAL:
        raise RejectedError(f"the job {name} is over: it has {phase.lower()}")


async def _delete(api: Api, namespace: str, arguments: argparse.Namespace) -> int:
    jobs = [await _get(api, name, namespace) for name in arguments.jobs]
    for job in jobs:
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        await api.delete(ELASTICJOBS, name, namespace, uid=uid)
        print(f"elasticjob/{name} deleted")
    return 0


async def _get(api: Api, name: str, namespace: str) -> dict[str, Any]:
    try:
        return await api.get(ELASTICJOBS, name, namespace)
    except NotFound as exc:
        raise RejectedError(f"there is no job {name} in the namespace {namespace}") from exc


async def _listed(api: Api, namespace: str) -> Any:
    try:
        return await api.list(ELASTICJOBS, namespace)
    except NotFound as exc:
        raise RejectedError("Holdfast is not installed in this cluster: no ElasticJobs") from exc


_ACTIONS: dict[str, Action] = {
    "submit": _submit,
    "status": _status,
    "logs": _logs,
    "scale": _scale,
    "suspend": _suspend,
    "resume": _resume,
    "delete": _delete,
}
