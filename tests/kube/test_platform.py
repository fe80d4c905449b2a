# SPDX-License-Identifier: Apache-2.0
"""The platform against a real API server, where things do not go as they should.

No kubelet runs the pods: they stay pending until the test says what becomes of them. What every
platform promises is in tests/contract/test_platforms.py.
"""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.model.errors import HoldfastError
from holdfast.model.ids import NodeId
from holdfast.model.node import ExitReason, Phase
from holdfast.platforms.kubernetes import api as requests
from holdfast.platforms.kubernetes import gang
from holdfast.platforms.kubernetes.answers import Conflict, NotFound
from holdfast.platforms.kubernetes.api import Api
from holdfast.platforms.kubernetes.kinds import CRDS, PODS, ROLE_BINDINGS, ROLES, SERVICES, Kind
from holdfast.platforms.kubernetes.manifest import Role, Strategy
from holdfast.platforms.kubernetes.render import node_pod
from tests.kube.cluster import NOBODY, Cluster, OwnCluster
from tests.kube.line import lined
from tests.kube.platform_stage import (
    WAIT_S,
    Stage,
    fail,
    job_in,
    names_of,
    order,
    template,
    until_pods,
)
from tests.waiting import until

pytestmark = pytest.mark.kube

POD_GROUPS = Kind("scheduling.x-k8s.io", "v1alpha1", "podgroups")
PRIORITY_CLASSES = Kind("scheduling.k8s.io", "v1", "priorityclasses", namespaced=False)


