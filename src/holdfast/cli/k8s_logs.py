# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s logs`: the output of a rank; with -f that of all its pods, one after another.

A rank outlives its pods. When a pod has ended, is gone, or has a running successor (its machine may
be lost silently), its log is over and the next pod's log follows, until the job is over.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

from holdfast.model.errors import RejectedError
from holdfast.model.node import Phase
from holdfast.platforms.kubernetes import names, pods
from holdfast.platforms.kubernetes.answers import Refusal
from holdfast.platforms.kubernetes.api import ELASTICJOBS, PODS, Api, Unavailable
from holdfast.platforms.kubernetes.pauses import Pauses
from holdfast.platforms.kubernetes.pods import MAIN_ANNOTATION, Pod
from holdfast.platforms.kubernetes.status import FINAL
from holdfast.platforms.kubernetes.watching import Listed, follow
from holdfast.runtime.observe import Say, sayer

SETTLE_S = 5.0
"""The longest time between the end of a log and the news that its pod ended or has a successor."""
LONGEST_PAUSE_S = 30.0


async def logs(
    api: Api, namespace: str, job: Mapping[str, Any], arguments: argparse.Namespace
) -> int:
    """Print the log of the rank's newest pod; with -f go on, also with the pods after it."""
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    role = names.MASTER_ROLE if arguments.master else arguments.role
    selector = f"{names.selector(name, role)},{names.NODE_RANK_LABEL}={arguments.rank}"
    found = await api.list(PODS, namespace, labels=selector, type=Pod)
    there = [pod for pod in found.items if pod.is_of(uid)]
    if not there and not (arguments.follow and _may_come(job, role, arguments.rank)):
        raise RejectedError(f"the job {name} has no pod of {role} {arguments.rank} now")
    printer = _Printer(api, namespace, arguments.container)
    if not arguments.follow:
        await printer.print(max(there, key=_turn), tail=arguments.tail)
        return 0
    say = sayer("k8s")
    if not there:
        say(f"waits for the first pod of {role} {arguments.rank}")
    await _Following(api, namespace, job, printer, say).run(selector, arguments.tail)
    return 0


def _may_come(job: Mapping[str, Any], role: str, rank: int) -> bool:
    if (job.get("status") or {}).get("phase") in FINAL:
        return False
    if role == names.MASTER_ROLE:
        return rank == 0
    spec = job["spec"]["replicaSpecs"].get(role)
    return spec is not None and rank < spec.get("replicas", 1)


def _turn(pod: Pod) -> int:
    """The pod's place among those of its rank: a later pod has a higher number."""
    return int(pod.metadata.labels.get(names.NODE_ID_LABEL, "0"))


class _Printer:
    """Writes logs to standard output."""

    def __init__(self, api: Api, namespace: str, container: str) -> None:
        self._api, self._namespace, self._container = api, namespace, container
        self.last_at = 0.0
        """When it wrote last, by the loop's clock."""

    async def print(
        self,
        pod: Pod,
        *,
        tail: int | None = None,
        since_s: int | None = None,
        follow: bool = False,
    ) -> None:
        main = pod.metadata.annotations.get(MAIN_ANNOTATION) or pod.main().name
        pieces = self._api.log(
            pod.metadata.name,
            self._namespace,
            container=self._container or main,
            tail=tail,
            since_s=since_s,
            follow=follow,
        )
        async with aclosing(pieces):
            async for piece in pieces:
                sys.stdout.buffer.write(piece)
                sys.stdout.buffer.flush()
                self.last_at = asyncio.get_running_loop().time()


