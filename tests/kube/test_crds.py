# SPDX-License-Identifier: Apache-2.0
"""The resources on a real API server: what it refuses, what it fills in, and what it keeps."""

import asyncio
import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.platforms.kubernetes.api import CRDS, ELASTICJOBS, SCALEPLANS, Api, Rejected
from holdfast.platforms.kubernetes.manifest import read_job
from holdfast.platforms.kubernetes.scaleplan import read_plan
from holdfast.platforms.kubernetes.templates import CONTAINER_FIELDS, POD_FIELDS
from tests.kube.cluster import CRDS as CRD_FOLDER
from tests.kube.cluster import Cluster

pytestmark = pytest.mark.kube

MANIFESTS = Path(__file__).parent / "manifests"
KINDS = {"ElasticJob": ELASTICJOBS, "ScalePlan": SCALEPLANS}
Obj = dict[str, Any]


def documents() -> list[Any]:
    """Every manifest of the prior art's shapes, one test each."""
    return [
        pytest.param(document, id=document["metadata"]["name"])
        for file in sorted(MANIFESTS.glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
    ]


def simple_job() -> Obj:
    template = {"spec": {"containers": [{"name": "main", "image": "train"}]}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "job"},
        "spec": {"replicaSpecs": {"worker": {"replicas": 3, "template": template}}},
    }


