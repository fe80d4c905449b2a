# SPDX-License-Identifier: Apache-2.0
"""What a pod template shows without a cluster: its main container, and its mistakes.

A template is never changed here, and mostly not interpreted: Kubernetes judges it when the first
pod is made. But an API server silently drops a field that it does not know, so misspelt fields of a
pod or a container are noted here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.model.resources import NOTHING, Limits, Resources
from holdfast.platforms.kubernetes import quantities
from holdfast.platforms.kubernetes.fields import Fields, show, suggestion

MAIN = "main"


def main_container(template: Mapping[str, Any]) -> int | None:
    """Which container is the node: the only one, or the one called "main"; else None."""
    spec = template.get("spec")
    containers = spec.get("containers") if isinstance(spec, Mapping) else None
    if not isinstance(containers, list):
        return None
    named = [
        index
        for index, container in enumerate(containers)
        if isinstance(container, Mapping) and container.get("name") == MAIN
    ]
    if len(named) == 1:
        return named[0]
    return 0 if len(containers) == 1 and isinstance(containers[0], Mapping) else None


def read_template(fields: Fields, *, is_master: bool = False) -> Resources:
    """What the main container asks for; mistakes in the template are noted."""
    fields.raw("metadata")
    spec = fields.nested("spec")
    fields.rest()
    written = list(spec.items("containers"))
    containers = [container for container, _ in written]
    _note_unknown(spec, POD_FIELDS)
    for container in containers:
        _note_unknown(container, CONTAINER_FIELDS)
    if spec.raw("restartPolicy") not in (None, "Never"):
        spec.note("restartPolicy", "pods always have Never: the job replaces its nodes itself")
    main = main_container({"spec": {"containers": [value for _, value in written]}})
    if main is None:
        said = "none is" if containers else "there is none"
        spec.problem("containers", f'one container must be called "{MAIN}", {said}')
        return NOTHING
    return _read_main(containers[main], is_master=is_master)


def _read_main(container: Fields, *, is_master: bool) -> Resources:
    if is_master:
        for name in ("command", "args"):
            if container.has(name):
                container.note(name, "is not used: the operator starts its own master")
        if container.has("image"):
            container.note("image", "is used only if neither masterImage nor the operator has one")
    elif not container.text("image"):
        container.problem("image", "a node needs an image")
    resources = container.nested("resources")
    requests = read_resources(resources.nested("requests"))
    limits = read_resources(resources.nested("limits"))
    return Resources(
        cpu_milli=requests.cpu_milli or limits.cpu_milli,
        memory_mib=requests.memory_mib or limits.memory_mib,
        gpus=requests.gpus or limits.gpus,
    )


def _note_unknown(fields: Fields, known: tuple[str, ...]) -> None:
    # Not a reason to stop: a newer Kubernetes may know the field.
    for name in fields.names():
        if name not in known:
            fields.note(name, f"unknown field of Kubernetes{suggestion(name, list(known))}")


def read_resources(fields: Fields) -> Resources:
    """The amounts, under the names of Kubernetes and of the prior art."""
    gpus = sum(
        _amount(fields, name, quantities.whole, "4") for name in fields.names() if is_gpu(name)
    )
    for name in others(fields):
        fields.raw(name)  # The pod's own affair.
    memory_mib = _amount(fields, "memory", quantities.mib, "16Gi or 512Mi")
    memory = fields.raw("memory")
    if memory_mib == 1 and quantities.amount(f"{memory}Mi") is not None:
        fields.problem("memory", f"{memory} is in bytes, did you mean {memory}Mi?")
    cpu_milli = _amount(fields, "cpu", quantities.milli, "8 or 500m")
    fields.rest()
    return Resources(cpu_milli=cpu_milli, memory_mib=memory_mib, gpus=gpus)


def read_limits(fields: Fields) -> Limits:
    """The most of each resource; a missing entry means no limit, an entry of 0 is a limit."""
    for name in others(fields):
        fields.note(name, "has no effect: only cpu, memory and gpu have limits")
    said = read_resources(fields)
    has_gpus = any(is_gpu(name) and fields.has(name) for name in fields.names())
    return Limits(
        cpu_milli=said.cpu_milli if fields.has("cpu") else None,
        memory_mib=said.memory_mib if fields.has("memory") else None,
        gpus=said.gpus if has_gpus else None,
    )


def is_gpu(name: str) -> bool:
    """Whether this resource is a GPU of any vendor, or a part of one."""
    return name == "gpu" or "nvidia.com" in name or name.endswith("/gpu")


def others(fields: Fields) -> list[str]:
    """Resources of other kinds than cpu, memory and GPUs, such as huge pages."""
    return [
        name
        for name in fields.names()
        if ("/" in name or name == "ephemeral-storage" or name.startswith("hugepages-"))
        and not is_gpu(name)
    ]


def _amount(fields: Fields, name: str, unit: Callable[[object], int | None], like: str) -> int:
    value = fields.raw(name)
    if value is None:
        return 0
    number = unit(value)
    if number is None:
        fields.problem(name, f"must be an amount such as {like}, not {show(value)}")
    return number or 0


POD_FIELDS = tuple(
    """
    activeDeadlineSeconds affinity automountServiceAccountToken containers dnsConfig dnsPolicy
    enableServiceLinks ephemeralContainers hostAliases hostIPC hostNetwork hostPID hostUsers
    hostname hostnameOverride imagePullSecrets initContainers nodeName nodeSelector os overhead
    preemptionPolicy priority priorityClassName readinessGates resourceClaims resources
    restartPolicy runtimeClassName schedulerName schedulingGates securityContext serviceAccount
    serviceAccountName setHostnameAsFQDN shareProcessNamespace subdomain
    terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes
    """.split()  # noqa: SIM905 (a paragraph, not a page)
)
CONTAINER_FIELDS = tuple(
    """
    args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports
    readinessProbe resizePolicy resources restartPolicy restartPolicyRules securityContext
    startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty volumeDevices
    volumeMounts workingDir
    """.split()  # noqa: SIM905 (a paragraph, not a page)
)
