# SPDX-License-Identifier: Apache-2.0
"""From an ElasticJob to the rules that its master follows."""

from dataclasses import replace

from holdfast.model.job import JobSpec
from holdfast.model.order import WORKER
from holdfast.platforms.kubernetes.manifest import ElasticJob, Role
from holdfast.platforms.kubernetes.plain_roles import plain_roles, relaunches

ALL = "all"


def job_spec(job: ElasticJob, patience: JobSpec) -> JobSpec:
    """The rules of the job. `patience` has the waiting times for agents, which the manifest lacks.

    The minimum of nodes, their unit, and the number of worker restarts are in the nodes' own
    command: `holdfast run --nnodes 2:4 ...`.
    """
    worker = job.roles.get(WORKER, Role())
    critical, critical_others = _critical(worker)
    return replace(
        patience,
        managed=True,
        size_from_platform=True,
        max_nodes=max(worker.replicas, 1),
        suspended=job.suspend,
        node_memory_mib=worker.resources.memory_mib,
        node_cpu_milli=worker.resources.cpu_milli,
        node_gpus=worker.resources.gpus,
        limits=job.resource_limits,
        auto_scale=job.may_scale(worker),
        node_relaunches=relaunches(worker.restart_count, of_the_program=True),
        restart_timeout_s=worker.restart_timeout_s,
        roles=plain_roles(job),
        critical=critical,
        critical_others=critical_others,
        priority=worker.priority,
        groups=dict(job.groups),
        pending_timeout_s=job.pending_timeout_s,
        pending_strategy=str(job.pending_strategy),
    )


def _critical(worker: Role) -> tuple[dict[int, int], int | None]:
    """The ranks that the job cannot go on without, and how often each may be relaunched."""
    if worker.critical_nodes == ALL:
        return {}, worker.restart_count
    return dict(worker.critical_ranks), None
