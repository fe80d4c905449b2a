# SPDX-License-Identifier: Apache-2.0
"""What keeps the pod of a job's master harmless.

Of the user's template, the user that a container runs as counts, unless it is root. Everything else
in a securityContext, and the namespaces of the machine, counts only if the job says so by name: a
container's own value overrides that of its pod, so a single one is enough to remove the protection.
"""

from collections.abc import Iterator, Mapping
from typing import Any

USER_ID = 10001
"""The user id of a master, unless its template has another one: an arbitrary one, not root."""

_USER = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
_OF_TEMPLATE = frozenset(
    {
        *_USER,
        "fsGroupChangePolicy",
        "supplementalGroups",
        "supplementalGroupsPolicy",
    }
)
"""The fields of a template's securityContext that count. A list of the fields that do not would
miss those that Kubernetes adds: `procMount`, `appArmorProfile`, `windowsOptions.hostProcess` all
came later."""

_ROOT = ("runAsUser", 0)
"""Never counts: with `runAsNonRoot` the kubelet refuses the pod, and the job has no master."""

_SAFE_POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_SAFE_ROOT = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_SAFE_CONTAINER = {**_SAFE_ROOT, **_SAFE_POD}

_HOST = ("hostPID", "hostNetwork", "hostIPC")
_ANNOTATIONS = (
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
"""Prefixes of the annotations that set profiles in older versions of Kubernetes."""


def secure(template: dict[str, Any], main: dict[str, Any], *, own: bool) -> None:
    """Change a master's template; `main` is the container in which the master runs. With `own` the
    job says by name that values of the template override the safe ones."""
    spec = template["spec"]
    if own:
        spec["securityContext"] = {**_USER, **_SAFE_POD, **_context(spec)}
        # No more than that: the pod's users and profiles are meant for this container too.
        main["securityContext"] = {**_SAFE_ROOT, **_context(main)}
        return
    for name in _HOST:
        spec.pop(name, None)
    annotations = template["metadata"].get("annotations") or {}
    for name in [name for name in annotations if name.startswith(_ANNOTATIONS)]:
        del annotations[name]
    spec["securityContext"] = {**_USER, **_counted(spec), **_SAFE_POD}
    for _, container in _containers(spec):
        container["securityContext"] = {**_counted(container), **_SAFE_CONTAINER}


def without_effect(template: Mapping[str, Any]) -> list[str]:
    """Paths of the values that `secure` removes, unless the job says by name that it wants them."""
    spec, metadata = template.get("spec"), template.get("metadata")
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    paths = [
        f"metadata.annotations.{name}"
        for name in (annotations if isinstance(annotations, Mapping) else ())
        if str(name).startswith(_ANNOTATIONS)
    ]
    if not isinstance(spec, Mapping):
        return paths
    paths += [f"spec.{name}" for name in _HOST if spec.get(name)]
    described = [("spec", spec, _SAFE_POD)]
    described += [(f"spec.{at}", one, _SAFE_CONTAINER) for at, one in _containers(spec)]
    for at, one, safe in described:
        paths += [
            f"{at}.securityContext.{name}"
            for name, value in _context(one).items()
            if name not in _OF_TEMPLATE and value != safe.get(name, False)
        ]
        if _ROOT in _context(one).items():
            paths.append(f"{at}.securityContext.runAsUser: 0")
    return paths


def _containers(spec: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each container with its path. The API server refuses entries that are no containers."""
    for name in ("initContainers", "containers"):
        found = spec.get(name)
        for index, one in enumerate(found if isinstance(found, list) else ()):
            if isinstance(one, Mapping):
                yield f"{name}[{index}]", one


def _context(described: Mapping[str, Any]) -> dict[str, Any]:
    """The securityContext of a pod or a container."""
    own = described.get("securityContext")
    return dict(own) if isinstance(own, Mapping) else {}


def _counted(described: Mapping[str, Any]) -> dict[str, Any]:
    own = _context(described).items()
    return {name: of for name, of in own if name in _OF_TEMPLATE and (name, of) != _ROOT}
