# SPDX-License-Identifier: Apache-2.0
"""The objects around a job's master. Pure, but for the Secret, which is random.

All of them belong to the ElasticJob and are deleted with it (owner references). Each master has its
own ServiceAccount, which may do what a master does, and nothing else.
"""

import base64
import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.model.order import WORKER
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.kinds import (
    PVCS,
    ROLE_BINDINGS,
    ROLES,
    SERVICE_ACCOUNTS,
    SERVICES,
    Kind,
)
from holdfast.platforms.kubernetes.manifest import ElasticJob, Role
from holdfast.platforms.kubernetes.master_security import secure
from holdfast.platforms.kubernetes.operator.credentials import new_credentials
from holdfast.platforms.kubernetes.templates import main_container

DIGEST_ANNOTATION = "holdfast.io/digest"
"""The digest of the object that the operator wanted: if it differs, the object is applied again."""
ERRORS_ANNOTATION = "holdfast.io/master-errors"
QUICK_LOSSES_ANNOTATION = "holdfast.io/master-quick-losses"
"""A count of lost masters, for the next one's pod (see reconcile.py)."""

UNREACHABLE_S = 30
"""How long a master's machine may be silent before the cluster counts the pod as lost."""

Body = dict[str, Any]


def master_labels(job: ElasticJob) -> dict[str, str]:
    """The labels of every object around the master."""
    return {
        names.APP_LABEL: names.APP,
        names.JOB_LABEL: job.name,
        names.ROLE_LABEL: names.MASTER_ROLE,
    }


def kept(job: ElasticJob) -> list[tuple[Kind, Body]]:
    """The objects that must exist in this form for as long as the job is not over."""
    made = [
        (SERVICE_ACCOUNTS, _service_account(job)),
        (ROLES, _role(job)),
        (ROLE_BINDINGS, _role_binding(job)),
        (SERVICES, _service(job)),
    ]
    for _, body in made:
        canonical = msgspec.json.encode(body, order="deterministic")
        digest = hashlib.sha256(canonical).hexdigest()[:16]
        body["metadata"]["annotations"] = {DIGEST_ANNOTATION: digest}
    return made


def claim(job: ElasticJob) -> tuple[Kind, Body] | None:
    """The volume for the master's state; None if the state may be lost with the pod."""
    volume = job.state_volume
    if volume.ephemeral:
        return None
    spec: Body = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.storage_class is not None:
        spec["storageClassName"] = volume.storage_class
    body = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, names.master_name(job.name)),
        "spec": spec,
    }
    return PVCS, body


def secret(job: ElasticJob) -> Body:
    """The job's token and certificate. Each call makes new ones; a job's Secret never changes."""
    service = names.master_name(job.name)
    in_namespace = f"{service}.{job.namespace}"
    hosts = (service, in_namespace, f"{in_namespace}.svc", f"{in_namespace}.svc.cluster.local")
    credentials = new_credentials((*hosts, "localhost"))
    data = {key: base64.b64encode(value).decode() for key, value in credentials.items()}
    return {**secret_shell(job), "data": data}


def secret_shell(job: ElasticJob) -> Body:
    """The job's Secret without its secret values: enough to ask whether it exists."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, names.secret_name(job.name, job.uid)),
        "type": "Opaque",
        "immutable": True,
    }


def master_rules(job_name: str) -> list[Body]:
    """What a master may do in its namespace. docs/kubernetes.md has the table.

    RBAC cannot tell pods apart by their labels, so a master may touch every pod of its namespace;
    it can see only its own ElasticJob.
    """
    group = names.GROUP
    return [
        _rule("", ["pods"], ["get", "list", "watch", "create", "delete"]),
        _rule("", ["services"], ["get", "create", "patch", "delete"]),
        _rule("", ["events"], ["create", "patch"]),
        {**_rule(group, ["elasticjobs"], ["get", "list", "watch"]), "resourceNames": [job_name]},
        {**_rule(group, ["elasticjobs/status"], ["patch"]), "resourceNames": [job_name]},
        _rule(group, ["scaleplans"], ["get", "list", "watch"]),
        _rule(group, ["scaleplans/status"], ["patch"]),
        # Objects of this group exist only where Volcano is installed.
        _rule("scheduling.volcano.sh", ["podgroups"], ["get", "create", "patch"]),
        _rule("scheduling.x-k8s.io", ["podgroups"], ["get", "create", "patch"]),
    ]


def master_pod(
    job: ElasticJob, number: int, *, default_image: str, errors: int, quick_losses: int
) -> Body:
    """The pod of the master with this number, made from the user's template if there is one."""
    template = _template(job)
    metadata, spec = template["metadata"], template["spec"]
    main = _put_master(job, template, default_image)
    secure(template, main, own=job.own_security)
    _add_volumes(job, spec)
    _add_defaults(spec)
    if job.master is not None and job.master.priority in ("high", "low"):
        spec.setdefault("priorityClassName", job.master.priority)
    spec["restartPolicy"] = "Never"  # The operator decides about the next one.
    # This account alone has the master's rights: a user who creates a job must not choose one.
    spec["serviceAccountName"] = names.master_name(job.name)
    spec.pop("serviceAccount", None)
    labels = {**(metadata.get("labels") or {}), **master_labels(job)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **_metadata(job, names.master_pod_name(job.name, number)),
            "labels": {**labels, names.NODE_ID_LABEL: str(number), names.NODE_RANK_LABEL: "0"},
            "annotations": {
                **(metadata.get("annotations") or {}),
                ERRORS_ANNOTATION: str(errors),
                QUICK_LOSSES_ANNOTATION: str(quick_losses),
            },
        },
        "spec": spec,
    }


