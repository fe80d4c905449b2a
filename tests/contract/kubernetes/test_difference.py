# SPDX-License-Identifier: Apache-2.0
"""From one spec to the next: what a job is asked, in which order, and what it is asked again."""

from typing import Any

import pytest

from holdfast.core.job.events import PlanAsked
from holdfast.model.job import JobSpec
from holdfast.model.order import Plan
from holdfast.platforms.kubernetes.difference import REFUSED, difference, still_refused
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.spec import job_spec
from tests.core.harness import Job, settled


def observed(generation: int, *, suspend: bool = False, **replicas: int) -> dict[str, Any]:
    replicas = {"worker": 2, "ps": 2, **replicas}
    return {"generation": generation, "replicas": replicas, "suspend": suspend, "limits": {}}


def manifest(*roles: str) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "main", "image": "i"}]}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "j", "namespace": "default", "uid": "u"},
        "spec": {"replicaSpecs": {role: {"replicas": 2, "template": template} for role in roles}},
    }


def job_of(obj: dict[str, Any]) -> Job:
    return Job(job_spec(read_job(obj)[0], JobSpec()))


def job_with_servers() -> Job:
    return job_of(manifest("worker", "ps"))


def follow(job: Job, before: dict[str, Any], after: dict[str, Any]) -> tuple[list[Plan], list[str]]:
    """Ask the job for what has changed: what was asked, and what of it was refused."""
    plans = difference(before, after)
    answers = [settled(job.feed(PlanAsked(plan))) for plan in plans]
    return plans, [text for ok, text in answers if not ok]


def test_a_refused_size_is_asked_again_when_the_job_is_suspended() -> None:
    """The refusal says: suspend the job, change this, and resume it. The change was there first."""
    job = job_with_servers()
    first = observed(1)
    follow(job, {}, first)
    plans, refusals = follow(job, first, second := observed(2, ps=4))
    assert [(plan.role, plan.nodes) for plan in plans] == [("ps", 4)]
    assert "suspend the job, change this, and resume it" in refusals[0]
    second[REFUSED] = {"ps": 4}
    # Something else changes: the size stays refused, and is not asked.
    third = observed(3, ps=4, worker=3)
    plans, refusals = follow(job, second, third)
    assert [(plan.role, plan.nodes) for plan in plans] == [("worker", 3)]
    third[REFUSED] = still_refused(second, third, plans)
    assert third[REFUSED] == {"ps": 4}
    plans, refusals = follow(job, third, fourth := observed(4, ps=4, worker=3, suspend=True))
    assert [(plan.role, plan.nodes, plan.suspend) for plan in plans] == [
        ("worker", None, True),
        ("ps", 4, None),
    ]
    assert not refusals
    assert not still_refused(third, fourth, plans)
    plans, refusals = follow(job, fourth, observed(5, ps=4, worker=3))
    assert [(plan.nodes, plan.suspend) for plan in plans] == [(None, False)]
    assert not refusals


def test_a_size_and_the_resume_in_one_edit_are_both_done() -> None:
    job = job_with_servers()
    follow(job, {}, first := observed(1))
    follow(job, first, second := observed(2, suspend=True))
    plans, refusals = follow(job, second, observed(3, ps=4))
    assert not refusals
    assert [(plan.role, plan.suspend) for plan in plans] == [("ps", None), ("worker", False)]


def test_a_size_that_is_refused_once_more_does_not_keep_the_job_from_its_suspension() -> None:
    before = {**observed(2, worker=9), REFUSED: {"worker": 9}}
    plans = difference(before, observed(3, worker=9, suspend=True))
    assert [(plan.nodes, plan.suspend) for plan in plans] == [(None, True), (9, None)]
    assert len({plan.plan_id for plan in plans}) == 2


@pytest.mark.parametrize("suspend", [True, False])
def test_a_size_that_is_refused_does_not_keep_the_rest_of_its_edit_from_being_done(
    suspend: bool,
) -> None:
    """As one plan, refused as a whole, the job ran on with `suspend: true` in its spec for ever."""
    obj = manifest("worker")
    (container,) = obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["containers"]
    container["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    obj["spec"] |= {"resourceLimits": {"gpu": 32}, "suspend": not suspend}
    job = job_of(obj)
    first = {**observed(1, suspend=not suspend), "limits": {"gpus": 32}}
    follow(job, {}, first)
    second = {**first, "generation": 2, "suspend": suspend, "replicas": {"worker": 5, "ps": 2}}
    _, refusals = follow(job, first, second)
    assert refusals == ["all nodes together would ask for 40 GPUs, more than 32 GPUs"]
    wanted: Any = job.machines.view(job.now)["wanted"]
    assert (wanted["nodes"], wanted["suspended"]) == (2, suspend)


def test_no_plan_has_a_size_and_something_else() -> None:
    before, after = observed(1), observed(2, suspend=True, worker=5, ps=4)
    for first in (before, {}):
        plans = difference(first, {**after, "limits": {"gpus": 8}})
        assert plans
        for plan in plans:
            parts = (plan.nodes, plan.suspend, plan.limits)
            assert sum(part is not None for part in parts) == 1, plan


def test_nothing_is_refused_of_a_job_that_begins_with_a_chief_and_no_worker() -> None:
    """The only worker becomes the chief: a size of 0 workers is no wish."""
    obj = manifest("worker", "ps")
    obj["spec"]["replicaSpecs"]["worker"]["replicas"] = 1
    job = job_of(obj)
    _, refusals = follow(job, {}, observed(1, worker=0, chief=1))
    assert not refusals
