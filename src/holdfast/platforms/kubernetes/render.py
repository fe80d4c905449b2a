# SPDX-License-Identifier: Apache-2.0
"""A job and an order in, the node's pod out. Pure: the same input gives the same output.

The user's template is kept whole, and what a node needs is added. Where both have a value, the
user's wins, except for values that tell a node its identity.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.model.errors import UsageError
from holdfast.model.order import WORKER, Order
from holdfast.platforms.kubernetes import names, quantities
from holdfast.platforms.kubernetes.gang import join_gang
from holdfast.platforms.kubernetes.manifest import (
    CHIEF,
    EVALUATOR,
    ElasticJob,
    Role,
    Strategy,
)
from holdfast.platforms.kubernetes.plain_roles import sizes
from holdfast.platforms.kubernetes.pods import MAIN_ANNOTATION
from holdfast.platforms.kubernetes.templates import main_container
from holdfast.platforms.kubernetes.tf_config import port_of, service_name, tf_config

GRACE_S = 120
"""How long a pod may take to end if its template does not say it: time to save what is in memory.
Kubernetes gives 30 s, which is too short for many checkpoints."""

RACK_LABEL = "scheduling/rack-group"
"""For schedulers that put the nodes of one group into one rack."""
HOST_LABEL = "kubernetes.io/hostname"
LOGS_CONTAINER = "kubectl.kubernetes.io/default-container"
"""The container whose log `kubectl logs` shows."""

SECRETS_VOLUME = "holdfast"
SECRETS_MODE = 0o444
"""Readable for any user of the image; the mount is read-only and belongs to the pod alone."""

MEMORY_VOLUME = "holdfast-memory"
MEMORY_DIR = "/dev/shm"
MEMORY_VARIABLE = "HOLDFAST_MEMORY_DIR"
"""The folder that the user wants for memory checkpoints instead."""

IDENTITY = ("NODE_ID", "NODE_RANK")
"""With HOLDFAST_*: what a template cannot have, because it differs from node to node."""


def node_pod(job: ElasticJob, order: Order) -> dict[str, Any]:
    """The pod of one node. UsageError if the manifest has no template for it."""
    role = role_of(job, order.role)
    template = copy.deepcopy(dict(role.template))
    index = main_container(template)
    if index is None:
        raise UsageError(
            f"the template of role {order.role} has no main container: "
            'it must have one container only, or call one of them "main"'
        )
    spec: dict[str, Any] = template["spec"]
    main: dict[str, Any] = spec["containers"][index]
    metadata = _metadata(job, order, template.get("metadata") or {}, main["name"])
    spec["restartPolicy"] = "Never"
    grace_s = spec.setdefault("terminationGracePeriodSeconds", GRACE_S)
    if not spec.get("serviceAccountName"):
        spec.setdefault("automountServiceAccountToken", False)
    if order.priority in ("high", "low") and "priority" not in spec:
        spec.setdefault("priorityClassName", order.priority)
    _avoid_hosts(spec, order.avoid_hosts)
    _mount_secrets(job, spec, main)
    main["env"] = _env(job, order, grace_s, main.get("env") or [])
    if job.strategy is not Strategy.PARAMETER_SERVER:
        _mount_memory(spec, main)
    main["resources"] = _resources(order, main.get("resources") or {})
    # The agent's last lines become the pod's message: it shows why a node failed without its log.
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    join_gang(job, metadata, spec)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def node_service(job: ElasticJob, order: Order) -> dict[str, Any] | None:
    """The address that a rank keeps over all its nodes; None for a job that needs no addresses.

    Workers under agents find each other through the master; TensorFlow's roles have fixed ones.
    """
    if job.strategy is not Strategy.PARAMETER_SERVER:
        return None
    selector = {
        names.JOB_LABEL: job.name,
        names.ROLE_LABEL: order.role,
        names.NODE_RANK_LABEL: str(order.node_rank),
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(job.name, order.role, order.node_rank),
            "namespace": job.namespace,
            "labels": {names.APP_LABEL: names.APP, **selector},
            "ownerReferences": [names.owner_reference(job.name, job.uid)],
        },
        "spec": {
            "selector": selector,
            # Server-side apply knows a port by its number and protocol: both must be there.
            "ports": [{"name": "training", "port": port_of(order.role), "protocol": "TCP"}],
        },
    }


def role_of(job: ElasticJob, name: str) -> Role:
    """The role of that name; a chief or evaluator without a template is like a worker."""
    role = job.roles.get(name)
    if (role is None or not role.template) and name in (CHIEF, EVALUATOR):
        role = job.roles.get(WORKER)
    if role is None:
        raise UsageError(f"the job {job.name} has no role {name}")
    return role


def _metadata(
    job: ElasticJob, order: Order, users: Mapping[str, Any], main_name: str
) -> dict[str, Any]:
    labels = {
        names.APP_LABEL: names.APP,
        **(users.get("labels") or {}),
        names.JOB_LABEL: job.name,
        names.ROLE_LABEL: order.role,
        names.NODE_ID_LABEL: str(order.node_id),
        names.NODE_RANK_LABEL: str(order.node_rank),
        names.RELAUNCHES_LABEL: str(order.relaunches),
    }
    if order.group >= 0:
        labels[RACK_LABEL] = str(order.group)
    annotations = {
        LOGS_CONTAINER: main_name,
        **(users.get("annotations") or {}),
        MAIN_ANNOTATION: main_name,
    }
    metadata = {
        **users,
        "name": names.node_pod_name(job.name, order.role, order.node_id),
        "namespace": job.namespace,
        "labels": labels,
        "annotations": annotations,
        "ownerReferences": [names.owner_reference(job.name, job.uid)],
    }
    metadata.pop("generateName", None)
    return metadata


def _env(
    job: ElasticJob, order: Order, grace_s: int, of_container: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Holdfast's variables first, so that the user's may refer to them as $(NODE_NUM)."""
    ours = _own_env(job, order, grace_s)
    firm = {name for name in ours if name.startswith("HOLDFAST_") or name in IDENTITY}
    in_container = {entry.get("name") for entry in of_container}
    of_job = [dict(entry) for entry in job.envs if entry.get("name") not in in_container]
    users = [entry for entry in (*of_job, *of_container) if entry.get("name") not in firm]
    replaced = {entry.get("name") for entry in users}
    own = [{"name": name, **value} for name, value in ours.items() if name not in replaced]
    return [*own, *users]


