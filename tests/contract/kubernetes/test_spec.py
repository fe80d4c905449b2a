# SPDX-License-Identifier: Apache-2.0
"""What the fields of an ElasticJob mean to its master."""

from typing import Any

import pytest

from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.plain_roles import UNLIMITED
from holdfast.platforms.kubernetes.spec import job_spec


def spec_of(
    worker: dict[str, Any] | None = None,
    annotations: dict[str, str] | None = None,
    roles: tuple[str, ...] = (),
    **spec: Any,
) -> JobSpec:
    resources = {"limits": {"memory": "8Gi"}}
    template = {"spec": {"containers": [{"name": "main", "image": "i", "resources": resources}]}}
    job, problems = read_job(
        {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "j", "uid": "u", "annotations": annotations or {}},
            "spec": {
                "distributionStrategy": "AllreduceStrategy",
                **spec,
                "replicaSpecs": {
                    "worker": {"replicas": 4, "template": template, **(worker or {})},
                    **{role: {"template": template} for role in roles},
                },
            },
        }
    )
    assert not [problem for problem in problems if problem.fatal]
    rules = job_spec(job, JobSpec(beat_s=2.0))
    rules.validate()
    return rules


def test_a_plain_job() -> None:
    rules = spec_of()
    assert rules.managed
    assert rules.size_from_platform
    assert (rules.max_nodes, rules.suspended, rules.beat_s) == (4, False, 2.0)
    assert (rules.node_memory_mib, rules.memory_max_mib) == (8192, 0)
    assert (rules.critical, rules.critical_others, rules.priority) == ({}, None, "")


def test_restart_count_limits_what_the_program_does_and_nothing_else() -> None:
    relaunches = spec_of({"restartCount": 2}).node_relaunches
    assert set(relaunches) == set(ExitReason)
    for reason in (ExitReason.ERROR, ExitReason.OOM, ExitReason.HARDWARE, ExitReason.UNKNOWN):
        assert relaunches[reason] == 2
    assert relaunches[ExitReason.KILLED] == relaunches[ExitReason.LOST] == UNLIMITED
    assert spec_of().node_relaunches[ExitReason.ERROR] == 3


def test_a_program_that_fails_under_parameter_servers_is_not_tried_again() -> None:
    rules = spec_of(roles=("ps",), distributionStrategy="ParameterServerStrategy")
    assert rules.roles["worker"].relaunches[ExitReason.ERROR] == 0
    assert rules.roles["worker"].relaunches[ExitReason.OOM] == 3


@pytest.mark.parametrize(
    ("text", "critical", "others"),
    [("", {}, None), ("none", {}, None), ("all", {}, 5), ("0:2,3:1", {0: 2, 3: 1}, None)],
)
def test_critical_nodes(text: str, critical: dict[int, int], others: int | None) -> None:
    rules = spec_of({"criticalNodes": text, "restartCount": 5})
    assert (rules.critical, rules.critical_others) == (critical, others)


def test_suspend_and_priority() -> None:
    assert spec_of(suspend=True).suspended
    assert spec_of({"priority": "0.5"}).priority == "0.5"
    assert spec_of({"priority": "high"}).priority == "high"


@pytest.mark.parametrize(
    ("annotation", "strategy"), [("0", "skip"), ("1", "necessary"), ("2", "all")]
)
def test_pending_time_outs(annotation: str, strategy: str) -> None:
    """A weakness of the prior art: `pending_timeout` sets an attribute that nobody reads."""
    rules = spec_of(annotations={"pending_timeout": "120", "pending_fail_strategy": annotation})
    assert (rules.pending_timeout_s, rules.pending_strategy) == (120.0, strategy)


def test_the_limit_of_all_nodes_bounds_the_memory_of_each() -> None:
    assert spec_of(resourceLimits={"memory": "64Gi"}).memory_max_mib == 16 * 1024
    # A limit below what the nodes ask for anyway leaves nothing to raise.
    assert spec_of(resourceLimits={"memory": "16Gi"}).memory_max_mib == 8 * 1024