class _Following:
    """One rank of a job: its pods as they come and go, and whether more can come."""

    def __init__(
        self, api: Api, namespace: str, job: Mapping[str, Any], printer: _Printer, say: Say
    ) -> None:
        self._api, self._namespace, self._printer, self._say = api, namespace, printer, say
        self._name, self._uid = job["metadata"]["name"], job["metadata"]["uid"]
        self._pods: dict[int, Pod] = {}
        self._is_listed = self._is_over = False
        self._changed = asyncio.Condition()

    async def run(self, selector: str, tail: int | None) -> None:
        """Follow until the job is over."""
        tasks = [
            asyncio.create_task(doing)
            for doing in (self._print_all(tail), self._watch_pods(selector), self._watch_job())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _end(tasks)

    # ---- what is seen ----------------------------------------------------------------------------

    async def _watch_pods(self, selector: str) -> None:
        changes = follow(self._api, PODS, self._namespace, labels=selector, type=Pod, say=self._say)
        async for change in changes:
            async with self._changed:
                if isinstance(change, Listed):
                    self._is_listed = True
                elif change.obj.is_of(self._uid) and change.gone:
                    self._pods.pop(_turn(change.obj), None)
                elif change.obj.is_of(self._uid):
                    self._pods[_turn(change.obj)] = change.obj
                self._changed.notify_all()

    async def _watch_job(self) -> None:
        is_there = is_final = False
        one = f"metadata.name={self._name}"
        async for change in follow(self._api, ELASTICJOBS, self._namespace, fields=one):
            if not isinstance(change, Listed):
                if change.meta.uid != self._uid:
                    continue
                is_there = not change.gone
                is_final = (change.obj.get("status") or {}).get("phase") in FINAL
            async with self._changed:
                self._is_over = is_final or not is_there
                self._changed.notify_all()

    def _with_log_after(self, turn: int) -> list[int]:
        """Later pods whose main container has begun, and so has a log."""
        return [
            later
            for later, pod in sorted(self._pods.items())
            if later > turn and pods.seen(pod)[0] is not Phase.PENDING
        ]

    def _is_past(self, turn: int) -> bool:
        """Whether the pod will write nothing more."""
        pod = self._pods.get(turn)
        is_over = pod is None or pods.seen(pod)[0].is_final
        return is_over or self._is_over or bool(self._with_log_after(turn))

    # ---- what is printed -------------------------------------------------------------------------

    async def _print_all(self, tail: int | None) -> None:
        turn, name = -1, ""
        while (pod := await self._next(turn)) is not None:
            if name:
                self._say(f"{pod.metadata.name} follows {name}")
            await self._print_until_past(pod, None if name else tail)
            turn, name = _turn(pod), pod.metadata.name

    async def _next(self, turn: int) -> Pod | None:
        """The next pod to read, at first the newest; None if there will be none."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._is_listed and (self._is_over or self._with_log_after(turn))
            )
            later = self._with_log_after(turn)
            return self._pods[later[0 if turn >= 0 else -1]] if later else None

    async def _print_until_past(self, pod: Pod, tail: int | None) -> None:
        printing = asyncio.create_task(self._print(pod, tail))
        past = asyncio.create_task(self._until_past(_turn(pod)))
        try:
            await asyncio.wait({printing, past}, return_when=asyncio.FIRST_COMPLETED)
            # The last lines of its log may still be on their way.
            done, _ = await asyncio.wait({printing}, timeout=SETTLE_S)
            for task in done:
                task.result()
        finally:
            await _end((printing, past))

    async def _print(self, pod: Pod, tail: int | None) -> None:
        """One log to its end, however often the connection breaks."""
        name, since_s, pauses = pod.metadata.name, None, Pauses(SETTLE_S, LONGEST_PAUSE_S)
        loop = asyncio.get_running_loop()
        self._printer.last_at = loop.time()
        while True:
            began, broken = loop.time(), Unavailable("the connection ended")
            try:
                await self._printer.print(pod, tail=tail, since_s=since_s, follow=True)
            except Refusal as exc:
                self._say(f"the log of {name} cannot be read: {exc}")
                return
            except Unavailable as exc:
                broken = exc
            if self._printer.last_at > began:
                pauses.renew()
            try:
                async with asyncio.timeout(pauses.after(broken)):
                    await self._until_past(_turn(pod))
                    return
            except TimeoutError:
                since_s, tail = math.ceil(loop.time() - self._printer.last_at) + 1, None
                self._say(f"{broken}; the last {since_s} s of the log of {name} may come twice")

    async def _until_past(self, turn: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_past(turn))


async def _end(tasks: "Sequence[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
