# SPDX-License-Identifier: Apache-2.0
"""A platform on a real API server for tests, which say what becomes of its pods."""

import asyncio
from collections.abc import Collection
from contextlib import aclosing
from typing import Any

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.order import Order
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.kinds import PODS, Kind
from holdfast.platforms.kubernetes.manifest import ElasticJob, Role
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.kubernetes.watching import Listed, follow
from holdfast.runtime.observe import Details, Level
from tests.sightings import Sightings

WAIT_S = 90.0

Json = dict[str, Any]


def template(**spec: Any) -> Json:
    return {"spec": {"containers": [{"name": "main", "image": "none"}], **spec}}


def job_in(namespace: str, **more: Any) -> ElasticJob:
    return ElasticJob(
        name="job",
        namespace=namespace,
        uid="0b1e55ed-0000-4000-8000-000000000000",
        roles={"worker": Role(template=template())},
        **more,
    )


def order(node_id: int, rank: int | None = None, **more: Any) -> Order:
    return Order(
        node_id=NodeId(node_id), node_rank=NodeRank(node_id if rank is None else rank), **more
    )


async def names_of(api: Api, namespace: str, kind: Kind = PODS) -> list[str]:
    found = await api.list(kind, namespace)
    return sorted(each["metadata"]["name"] for each in found.items)


async def until_pods(api: Api, namespace: str, *wanted: str) -> None:
    """Wait until exactly these pods exist: a pod that nobody runs goes as soon as it is deleted."""
    there: set[str] = set()
    is_whole = False
    async with asyncio.timeout(WAIT_S), aclosing(follow(api, PODS, namespace)) as changes:
        async for change in changes:
            if isinstance(change, Listed):
                is_whole = True
            elif change.gone:
                there.discard(change.meta.name)
            else:
                there.add(change.meta.name)
            if is_whole and there == set(wanted):
                return


async def fail(api: Api, namespace: str, name: str, code: int = 1) -> None:
    """What a kubelet says of a pod whose program ended."""
    state = {"terminated": {"exitCode": code, "reason": "Error"}}
    container = {"name": "main", "image": "none", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [{**container, "state": state}]}
    await api.patch(PODS, name, {"status": status}, namespace, subresource="status")


class Stage:
    """A platform that is watched, and what it said to people."""

    def __init__(self, api: Api, job: ElasticJob, known: Collection[NodeId] = ()) -> None:
        self.said: list[str] = []
        self._has_said = asyncio.Event()
        self.platform = KubernetesPlatform(api, job, known=known, say=self._hear)
        self.seen = Sightings(self.platform)

    def _hear(self, text: str | Details, level: Level = Level.INFO, /) -> None:
        self.said.append(str(text))
        self._has_said.set()

    async def until_said(self, words: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not any(words in text for text in self.said):
                self._has_said.clear()
                await self._has_said.wait()

    async def __aenter__(self) -> "Stage":
        await self.seen.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.seen.__aexit__(None, None, None)
        await self.platform.close()
