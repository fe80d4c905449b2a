# SPDX-License-Identifier: Apache-2.0
"""An operator on a real API server, with no more rights than deploy/operator/rbac.yaml gives.

There is no kubelet: the tests give pods their status, as one would.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.api import (
    ELASTICJOBS,
    LEASES,
    PODS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    Api,
    Kind,
)
from holdfast.platforms.kubernetes.operator.process import Operator
from holdfast.platforms.kubernetes.times import stamp
from holdfast.platforms.kubernetes.watching import Listed, follow
from holdfast.runtime.observe import Say
from tests.hearing import Heard
from tests.kube.cluster import Cluster
from tests.waiting import until

Json = dict[str, Any]

WAIT_S = 120.0
RBAC = Path(__file__).resolve().parents[2] / "deploy" / "operator" / "rbac.yaml"
CLUSTER_ROLES = Kind("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDINGS = Kind(
    "rbac.authorization.k8s.io", "v1", "clusterrolebindings", namespaced=False
)
ACCOUNT = "holdfast-operator"


async def allow_operator(
    cluster: Cluster, api: Api, namespace: str, *, whole_cluster: bool = False
) -> str:
    """Install deploy/operator/rbac.yaml with the operator in `namespace`; its user name."""
    for body in yaml.safe_load_all(RBAC.read_text()):
        kind = {
            "ServiceAccount": SERVICE_ACCOUNTS,
            "ClusterRole": CLUSTER_ROLES,
            "ClusterRoleBinding": CLUSTER_ROLE_BINDINGS,
            "Role": ROLES,
            "RoleBinding": ROLE_BINDINGS,
        }[body["kind"]]
        for subject in body.get("subjects", ()):
            subject["namespace"] = namespace
        if kind == CLUSTER_ROLE_BINDINGS and not whole_cluster:
            # Bound in one namespace instead, as deploy/namespaced does.
            kind = ROLE_BINDINGS
            body["kind"] = "RoleBinding"
        where = namespace if kind.namespaced else None
        await api.apply(kind, body["metadata"]["name"], body, where, manager="test")
    user = f"system:serviceaccount:{namespace}:{ACCOUNT}"
    until_allowed(cluster, user, namespace, names.GROUP, "elasticjobs")
    until_allowed(cluster, user, namespace, LEASES.group, LEASES.plural)
    return user


def until_allowed(
    cluster: Cluster, user: str, namespace: str, group: str, resource: str, name: str = ""
) -> None:
    """Wait until the API server has heard of a right: it learns of new Roles by a watch itself."""
    attributes = {"namespace": namespace, "verb": "get", "group": group, "resource": resource}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "resourceAttributes": {**attributes, "name": name}},
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    until(lambda: cluster.post(path, body)["status"]["allowed"], WAIT_S, f"{user} to be allowed")


async def also_in(cluster: Cluster, api: Api, namespace: str, user_namespace: str) -> None:
    """Let the operator of `user_namespace` work in this namespace too."""
    body = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": ACCOUNT},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": ACCOUNT,
        },
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": user_namespace}],
    }
    await api.create(ROLE_BINDINGS, body, namespace)
    user = f"system:serviceaccount:{user_namespace}:{ACCOUNT}"
    until_allowed(cluster, user, namespace, names.GROUP, "elasticjobs")


@asynccontextmanager
async def operating(
    cluster: Cluster, user: str, *namespaces: str, restarts: bool = False, say: Say | None = None
) -> AsyncIterator[None]:
    """An operator at work as `user`, whom the API server refuses nothing; unless it `restarts`:
    then it does not know anybody for a moment. It has no bugs, unless the test listens itself."""
    said = Heard()
    api = Api(cluster.access(impersonate=user))
    operator = Operator(api, namespaces=namespaces, default_image="holdfast:test", say=say or said)
    task = asyncio.create_task(operator.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.close()
        print("\n".join(said))  # Shown if the test fails.
        assert not any("a bug in the operator" in line for line in said)
        assert restarts or not any("forbidden" in line for line in said)


def manifest(name: str, **spec: Any) -> Json:
    template = {"spec": {"containers": [{"name": "main", "image": "worker:1"}]}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {"replicaSpecs": {"worker": {"replicas": 2, "template": template}}, **spec},
    }


async def seen(
    api: Api, kind: Kind, namespace: str, want: Callable[[Json], object], what: str
) -> Json:
    """The first object for which `want` is true, now or later."""
    last: Json = {}
    try:
        async with asyncio.timeout(WAIT_S):
            async for change in follow(api, kind, namespace):
                if not isinstance(change, Listed) and not change.gone:
                    last = change.obj
                    if want(last):
                        return last
    except TimeoutError:
        raise AssertionError(f"waited in vain for {what}; seen last: {last}") from None
    raise AssertionError("a watch ended by itself")


async def master_of(api: Api, namespace: str, job: str, number: int) -> Json:
    name = names.master_pod_name(job, number)
    return await seen(api, PODS, namespace, lambda pod: pod["metadata"]["name"] == name, name)


async def condition(
    api: Api, namespace: str, job: str, kind: str, status: str, reason: str = ""
) -> Json:
    """The condition, once the job has it so."""

    def found(obj: Json) -> Json | None:
        if obj["metadata"]["name"] != job:
            return None
        for one in obj.get("status", {}).get("conditions", ()):
            if (one["type"], one["status"]) == (kind, status) and reason in ("", one["reason"]):
                return dict(one)
        return None

    obj = await seen(api, ELASTICJOBS, namespace, found, f"{kind}={status} {reason} of {job}")
    return found(obj) or {}


async def gone(api: Api, kind: Kind, name: str, namespace: str) -> None:
    """Until there is no such object."""
    async with asyncio.timeout(WAIT_S):
        async for change in follow(api, kind, namespace):
            if isinstance(change, Listed) and (namespace, name) not in change.names:
                return
            if not isinstance(change, Listed) and change.gone and change.meta.name == name:
                return


async def set_status(api: Api, namespace: str, pod: Json, status: Json) -> None:
    """What a kubelet would say of a pod."""
    body = {"status": status}
    await api.patch(PODS, pod["metadata"]["name"], body, namespace, subresource="status")


def runs() -> Json:
    state = {"running": {"startedAt": stamp(1_800_000_000)}}
    return {"phase": "Running", "containerStatuses": [_container(state)]}


def exited(code: int) -> Json:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": "no luck"}}
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [_container(state)]}


def _container(state: Json) -> Json:
    return {
        "name": "main",
        "image": "i",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": state,
    }


def node_pod(job: str, uid: str) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job}-edljob-worker-0",
            "labels": {
                names.JOB_LABEL: "mnist",
                names.ROLE_LABEL: "worker",
                names.NODE_ID_LABEL: "0",
            },
            "ownerReferences": [names.owner_reference(job, uid)],
        },
        "spec": {"containers": [{"name": "main", "image": "worker:1"}]},
    }