def _own_env(job: ElasticJob, order: Order, grace_s: int) -> dict[str, dict[str, Any]]:
    address = names.master_address(job.name, job.namespace)
    size = order.size or sizes(job).get(order.role, 1)
    values = {
        "HOLDFAST_MASTER": address,
        "HOLDFAST_TOKEN_FILE": f"{names.SECRETS_DIR}/{names.TOKEN_KEY}",
        "HOLDFAST_TLS_CA": f"{names.SECRETS_DIR}/{names.CA_KEY}",
        "HOLDFAST_NODE_ID": order.node_id,
        "HOLDFAST_GRACE_S": grace_s,
        "DLROVER_MASTER_ADDR": address,
        "ELASTIC_JOB_NAME": job.name,
        "JOB_UID": job.uid,
        "NODE_TYPE": order.role,
        "NODE_ID": order.node_id,
        "NODE_NUM": size,
        "NODE_RANK": order.node_rank,
        "WORKER_TYPE": order.role,
        "WORKER_ID": order.node_id,
        "WORKER_NUM": size,
        "WORKER_RANK": order.node_rank,
        "MONITOR_ENABLED": "true",
    }
    if order.group >= 0:
        values["HOLDFAST_TOPOLOGY"] = f"group-{order.group}"
    if job.strategy is Strategy.PARAMETER_SERVER:
        # The present sizes, not those of the manifest: plans and losses have changed them since.
        now = dict(order.roles) or sizes(job)
        values["TF_CONFIG"] = tf_config(job.name, job.namespace, now, order)
    fields = {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        "NODE_IP": "status.hostIP",
    }
    return {
        **{name: {"value": str(value)} for name, value in values.items()},
        **{name: {"valueFrom": {"fieldRef": {"fieldPath": f}}} for name, f in fields.items()},
    }