def kubectl(cluster: Cluster, *words: str) -> str:
    """What it printed; a warning of the server fails the test, as a failure does."""
    program = Path(sys.executable).parent / "kubectl"
    kubeconfig = cluster.kubeconfig()
    done = subprocess.run(
        [program, f"--kubeconfig={kubeconfig}", "--warnings-as-errors", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestDefinitions:
    def test_are_accepted_without_a_warning(self, cluster: Cluster) -> None:
        files = [f"-f={CRD_FOLDER / plural}.yaml" for plural in ("elasticjobs", "scaleplans")]
        kubectl(cluster, "apply", "--server-side", "--dry-run=server", *files)

    @pytest.mark.parametrize("plural", ["elasticjobs", "scaleplans"])
    def test_have_a_structural_schema(self, api: Api, runner: asyncio.Runner, plural: str) -> None:
        crd = runner.run(api.get(CRDS, f"{plural}.elastic.iml.github.io"))
        conditions = {found["type"]: found["status"] for found in crd["status"]["conditions"]}
        assert conditions == {"NamesAccepted": "True", "Established": "True"}


class TestManifestsOfThePriorArt:
    @pytest.mark.parametrize("document", documents())
    def test_are_accepted_kept_whole_and_understood(
        self, api: Api, runner: asyncio.Runner, namespace: str, document: Obj
    ) -> None:
        kind = KINDS[document["kind"]]
        kept = runner.run(api.create(kind, document, namespace))
        assert_contains(kept["spec"], without_nulls(document["spec"]))
        _, problems = read_job(kept) if kind is ELASTICJOBS else read_plan(kept)
        assert [str(problem) for problem in problems if problem.fatal] == []


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return value


def assert_contains(whole: Any, part: Any) -> None:
    """Everything that was written is there; the server may have added defaults."""
    if isinstance(part, dict):
        for name, value in part.items():
            assert_contains(whole[name], value)
    else:
        assert whole == part


class TestDefaults:
    def test_are_filled_in_by_the_server(
        self, api: Api, runner: asyncio.Runner, namespace: str
    ) -> None:
        job = simple_job()
        del job["spec"]["replicaSpecs"]["worker"]["replicas"]
        kept = runner.run(api.create(ELASTICJOBS, job, namespace))
        worker = kept["spec"]["replicaSpecs"]["worker"]
        del worker["template"]
        assert worker == {
            "replicas": 1,
            "restartCount": 3,
            "restartTimeout": 0,
            "autoScale": True,
        }


class TestEmptyTexts:
    def test_are_the_same_as_no_texts(
        self, api: Api, runner: asyncio.Runner, namespace: str
    ) -> None:
        """Some servers of version 1.20 take an empty text for null, and refuse that."""
        job = simple_job()
        worker = job["spec"]["replicaSpecs"]["worker"]
        worker |= dict.fromkeys(("priority", "criticalNodes", "batchScheduler"), "")
        worker |= dict.fromkeys(("BatchScheduler", "restartPolicy"), "")
        job["spec"] |= dict.fromkeys(("distributionStrategy", "optimizeMode"), "")
        job["spec"] |= dict.fromkeys(("brainService", "masterImage"), "")
        job["spec"]["envs"] = {"A": {"name": "", "value": ""}}
        for name in ("created", "applied"):
            job["metadata"]["name"] = name
            if name == "created":
                kept = runner.run(api.create(ELASTICJOBS, job, namespace))
            else:
                kept = runner.run(api.apply(ELASTICJOBS, name, job, namespace, manager="people"))
            assert kept["spec"]["envs"] == {"A": {"name": "", "value": ""}}
            assert read_job(kept)[1] == ()


def at(path: str, value: object) -> Callable[[Obj], None]:
    """A change of one field of a manifest, by its path."""

    def change(obj: Obj) -> None:
        *way, last = path.split(".")
        for name in way:
            obj = obj.setdefault(name, {})
        obj[last] = value

    return change


WORKER = "spec.replicaSpecs.worker"
REFUSED = [
    ("metadata.name", "Upper"),
    ("metadata.name", "3d"),
    ("metadata.name", "a.b"),
    ("metadata.name", "x" * 38),
    ("spec.distributionStrategy", "AllReduce"),
    ("spec.optimizeMode", "automatic"),
    ("spec.brainService", 5),
    ("spec.suspend", "yes"),
    ("spec.resourceLimits", "8"),
    ("spec.resourceLimits.memory", "16GB"),
    ("spec.resourceLimits.cpu", -1.5),
    ("spec.envs", [{"name": "A", "value": "1"}]),
    ("spec.envs.A.value", 1),
    ("spec.replicaSpecs", {}),
    ("spec.replicaSpecs", []),
    (f"{WORKER}.replicas", -1),
    (f"{WORKER}.replicas", "4"),
    (f"{WORKER}.replicas", 1.5),
    (f"{WORKER}.restartCount", -1),
    (f"{WORKER}.restartTimeout", "1m"),
    (f"{WORKER}.autoScale", "on"),
    (f"{WORKER}.priority", "medium"),
    (f"{WORKER}.priority", "1.5"),
    (f"{WORKER}.priority", "0.0"),
    (f"{WORKER}.priority", 0),
    (f"{WORKER}.priority", 1.01),
    (f"{WORKER}.criticalNodes", "0;3"),
    (f"{WORKER}.batchScheduler", "slurm"),
    (f"{WORKER}.BatchScheduler", "slurm"),
    (f"{WORKER}.restartPolicy", "Sometimes"),
    (f"{WORKER}.template", "train"),
    (f"{WORKER}.template.spec.containers", []),
    (f"{WORKER}.template.spec.containers", {"name": "main"}),
    ("spec.ttlSecondsAfterFinished", -1),
    ("spec.masterImage", True),
    ("spec.stateVolume", "emptyDir"),
    ("spec.stateVolume.claim.size", "big"),
]


class TestMalformedManifests:
    @pytest.mark.parametrize(("path", "value"), REFUSED, ids=str)
    def test_are_refused_at_once_with_the_field_named(
        self, api: Api, runner: asyncio.Runner, namespace: str, path: str, value: object
    ) -> None:
        job = simple_job()
        at(path, value)(job)
        with pytest.raises(Rejected) as refusal:
            runner.run(api.create(ELASTICJOBS, job, namespace))
        assert path in str(refusal.value)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("spec.ownerJob", 3),
            ("spec.manualScaling", "True"),
            ("spec.replicaResourceSpecs.worker.replicas", -2),
            ("spec.replicaResourceSpecs.worker.resource.memory", "1 GB"),
            ("spec.createPods", "worker-1"),
            ("spec.psHosts", "host"),
        ],
        ids=str,
    )
    def test_plans_too(
        self, api: Api, runner: asyncio.Runner, namespace: str, path: str, value: object
    ) -> None:
        plan: Obj = {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ScalePlan",
            "metadata": {"name": "plan"},
            "spec": {"ownerJob": "job"},
        }
        at(path, value)(plan)
        with pytest.raises(Rejected) as refusal:
            runner.run(api.create(SCALEPLANS, plan, namespace))
        assert path in str(refusal.value)

    def test_a_manifest_without_a_spec_is_refused(
        self, api: Api, runner: asyncio.Runner, namespace: str
    ) -> None:
        job = simple_job()
        job["specs"] = job.pop("spec")
        with pytest.raises(Rejected, match="spec"):
            runner.run(api.create(ELASTICJOBS, job, namespace))


