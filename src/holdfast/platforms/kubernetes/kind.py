# SPDX-License-Identifier: Apache-2.0
"""The job of a master in a pod: an ElasticJob, its pods, and the people who edit it."""

import argparse
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.platforms import Asked, Found
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.beginning import clear_away, own_job
from holdfast.platforms.kubernetes.config import Access
from holdfast.platforms.kubernetes.desk import KubernetesDesk
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.kubernetes.spec import job_spec
from holdfast.platforms.kubernetes.status import FINAL, SUCCEEDED
from holdfast.ports.surroundings import Surroundings
from holdfast.runtime.observe import Say


@asynccontextmanager
async def open_job(
    arguments: argparse.Namespace, asked: Asked, say: Say
) -> AsyncIterator[Found | int]:
    """The ElasticJob of this name, until its master ends."""
    access = Access.find(arguments.kubeconfig, arguments.context)
    namespace = arguments.namespace or access.namespace
    api = Api(access)
    try:
        job, status = await own_job(api, asked.job, namespace, say)
        if status.get("phase") in FINAL:
            say(f"the job has ended: {status.get('message', status['phase'])}")
            yield 0 if status["phase"] == SUCCEEDED else 1
            return

        # If something is wrong with the folder, the journal says so in words.
        with suppress(OSError):
            asked.state.mkdir(mode=0o700, exist_ok=True)

        async def begin(spec: JobSpec) -> JobSpec:
            first = await clear_away(api, job, lease_s=spec.lease_s, say=say)
            return replace(spec, first_node_id=first)

        def make_platform(known: Collection[NodeId]) -> KubernetesPlatform:
            return KubernetesPlatform(api, job, known=known, say=say)

        yield Found(
            # A later job of the same name may find the same volume: it is another job.
            state=asked.state / job.uid,
            spec=job_spec(job, asked.spec),
            surroundings=Surroundings(
                make_platform=make_platform,
                make_desk=lambda: KubernetesDesk(api, job, status, say=say),
                begin=begin,
            ),
            hands_over=True,
        )
    finally:
        await api.close()