def _mount_secrets(job: ElasticJob, spec: dict[str, Any], main: dict[str, Any]) -> None:
    """Mount only what an agent needs: the master's key stays with the master."""
    keys = (names.TOKEN_KEY, names.CA_KEY)
    volume = {
        "name": SECRETS_VOLUME,
        "secret": {
            "secretName": names.secret_name(job.name, job.uid),
            "defaultMode": SECRETS_MODE,
            "items": [{"key": key, "path": key} for key in keys],
        },
    }
    mount = {"name": SECRETS_VOLUME, "mountPath": names.SECRETS_DIR, "readOnly": True}
    spec["volumes"] = [*(spec.get("volumes") or []), volume]
    main["volumeMounts"] = [*(main.get("volumeMounts") or []), mount]


def _mount_memory(spec: dict[str, Any], main: dict[str, Any]) -> None:
    """Memory for checkpoints, unless the user set it up: container runtimes give 64 MiB of it.

    The mount has no size limit: its contents count against the memory limit of the container.
    """
    mounts = main["volumeMounts"]
    has_own = any(str(mount.get("mountPath", "")).rstrip("/") == MEMORY_DIR for mount in mounts)
    has_other = any(entry.get("name") == MEMORY_VARIABLE for entry in main["env"])
    if has_own or has_other or spec.get("hostIPC"):
        return
    spec["volumes"].append({"name": MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": MEMORY_VOLUME, "mountPath": MEMORY_DIR})


def _resources(order: Order, users: Mapping[str, Any]) -> dict[str, Any]:
    """The user's resources, raised to those of the order; missing requests equal the limits."""
    limits = dict(users.get("limits") or {})
    requests = {**limits, **(users.get("requests") or {})}
    if order.memory_mib > (quantities.mib(requests.get("memory")) or 0):
        _ask(requests, limits, "memory", order.memory_mib, quantities.mib, "Mi")
    if order.cpu_milli:
        _ask(requests, limits, "cpu", order.cpu_milli, quantities.milli, "m")
    resources = {**users, "limits": limits, "requests": requests}
    return {name: amounts for name, amounts in resources.items() if amounts}


def _ask(
    requests: dict[str, Any],
    limits: dict[str, Any],
    name: str,
    asked: int,
    read: Callable[[object], int | None],
    unit: str,
) -> None:
    """Ask for this amount. A limit above the request keeps its distance; no limit is added."""
    before = read(requests.get(name))
    if name in limits:
        limit = read(limits[name]) or 0
        limits[name] = f"{-(-limit * asked // before) if before else asked}{unit}"
    requests[name] = f"{asked}{unit}"


def _avoid_hosts(spec: dict[str, Any], hosts: tuple[str, ...]) -> None:
    """Keep the pod off these hosts. Terms are alternatives, so each of the user's gets the rule."""
    if not hosts:
        return
    exclusion = {"key": HOST_LABEL, "operator": "NotIn", "values": list(hosts)}
    affinity = dict(spec.get("affinity") or {})
    of_node = dict(affinity.get("nodeAffinity") or {})
    required = of_node.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{"matchExpressions": []}]
    of_node["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": [
            # An empty term matches no machine, and must stay empty.
            {**term, "matchExpressions": [*(term.get("matchExpressions") or []), exclusion]}
            if term
            else term
            for term in terms
        ]
    }
    spec["affinity"] = {**affinity, "nodeAffinity": of_node}
