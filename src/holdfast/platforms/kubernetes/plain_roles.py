# SPDX-License-Identifier: Apache-2.0
"""Which nodes of an ElasticJob run without an agent, and the rules for each of their roles."""

from dataclasses import replace

from holdfast.model.node import ExitReason
from holdfast.model.order import WORKER
from holdfast.model.role import RoleSpec
from holdfast.platforms.kubernetes.manifest import CHIEF, PS, ElasticJob, Role, Strategy

UNLIMITED = 1_000_000
"""For evictions, preemptions and lost machines: they say nothing about the job, and growing pauses
slow them down."""


def sizes(job: ElasticJob) -> dict[str, int]:
    """How many nodes each role has. A job with parameter servers needs a chief."""
    counts = {name: role.replicas for name, role in job.roles.items()}
    if job.strategy is Strategy.PARAMETER_SERVER and not counts.get(CHIEF):
        counts[CHIEF] = 1
        counts[WORKER] = max(counts.get(WORKER, 0) - 1, 0)
    return counts


def plain_roles(job: ElasticJob) -> dict[str, RoleSpec]:
    """The roles without agents: all roles of a job with parameter servers, else all but workers."""
    has_servers = job.strategy is Strategy.PARAMETER_SERVER
    return {
        name: _role_spec(job, name, nodes)
        for name, nodes in sizes(job).items()
        if has_servers or name != WORKER
    }


def _role_spec(job: ElasticJob, name: str, nodes: int) -> RoleSpec:
    role = job.roles.get(name) or _stand_in(job)
    spec = RoleSpec(
        nodes=nodes,
        relaunches=relaunches(role.restart_count, of_the_program=False),
        ends_the_job=name in (WORKER, CHIEF),
        holds_variables=job.strategy is Strategy.PARAMETER_SERVER and name == PS,
        critical_others=role.restart_count,
        restart_timeout_s=role.restart_timeout_s,
        node_memory_mib=role.resources.memory_mib,
        node_cpu_milli=role.resources.cpu_milli,
        node_gpus=role.resources.gpus,
        auto_scale=job.may_scale(role),
        priority=role.priority,
    )
    if name != WORKER or role.critical_nodes == "all":
        return spec
    # If the manifest does not say which workers are critical, the first one is.
    critical = {0: role.restart_count} if role.critical_nodes == "" else dict(role.critical_ranks)
    return replace(spec, critical=critical, critical_others=None)


def _stand_in(job: ElasticJob) -> Role:
    """The description of a role that the manifest does not describe: the worker's."""
    return job.roles.get(WORKER) or job.roles[PS]


def relaunches(restart_count: int, *, of_the_program: bool) -> dict[ExitReason, int]:
    """How often a rank is launched again, by the reason of its loss.

    A program that fails by itself fails again; where all nodes train together, another node may be
    at fault.
    """
    by_reason = dict.fromkeys(ExitReason, restart_count)
    by_reason[ExitReason.KILLED] = by_reason[ExitReason.LOST] = UNLIMITED
    if not of_the_program:
        by_reason[ExitReason.ERROR] = 0
    return by_reason
