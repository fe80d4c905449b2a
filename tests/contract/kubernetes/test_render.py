# SPDX-License-Identifier: Apache-2.0
"""A manifest and an order become a pod: golden files, and what must hold for every template."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.model.errors import UsageError
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.order import Order
from holdfast.platforms.kubernetes import gang, names
from holdfast.platforms.kubernetes.manifest import ElasticJob, read_job
from holdfast.platforms.kubernetes.render import node_pod, node_service

Json = dict[str, Any]

GOLDEN = Path(__file__).parent / "golden"

DDP = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: mnist, namespace: research, uid: 0f9a1c22-1111-2222-3333-444455556666}
spec:
  distributionStrategy: AllreduceStrategy
  optimizeMode: single-job
  replicaSpecs:
    worker:
      replicas: 3
      restartCount: 3
      template:
        spec:
          restartPolicy: Never
          containers:
            - name: main
              image: example/mnist:1
              command: ["/bin/bash", "-c", "dlrover-run --nnodes=3:$NODE_NUM train.py"]
              resources: {limits: {cpu: "8", memory: 16Gi, nvidia.com/gpu: 8}}
"""

RICH = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata:
  name: llm
  namespace: research
  uid: aa0b1c22-1111-2222-3333-444455556666
spec:
  envs:
    NCCL_DEBUG: {name: NCCL_DEBUG, value: WARN}
    DATA: {name: DATA, value: /of/the/job}
  replicaSpecs:
    worker:
      replicas: 8
      template:
        metadata:
          name: dropped
          generateName: dropped-
          labels: {app: llm, team: language, elasticjob.dlrover/name: spoofed}
          annotations: {prometheus.io/scrape: "true"}
          finalizers: [example.com/hold]
        spec:
          restartPolicy: OnFailure
          terminationGracePeriodSeconds: 600
          priorityClassName: urgent
          serviceAccountName: reader
          schedulerName: my-scheduler
          nodeSelector: {pool: a100}
          tolerations: [{key: gpu, operator: Exists}]
          securityContext: {runAsNonRoot: true, fsGroup: 2000}
          hostNetwork: true
          imagePullSecrets: [{name: registry}]
          affinity:
            podAntiAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {app: llm}}}
            nodeAffinity:
              preferredDuringSchedulingIgnoredDuringExecution:
                - {weight: 1, preference: {matchExpressions: [{key: fast, operator: Exists}]}}
              requiredDuringSchedulingIgnoredDuringExecution:
                nodeSelectorTerms:
                  - matchExpressions: [{key: zone, operator: In, values: [a]}]
                  - matchFields: [{key: metadata.name, operator: NotIn, values: [bad]}]
          volumes:
            - name: data
              persistentVolumeClaim: {claimName: data}
            - name: shm
              emptyDir: {medium: Memory}
          initContainers:
            - name: fetch
              image: example/fetch:1
          containers:
            - name: logs
              image: example/logs:1
              env: [{name: NODE_NUM, value: "of the sidecar"}]
            - name: main
              image: example/llm:1
              args: ["--data=$(DATA)"]
              env:
                - {name: DATA, value: /of/the/container}
                - {name: NODE_NUM, value: "16"}
                - {name: NODE_RANK, value: "99"}
                - {name: HOLDFAST_MASTER, value: elsewhere}
                - {name: HOLDFAST_MEMORY_DIR, value: /memory}
                - {name: WHERE, value: "$(POD_IP)"}
              envFrom: [{configMapRef: {name: more}}]
              lifecycle: {preStop: {exec: {command: [sync]}}}
              livenessProbe: {exec: {command: ["true"]}}
              securityContext: {capabilities: {drop: [ALL]}}
              terminationMessagePolicy: File
              volumeMounts:
                - {name: data, mountPath: /data}
                - {name: shm, mountPath: /dev/shm}
              resources:
                requests: {cpu: 4, memory: 32Gi}
                limits: {memory: 48Gi, nvidia.com/gpu: 8}
                claims: [{name: fabric}]
