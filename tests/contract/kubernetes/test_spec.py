# SPDX-License-Identifier: Apache-2.0
"""What the fields of an ElasticJob mean to its master."""

from typing import Any

import pytest

from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.model.resources import NO_LIMITS, Limits, Resources
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
    assert rules.node == Resources(memory_mib=8192)
    assert (rules.limits, rules.auto_scale) == (NO_LIMITS, True)
    assert (rules.critical, rules.critical_others, rules.priority) == ({}, None, "")


def test_restart_count_limits_what_the_program_does_and_nothing_else() -> None:
    relaunches = spec_of({"restartCount": 2}).node_relaunches
    assert set(relaunches) == set(ExitReason)
    for reason in (ExitReason.ERROR, ExitReason.OOM, ExitReason.HARDWARE, ExitReason.UNKNOWN):
        assert relaunches[reason] == 2
    assert relaunches[ExitReason.KILLED] == relaunches[ExitReason.LOST] == UNLIMITED
    assert spec_of().node_relaunches[ExitReason.ERROR] == 3


def test_restart_timeout_bounds_how_long_a_rank_is_waited_for() -> None:
    assert spec_of().restart_timeout_s == 0
    assert spec_of({"restartTimeout": 600}).restart_timeout_s == 600
    servers = spec_of(
        {"restartTimeout": 600}, roles=("ps",), distributionStrategy="ParameterServerStrategy"
    )
    waits = {name: role.restart_timeout_s for name, role in servers.roles.items()}
    assert waits == {"ps": 0, "worker": 600, "chief": 600}


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


def test_what_is_said_is_a_limit_and_what_is_not_said_is_none() -> None:
    limits = spec_of(resourceLimits={"memory": "64Gi", "gpu": 0}).limits
    assert limits == Limits(memory_mib=64 * 1024, gpus=0)


@pytest.mark.parametrize(
    ("mode", "auto_scale", "may_scale"),
    [
        ("", True, True),
        ("single-job", True, True),
        ("cluster", True, True),
        ("single-job", False, False),
        ("manual", True, False),
        ("manunal", True, False),
        ("mannual", False, False),
    ],
)
def test_who_may_change_what_nodes_ask_for(mode: str, auto_scale: bool, may_scale: bool) -> None:
    rules = spec_of({"autoScale": auto_scale}, roles=("evaluator",), optimizeMode=mode)
    assert rules.auto_scale is may_scale
    # Each role says it for itself, and the mode for all.
    assert rules.roles["evaluator"].auto_scale is not mode.startswith("man")
