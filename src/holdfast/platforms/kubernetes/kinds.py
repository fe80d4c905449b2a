# SPDX-License-Identifier: Apache-2.0
"""The kinds of objects that Holdfast uses, as the paths of the Kubernetes API name them."""

import re
from dataclasses import dataclass

from holdfast.model.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:-]*")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of objects, as the server's paths name it."""

    group: str
    """Empty for the core group."""
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """What stands in an object's apiVersion."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The path of all objects, or of one; `namespace` None means all namespaces."""
        for word in (namespace, name):
            # A person may have typed it: it must not lead to another path.
            if word and not _NAME.fullmatch(word):
                raise UsageError(f"{word!r} cannot be a name in Kubernetes")
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


PODS = Kind("", "v1", "pods")
SERVICES = Kind("", "v1", "services")
SECRETS = Kind("", "v1", "secrets")
CONFIG_MAPS = Kind("", "v1", "configmaps")
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts")
PVCS = Kind("", "v1", "persistentvolumeclaims")
EVENTS = Kind("", "v1", "events")
NODES = Kind("", "v1", "nodes", namespaced=False)
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
ROLES = Kind("rbac.authorization.k8s.io", "v1", "roles")
ROLE_BINDINGS = Kind("rbac.authorization.k8s.io", "v1", "rolebindings")
LEASES = Kind("coordination.k8s.io", "v1", "leases")
CRDS = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False)
ELASTICJOBS = Kind("elastic.iml.github.io", "v1alpha1", "elasticjobs")
SCALEPLANS = Kind("elastic.iml.github.io", "v1alpha1", "scaleplans")