def test_a_pod_that_is_refused_holds_nobody_up(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Prior art: creation of one pod that fails blocks the queue behind it for ever."""

    async def scene() -> None:
        broken = template(containers=[{"name": "main", "image": "none", "imagePullPolicy": "Now"}])
        job = job_in(namespace)
        job = replace(job, roles={**job.roles, "ps": Role(template=broken)})
        async with Stage(api, job) as stage:
            await stage.platform.launch(order(1, role="ps"))
            await stage.platform.launch(order(2))
            await stage.seen.of_node(2, Phase.PENDING)
            refused = await stage.seen.of_node(1, Phase.FAILED)
            assert refused.reason is ExitReason.ERROR
            assert "imagePullPolicy" in refused.message
            assert await names_of(api, namespace) == ["job-edljob-worker-2"]

    runner.run(scene())


def test_a_template_that_server_side_apply_refuses_is_launched(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Manifests that ran with the prior art have such: so pods are created, not applied."""

    async def scene() -> None:
        main = {
            "name": "main",
            "image": "none",
            "resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 0.5}},
            "env": [{"name": "TWICE", "value": "1"}, {"name": "TWICE", "value": "2"}],
            "ports": [{"name": "a", "containerPort": 80}, {"name": "b", "containerPort": 80}],
        }
        role = Role(
            template=template(
                containers=[main],
                volumes=[{"name": "cache", "emptyDir": {"sizeLimit": 1000}}],
                imagePullSecrets=[{"name": "twice"}, {"name": "twice"}],
            )
        )
        job = replace(job_in(namespace), roles={"worker": role})
        async with Stage(api, job) as stage:
            await stage.platform.launch(order(1))
            await stage.seen.of_node(1, Phase.PENDING)
        pod = node_pod(job, order(2))
        with pytest.raises(HoldfastError):
            await api.apply(PODS, pod["metadata"]["name"], pod, namespace, manager="test")

    runner.run(scene())


def test_a_role_without_a_template_fails_in_words(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.launch(order(1, role="ps"))
            refused = await stage.seen.of_node(1, Phase.FAILED)
            assert refused.message == "the job job has no role ps"

    runner.run(scene())


def test_what_is_forbidden_now_is_made_as_soon_as_it_is_allowed(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        name = f"class-{secrets.token_hex(4)}"
        role = Role(template=template(priorityClassName=name))
        async with Stage(api, replace(job_in(namespace), roles={"worker": role})) as stage:
            await stage.platform.launch(order(1))
            forbidden = await stage.seen.of_node(1, Phase.PENDING)
            assert name in forbidden.message
            priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1}
            await api.create(PRIORITY_CLASSES, {**priority, "metadata": {"name": name}})
            await until_pods(api, namespace, "job-edljob-worker-1")

    runner.run(scene())


def test_a_master_waits_for_its_rights(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    group = "rbac.authorization.k8s.io"
    head = {"apiVersion": f"{group}/v1", "metadata": {"name": "nodes"}}
    verbs = ["list", "watch", "create", "delete"]
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": verbs}
    role = {**head, "kind": "Role", "rules": [rule]}
    binding = {
        **head,
        "kind": "RoleBinding",
        "roleRef": {"apiGroup": group, "kind": "Role", "name": "nodes"},
        "subjects": [{"apiGroup": group, "kind": "User", "name": "nobody"}],
    }

    async def scene() -> None:
        nobody = Api(cluster.access(NOBODY))
        async with Stage(nobody, job_in(namespace)) as stage:
            await stage.platform.launch(order(1))
            await stage.platform.remove(NodeId(2))
            forbidden = await stage.seen.of_node(1, Phase.PENDING)
            assert "forbidden" in forbidden.message
            await stage.until_said("pods are made and removed as soon as that is possible")
            await api.create(ROLES, role, namespace)
            await api.create(ROLE_BINDINGS, binding, namespace)
            await stage.seen.until(lambda seen: seen.node_id == 1 and not seen.message)
            await stage.seen.of_node(2, Phase.GONE)
        await nobody.close()

    runner.run(scene())


def test_a_pod_of_an_older_job_of_the_same_name_is_waited_for(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        older = replace(job_in(namespace), uid="01d00000-0000-4000-8000-000000000000")
        await api.create(PODS, node_pod(older, order(1)), namespace)
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.launch(order(1))
            waits = await stage.seen.of_node(1, Phase.PENDING)
            assert "job-edljob-worker-1 of an earlier job" in waits.message
            await api.delete(PODS, "job-edljob-worker-1", namespace)
            await stage.seen.until(lambda seen: seen.node_id == 1 and not seen.message)
            pod = await api.get(PODS, "job-edljob-worker-1", namespace)
            assert pod["metadata"]["ownerReferences"][0]["uid"] == job_in(namespace).uid
            assert Phase.GONE not in stage.seen.phases(1)

    runner.run(scene())


def test_a_pod_of_an_older_job_is_neither_seen_nor_removed(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        older = replace(job_in(namespace), uid="01d00000-0000-4000-8000-000000000000")
        await api.create(PODS, node_pod(older, order(1)), namespace)
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.remove(NodeId(1))
            assert (await stage.seen.of_node(1)).phase is Phase.GONE
            await stage.platform.launch(order(2))
            await stage.seen.of_node(2)
            assert stage.seen.phases(1) == [Phase.GONE]
            pods = ["job-edljob-worker-1", "job-edljob-worker-2"]
            assert await names_of(api, namespace) == pods

    runner.run(scene())


def test_a_deleted_pod_is_seen_as_gone(api: Api, namespace: str, runner: asyncio.Runner) -> None:
    """Prior art: a pod that is force-deleted while it runs is never replaced."""

    async def scene() -> None:
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.launch(order(1))
            await stage.seen.of_node(1)
            await api.delete(PODS, "job-edljob-worker-1", namespace, grace_s=0)
            gone = await stage.seen.of_node(1, Phase.GONE)
            assert gone.reason is ExitReason.KILLED

    runner.run(scene())


def test_what_vanished_while_no_master_was_there_is_gone(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Prior art: a node that is missing from a listing is neither replaced nor told to anybody."""

    async def scene() -> None:
        await api.create(PODS, node_pod(job_in(namespace), order(1)), namespace)
        known = [NodeId(1), NodeId(2), NodeId(3)]
        async with Stage(api, job_in(namespace), known) as stage:
            await stage.platform.launch(order(3))
            await stage.seen.of_node(2, Phase.GONE)
            await stage.seen.of_node(3, Phase.PENDING)
            assert stage.seen.phases(1) == [Phase.PENDING]
            assert stage.seen.phases(3) == [Phase.PENDING]

    runner.run(scene())


def test_a_broken_pod_with_the_job_s_label_disturbs_nobody(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Prior art: one bad pod ends the watch for good, while the master goes on answering."""

    async def scene() -> None:
        for number, label in enumerate(("seven", "1.5", "")):
            bad = node_pod(job_in(namespace), order(number))
            bad["metadata"]["name"] = f"bad-{number}"
            bad["metadata"]["labels"]["elasticjob.dlrover/replica-index"] = label
            await api.create(PODS, bad, namespace)
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.launch(order(5))
            await stage.seen.of_node(5)
            assert {seen.node_id for seen in stage.seen.all} == {5}

    runner.run(scene())


def test_a_pod_that_appears_after_its_node_was_removed_is_removed_too(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """A request that nobody answered may be carried out long after it was given up."""

    async def scene() -> None:
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.remove(NodeId(1))
            await stage.seen.of_node(1, Phase.GONE)
            await api.create(PODS, node_pod(job_in(namespace), order(1)), namespace)
            await until_pods(api, namespace)
            await stage.platform.launch(order(1))
            await stage.platform.launch(order(2))
            await stage.seen.of_node(2)
            assert await names_of(api, namespace) == ["job-edljob-worker-2"]

    runner.run(scene())


def test_of_each_rank_the_last_pod_that_ended_is_kept_for_its_log(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """Prior art: failed pods are left behind, all of them."""

    async def scene() -> None:
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.launch(order(9, rank=1))
            for node_id in (1, 2, 3):
                await stage.platform.launch(order(node_id, rank=0))
                await stage.seen.of_node(node_id)
                await fail(api, namespace, f"job-edljob-worker-{node_id}")
                await stage.seen.of_node(node_id, Phase.FAILED)
                # A master removes what it takes for lost, whether it has ended or not.
                await stage.platform.remove(NodeId(node_id))
            await until_pods(api, namespace, "job-edljob-worker-3", "job-edljob-worker-9")
        # The next master finds two that ended, and keeps the later one.
        older = node_pod(job_in(namespace), order(2, rank=0))
        await api.create(PODS, older, namespace)
        await fail(api, namespace, "job-edljob-worker-2")
        async with Stage(api, job_in(namespace)):
            await until_pods(api, namespace, "job-edljob-worker-3", "job-edljob-worker-9")

    runner.run(scene())


def test_an_order_tried_again_makes_no_second_pod_of_a_node_that_is_gone(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """The server made the pod and its answer was lost; the pod ran and was deleted. Whichever comes
    first afterwards, the next try or the watch: the node is gone, and its pod stays gone."""

    async def scene() -> None:
        job = job_in(namespace)
        async with lined(cluster, tmp_path) as (line, far), Stage(far, job) as stage:
            await stage.platform.launch(order(1))
            await stage.seen.of_node(1)
            line.cut()
            await stage.platform.launch(order(2))
            await stage.until_said("pods are made and removed as soon as that is possible")
            await api.create(PODS, node_pod(job, order(2)), namespace)
            await fail(api, namespace, "job-edljob-worker-2", code=137)
            await api.delete(PODS, "job-edljob-worker-2", namespace, grace_s=0)
            line.mend()
            await stage.seen.of_node(2, Phase.GONE)
            await stage.platform.launch(order(2))
            await stage.platform.launch(order(3))
            await stage.seen.of_node(3)
            await until_pods(api, namespace, "job-edljob-worker-1", "job-edljob-worker-3")

    runner.run(scene())


def test_a_sidecar_does_not_hold_what_the_successor_of_its_node_needs(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        containers = [{"name": "main", "image": "none"}, {"name": "logs", "image": "none"}]
        role = Role(template=template(containers=containers))
        async with Stage(api, replace(job_in(namespace), roles={"worker": role})) as stage:
            await stage.platform.launch(order(1))
            await stage.seen.of_node(1)
            rest = {"image": "none", "imageID": "", "ready": False, "restartCount": 0}
            ended = {"terminated": {"exitCode": 1, "reason": "Error"}}
            running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            statuses = [
                {**rest, "name": "main", "state": ended},
                {**rest, "name": "logs", "state": running},
            ]
            status = {"status": {"phase": "Running", "containerStatuses": statuses}}
            await api.patch(PODS, "job-edljob-worker-1", status, namespace, subresource="status")
            failed = await stage.seen.of_node(1, Phase.FAILED)
            assert failed.reason is ExitReason.ERROR
            await until_pods(api, namespace)

    runner.run(scene())


def test_why_a_pod_waits_is_told(api: Api, namespace: str, runner: asyncio.Runner) -> None:
    async def scene() -> None:
        async with Stage(api, job_in(namespace)) as stage:
            await stage.platform.launch(order(1))
            await stage.seen.of_node(1)
            unschedulable = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/4 nodes are available",
            }
            status = {"status": {"conditions": [unschedulable]}}
            await api.patch(PODS, "job-edljob-worker-1", status, namespace, subresource="status")
            await stage.seen.until(lambda seen: "0/4 nodes are available" in seen.message)
            # A change that means nothing to the node is no news.
            label = {"metadata": {"labels": {"mine": "1"}}}
            await api.patch(PODS, "job-edljob-worker-1", label, namespace)
            await stage.platform.launch(order(2))
            await stage.seen.of_node(2)
            assert len(stage.seen.of(1)) == 2

    runner.run(scene())


def test_parameter_servers_have_addresses(api: Api, namespace: str, runner: asyncio.Runner) -> None:
    async def scene() -> None:
        job = job_in(namespace, strategy=Strategy.PARAMETER_SERVER)
        async with Stage(api, replace(job, roles={"ps": Role(template=template())})) as stage:
            for node_id in (1, 2):
                await stage.platform.launch(order(node_id, rank=0, role="ps"))
                await stage.seen.of_node(node_id)
            assert await names_of(api, namespace, SERVICES) == ["job-edljob-ps-0"]

    runner.run(scene())


def test_a_gang_scheduler_is_told_how_many_belong_together(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": "podgroups.scheduling.x-k8s.io",
            # The group is a protected one.
            "annotations": {"api-approved.kubernetes.io": "unapproved, only for a test"},
        },
        "spec": {
            "group": "scheduling.x-k8s.io",
            "scope": "Namespaced",
            "names": {"plural": "podgroups", "singular": "podgroup", "kind": "PodGroup"},
            "versions": [
                {
                    "name": "v1alpha1",
                    "served": True,
                    "storage": True,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "x-kubernetes-preserve-unknown-fields": True,
                        }
                    },
                }
            ],
        },
    }

    async def is_served() -> bool:
        try:
            await api.list(POD_GROUPS, namespace)
        except NotFound:
            return False
        return True

    async def scene() -> None:
        job = job_in(namespace, gang=gang.COSCHEDULING)
        name = gang.group_name(job)
        async with Stage(api, job) as stage:
            await stage.platform.launch(order(1, size=4))
            await stage.seen.of_node(1)
            group = await api.get(POD_GROUPS, name, namespace)
            assert group["spec"] == {"minMember": 4}
            await stage.platform.launch(order(2, size=6))
            await stage.seen.of_node(2)
            group = await api.get(POD_GROUPS, name, namespace)
            assert group["spec"] == {"minMember": 6}

    with suppress(Conflict):  # An earlier try of this test made it.
        runner.run(api.create(CRDS, crd))
    until(lambda: runner.run(is_served()), WAIT_S, "PodGroups to be served")
    runner.run(scene())


def test_a_gang_scheduler_that_is_not_there_is_named_and_pods_are_made(
    api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    async def scene() -> None:
        async with Stage(api, job_in(namespace, gang=gang.VOLCANO)) as stage:
            await stage.platform.launch(order(1))
            await stage.seen.of_node(1)
            assert any("gang scheduler" in text for text in stage.said)

    runner.run(scene())


def test_an_outage_of_the_api_server_loses_nothing(
    private_cluster: Callable[..., OwnCluster], runner: asyncio.Runner
) -> None:
    """Prior art: a failure that lasts looks like "the job does not exist", and the plan is lost."""
    cluster = private_cluster()
    namespace = cluster.new_namespace()

    async def scene() -> None:
        api = Api(cluster.access())
        async with Stage(api, job_in(namespace)) as stage:
            for node_id in (1, 2):
                await stage.platform.launch(order(node_id))
                await stage.seen.of_node(node_id)
            cluster.stop_api_server()
            await stage.platform.remove(NodeId(1))
            for node_id in range(3, 43):
                await stage.platform.launch(order(node_id))
            await stage.platform.launch(order(50))
            await stage.platform.remove(NodeId(50))
            await stage.until_said("pods are made and removed as soon as that is possible")
            cluster.start_api_server()
            for node_id in range(3, 43):
                await stage.seen.of_node(node_id, Phase.PENDING)
            await stage.seen.of_node(1, Phase.GONE)
            await stage.seen.of_node(50, Phase.GONE)
            # Nobody took what could not be looked up for gone.
            assert stage.seen.phases(2) == [Phase.PENDING]
            assert stage.seen.phases(50) == [Phase.GONE]
            pods = [f"job-edljob-worker-{node_id}" for node_id in range(2, 43)]
            assert await names_of(api, namespace) == sorted(pods)
        await api.close()

    runner.run(scene())


def test_a_broken_stream_makes_it_look_past_a_silent_watch(
    api: Api, cluster: Cluster, namespace: str, runner: asyncio.Runner, tmp_path: Path
) -> None:
    """The watch alone would find out when it ends; an agent's stream has broken long before.

    The first look is sent on a connection that nothing carries any more, and waits in vain.
    """

    async def scene() -> None:
        async with (
            lined(cluster, tmp_path, watch_s=3600.0) as (line, far),
            Stage(far, job_in(namespace)) as stage,
        ):
            await stage.platform.launch(order(1))
            await stage.platform.launch(order(2))
            await stage.seen.of_node(1, Phase.PENDING)
            await stage.seen.of_node(2, Phase.PENDING)
            line.forget()
            await api.delete(PODS, "job-edljob-worker-1", namespace, grace_s=0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(requests, "REQUEST_S", 3.0)
                for _ in range(100):
                    stage.platform.look_again()
                await stage.seen.of_node(1, Phase.GONE)
            # What the new listing tells again is no news, and the watch behind it works.
            await fail(api, namespace, "job-edljob-worker-2")
            await stage.seen.of_node(2, Phase.FAILED)

    runner.run(scene())
