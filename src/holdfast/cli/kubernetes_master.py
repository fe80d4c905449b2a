# SPDX-License-Identifier: Apache-2.0
"""`holdfast master --platform kubernetes`: the master of one ElasticJob, in a pod of its own."""

import argparse
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace

from holdfast.master.process import MasterSettings, Surroundings, run_master
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.beginning import clear_away, own_job
from holdfast.platforms.kubernetes.config import Access
from holdfast.platforms.kubernetes.desk import KubernetesDesk
from holdfast.platforms.kubernetes.platform import KubernetesPlatform
from holdfast.platforms.kubernetes.spec import job_spec
from holdfast.platforms.kubernetes.status import FINAL, SUCCEEDED
from holdfast.runtime.observe import Say

EXIT_HANDED_OVER = 143
"""SIGTERM ended this master, as it ends any process; the job goes on under the next one."""


async def serve(
    arguments: argparse.Namespace,
    settings: MasterSettings,
    *,
    say: Say,
    announce: Callable[[str], None],
) -> int:
    """Serve the ElasticJob until it ends; the exit code."""
    access = Access.find(arguments.kubeconfig, arguments.context)
    namespace = arguments.namespace or access.namespace
    api = Api(access)
    try:
        job, status = await own_job(api, settings.job, namespace, say)
        if status.get("phase") in FINAL:
            say(f"the job has ended: {status.get('message', status['phase'])}")
            return 0 if status["phase"] == SUCCEEDED else 1

        # What may be wrong with the folder, the journal says in words.
        with suppress(OSError):
            settings.state.mkdir(mode=0o700, exist_ok=True)

        async def begin(spec: JobSpec) -> JobSpec:
            first = await clear_away(api, job, lease_s=spec.lease_s, say=say)
            return replace(spec, first_node_id=first)

        def make_platform(known: Collection[NodeId]) -> KubernetesPlatform:
            return KubernetesPlatform(api, job, known=known, say=say)

        end = await run_master(
            replace(
                settings,
                # A later job of the same name may find the same volume: it is another job.
                state=settings.state / job.uid,
                spec=job_spec(job, settings.spec),
                hands_over=True,
            ),
            say=say,
            announce=announce,
            surroundings=Surroundings(
                make_platform=make_platform,
                make_desk=lambda: KubernetesDesk(api, job, status, say=say),
                begin=begin,
            ),
        )
    finally:
        await api.close()
    if end is None:
        return EXIT_HANDED_OVER
    return 0 if end.ok else 1
