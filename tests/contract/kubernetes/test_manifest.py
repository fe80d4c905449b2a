# SPDX-License-Identifier: Apache-2.0
"""Reading ElasticJobs: every field of the prior art, and every mistake in one sentence."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.model.resources import Limits, Resources
from holdfast.platforms.kubernetes.manifest import (
    ElasticJob,
    OptimizeMode,
    PendingStrategy,
    StateVolume,
    Strategy,
    read_job,
)
from holdfast.platforms.kubernetes.templates import main_container

MANIFESTS = Path(__file__).parents[2] / "kube" / "manifests"
WORKER = "spec.replicaSpecs.worker"
Obj = dict[str, Any]


def load(file: str) -> list[Obj]:
    return list(yaml.safe_load_all((MANIFESTS / file).read_text()))


def manifest() -> Obj:
    template = {"spec": {"containers": [{"name": "main", "image": "train"}]}}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "job"},
        "spec": {"replicaSpecs": {"worker": {"replicas": 3, "template": template}}},
    }


def with_field(path: str, value: object) -> Obj:
    """A good manifest, except that this field has this value."""
    whole = obj = manifest()
    *way, last = path.split(".")
    for name in way:
        obj = obj.setdefault(name, {})
    obj[last] = value
    return whole


def read_well(obj: Mapping[str, Any]) -> ElasticJob:
    job, problems = read_job(obj)
    assert [str(problem) for problem in problems if problem.fatal] == []
    return job


def fatal(obj: Mapping[str, Any]) -> list[str]:
    return [str(problem) for problem in read_job(obj)[1] if problem.fatal]


def notes(obj: Mapping[str, Any]) -> list[str]:
    return [str(problem) for problem in read_job(obj)[1] if not problem.fatal]


# ---- manifests of the prior art ------------------------------------------------------------------


def test_an_all_reduce_job_with_every_field() -> None:
    [document] = load("allreduce.yaml")
    job = read_well(document)
    assert (job.name, job.namespace, job.labels) == (
        "gpt-pretrain",
        "default",
        {"team": "language"},
    )
    assert job.strategy is Strategy.ALLREDUCE
    assert job.optimize_mode is OptimizeMode.SINGLE_JOB
    assert job.brain_service == "brain.kube-system.svc:50001"
    assert not job.suspend
    assert job.resource_limits == Limits(cpu_milli=64_000, memory_mib=512 * 1024, gpus=32)
    assert job.envs == (
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "DATA_KEY", "valueFrom": {"secretKeyRef": {"name": "data", "key": "key"}}},
    )
    assert job.pending_timeout_s == 600
    assert job.pending_strategy is PendingStrategy.ALL
    assert job.gang == "volcano"
    assert list(job.roles) == ["worker"]
    worker = job.roles["worker"]
    assert worker.replicas == 4
    assert worker.restart_count == 5
    assert worker.restart_timeout_s == 600
    assert worker.auto_scale
    assert worker.priority == "0.5"
    assert worker.critical_ranks == {0: 3, 1: 2}
    assert worker.batch_scheduler == "volcano"
    assert worker.resources == Resources(cpu_milli=8000, memory_mib=16384, gpus=8)
    assert main_container(worker.template) == 1
    assert job.master is not None
    assert job.master.restart_count == 2


def test_a_template_is_kept_whole_as_the_prior_art_does_not() -> None:
    """The prior art loses lifecycle hooks, grace periods and priority classes of the template."""
    [document] = load("allreduce.yaml")
    untouched = copy.deepcopy(document)
    job = read_well(document)
    assert document == untouched
    assert job.roles["worker"].template == document["spec"]["replicaSpecs"]["worker"]["template"]


def test_what_has_no_effect_is_said_with_the_reason() -> None:
    [document] = load("allreduce.yaml")
    said = notes(document)
    annotations = ("service_type", "pre_check_ops", "pre_check_bypass", "training_elastic_mode")
    for name in (*annotations, "enable_dashboard", "dashboard_port"):
        assert any(
            note.startswith(f"metadata.annotations.{name}: has no effect: ") for note in said
        )
    master = "spec.replicaSpecs.dlrover-master.template.spec.containers[0]"
    for path in (f"{master}.image", f"{master}.command", f"{WORKER}.restartPolicy"):
        assert any(note.startswith(f"{path}: ") for note in said)
    assert any(note.startswith(f"{WORKER}.template.spec.restartPolicy: ") for note in said)
    assert any(note.startswith("spec.brainService: ") for note in said)


def test_a_parameter_server_job_with_every_role() -> None:
    [document] = load("parameter-servers.yaml")
    job = read_well(document)
    assert job.strategy is Strategy.PARAMETER_SERVER
    assert job.optimize_mode is OptimizeMode.CLUSTER
    assert {name: role.replicas for name, role in job.roles.items()} == {
        "worker": 3,
        "ps": 2,
        "chief": 1,
        "evaluator": 1,
    }
    ps, worker = job.roles["ps"], job.roles["worker"]
    assert (ps.priority, ps.critical_nodes, ps.auto_scale) == ("high", "all", False)
    assert (worker.priority, worker.critical_nodes) == ("low", "none")
    assert worker.batch_scheduler == ""
    assert ps.resources == Resources(cpu_milli=1000, memory_mib=4096)
    assert job.roles["chief"].template == worker.template
    assert job.roles["chief"].resources == worker.resources
    assert job.roles["evaluator"].template == worker.template


def test_odd_spellings() -> None:
    manual, mannual, smallest, local = (read_well(document) for document in load("odd.yaml"))
    assert manual.strategy is Strategy.PARAMETER_SERVER
    assert manual.optimize_mode is OptimizeMode.MANUAL
    assert manual.roles["worker"].priority == "0.5"
    assert mannual.strategy is Strategy.CUSTOM
    assert mannual.optimize_mode is OptimizeMode.MANUAL
    assert mannual.pending_strategy is PendingStrategy.SKIP
    assert mannual.roles["worker"].priority == "1"
    assert mannual.gang == "volcano"
    assert mannual.master is not None
    assert mannual.master.restart_count == 1
    assert smallest.strategy is Strategy.ALLREDUCE
    assert local.strategy is Strategy.LOCAL
    assert local.suspend


def test_defaults() -> None:
    obj = manifest()
    del obj["spec"]["replicaSpecs"]["worker"]["replicas"]
    job = read_well(obj)
    worker = job.roles["worker"]
    assert (worker.replicas, worker.restart_count, worker.restart_timeout_s) == (1, 3, 0)
    assert (worker.auto_scale, worker.priority, worker.critical_nodes) == (True, "", "")
    assert job.pending_timeout_s == 900
    assert job.pending_strategy is PendingStrategy.NECESSARY
    assert job.master is None
    assert job.ttl_s is None
    assert job.state_volume == StateVolume(ephemeral=False, size="1Gi", storage_class=None)
    assert read_job(obj)[1] == ()


def test_fields_of_our_own() -> None:
    obj = manifest()
    obj["metadata"]["annotations"] = {"group_affinity": "{0: 1, 1: 2}", "holdfast.io/gang": "kueue"}
    claim = {"size": "5Gi", "storageClassName": "fast"}
    obj["spec"] |= {
        "ttlSecondsAfterFinished": 0,
        "masterImage": "m",
        "stateVolume": {"claim": claim},
    }
    job = read_well(obj)
    assert job.ttl_s == 0
    assert job.master_image == "m"
    assert job.state_volume == StateVolume(size="5Gi", storage_class="fast")
    assert job.groups == {0: 1, 1: 2}
    assert job.gang == "kueue"
    assert read_well(with_field("spec.stateVolume.emptyDir", {})).state_volume.ephemeral


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("kind", "ElasticJobs", "must be ElasticJob"),
        ("metadata.name", "", "a job needs a name"),
        ("metadata.name", "My-Job", "small letters"),
        ("metadata.name", "job.v2", "small letters"),
        ("metadata.name", "2nd", "begin with a letter"),
        ("metadata.name", "n" * 38, "has 38 characters, at most 37 are possible"),
        ("spec.distributionStrategy", "AllReduceStrategy", "did you mean AllreduceStrategy?"),
        ("spec.optimizeMode", "auto", "must be one of manual, single-job, cluster"),
        ("spec.suspend", "true", 'must be true or false, not "true"'),
        ("spec.brainService", 8, 'must be text, not 8; write it in quotes: "8"'),
        ("spec.resourceLimits", "8", "must be a mapping"),
        ("spec.resourceLimits.cpu", "many", 'must be an amount such as 8 or 500m, not "many"'),
        ("spec.resourceLimits.memory", "16GB", "must be an amount such as 16Gi"),
        ("spec.resourceLimits.memory", "8192", "8192 is in bytes, did you mean 8192Mi?"),
        ("spec.resourceLimits.mem", "1Gi", "unknown field, did you mean memory?"),
        ("spec.envs.A", "1", "must be a mapping"),
        ("spec.envs.A.name", "B", 'is "B", but its key is "A"'),
        ("spec.envs.A", {"value": "1", "valueFrom": {"fieldRef": {}}}, "beside valueFrom"),
        ("spec.replicaSpecs.chief", 3, "must be a mapping of fields, not 3"),
        (f"{WORKER}.replicas", 0, "at least 1 worker; to pause it set spec.suspend"),
        (f"{WORKER}.replicas", "4", 'whole number of at least 0, not "4"'),
        (f"{WORKER}.replicas", True, "whole number of at least 0, not true"),
        (f"{WORKER}.restartCount", -1, "whole number of at least 0, not -1"),
        (f"{WORKER}.priority", "medium", "must be high, low, or the part"),
        (f"{WORKER}.priority", 0, "must be high, low, or the part"),
        (f"{WORKER}.priority", 1.5, "must be high, low, or the part"),
        (f"{WORKER}.criticalNodes", "0:1,0:2", "must be all, none, or ranks"),
        (f"{WORKER}.criticalNodes", "first", "must be all, none, or ranks"),
        (f"{WORKER}.batchScheduler", "slurm", "must be one of default, volcano"),
        (f"{WORKER}.template", None, "one container"),
        (f"{WORKER}.template.spec.containers", [], "there is none"),
        (
            f"{WORKER}.template.spec.containers",
            [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}],
            'one container must be called "main", none is',
        ),
        (f"{WORKER}.template.spec.containers", [{"name": "main"}], "a node needs an image"),
        (f"{WORKER}.templates", {}, "unknown field, did you mean template?"),
        ("spec.replicaSpecs.works", {}, "unknown field, did you mean worker?"),
        ("spec.replicaSpecs.dlrover-master.replicas", 2, "a job has one master, not 2"),
        ("spec.ttlSecondsAfterFinished", -5, "whole number of at least 0"),
        ("spec.stateVolume.claim.size", "big", 'must be an amount such as 1Gi, not "big"'),
        ("spec.stateVolume.hostPath", {}, "unknown field"),
        ("metadata.annotations.pending_timeout", "soon", "must be a number of seconds"),
        ("metadata.annotations.pending_timeout", 900, "write it in quotes"),
        ("metadata.annotations.pending_fail_strategy", "3", "must be one of skip"),
        ("metadata.annotations.group_affinity", "all", 'must be like "0:10,1:15"'),
        ("metadata.annotations.holdfast.io/gang", "slurm", "must be one of volcano"),
        ("specs", {}, "unknown field, did you mean spec?"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_path(path: str, value: object, said: str) -> None:
    if path.endswith("/gang"):
        obj = manifest()
        obj["metadata"]["annotations"] = {"holdfast.io/gang": value}
    else:
        obj = with_field(path, value)
    [problem] = fatal(obj)
    assert problem.startswith(path)
    assert said in problem


def test_all_mistakes_are_told_at_once() -> None:
    obj = with_field("spec.suspended", True)
    obj["spec"]["replicaSpecs"]["worker"]["replica"] = 4
    obj["metadata"]["name"] = "Job"
    paths = {problem.split(":")[0] for problem in fatal(obj)}
    assert paths == {"metadata.name", "spec.suspended", f"{WORKER}.replica"}


def test_a_strategy_needs_its_roles() -> None:
    obj = with_field("spec.distributionStrategy", "ParameterServerStrategy")
    assert fatal(obj) == [
        "spec.replicaSpecs.ps: a job of ParameterServerStrategy needs parameter servers"
    ]
    obj = with_field("spec.replicaSpecs", {})
    assert fatal(obj) == ["spec.replicaSpecs.worker: a job needs workers"]


def test_two_names_of_the_master_are_a_mistake() -> None:
    obj = with_field("spec.replicaSpecs.dlrover-master", {"restartCount": 1})
    obj["spec"]["replicaSpecs"]["master"] = {"restartCount": 2}
    assert fatal(obj) == [
        "spec.replicaSpecs.master: is another name of dlrover-master, which is there as well"
    ]


def test_two_volumes_for_the_state_are_a_mistake() -> None:
    obj = with_field("spec.stateVolume", {"emptyDir": {}, "claim": {"size": "1Gi"}})
    assert fatal(obj) == ["spec.stateVolume.claim: cannot stand beside emptyDir"]


def test_two_batch_schedulers_are_a_mistake_only_if_they_differ() -> None:
    obj = with_field(f"{WORKER}.BatchScheduler", "volcano")
    obj["spec"]["replicaSpecs"]["worker"]["batchScheduler"] = "volcano"
    assert read_well(obj).gang == "volcano"
    obj["spec"]["replicaSpecs"]["worker"]["batchScheduler"] = "default"
    assert fatal(obj) == [f"{WORKER}.batchScheduler: is default, but BatchScheduler is volcano"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.template.spec.containers[0].resorces", {}, "did you mean resources?"),
        ("spec.template.spec.nodeSelektor", {}, "did you mean nodeSelector?"),
    ],
)
def test_misspelt_fields_of_a_pod_are_noted_not_refused(
    path: str, value: object, said: str
) -> None:
    """A newer Kubernetes may know more fields than we do."""
    obj = manifest()
    pod = obj["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    place = pod["containers"][0] if "containers" in path else pod
    place[path.rpartition(".")[2]] = value
    assert fatal(obj) == []
    [note] = notes(obj)
    assert said in note


def test_a_misspelt_annotation_is_noted() -> None:
    obj = with_field("metadata.annotations", {"pending_timout": "5", "owner": "me", "a/b": "c"})
    [note] = notes(obj)
    assert (
        note == "metadata.annotations.pending_timout: has no effect, did you mean pending_timeout?"
    )


def test_a_critical_rank_that_does_not_exist_is_noted() -> None:
    [note] = notes(with_field(f"{WORKER}.criticalNodes", "7:1"))
    assert note == f"{WORKER}.criticalNodes: rank 7 does not exist: there are 3 replicas"


def test_groups_that_do_not_fit_the_job_are_noted() -> None:
    [note] = notes(with_field("metadata.annotations.group_affinity", "0:1,1:1"))
    assert note == (
        "metadata.annotations.group_affinity: has places for 2 nodes, and there are 3 workers"
    )


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
_PATHS = [
    "metadata", "metadata.annotations", "metadata.annotations.pending_timeout", "metadata.name",
    "spec", "spec.envs", "spec.envs.A", "spec.replicaSpecs", WORKER, "spec.resourceLimits",
    "spec.stateVolume", "spec.stateVolume.claim", f"{WORKER}.template", f"{WORKER}.template.spec",
    f"{WORKER}.template.spec.containers", f"{WORKER}.priority", f"{WORKER}.criticalNodes",
    "spec.replicaSpecs.dlrover-master", "spec.replicaSpecs.chief",
]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(path=st.sampled_from(_PATHS), value=_ANYTHING)
def test_nothing_that_somebody_writes_raises(path: str, value: object) -> None:
    read_job(with_field(path, value))


def test_a_master_s_account_and_security_are_its_own_unless_said_by_name() -> None:
    obj = manifest()
    container: dict[str, Any] = {"name": "main", "image": "m"}
    spec: dict[str, Any] = {"containers": [container], "serviceAccountName": "of-others"}
    obj["spec"]["replicaSpecs"]["dlrover-master"] = {"replicas": 1, "template": {"spec": spec}}
    assert [note for note in notes(obj) if "of-others has no effect" in note]
    assert not read_well(obj).own_security
    assert not [note for note in notes(obj) if "by name" in note]
    spec["hostPID"] = True
    container["securityContext"] = {"runAsUser": 7, "procMount": "Unmasked"}
    (told,) = [note for note in notes(obj) if "by name" in note]
    assert told.startswith(
        "spec.replicaSpecs.dlrover-master.template: spec.hostPID, "
        "spec.containers[0].securityContext.procMount: no effect on the job's master"
    )
    spec["securityContext"] = {"runAsUser": 0, "runAsGroup": 0}
    container["securityContext"] = {"runAsUser": 0}
    (told,) = [note for note in notes(obj) if "by name" in note]
    assert told.startswith(
        "spec.replicaSpecs.dlrover-master.template: spec.hostPID, "
        "spec.securityContext.runAsUser: 0, "
        "spec.containers[0].securityContext.runAsUser: 0: no effect on the job's master"
    )
    obj["metadata"]["annotations"] = {"holdfast.io/master-security": "template"}
    assert read_well(obj).own_security
    assert not [note for note in notes(obj) if "by name" in note]
    obj["metadata"]["annotations"] = {"holdfast.io/master-security": "no"}
    assert "must be" in fatal(obj)[0]