"""

PARAMETER_SERVER = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: ctr, namespace: ads, uid: bb0b1c22-1111-2222-3333-444455556666}
spec:
  distributionStrategy: ParameterServerStrategy
  replicaSpecs:
    ps:
      replicas: 2
      template: {spec: {containers: [{name: main, image: "example/ctr:1"}]}}
    worker:
      replicas: 4
      template: {spec: {containers: [{name: main, image: "example/ctr:1"}]}}
"""


def job_of(text: str, **metadata: Json) -> ElasticJob:
    """The job of a manifest without mistakes; `metadata` is put into its own."""
    manifest = yaml.safe_load(text)
    manifest["metadata"].update(metadata)
    job, problems = read_job(manifest)
    assert [problem for problem in problems if problem.fatal] == []
    return job


def order(node_id: int = 5, rank: int = 1, **more: Any) -> Order:
    return Order(node_id=NodeId(node_id), node_rank=NodeRank(rank), **more)


def main_of(pod: Mapping[str, Any]) -> Json:
    name = pod["metadata"]["annotations"]["holdfast.io/main-container"]
    found = [each for each in pod["spec"]["containers"] if each["name"] == name]
    assert len(found) == 1
    main: Json = found[0]
    return main


def env_of(pod: Mapping[str, Any]) -> Json:
    """By name. No name is there twice."""
    entries = main_of(pod)["env"]
    found = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}
    assert len(found) == len(entries)
    return found


def bare(**spec: Any) -> ElasticJob:
    """A job whose template has one container and what is given."""
    job = job_of(DDP)
    template = {"spec": {"containers": [{"name": "any", "image": "example/any:1"}], **spec}}
    return replace(job, roles={"worker": replace(job.roles["worker"], template=template)})


# ---- golden files ------------------------------------------------------------------------------

ORDINARY = order(size=3)
TROUBLED = order(
    12,
    3,
    size=8,
    relaunches=2,
    memory_mib=65536,
    priority="high",
    group=1001,
    avoid_hosts=("host-4", "host-9"),
)
GANG = {"holdfast.io/gang": "volcano", "scheduling.volcano.sh/queue-name": "night"}

CASES: dict[str, Callable[[], object]] = {
    "ddp": lambda: node_pod(job_of(DDP), ORDINARY),
    "rich": lambda: node_pod(job_of(RICH), ORDINARY),
    "rich-troubled": lambda: node_pod(job_of(RICH), TROUBLED),
    "troubled": lambda: node_pod(job_of(DDP), TROUBLED),
    "ps": lambda: node_pod(job_of(PARAMETER_SERVER), order(role="ps")),
    "ps-service": lambda: node_service(job_of(PARAMETER_SERVER), order(role="ps")),
    "volcano": lambda: node_pod(job_of(DDP, annotations=GANG), ORDINARY),
    "volcano-group": lambda: gang.pod_group(job_of(DDP, annotations=GANG), order(size=5)),
    "coscheduling": lambda: node_pod(
        job_of(DDP, annotations={"holdfast.io/gang": "coscheduling"}), ORDINARY
    ),
    "coscheduling-group": lambda: gang.pod_group(
        job_of(DDP, annotations={"holdfast.io/gang": "coscheduling"}), ORDINARY
    ),
    "kueue": lambda: node_pod(
        job_of(
            DDP,
            annotations={"holdfast.io/gang": "kueue"},
            labels={"kueue.x-k8s.io/queue-name": "night"},
        ),
        ORDINARY,
    ),
}


