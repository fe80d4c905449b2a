# SPDX-License-Identifier: Apache-2.0
"""How a pod's description becomes a container's: environment, command, volumes and user."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from holdfast.platforms.kubernetes import quantities
from tests.conftest import RUN_VARIABLE
from tests.kube.pod_container import ROOT, Design, Mount
from tests.kube.pod_network import GATEWAY

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
API_NAME = "kubernetes.default.svc"

IMAGE_ENV = {
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PYTHONPATH": str(ROOT / "src"),
    "OMP_NUM_THREADS": "1",
}
"""What every "image" brings along."""

_REFERENCE = re.compile(r"\$\$|\$\(([^)]+)\)")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


def expand(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes puts it in: what nobody knows stays, and $$ is a plain $."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def field_of(pod: Mapping[str, Any], path: str, address: str) -> str:
    """What the downward API says for a field."""
    if keyed := _KEYED_FIELD.fullmatch(path):
        return str(pod["metadata"].get(keyed[1], {}).get(keyed[2], ""))
    fields = {
        "metadata.name": pod["metadata"]["name"],
        "metadata.namespace": pod["metadata"]["namespace"],
        "metadata.uid": pod["metadata"]["uid"],
        "spec.nodeName": pod["spec"].get("nodeName", ""),
        "spec.serviceAccountName": pod["spec"].get("serviceAccountName", ""),
        "status.podIP": address,
        "status.hostIP": GATEWAY,
    }
    return str(fields[path])


def environment(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    *,
    address: str,
    api_port: int,
    secrets: Mapping[tuple[str, str], str],
) -> dict[str, str]:
    """The variables that the container gets; `secrets` has values by Secret and key."""
    env = {
        **IMAGE_ENV,
        # By this the tests find out what they left behind.
        RUN_VARIABLE: os.environ.get(RUN_VARIABLE, ""),
        "HOSTNAME": pod["metadata"]["name"],
        "KUBERNETES_SERVICE_HOST": API_NAME,
        "KUBERNETES_SERVICE_PORT": str(api_port),
    }
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            env[entry["name"]] = field_of(pod, source["fieldRef"]["fieldPath"], address)
        elif "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            env[entry["name"]] = secrets[reference["name"], reference["key"]]
        else:
            env[entry["name"]] = expand(entry.get("value", ""), env)
    return env


def secret_references(pod: Mapping[str, Any]) -> set[str]:
    """The names of the Secrets whose values stand in the environment of some container."""
    entries = [entry for container in containers_of(pod) for entry in container.get("env", ())]
    sources = [entry.get("valueFrom", {}).get("secretKeyRef") for entry in entries]
    return {source["name"] for source in sources if source}


def containers_of(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def design(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    volumes: Mapping[str, Path],
    hosts: Path,
    account: Path | None,
) -> Design:
    """The container to be made. `volumes` are folders by name, `account` that of its token."""
    mounts = [Mount(hosts, "/etc/hosts", read_only=True)]
    if account is not None:
        mounts.append(Mount(account, TOKEN_FOLDER, read_only=True))
    for mount in container.get("volumeMounts", ()):
        source = volumes[mount["name"]] / mount.get("subPath", "")
        mounts.append(Mount(source, mount["mountPath"], mount.get("readOnly", False)))
    security = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
    words = [*container.get("command", ()), *container.get("args", ())]
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    return Design(
        name=container["name"],
        command=[expand(word, env) for word in words],
        env=env,
        mounts=mounts,
        working_dir=container.get("workingDir", "/"),
        memory_bytes=int(quantities.amount(limit) or 0),
        user=security.get("runAsUser", 0),
        group=security.get("runAsGroup", security.get("runAsUser", 0)),
        more_groups=[security["fsGroup"]] if "fsGroup" in security else [],
        is_root_read_only=security.get("readOnlyRootFilesystem", False),
        hostname=pod["metadata"]["name"],
    )


def is_allowed(pod: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a host with these labels will do for the pod."""
    selector = pod["spec"].get("nodeSelector", {})
    if any(labels.get(name) != value for name, value in selector.items()):
        return False
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms", ())
    return not terms or any(
        all(_fits(rule, labels) for rule in term.get("matchExpressions", ())) for term in terms
    )


def _fits(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    there = rule["key"] in labels
    match rule["operator"]:
        case "Exists":
            return there
        case "DoesNotExist":
            return not there
        case "In":
            return labels.get(rule["key"]) in rule["values"]
        case "NotIn":
            return labels.get(rule["key"]) not in rule["values"]
    raise ValueError(f"the fake scheduler does not know the operator {rule['operator']}")


def selects(service: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Whether the Service leads to this pod."""
    labels = pod["metadata"].get("labels", {})
    selector = service["spec"].get("selector", {})
    return bool(selector) and all(labels.get(name) == value for name, value in selector.items())


def hosts_file(own: tuple[str, str], services: Iterable[tuple[Mapping[str, Any], str]]) -> str:
    """/etc/hosts of a pod: itself, the API server, and Services, which a cluster has in its DNS."""
    address, name = own
    lines = ["127.0.0.1 localhost", f"{address} {name}", f"{GATEWAY} {API_NAME}"]
    for service, reached_at in services:
        short, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
        full = f"{short}.{namespace}.svc"
        lines.append(f"{reached_at} {short} {short}.{namespace} {full} {full}.cluster.local")
    return "\n".join(lines) + "\n"
