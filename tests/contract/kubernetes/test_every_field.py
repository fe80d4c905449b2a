# SPDX-License-Identifier: Apache-2.0
"""Every field of both CRDs either changes what follows from a manifest, or a note says that it does
not. The prior art accepts fields that nobody reads, without a word.

A new field of a CRD fails here until it is in one of the tables.
"""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli import main
from holdfast.core.job import events as ev
from holdfast.core.job.commands import LaunchNode
from holdfast.core.job.flow import build
from holdfast.model.job import JobSpec
from holdfast.platforms.kubernetes.gang import pod_group
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.operator import objects
from holdfast.platforms.kubernetes.operator.reconcile import WriteStatus, reconcile
from holdfast.platforms.kubernetes.render import node_pod, node_service
from holdfast.platforms.kubernetes.scaleplan import read_plan
from holdfast.platforms.kubernetes.spec import job_spec
from holdfast.platforms.kubernetes.times import stamp
from tests.contract.kubernetes.sights import T0, ended, manifest, master_pod, see

Json = dict[str, Any]

REPOSITORY = Path(__file__).parents[3]
CRDS = REPOSITORY / "deploy" / "crds"
DOCUMENT = (REPOSITORY / "docs" / "kubernetes.md").read_text()
WORKER, MASTER = "spec.replicaSpecs.worker", "spec.replicaSpecs.dlrover-master"


def job() -> Json:
    """Workers with agents, a parameter server beside them, and a master with a template."""
    container = {"name": "main", "image": "i", "resources": {"limits": {"memory": "1Gi"}}}
    template = {"spec": {"containers": [container]}}
    obj = manifest(master={"template": template}, distributionStrategy="AllreduceStrategy")
    for role in ("worker", "ps"):
        obj["spec"]["replicaSpecs"][role] = {"replicas": 2, "template": copy.deepcopy(template)}
    return obj


def put(obj: Json, path: str, value: object) -> Json:
    """The same, except for this field. `[0]` is the first of a list."""
    whole = obj
    *way, last = path.replace("[0]", "").split(".")
    for name in way:
        step = obj.setdefault(name, {})
        obj = step[0] if isinstance(step, list) else step
    obj[last] = value
    return whole


def fields_of(schema: Json, path: str) -> Iterator[str]:
    """Paths of the fields that a schema has; amounts, templates and variables count as one."""
    inner = schema.get("properties") or {}
    for name, of_field in inner.items():
        at = f"{path}.{name}"
        if name == "replicaSpecs" or name.startswith("replicaResourceSpec"):
            yield from fields_of(of_field["additionalProperties"], f"{at}.worker")
        elif "properties" in of_field.get("items", {}):
            yield from fields_of(of_field["items"], f"{at}[0]")
        elif name in ("stateVolume", "claim"):
            yield from fields_of(of_field, at)
        else:
            yield at