class WholeDumper(yaml.SafeDumper):
    """Writes an object that occurs twice in full both times."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, pytestconfig: pytest.Config) -> None:
    """A changed line is what existing jobs get after an upgrade: look at every one."""
    path, made = GOLDEN / f"{name}.yaml", CASES[name]()
    if pytestconfig.getoption("rewrite_pods", default=False):
        path.write_text(yaml.dump(made, Dumper=WholeDumper), encoding="utf-8")
    assert made == yaml.safe_load(path.read_text(encoding="utf-8"))


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


# ---- the user's template -----------------------------------------------------------------------


def is_kept(users: object, made: object, path: str = "") -> list[str]:
    """The paths of everything in `users` that is not in `made`; lists may have more items."""
    if isinstance(users, Mapping) and isinstance(made, Mapping):
        return [
            lost
            for key, value in users.items()
            for lost in is_kept(value, made.get(key), f"{path}.{key}")
        ]
    if isinstance(users, list) and isinstance(made, list):
        return [
            f"{path}[{index}]"
            for index, value in enumerate(users)
            if all(is_kept(value, other) for other in made)
        ]
    return [] if users == made else [path]


def test_the_user_s_template_is_kept_whole() -> None:
    """Prior art: env, lifecycle, labels, annotations, the grace period and the priority class of
    the user are replaced instead of merged."""
    job = job_of(RICH)
    lost = is_kept(job.roles["worker"].template, node_pod(job, ORDINARY))
    assert lost == [
        ".metadata.name",
        ".metadata.generateName",
        ".metadata.labels.elasticjob.dlrover/name",
        ".spec.restartPolicy",
        # Its main container, because of the two variables that tell a node who it is.
        ".spec.containers[1]",
    ]
    users = dict(job.roles["worker"].template["spec"]["containers"][1])
    made = main_of(node_pod(job, ORDINARY))
    firm = {"NODE_RANK", "HOLDFAST_MASTER"}
    users["env"] = [entry for entry in users["env"] if entry["name"] not in firm]
    assert is_kept(users, made) == []


def test_the_template_itself_is_not_touched() -> None:
    job = job_of(RICH)
    before = yaml.safe_dump(dict(job.roles["worker"].template))
    assert node_pod(job, TROUBLED) == node_pod(job, TROUBLED)
    assert yaml.safe_dump(dict(job.roles["worker"].template)) == before


def test_a_user_s_variable_wins_unless_it_tells_a_node_who_it_is() -> None:
    env = env_of(node_pod(job_of(RICH), ORDINARY))
    assert env["NODE_NUM"] == "16"
    assert env["DATA"] == "/of/the/container"
    assert env["NCCL_DEBUG"] == "WARN"
    assert env["HOLDFAST_MEMORY_DIR"] == "/memory"
    assert (env["NODE_RANK"], env["NODE_ID"]) == ("1", "5")
    assert env["HOLDFAST_MASTER"] == "elasticjob-llm-dlrover-master.research.svc:50001"


def test_the_user_s_variables_may_refer_to_ours() -> None:
    """Kubernetes replaces $(NAME) only by what stands before."""
    order_of_names = list(env_of(node_pod(job_of(RICH), ORDINARY)))
    assert order_of_names.index("POD_IP") < order_of_names.index("WHERE")


def test_a_sidecar_gets_neither_the_token_nor_a_variable() -> None:
    pod = node_pod(job_of(RICH), ORDINARY)
    template = job_of(RICH).roles["worker"].template
    assert pod["spec"]["containers"][0] == template["spec"]["containers"][0]
    assert pod["spec"]["initContainers"] == template["spec"]["initContainers"]


def test_a_chief_without_a_template_has_the_worker_s() -> None:
    pod = node_pod(job_of(DDP), order(role="chief"))
    assert main_of(pod)["image"] == "example/mnist:1"
    assert pod["metadata"]["labels"][names.ROLE_LABEL] == "chief"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"containers": [{"name": "a"}, {"name": "b"}]}, 'one of them "main"'),
        ({"containers": []}, "no main container"),
    ],
)
def test_a_template_without_a_main_container(spec: Json, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        node_pod(bare(**spec), order())


def test_a_role_that_the_job_does_not_have() -> None:
    with pytest.raises(UsageError, match="the job mnist has no role ps"):
        node_pod(job_of(DDP), order(role="ps"))


# ---- what a pod may do -------------------------------------------------------------------------


def test_a_node_pod_cannot_speak_to_the_api_server_unless_its_template_asks() -> None:
    """Prior art: every training pod has the rights of the namespace's default account."""
    assert node_pod(bare(), order())["spec"]["automountServiceAccountToken"] is False
    asked = bare(automountServiceAccountToken=True)
    assert node_pod(asked, order())["spec"]["automountServiceAccountToken"] is True
    account = bare(serviceAccountName="reader")
    assert "automountServiceAccountToken" not in node_pod(account, order())["spec"]


