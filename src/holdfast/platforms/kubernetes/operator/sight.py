# SPDX-License-Identifier: Apache-2.0
"""What the operator sees of the cluster, put together from several watches.

Jobs, and the objects around their masters, are found by namespace and name; only the uid decides
which job an object belongs to (`observed.py`).
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.kinds import PODS, Kind
from holdfast.platforms.kubernetes.operator.observed import Child, MasterPod, Observed, observe

Key = tuple[str, str]
"""Namespace and name of a job."""

GONE_MAX = 1000


class Sight:
    """All jobs, and all objects around masters."""

    def __init__(self) -> None:
        self._jobs: dict[Key, Mapping[str, Any]] = {}
        self._children: dict[Key, dict[tuple[str, str], MasterPod | Child]] = {}
        #: The uids of objects that went lately: a late answer must not bring one back.
        self._gone: deque[str] = deque(maxlen=GONE_MAX)

    def uid(self, key: Key) -> str:
        """The uid of the job that has this name now; empty if there is none."""
        return str(self._jobs[key]["metadata"].get("uid", "")) if key in self._jobs else ""

    def generation(self, key: Key) -> int:
        """The generation of its manifest: it changes with the spec, and not with the status."""
        return int(self._jobs[key]["metadata"].get("generation", 0)) if key in self._jobs else -1

    def observed(self, key: Key) -> Observed | None:
        """What the operator sees of a job; None if there is none."""
        obj = self._jobs.get(key)
        if obj is None:
            return None
        around = self._children.get(key, {})
        masters = [child for child in around.values() if isinstance(child, MasterPod)]
        others = {
            plural: child for (plural, _), child in around.items() if isinstance(child, Child)
        }
        return observe(obj, masters, others)

    def see_job(self, obj: Mapping[str, Any], *, gone: bool = False) -> Key | None:
        """Take in a job as it is now, or its end. Returns its key, or None if nothing changed that
        matters here: masters write their progress every second."""
        metadata = obj["metadata"]
        key = metadata["namespace"], metadata["name"]
        before = self._jobs.get(key)
        if not gone:
            self._jobs[key] = obj
        elif self.uid(key) == metadata["uid"]:
            # Otherwise a new job of the same name was seen before the end of the old one.
            del self._jobs[key]
        is_same = before is not None and not gone and _matters(before) == _matters(obj)
        return None if is_same else key

    def see_child(self, kind: Kind, child: MasterPod | Child, *, gone: bool = False) -> Key:
        """Take in an object around a master, or its end."""
        metadata = child.metadata
        key = metadata.namespace, metadata.labels.get(names.JOB_LABEL, "")
        around = self._children.setdefault(key, {})
        if gone:
            self._gone.append(metadata.uid)
            around.pop((kind.plural, metadata.name), None)
        else:
            around[kind.plural, metadata.name] = child
        if not around:
            del self._children[key]
        return key

    def hear_job(self, obj: Mapping[str, Any], asked_at: str) -> None:
        """Take in the server's answer to a change. It counts only if no newer state was seen
        meanwhile, that is if the job still has the version that was changed."""
        metadata = obj["metadata"]
        now = self._jobs.get((metadata["namespace"], metadata["name"]))
        if now is not None and now["metadata"].get("resourceVersion") == asked_at:
            self.see_job(obj)

    def hear_child(self, kind: Kind, child: MasterPod | Child, asked_at: str) -> None:
        """The same for an object around a master; `asked_at` is empty if it did not exist."""
        if self.version(kind, child) == asked_at and child.metadata.uid not in self._gone:
            self.see_child(kind, child)

    def version(self, kind: Kind, child: MasterPod | Child) -> str:
        """The version of the object of that name that was seen last; empty if there was none."""
        metadata = child.metadata
        key = metadata.namespace, metadata.labels.get(names.JOB_LABEL, "")
        known = self._children.get(key, {}).get((kind.plural, metadata.name))
        return "" if known is None else known.metadata.resource_version


def _matters(obj: Mapping[str, Any]) -> tuple[object, ...]:
    """Everything of a job that the operator's decisions depend on."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    own = ("uid", "generation", "annotations", "labels", "deletionTimestamp")
    said = ("phase", "conditions", "completionTime", "master")
    return (*map(metadata.get, own), *map(status.get, said))


def read_child(kind: Kind) -> type[MasterPod] | type[Child]:
    """The type that objects of this kind are decoded into."""
    return MasterPod if kind == PODS else Child