def spec_fields(file: str) -> set[str]:
    crd = yaml.safe_load((CRDS / file).read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return set(fields_of(schema, "spec"))


# ---- ElasticJobs --------------------------------------------------------------------------------

HAVE_EFFECTS: dict[str, object] = {
    "spec.distributionStrategy": "ParameterServerStrategy",
    "spec.optimizeMode": "manunal",
    "spec.suspend": True,
    "spec.resourceLimits": {"gpu": 4},
    "spec.envs": {"A": {"value": "1"}},
    "spec.ttlSecondsAfterFinished": 10,
    "spec.masterImage": "m:2",
    "spec.stateVolume.emptyDir": {},
    "spec.stateVolume.claim.size": "5Gi",
    "spec.stateVolume.claim.storageClassName": "fast",
    f"{WORKER}.replicas": 3,
    f"{WORKER}.restartCount": 1,
    f"{WORKER}.restartTimeout": 60,
    f"{WORKER}.autoScale": False,
    f"{WORKER}.priority": "high",
    f"{WORKER}.criticalNodes": "0:1",
    f"{WORKER}.batchScheduler": "volcano",
    f"{WORKER}.BatchScheduler": "volcano",
    f"{WORKER}.template": {"spec": {"containers": [{"name": "main", "image": "other"}]}},
    "spec.replicaSpecs.ps.autoScale": False,
    "spec.replicaSpecs.ps.priority": "high",
    "spec.replicaSpecs.ps.restartCount": 1,
    "spec.replicaSpecs.ps.restartTimeout": 60,
    f"{MASTER}.restartCount": 0,
    f"{MASTER}.priority": "low",
    f"{MASTER}.template": {"spec": {"containers": [{"name": "main", "image": "other"}]}},
    "metadata.annotations.pending_timeout": "100",
    "metadata.annotations.pending_fail_strategy": "2",
    "metadata.annotations.group_affinity": "0:1,1:1",
}
SAY_THAT_THEY_HAVE_NONE: dict[str, object] = {
    "spec.optimizeMode": "cluster",
    "spec.brainService": "brain.kube-system.svc:50001",
    "spec.resourceLimits.ephemeral-storage": "1Gi",
    f"{WORKER}.restartPolicy": "OnFailure",
    "spec.replicaSpecs.ps.criticalNodes": "none",
    f"{MASTER}.restartPolicy": "Always",
    f"{MASTER}.restartTimeout": 60,
    f"{MASTER}.autoScale": False,
    f"{MASTER}.criticalNodes": "all",
    f"{MASTER}.batchScheduler": "volcano",
    f"{MASTER}.BatchScheduler": "volcano",
    "metadata.annotations.service_type": "http",
    "metadata.annotations.pre_check_ops": "[]",
    "metadata.annotations.pre_check_bypass": "true",
    "metadata.annotations.training_elastic_mode": "ucp",
    "metadata.annotations.enable_dashboard": "true",
    "metadata.annotations.dashboard_port": "8080",
}


def consequences(obj: Json) -> list[object]:
    """All that follows from a manifest: the rules of the job, its objects, and its end."""
    read, problems = read_job(obj)
    assert [str(problem) for problem in problems if problem.fatal] == []
    rules = job_spec(read, JobSpec())
    start = build(rules, "mnist").core.handle(ev.MasterStarted(), 0.0)
    orders = [one.order for one in start.commands if isinstance(one, LaunchNode)]
    found: list[object] = [rules, objects.claim(read), *objects.kept(read)]
    found += [objects.master_pod(read, 0, default_image="", errors=0, quick_losses=0)]
    for order in orders:
        found += [node_pod(read, order), node_service(read, order), pod_group(read, order)]
    counted = {"master": {"launches": 1}}
    over = {**obj, "status": {**counted, "phase": "Failed", "completionTime": stamp(T0)}}
    failed = {**obj, "status": {**counted, "phase": "Running"}}
    pod = master_pod(0, status=ended(1))
    return [*found, reconcile(see(over), T0 + 60), reconcile(see(failed, pod), T0 + 60).actions]


def notes(obj: Json) -> dict[str, str]:
    return {problem.path: problem.text for problem in read_job(obj)[1] if not problem.fatal}


def test_every_field_of_an_elasticjob_is_in_one_of_the_tables() -> None:
    known = HAVE_EFFECTS.keys() | SAY_THAT_THEY_HAVE_NONE.keys()
    assert spec_fields("elasticjobs.yaml") <= known


@pytest.mark.parametrize("path", HAVE_EFFECTS)
def test_a_field_changes_what_follows(path: str) -> None:
    changed = put(job(), path, HAVE_EFFECTS[path])
    assert consequences(changed) != consequences(job())
    assert path not in notes(changed)


@pytest.mark.parametrize("path", SAY_THAT_THEY_HAVE_NONE)
def test_a_field_without_an_effect_says_so_and_has_none(path: str) -> None:
    changed = put(job(), path, SAY_THAT_THEY_HAVE_NONE[path])
    assert set(notes(changed)) - set(notes(job())) == {path}
    assert _without_words(consequences(changed)) == _without_words(consequences(job()))


def _without_words(found: list[object]) -> list[object]:
    """Without what the operator tells, which has the notes in it."""
    return found[:-2]


@pytest.mark.parametrize("file", ["elasticjobs.yaml", "scaleplans.yaml"])
def test_every_field_is_in_the_documentation(file: str) -> None:
    names = {path.split(".")[-1] for path in spec_fields(file)}
    assert {name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`", DOCUMENT)} == set()


def test_people_see_the_notes_where_they_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the condition, and so in `kubectl describe` and `holdfast k8s status`; and in a render."""
    obj = job()
    obj["spec"] |= {"optimizeMode": "cluster", "brainService": "brain:50001"}
    said = (
        "spec.optimizeMode: there is no brain to ask yet: cluster works as single-job does",
        "spec.brainService: has no effect: brain:50001 is not asked by anybody yet",
    )
    (status,) = [
        one.status for one in reconcile(see(obj), T0).actions if isinstance(one, WriteStatus)
    ]
    (condition,) = [one for one in status["conditions"] if one["type"] == "Malformed"]
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(obj))
    assert main(["k8s", "render", str(file)]) == 0
    told = capsys.readouterr().err
    for note in said:
        assert note in condition["message"]
        assert note in told
    assert condition["status"] == "False"


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"memory": "3Gi"}, "4096 MiB of memory, more than 3072 MiB of memory"),
        ({"cpu": 3}, "4 cores, more than 3 cores"),
        ({"gpu": "11"}, "12 GPUs, more than 11 GPUs"),
    ],
)
def test_a_job_that_is_larger_than_its_limits_says_so_and_is_not_started(
    limits: Json, said: str
) -> None:
    obj = put(job(), "spec.resourceLimits", limits)
    devices = {"cpu": 1, "memory": "1Gi", "nvidia.com/gpu": 1, "amd.com/gpu": "2"}
    for role in ("worker", "ps"):
        (container,) = obj["spec"]["replicaSpecs"][role]["template"]["spec"]["containers"]
        container["resources"]["limits"] = devices
    decision = reconcile(see(obj), T0)
    (status,) = [one.status for one in decision.actions if isinstance(one, WriteStatus)]
    (condition,) = [one for one in status["conditions"] if one["type"] == "Malformed"]
    assert condition["message"] == (f"spec.resourceLimits: all nodes together would ask for {said}")
    assert condition["status"] == "True"
    assert status["master"]["launches"] == 0


def test_a_job_that_is_larger_than_its_limits_is_not_rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(put(job(), "spec.resourceLimits", {"memory": "3Gi"})))
    assert main(["k8s", "render", str(file)]) != 0
    assert "4096 MiB of memory, more than 3072 MiB of memory" in capsys.readouterr().err


def test_a_job_that_runs_goes_on_when_its_spec_asks_for_more_than_its_limits() -> None:
    obj = put(job(), "spec.resourceLimits", {"memory": "3Gi"})
    obj["status"] = {"master": {"launches": 1}, "phase": "Running"}
    decision = reconcile(see(obj, master_pod(0)), T0)
    (status,) = [one.status for one in decision.actions if isinstance(one, WriteStatus)]
    (condition,) = [one for one in status["conditions"] if one["type"] == "Malformed"]
    assert condition["message"].startswith(
        "the job goes on as it was before this: spec.resourceLimits: all nodes together"
    )


def test_a_job_of_just_the_size_of_its_limits_is_started() -> None:
    assert consequences(put(job(), "spec.resourceLimits", {"memory": "4Gi", "cpu": 0, "gpu": 0}))


# ---- ScalePlans ---------------------------------------------------------------------------------

PLANS_HAVE_EFFECTS: dict[str, object] = {
    "spec.ownerJob": "other",
    "spec.replicaResourceSpecs.worker.replicas": 5,
    "spec.replicaResourceSpecs.worker.resource": {"cpu": 2},
    "spec.replicaResourceSpec.worker.replicas": 5,
    "spec.replicaResourceSpec.worker.resource": {"memory": "2Gi"},
    "spec.createPods[0].name": "j-edljob-worker-9",
    "spec.createPods[0].id": 9,
    "spec.createPods[0].type": "ps",
    "spec.createPods[0].rankIndex": 4,
    "spec.migratePods[0].name": "j-edljob-worker-1",
    "spec.migratePods[0].id": 3,
    "spec.migratePods[0].type": "ps",
    "spec.createPods[0].resource": {"cpu": 2},
    "spec.migratePods[0].resource": {"cpu": 2},
    "spec.removePods": ["j-edljob-worker-2"],
}
PLANS_SAY_THAT_THEY_HAVE_NONE: dict[str, object] = {
    "spec.manualScaling": False,
    "spec.psHosts": ["ps-0:2222"],
    "spec.createPods[0].service": "a:1",
    "spec.migratePods[0].service": "a:1",
    "spec.migratePods[0].rankIndex": 3,
    "spec.removePods[0].rankIndex": 3,
    "spec.removePods[0].resource": {"cpu": 2},
    "spec.replicaResourceSpecs.worker.resource.ephemeral-storage": "1Gi",
}


def plan(path: str) -> Json:
    """One that asks for something, with room for the field."""
    spec: Json = {"ownerJob": "j"}
    if "[0]" in path and "create" in path:
        spec["createPods"] = [{}] if path.endswith((".name", ".id")) else [{"rankIndex": 3}]
    elif "remove" in path and "[0]" in path:
        spec["removePods"] = [{"id": 1}]
    elif "[0]" in path:
        spec["migratePods"] = [{}] if path.endswith(".name") else [{"id": 1}]
    else:
        spec["createPods"] = [{"rankIndex": 3}]
    kind = {"apiVersion": "elastic.iml.github.io/v1alpha1", "kind": "ScalePlan"}
    return {**kind, "metadata": {"name": "p", "uid": "u"}, "spec": spec}


def test_every_field_of_a_scaleplan_is_in_one_of_the_tables() -> None:
    known = PLANS_HAVE_EFFECTS.keys() | PLANS_SAY_THAT_THEY_HAVE_NONE.keys()
    assert spec_fields("scaleplans.yaml") <= known


@pytest.mark.parametrize("path", PLANS_HAVE_EFFECTS)
def test_a_field_of_a_plan_changes_it(path: str) -> None:
    changed, problems = read_plan(put(plan(path), path, PLANS_HAVE_EFFECTS[path]))
    assert [str(problem) for problem in problems if problem.fatal] == []
    before = read_plan(plan(path))[0]
    assert (changed.job, changed.plan) != (before.job, before.plan)


@pytest.mark.parametrize("path", PLANS_SAY_THAT_THEY_HAVE_NONE)
def test_a_field_of_a_plan_without_an_effect_says_so(path: str) -> None:
    changed, problems = read_plan(put(plan(path), path, PLANS_SAY_THAT_THEY_HAVE_NONE[path]))
    assert [problem.path for problem in problems if not problem.fatal] == [path]
    assert changed.plan