class TestUnknownFields:
    """An API server drops what a schema does not know without a word. Ours keeps it to name it."""

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("suspend", "unknown field"),
            ("spec.suspended", "did you mean suspend?"),
            ("spec.replicaSpecs.wroker", "did you mean worker?"),
            (f"{WORKER}.replica", "did you mean replicas?"),
            (f"{WORKER}.restartcount", "did you mean restartCount?"),
            ("spec.envs.A.valuefrom", "did you mean valueFrom?"),
            ("spec.stateVolume.emptydir", "did you mean emptyDir?"),
            ("spec.stateVolume.claim.storageClass", "did you mean storageClassName?"),
            ("spec.resourceLimits.memroy", "did you mean memory?"),
            (f"{WORKER}.template.specs", "did you mean spec?"),
        ],
    )
    def test_are_kept_by_the_server_and_named_with_what_was_meant(
        self, api: Api, runner: asyncio.Runner, namespace: str, path: str, meant: str
    ) -> None:
        job = simple_job()
        at(path, 1 if path == "spec.resourceLimits.memroy" else {})(job)
        kept = runner.run(api.create(ELASTICJOBS, job, namespace))
        _, problems = read_job(kept)
        said = [str(problem) for problem in problems if problem.fatal]
        assert len(said) == 1
        assert said[0].startswith(f"{path}: ")
        assert meant in said[0]

    def test_what_we_take_for_the_fields_of_a_pod_are_those_of_kubernetes(
        self, cluster: Cluster
    ) -> None:
        raw = json.loads(kubectl(cluster, "get", "--raw=/openapi/v2"))["definitions"]
        pod = raw["io.k8s.api.core.v1.PodSpec"]["properties"]
        container = raw["io.k8s.api.core.v1.Container"]["properties"]
        assert set(pod) <= set(POD_FIELDS)
        assert set(container) <= set(CONTAINER_FIELDS)


class TestKubectl:
    def test_applies_shows_and_scales_a_job(
        self, cluster: Cluster, api: Api, runner: asyncio.Runner, namespace: str, tmp_path: Path
    ) -> None:
        """The prior art has no supported way to scale a running job by hand."""
        manifest = tmp_path / "job.yaml"
        manifest.write_text(yaml.safe_dump(simple_job()))
        where = f"--namespace={namespace}"
        kubectl(cluster, "apply", where, f"-f={manifest}")
        note = {"type": "Malformed", "status": "False", "message": "brainService has no effect"}
        status = {"phase": "Running", "replicas": 2, "step": 1200, "selector": "a=b"}
        status["conditions"] = [note]
        body = copy.deepcopy(simple_job()) | {"status": status}
        runner.run(api.patch(ELASTICJOBS, "job", body, namespace, subresource="status"))

        header, row = kubectl(cluster, "get", "ej", where).splitlines()
        assert header.split() == ["NAME", "PHASE", "WORKERS", "ACTIVE", "STEP", "AGE"]
        assert row.split()[:5] == ["job", "Running", "3", "2", "1200"]
        assert "job" in kubectl(cluster, "get", "all", where)
        assert "brainService has no effect" in kubectl(cluster, "get", "ej", "-o=wide", where)

        kubectl(cluster, "scale", where, "elasticjob/job", "--replicas=8")
        job = runner.run(api.get(ELASTICJOBS, "job", namespace))
        assert job["spec"]["replicaSpecs"]["worker"]["replicas"] == 8
        scale_path = f"/apis/elastic.iml.github.io/v1alpha1/namespaces/{namespace}/elasticjobs/job"
        scale = json.loads(kubectl(cluster, "get", f"--raw={scale_path}/scale"))
        assert scale["status"] == {"replicas": 2, "selector": "a=b"}

    def test_a_job_can_be_scaled_that_does_not_say_how_many_workers_it_has(
        self, cluster: Cluster, api: Api, runner: asyncio.Runner, namespace: str
    ) -> None:
        job = simple_job()
        del job["spec"]["replicaSpecs"]["worker"]["replicas"]
        runner.run(api.create(ELASTICJOBS, job, namespace))
        kubectl(cluster, "scale", f"--namespace={namespace}", "ej/job", "--replicas=2")
        kept = runner.run(api.get(ELASTICJOBS, "job", namespace))
        assert kept["spec"]["replicaSpecs"]["worker"]["replicas"] == 2


class TestStatus:
    def test_two_writers_keep_conditions_of_their_own(
        self, api: Api, runner: asyncio.Runner, namespace: str
    ) -> None:
        runner.run(api.create(ELASTICJOBS, simple_job(), namespace))
        for manager, kind in (("operator", "Created"), ("master", "Running")):
            body = {
                "apiVersion": "elastic.iml.github.io/v1alpha1",
                "kind": "ElasticJob",
                "metadata": {"name": "job"},
                "status": {"conditions": [{"type": kind, "status": "True"}]},
            }
            runner.run(
                api.apply(
                    ELASTICJOBS, "job", body, namespace, manager=manager, subresource="status"
                )
            )
        job = runner.run(api.get(ELASTICJOBS, "job", namespace))
        assert [found["type"] for found in job["status"]["conditions"]] == ["Created", "Running"]
        assert job["metadata"]["generation"] == 1
