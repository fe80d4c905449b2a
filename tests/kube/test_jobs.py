# SPDX-License-Identifier: Apache-2.0
"""Whole jobs in a cluster train to their end, whatever happens to their pods.

Every run lets a worker run out of memory and loses a master and a machine. `make soak` adds what
the tests beside this one show without a training in every run: pods that are deleted or evicted
and an API server that is away (test_platform.py), scaling and suspension (test_desk.py).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.platforms.kubernetes import quantities
from holdfast.platforms.kubernetes.kinds import SCALEPLANS
from holdfast.torch import ElasticDistributedSampler
from tests.integration.jobs import ROOT
from tests.kube.cluster import Cluster, OwnCluster
from tests.kube.kubelet import missing
from tests.kube.pod_jobs import SCRIPTS, Field, elastic_job, field, now, worker

pytestmark = [
    pytest.mark.kube,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=f"no pods can run here: {missing()}"),
]
TRAIN = str(SCRIPTS / "pod_train.py")
GLOBAL_BATCH, SEED = 16, 4
"""As in tests/integration/scripts/elastic_job.py."""
LENGTH = GLOBAL_BATCH * 100
OUTAGE_S = 30.0


def test_a_manifest_of_the_prior_art_runs_unchanged(cluster: Cluster, tmp_path: Path) -> None:
    """With its launch command, its annotations, its odd spellings, and a template for a master
    that is not ours."""
    with field(cluster, tmp_path, hosts=2) as there:
        script = ROOT / "tests" / "integration" / "scripts" / "train.py"
        words = f"dlrover-run --nnodes=2:$NODE_NUM --nproc_per_node=1 --max_restarts=3 '{script}'"
        template = worker(
            there.jobs.folder,
            command=["/bin/bash", "-c", words],
            STEPS="30",
        )
        template["spec"]["restartPolicy"] = "Never"
        template["spec"]["containers"][0]["imagePullPolicy"] = "Always"
        job = elastic_job("torch-mnist", 2, template)
        job["metadata"]["annotations"] = {"service_type": "http", "pending_timeout": "900"}
        job["spec"] |= {"optimizeMode": "manunal", "suspend": False}
        job["spec"]["replicaSpecs"]["worker"] |= {"autoScale": True, "restartCount": 3}
        image = {"name": "main", "image": "registry.example/dlrover-master:1"}
        job["spec"]["replicaSpecs"]["dlrover-master"] = {
            "replicas": 1,
            "restartCount": 3,
            "template": {"spec": {"containers": [image]}},
        }
        there.apply(job)
        there.wait_phase("torch-mnist", "Succeeded")
        ends = there.jobs.events("end")
        assert {(event.world, event.step) for event in ends} == {(2, 30)}
        assert {event.node for event in ends} == {
            "torch-mnist-edljob-worker-0",
            "torch-mnist-edljob-worker-1",
        }


def test_a_job_outlives_a_worker_a_master_and_a_machine(cluster: Cluster, tmp_path: Path) -> None:
    """Every step of the model that comes out was trained once, with exactly its samples."""
    with field(cluster, tmp_path, hosts=3) as there:
        start(there, "1:$(NODE_NUM)", nodes=2)
        let_one_run_out_of_memory(there, nodes=2)
        delete_the_master(there, nodes=2)
        lose_a_machine(there)
        finish(there)


@pytest.mark.soak
def test_a_job_trains_to_its_end_whatever_happens_to_its_pods(
    private_cluster: Callable[..., OwnCluster], tmp_path: Path
) -> None:
    """Every step of the model that comes out was trained once, with exactly its samples."""
    cluster = private_cluster()
    with field(cluster, tmp_path, hosts=4) as there:
        start(there, "2:$(NODE_NUM)", nodes=3)
        delete_a_pod(there)
        let_one_run_out_of_memory(there, nodes=3)
        evict_one(there)
        delete_the_master(there, nodes=3)
        stop_the_api_server(there, cluster)
        scale(there)
        suspend_and_resume(there)
        lose_a_machine(there)
        finish(there)


def start(there: Field, sizes: str, *, nodes: int) -> None:
    command = ["holdfast", "run", f"--nnodes={sizes}", TRAIN]
    template = worker(there.jobs.folder, command=command, LENGTH=str(LENGTH))
    there.apply(elastic_job("ddp", nodes, template))
    there.wait_world(nodes)


def finish(there: Field) -> None:
    there.jobs.finish()
    there.wait_phase("ddp", "Succeeded")
    expect_every_sample_once(there)
    expect_hardly_a_step_lost(there)


def delete_a_pod(there: Field) -> None:
    began = now()
    lost = max(there.nodes())
    there.kubectl("delete", "pod", lost, "--wait=false")
    there.wait_replaced(lost, 3, after=began)


def let_one_run_out_of_memory(there: Field, *, nodes: int) -> None:
    began = now()
    before = there.nodes()
    eater = min(there.wait_world(nodes, after=began))
    (there.jobs.folder / f"eat-{eater}").touch()
    world = there.wait_replaced(eater, nodes, after=began)
    ended = there.pod(eater)["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["reason"] == "OOMKilled"
    (new,) = world.keys() - before.keys()
    assert memory_of(there.pod(new)) > memory_of(before[eater])


def memory_of(pod: dict[str, Any]) -> Any:
    return quantities.amount(pod["spec"]["containers"][0]["resources"]["limits"]["memory"])


def evict_one(there: Field) -> None:
    began = now()
    lost = min(there.wait_world(3, after=began))
    there.node.evict(lost)
    there.wait_replaced(lost, 3, after=began)
    assert there.pod(lost)["status"]["reason"] == "Evicted"


def delete_the_master(there: Field, *, nodes: int) -> None:
    """No worker notices."""
    (old,) = (name for name, pod in there.masters().items() if is_running(pod))
    before = there.wait_world(nodes, after=now())
    there.kubectl("delete", "pod", old, "--wait=false")

    def next_master() -> bool:
        return any(is_running(pod) for name, pod in there.masters().items() if name != old)

    there.until(next_master, "another master")
    there.until(lambda: has_written(there, "listening on"), "the new master to serve")
    after = there.wait_world(nodes, after=now(), steps=20)
    assert {pod: event.round for pod, event in after.items()} == {
        pod: event.round for pod, event in before.items()
    }


def is_running(pod: dict[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def has_written(there: Field, text: str) -> bool:
    return text in there.node.log(max(there.masters()))


def stop_the_api_server(there: Field, cluster: OwnCluster) -> None:
    """For 30 s. Training goes on, and a pod that dies meanwhile is replaced afterwards."""
    before = there.wait_world(3, after=now())
    cluster.stop_api_server()
    began = now()
    during = there.wait_world(3, after=began, steps=20)
    assert {pod: event.round for pod, event in during.items()} == {
        pod: event.round for pod, event in before.items()
    }
    lost = max(during)
    there.node.kill(lost)
    there.wait_world(2, after=now())
    there.until(lambda: now() > began + OUTAGE_S, "the end of the outage")
    cluster.start_api_server()
    there.wait_replaced(lost, 3, after=now())


def scale(there: Field) -> None:
    """Up with a ScalePlan, down with kubectl scale."""
    began = now()
    plan = {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ScalePlan",
        "metadata": {"name": "more", "labels": {"scale-type": "manual"}},
        "spec": {"ownerJob": "ddp", "replicaResourceSpecs": {"worker": {"replicas": 4}}},
    }
    there.apply(plan)
    there.wait_world(4, after=began)

    def is_done() -> bool:
        return bool(there.get(SCALEPLANS, "more").get("status", {}).get("phase") == "Succeeded")

    there.until(is_done, "the plan to be answered")
    began = now()
    there.kubectl("scale", "elasticjob/ddp", "--replicas=2")
    there.wait_world(2, after=began)


def suspend_and_resume(there: Field) -> None:
    there.wait_world(2, after=now())
    there.kubectl("patch", "elasticjob/ddp", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    there.wait_phase("ddp", "Suspended")

    def nobody_runs() -> bool:
        return not any(is_running(pod) for pod in there.nodes().values())

    there.until(nobody_runs, "the end of all nodes")
    last = max(event.step for event in there.jobs.events("step"))
    began = now()
    there.kubectl("patch", "elasticjob/ddp", "--type=merge", "-p", '{"spec": {"suspend": false}}')
    there.wait_world(2, after=began)
    loaded = {event.step for event in there.jobs.events("loaded") if event.t > began}
    # A rank may have saved a step and not noted it, or noted one that another has not saved.
    assert loaded <= {last - 1, last, last + 1}


def lose_a_machine(there: Field) -> None:
    """It goes without a word. Its nodes are replaced on others."""
    began = now()
    world = there.wait_world(2, after=began)
    hosts = {name: pod["spec"]["nodeName"] for name, pod in there.nodes().items()}
    (master,) = (pod["spec"]["nodeName"] for pod in there.masters().values() if is_running(pod))
    # What is in the memory of both nodes must not be lost at once, nor the master with it.
    lost = next(pod for pod in world if hosts[pod] != master)
    assert len({hosts[pod] for pod in world}) == 2
    there.node.lose(hosts[lost])
    after = there.wait_replaced(lost, 2, after=began)
    assert all(there.pod(pod)["spec"]["nodeName"] != hosts[lost] for pod in after)


def expect_every_sample_once(there: Field) -> None:
    """The last round that did a step did it with the samples that are its turn."""
    (last,) = {event.step for event in there.jobs.events("end")}
    assert last > 0
    done: dict[int, tuple[int, list[int]]] = {}
    for path in there.jobs.folder.glob("samples-*"):
        round_ = int(path.name.split("-")[1])
        for line in path.read_text().splitlines():
            told = json.loads(line)
            if done.get(told["step"], (0, []))[0] < round_:
                done[told["step"]] = (round_, [])
            if done[told["step"]][0] == round_:
                done[told["step"]][1].extend(told["rows"])
    assert sorted(done) == list(range(1, last + 1))
    per_epoch = LENGTH // GLOBAL_BATCH
    sampler = ElasticDistributedSampler(LENGTH, num_replicas=1, rank=0, seed=SEED)
    for epoch in range((last - 1) // per_epoch + 1):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for number in range(per_epoch):
            step = epoch * per_epoch + number + 1
            if step <= last:
                wanted = order[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH]
                assert sorted(done[step][1]) == sorted(wanted), f"step {step}"


def expect_hardly_a_step_lost(there: Field) -> None:
    """Whatever happened, a world went on where the one before was, or one step before that."""
    steps = there.jobs.events("step")
    for loaded in there.jobs.events("loaded"):
        made = [step.step for step in steps if step.round < loaded.round]
        assert max(loaded.step, 0) >= max(made, default=0) - 1, f"round {loaded.round}"