def master_image(job: ElasticJob, default: str) -> str:
    """The image of a master.

    The operator's default overrides the user's template, because manifests of the prior art name an
    image there with another master in it. A user who wants another image sets `masterImage`.
    """
    of_template = _main_image(job.master)
    return job.master_image or default or of_template or _main_image(job.roles.get(WORKER))


def _service_account(job: ElasticJob) -> Body:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(job, names.master_name(job.name)),
    }


def _role(job: ElasticJob) -> Body:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": _metadata(job, names.master_name(job.name)),
        "rules": master_rules(job.name),
    }


def _role_binding(job: ElasticJob) -> Body:
    name = names.master_name(job.name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(job, name),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


def _service(job: ElasticJob) -> Body:
    ports = (("agents", names.MASTER_PORT), ("http", names.HTTP_PORT))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, names.master_name(job.name)),
        "spec": {
            "selector": {names.JOB_LABEL: job.name, names.ROLE_LABEL: names.MASTER_ROLE},
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports
            ],
        },
    }


def _rule(group: str, resources: list[str], verbs: list[str]) -> Body:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _metadata(job: ElasticJob, name: str) -> Body:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": master_labels(job),
        "ownerReferences": [names.owner_reference(job.name, job.uid)],
    }


def _template(job: ElasticJob) -> Body:
    """The user's description of the master's pod, as a copy to change.

    It always has metadata, a spec and containers: if the manifest is spoilt while the job runs, the
    job must still get a master.
    """
    template = {} if job.master is None else copy.deepcopy(dict(job.master.template))
    for name in ("metadata", "spec"):
        if not isinstance(template.get(name), dict):
            template[name] = {}
    containers = template["spec"].get("containers")
    is_usable = isinstance(containers, list) and all(isinstance(c, dict) for c in containers)
    template["spec"]["containers"] = containers if is_usable else []
    return template


def _put_master(job: ElasticJob, template: Body, default_image: str) -> Body:
    """Put the master into the main one of the user's containers, or into a new first one if there
    is none; returns the container."""
    containers: list[Body] = template["spec"]["containers"]
    index = main_container(template)
    if index is None:
        index = 0
        containers.insert(0, {"name": "main"})
    main = containers[index]
    # Always a list of words, never a shell: nothing that a user wrote is ever part of a script.
    main["command"] = _command(job)
    main["args"] = []
    main["image"] = master_image(job, default_image)
    main.setdefault("resources", {"requests": {"cpu": "250m", "memory": "512Mi"}})
    main.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    main["ports"] = [
        *(main.get("ports") or []),
        {"name": "agents", "containerPort": names.MASTER_PORT, "protocol": "TCP"},
        {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
    ]
    main["volumeMounts"] = [
        *(main.get("volumeMounts") or []),
        {"name": "holdfast-secret", "mountPath": names.SECRETS_DIR, "readOnly": True},
        {"name": "holdfast-state", "mountPath": names.STATE_DIR},
        {"name": "holdfast-tmp", "mountPath": "/tmp"},
    ]
    health = {"path": "/healthz", "port": names.HTTP_PORT, "scheme": "HTTPS"}
    # Agents come back within seconds, so the Service must find a new master just as fast.
    main.setdefault("readinessProbe", {"httpGet": health, "periodSeconds": 1})
    main.setdefault(
        "livenessProbe",
        {"httpGet": health, "initialDelaySeconds": 60, "timeoutSeconds": 10, "failureThreshold": 9},
    )
    return main


def _command(job: ElasticJob) -> list[str]:
    files = {key: f"{names.SECRETS_DIR}/{key}" for key in (names.TOKEN_KEY, names.CERT_KEY)}
    return [
        *("holdfast", "master"),
        *("--platform", "kubernetes"),
        *("--job", job.name),
        *("--namespace", job.namespace),
        *("--state", names.STATE_DIR),
        *("--listen", f"0.0.0.0:{names.MASTER_PORT}"),
        *("--http", f"0.0.0.0:{names.HTTP_PORT}"),
        *("--token-file", files[names.TOKEN_KEY]),
        *("--tls-cert", files[names.CERT_KEY]),
        *("--tls-key", f"{names.SECRETS_DIR}/{names.KEY_KEY}"),
    ]


def _add_volumes(job: ElasticJob, spec: Body) -> None:
    state: Body = {"emptyDir": {}}
    if not job.state_volume.ephemeral:
        state = {"persistentVolumeClaim": {"claimName": names.master_name(job.name)}}
    source = {"secretName": names.secret_name(job.name, job.uid), "defaultMode": 0o440}
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": "holdfast-secret", "secret": source},
        {"name": "holdfast-state", **state},
        {"name": "holdfast-tmp", "emptyDir": {}},
    ]


def _add_defaults(spec: Body) -> None:
    """Add what a careful cluster asks of a pod, where the user's template has nothing."""
    spec.setdefault("enableServiceLinks", False)
    tolerations = list(spec.get("tolerations") or [])
    told = {toleration.get("key") for toleration in tolerations}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if key not in told:
            toleration = {"key": key, "operator": "Exists", "effect": "NoExecute"}
            tolerations.append({**toleration, "tolerationSeconds": UNREACHABLE_S})
    spec["tolerations"] = tolerations


def _main_image(role: Role | None) -> str:
    if role is None:
        return ""
    index = main_container(role.template)
    if index is None:
        return ""
    container: Mapping[str, Any] = role.template["spec"]["containers"][index]
    return str(container.get("image") or "")
