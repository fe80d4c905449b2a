# SPDX-License-Identifier: Apache-2.0
"""What a master and the operator may do on a real API server, and what not."""

import asyncio

import pytest

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import (
    CONFIG_MAPS,
    ELASTICJOBS,
    EVENTS,
    NODES,
    PODS,
    ROLES,
    SCALEPLANS,
    SECRETS,
    SERVICES,
    Api,
    Kind,
    NotFound,
    Rejected,
)
from holdfast.platforms.kubernetes.events import About, EventLog
from holdfast.platforms.kubernetes.watching import follow
from tests.kube.cluster import Cluster
from tests.kube.operator_scenes import (
    allow_operator,
    manifest,
    master_of,
    node_pod,
    operating,
    until_allowed,
)

pytestmark = [pytest.mark.kube, pytest.mark.timeout(400)]


def test_what_a_master_may_and_may_not_do(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """In the prior art every training pod may do anything to pods and nodes of the cluster."""

    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        async with operating(cluster, user, namespace):
            await api.create(ELASTICJOBS, manifest("other"), namespace)
            job = await api.create(ELASTICJOBS, manifest("mnist"), namespace)
            await master_of(api, namespace, "mnist", 0)
            await master_of(api, namespace, "other", 0)
        name = names.master_name("mnist")
        account = f"system:serviceaccount:{namespace}:{name}"
        until_allowed(cluster, account, namespace, names.GROUP, "elasticjobs", "mnist")
        master = Api(cluster.access(impersonate=account))
        await what_it_may(master, namespace, job["metadata"]["uid"])
        secret = names.secret_name("mnist", job["metadata"]["uid"])
        elsewhere = cluster.new_namespace()
        status = {"status": {"phase": "Succeeded"}}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}
        exec_in = Kind("", "v1", f"pods/{names.master_pod_name('other', 0)}/exec")
        for forbidden in (
            master.get(SECRETS, secret, namespace),
            master.list(SECRETS, namespace),
            master.list(NODES),
            master.list(PODS, elsewhere),
            master.list(PODS),
            master.create(PODS, node_pod("mnist", "x"), elsewhere),
            master.create(exec_in, {}, namespace),
            master.create(CONFIG_MAPS, config_map, namespace),
            master.get(ELASTICJOBS, "other", namespace),
            master.list(ELASTICJOBS, namespace),
            master.patch(ELASTICJOBS, "other", status, namespace, subresource="status"),
            master.patch(ELASTICJOBS, "mnist", {"spec": {"suspend": True}}, namespace),
            master.delete(ELASTICJOBS, "mnist", namespace),
            master.get(ROLES, name, namespace),
            master.patch(ROLES, name, {"rules": []}, namespace),
        ):
            with pytest.raises(Rejected) as refused:
                await forbidden
            assert refused.value.status == 403
        await master.close()

    runner.run(scene())


def test_what_is_told_again_is_one_event_with_a_count(
    cluster: Cluster, api: Api, namespace: str, runner: asyncio.Runner
) -> None:
    """And whoever tells it needs no right to read Events."""

    async def scene() -> None:
        user = await allow_operator(cluster, api, namespace)
        teller = Api(cluster.access(impersonate=user))
        about = About(
            api_version=names.API_VERSION,
            kind="ElasticJob",
            name="mnist",
            namespace=namespace,
            uid="some-uid",
        )
        for log in (EventLog(teller, "tester"), EventLog(teller, "tester")):
            # Each one a restarted process that knows of no earlier Event.
            await log.tell(about, "MasterLost", "the master is gone", warning=True)
        await EventLog(teller, "tester").tell(about, "MasterLost", "another one is gone")
        found = await api.list(EVENTS, namespace)
        told = {event["message"]: (event["count"], event["type"]) for event in found.items}
        assert told == {
            "the master is gone": (2, "Warning"),
            "another one is gone": (1, "Normal"),
        }
        await teller.close()

    runner.run(scene())


async def what_it_may(master: Api, namespace: str, uid: str) -> None:
    """All that a master does on the API: none of this raises."""
    own = "metadata.name=mnist"
    await master.get(ELASTICJOBS, "mnist", namespace)
    await anext(aiter(follow(master, ELASTICJOBS, namespace, fields=own)))
    body = {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": "mnist"},
        "status": {"phase": "Running"},
    }
    await master.apply(
        ELASTICJOBS, "mnist", body, namespace, manager=names.MASTER_MANAGER, subresource="status"
    )
    await master.list(SCALEPLANS, namespace)
    await master.list(PODS, namespace)
    pod = await master.create(PODS, node_pod("mnist", uid), namespace)
    await master.delete(PODS, pod["metadata"]["name"], namespace)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "node"},
        "spec": {"ports": [{"port": 2222, "protocol": "TCP"}]},
    }
    await master.apply(SERVICES, "node", service, namespace, manager=names.MASTER_MANAGER)
    await master.delete(SERVICES, "node", namespace)
    podgroups = Kind("scheduling.volcano.sh", "v1beta1", "podgroups")
    # Allowed, and only not there: the group's scheduler is not installed.
    with pytest.raises(NotFound):
        await master.get(podgroups, "mnist", namespace)
