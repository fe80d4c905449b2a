# SPDX-License-Identifier: Apache-2.0
"""What keeps the pod of a job's master harmless.

Of the user's template it counts as whom a container runs, unless that is root. Everything else in a
securityContext, and the namespaces of the machine, count only where the job says so by name: an own
value of a container goes before that of its pod, so one of them is enough to take the protection
away.
"""

from collections.abc import Iterator, Mapping
from typing import Any

USER_ID = 10001
"""Whom a master runs as, unless its template says otherwise: nobody in particular."""

_USER = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
_OF_TEMPLATE = frozenset(
    {
        *_USER,
        "fsGroupChangePolicy",
        "supplementalGroups",
        "supplementalGroupsPolicy",
    }
)
"""What counts of a template's securityContext. A list of what does not would miss what Kubernetes
adds: `procMount`, `appArmorProfile`, `windowsOptions.hostProcess` all came later."""

_ROOT = ("runAsUser", 0)
"""Does not count: with `runAsNonRoot` the kubelet refuses the pod, and the job has no master."""

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
"""How older versions of Kubernetes are told of profiles; each begins like this."""


def secure(template: dict[str, Any], main: dict[str, Any], *, own: bool) -> None:
    """Change a master's template, of which this container is the master. `own`: as the job says by
    name, what the template has goes before what is safe."""
    spec = template["spec"]
    if own:
        spec["securityContext"] = {**_USER, **_SAFE_POD, **_context(spec)}
        # No more than that: what the pod says of users and profiles is meant for it, too.
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
    """Paths of what `secure` takes away, unless the job says by name that it is meant."""
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
    """Each with its path. What is no container the API server will refuse."""
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
