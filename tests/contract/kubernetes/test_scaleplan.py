# SPDX-License-Identifier: Apache-2.0
"""Reading ScalePlans: every shape of the prior art, and every mistake in one sentence."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.order import Move, Plan
from holdfast.platforms.kubernetes.scaleplan import ScalePlan, read_plan

MANIFESTS = Path(__file__).parents[2] / "kube" / "manifests"


def plan(spec: object, labels: Mapping[str, str] | None = None, phase: str = "") -> dict[str, Any]:
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ScalePlan",
        "metadata": {
            "name": "plan",
            "namespace": "ns",
            "uid": "u1",
            "creationTimestamp": "2026-11-16T10:00:00Z",
            "labels": labels or {},
        },
        "spec": spec,
        "status": {"phase": phase},
    }


def read_well(obj: Mapping[str, Any]) -> ScalePlan:
    found, problems = read_plan(obj)
    assert [str(problem) for problem in problems if problem.fatal] == []
    return found


def notes(obj: Mapping[str, Any]) -> list[str]:
    return [str(problem) for problem in read_plan(obj)[1] if not problem.fatal]


def shapes() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((MANIFESTS / "scaleplans.yaml").read_text())
    return {document["metadata"]["name"]: document for document in documents}


def test_numbers_and_resources_by_role() -> None:
    found = read_well(shapes()["numbers"])
    assert found.job == "ctr"
    servers = Plan(plan_id="scaleplan//ps", role="ps", nodes=1, cpu_milli=500, memory_mib=256)
    assert found.plan == Plan(
        plan_id="scaleplan//worker",
        role="worker",
        nodes=2,
        cpu_milli=4000,
        memory_mib=1024,
        others=(servers,),
    )
    assert any("GPUs" in note for note in notes(shapes()["numbers"]))


def test_the_old_label_and_the_old_field_are_understood() -> None:
    """The prior art's own sample has a label that its selector never matches."""
    found = read_well(shapes()["old-words"])
    assert found.job == "ctr"
    assert found.plan == Plan(plan_id="scaleplan//worker", nodes=5)


def test_both_spellings_of_a_field_may_stand_side_by_side() -> None:
    numbers, amounts = {"worker": {"replicas": 5}}, {"worker": {"resource": {"memory": "1Gi"}}}
    for first, second in ((numbers, amounts), (amounts, numbers)):
        spec = {"ownerJob": "j", "replicaResourceSpecs": first, "replicaResourceSpec": second}
        found = read_well(plan(spec))
        assert found.plan == Plan(plan_id="scaleplan/u1/worker", nodes=5, memory_mib=1024)


def test_pods_to_create_to_remove_and_to_migrate() -> None:
    found = read_well(shapes()["pods"])
    assert found.plan is not None
    evaluator, ps = found.plan.others
    assert replace(found.plan, others=()) == Plan(
        plan_id="scaleplan//worker",
        add=(NodeRank(3), NodeRank(4)),
        remove=(NodeId(2), NodeId(3)),
        cpu_milli=2000,
        memory_mib=2048,
    )
    assert evaluator.role == "evaluator"
    assert evaluator.remove == (NodeId(6),)
    assert ps.role == "ps"
    assert ps.migrate == (
        Move(node_id=NodeId(0), memory_mib=1024, cpu_milli=4000),
        Move(node_id=NodeId(1)),
    )
    assert [note.split(":")[0] for note in notes(shapes()["pods"])] == [
        "spec.createPods[0].service",
        "spec.createPods[0].id",
        "spec.createPods[1].resource",
        "spec.migratePods[1].rankIndex",
        "spec.psHosts",
    ]


def test_what_the_desk_needs_to_know() -> None:
    spec = {"ownerJob": "j", "replicaResourceSpecs": {"worker": {"replicas": 0}}}
    found = read_well(plan(spec))
    assert (found.name, found.namespace, found.uid) == ("plan", "ns", "u1")
    assert found.created == "2026-11-16T10:00:00Z"
    assert not found.finished
    assert found.plan == Plan(plan_id="scaleplan/u1/worker", nodes=0)
    assert read_well(plan(spec, phase="Succeeded")).finished
    assert read_well(plan(spec, phase="Failed")).finished
    assert not read_well(plan(spec, phase="Scaling")).finished


def test_the_spec_decides_whose_plan_it_is() -> None:
    spec = {"ownerJob": "a", "replicaResourceSpecs": {"worker": {"replicas": 1}}}
    labels = {"elasticjob.dlrover/name": "b"}
    assert read_well(plan(spec, labels)).job == "a"
    assert notes(plan(spec, labels)) == ['spec.ownerJob: decides: the label says "b"']
    del spec["ownerJob"]
    assert read_well(plan(spec, labels)).job == "b"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ownerJob": ""}, "spec.ownerJob: a plan needs the name of its job"),
        ({"replicaResourceSpecs": {}}, "spec: changes nothing"),
        (
            {"replicaResourceSpecs": {"wroker": {"replicas": 1}}},
            "spec.replicaResourceSpecs.wroker: there is no such role, did you mean worker?",
        ),
        (
            {"replicaResourceSpecs": {"dlrover-master": {"replicas": 1}}},
            "spec.replicaResourceSpecs.dlrover-master: there is no such role",
        ),
        (
            {"replicaResourceSpecs": {"worker": {"replica": 1}}},
            "spec.replicaResourceSpecs.worker.replica: unknown field, did you mean replicas?",
        ),
        (
            {"replicaResourceSpecs": {"worker": {"resource": {"memory": "256"}}}},
            "spec.replicaResourceSpecs.worker.resource.memory: 256 is in bytes, "
            "did you mean 256Mi?",
        ),
        ({"createPods": [{"type": "worker"}]}, "spec.createPods[0].rankIndex: a new node needs"),
        ({"removePods": [{"type": "worker"}]}, "spec.removePods[0]: needs the id or the name"),
        ({"removePods": ["other-edljob-worker-1"]}, "spec.removePods[0]: \"other-edljob-worker-1\" "
         "is not a pod of this job: their names are like j-edljob-worker-0"),
        (
            {"migratePods": [{"name": "j-edljob-ps-1", "id": 2}]},
            'spec.migratePods[0].name: "j-edljob-ps-1" is not the name of ps 2',
        ),
        ({"migratePods": [{"id": 2, "typ": "ps"}]}, "unknown field, did you mean type?"),
        ({"migratePods": {"id": 2}}, "spec.migratePods: must be a list, not a mapping"),
        ({"createPod": []}, "spec.createPod: unknown field, did you mean createPods?"),
    ],
)  # fmt: skip
def test_a_mistake_is_said_and_nothing_of_the_plan_is_done(
    changes: Mapping[str, object], said: str
) -> None:
    spec = {"ownerJob": "j", "replicaResourceSpecs": {"worker": {"replicas": 1}}, **changes}
    found, problems = read_plan(plan(spec))
    assert found.plan is None
    assert any(said in str(problem) for problem in problems if problem.fatal)


def test_plans_of_another_controller_are_refused() -> None:
    spec = {"ownerJob": "j", "replicaResourceSpecs": {"worker": {"replicas": 1}}}
    found, problems = read_plan(plan(spec, {"scale-type": "auto"}))
    assert found.plan is None
    assert [str(problem) for problem in problems] == [
        'metadata.labels.scale-type: only manual plans are done, not "auto"'
    ]


@pytest.mark.parametrize("spec", [None, [], "scale up", {"removePods": [7, None]}])
def test_nothing_that_somebody_writes_raises(spec: object) -> None:
    found, problems = read_plan(plan(spec))
    assert found.plan is None
    assert problems