def test_a_node_gets_the_token_and_not_the_master_s_key() -> None:
    pod = node_pod(bare(), order())
    (volume, _) = pod["spec"]["volumes"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["token", "ca.crt"]
    (mount, _) = main_of(pod)["volumeMounts"]
    assert mount == {"name": "holdfast", "mountPath": "/var/run/holdfast", "readOnly": True}


# ---- memory for checkpoints --------------------------------------------------------------------


def memory_mounts(**of_main: Any) -> list[str]:
    """The names of the volumes that a node has at /dev/shm."""
    container = {"name": "main", "image": "example/any:1", **of_main}
    mounts = main_of(node_pod(bare(containers=[container]), order()))["volumeMounts"]
    return [mount["name"] for mount in mounts if mount["mountPath"].rstrip("/") == "/dev/shm"]


def test_a_node_has_more_memory_for_checkpoints_than_the_64_mib_of_container_runtimes() -> None:
    pod = node_pod(bare(), order())
    memory = {"name": "holdfast-memory", "emptyDir": {"medium": "Memory"}}
    assert memory in pod["spec"]["volumes"]
    assert memory_mounts() == ["holdfast-memory"]


def test_what_a_template_says_about_shared_memory_holds() -> None:
    own = {"name": "mine", "mountPath": "/dev/shm/"}
    assert memory_mounts(volumeMounts=[own]) == ["mine"]
    elsewhere = {"name": "HOLDFAST_MEMORY_DIR", "value": "/mnt/saves"}
    assert memory_mounts(env=[elsewhere]) == []
    hosts = node_pod(bare(hostIPC=True), order())
    assert [volume["name"] for volume in hosts["spec"]["volumes"]] == ["holdfast"]


def test_a_pod_has_time_to_save_and_knows_how_much() -> None:
    """Prior art: the grace period is lost, so that the save at SIGTERM gets 30 s."""
    pod = node_pod(bare(), order())
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120
    assert env_of(pod)["HOLDFAST_GRACE_S"] == "120"
    longer = node_pod(bare(terminationGracePeriodSeconds=600), order())
    assert longer["spec"]["terminationGracePeriodSeconds"] == 600
    assert env_of(longer)["HOLDFAST_GRACE_S"] == "600"


# ---- resources ---------------------------------------------------------------------------------


def resources_of(resources: Json, **of_order: int) -> Json:
    container = {"name": "main", "image": "example/any:1", "resources": resources}
    made: Json = main_of(node_pod(bare(containers=[container]), order(**of_order)))["resources"]
    return made


def test_missing_requests_equal_the_limits() -> None:
    limits = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": 8}
    assert resources_of({"limits": limits}) == {"limits": limits, "requests": limits}
    some = resources_of({"limits": limits, "requests": {"cpu": "2"}})
    assert some == {"limits": limits, "requests": {**limits, "cpu": "2"}}
    assert resources_of({}) == {}


def test_memory_is_raised_in_both_and_never_lowered() -> None:
    raised = resources_of({"limits": {"memory": "16Gi"}}, memory_mib=32768)
    assert raised == {"limits": {"memory": "32768Mi"}, "requests": {"memory": "32768Mi"}}
    kept = resources_of({"limits": {"memory": "16Gi"}}, memory_mib=8192)
    assert kept == {"limits": {"memory": "16Gi"}, "requests": {"memory": "16Gi"}}


def test_a_limit_above_the_request_is_raised_with_it() -> None:
    """Or a node that was out of memory at its limit would run into the same limit again."""
    users = {"requests": {"memory": "8Gi"}, "limits": {"memory": "16Gi"}}
    raised = resources_of(users, memory_mib=16384)
    assert raised == {"limits": {"memory": "32768Mi"}, "requests": {"memory": "16384Mi"}}


def test_a_limit_is_not_invented() -> None:
    assert resources_of({}, memory_mib=1024, cpu_milli=500) == {
        "requests": {"memory": "1024Mi", "cpu": "500m"}
    }


def test_a_plan_may_ask_for_less_cpu() -> None:
    made = resources_of({"limits": {"cpu": 8}}, cpu_milli=4000)
    assert made == {"limits": {"cpu": "4000m"}, "requests": {"cpu": "4000m"}}


# ---- where it may run --------------------------------------------------------------------------


def terms_of(pod: Mapping[str, Any]) -> list[Json]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms: list[Json] = pod["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    return terms


def test_every_alternative_of_the_user_excludes_the_hosts_that_failed() -> None:
    """Terms are alternatives: one without the exclusion would let the pod go back there."""
    exclusion = {
        "key": "kubernetes.io/hostname",
        "operator": "NotIn",
        "values": ["host-4", "host-9"],
    }
    rich = terms_of(node_pod(job_of(RICH), TROUBLED))
    assert [term["matchExpressions"][-1] for term in rich] == [exclusion, exclusion]
    assert terms_of(node_pod(bare(), TROUBLED)) == [{"matchExpressions": [exclusion]}]
    assert "affinity" not in node_pod(bare(), order())["spec"]


def test_a_term_that_matches_no_host_goes_on_matching_none() -> None:
    required = {"nodeSelectorTerms": [{}]}
    node = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    assert terms_of(node_pod(bare(affinity={"nodeAffinity": node}), TROUBLED)) == [{}]


@pytest.mark.parametrize("priority", ["high", "low"])
def test_a_priority_becomes_the_priority_class_of_that_name(priority: str) -> None:
    spec = node_pod(bare(), order(priority=priority))["spec"]
    assert spec["priorityClassName"] == priority
    own = bare(priorityClassName="urgent")
    assert node_pod(own, order(priority=priority))["spec"]["priorityClassName"] == "urgent"


def test_a_group_is_told_to_the_scheduler_and_to_the_agent() -> None:
    pod = node_pod(bare(), order(group=3))
    assert pod["metadata"]["labels"]["scheduling/rack-group"] == "3"
    assert env_of(pod)["HOLDFAST_TOPOLOGY"] == "group-3"
    assert "HOLDFAST_TOPOLOGY" not in env_of(node_pod(bare(), order()))


# ---- gangs -------------------------------------------------------------------------------------


def test_a_scheduler_of_the_user_s_own_wins() -> None:
    own = replace(bare(schedulerName="mine"), gang="coscheduling")
    assert node_pod(own, order())["spec"]["schedulerName"] == "mine"


def test_a_gang_has_all_roles_of_the_job() -> None:
    job = job_of(PARAMETER_SERVER, annotations={"holdfast.io/gang": "coscheduling"})
    group = gang.pod_group(job, order(size=6))
    assert group is not None
    # One of the four workers is the chief, because the manifest has none.
    assert group["spec"] == {"minMember": 2 + 6 + 1}
    assert gang.pod_group(job_of(DDP), order()) is None


# ---- addresses ---------------------------------------------------------------------------------


def test_every_role_of_a_parameter_server_job_knows_where_the_others_are() -> None:
    config = json.loads(env_of(node_pod(job_of(PARAMETER_SERVER), order(role="ps")))["TF_CONFIG"])
    assert config["task"] == {"type": "ps", "index": 1}
    assert {role: len(places) for role, places in config["cluster"].items()} == {
        "ps": 2,
        "worker": 3,
        "chief": 1,
    }
    assert config["cluster"]["ps"][1] == "ctr-edljob-ps-1.ads.svc:2222"
    assert "TF_CONFIG" not in env_of(node_pod(job_of(DDP), order()))


def test_weakness_tf_config_says_what_is_and_not_what_the_manifest_says() -> None:
    """A worker that was launched again after a plan saw the cluster of the manifest."""
    now = (("ps", 3), ("worker", 5), ("chief", 1), ("evaluator", 1))
    pod = node_pod(job_of(PARAMETER_SERVER), order(9, 0, role="worker", roles=now))
    cluster = json.loads(env_of(pod)["TF_CONFIG"])["cluster"]
    assert {role: len(places) for role, places in cluster.items()} == {
        "ps": 3,
        "worker": 5,
        "chief": 1,
    }


def test_a_rank_keeps_its_address_over_all_its_nodes() -> None:
    job = job_of(PARAMETER_SERVER)
    first, second = order(2, 0, role="worker"), order(9, 0, role="worker", relaunches=1)
    assert node_service(job, first) == node_service(job, second)
    service, pod = node_service(job, second), node_pod(job, second)
    assert service is not None
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert node_service(job_of(DDP), order()) is None
