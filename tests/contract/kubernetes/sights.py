# SPDX-License-Identifier: Apache-2.0
"""What an operator may see: jobs, masters in all states, and what is around them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.operator import objects
from holdfast.platforms.kubernetes.operator.observed import Child, MasterPod, Observed, observe
from holdfast.platforms.kubernetes.times import stamp

Json = dict[str, Any]

UID = "0f9a1c22-1111-2222-3333-444455556666"
T0 = 1_800_000_000.0


def manifest(
    *, master: Json | None = None, status: Json | None = None, uid: str = UID, **spec: Any
) -> Json:
    template = {"spec": {"containers": [{"name": "main", "image": "worker:1"}]}}
    replicas: Json = {"worker": {"replicas": 2, "template": template}}
    if master is not None:
        replicas["dlrover-master"] = master
    metadata = {"name": "mnist", "namespace": "research", "uid": uid, "resourceVersion": "7"}
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": metadata,
        "spec": {"replicaSpecs": replicas, **spec},
        "status": status or {},
    }


def master_pod(
    number: int,
    *,
    status: Json | None = None,
    age_s: float = 60.0,
    errors: int = 0,
    losses: int = 0,
    uid: str = UID,
    **metadata: Any,
) -> MasterPod:
    """The pod of a master that was made `age_s` before T0."""
    annotations = {
        objects.ERRORS_ANNOTATION: str(errors),
        objects.QUICK_LOSSES_ANNOTATION: str(losses),
    }
    body = {
        "metadata": {
            "name": names.master_pod_name("mnist", number),
            "namespace": "research",
            "uid": f"pod-{number}",
            "labels": {names.JOB_LABEL: "mnist", names.ROLE_LABEL: names.MASTER_ROLE},
            "annotations": annotations,
            "ownerReferences": [{"uid": uid}],
            "creationTimestamp": stamp(T0 - age_s),
            **metadata,
        },
        "status": status or running(),
    }
    return msgspec.convert(body, MasterPod)


def running() -> Json:
    container = {"name": "main", "state": {"running": {}}}
    return {"phase": "Running", "containerStatuses": [container]}


def ended(code: int, *, reason: str = "Error", at: float = T0) -> Json:
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": stamp(at)}}
    phase = "Failed" if code else "Succeeded"
    return {"phase": phase, "containerStatuses": [{"name": "main", "state": state}]}


def evicted() -> Json:
    return {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}


def children(job: Observed) -> dict[str, Child]:
    """Everything around the master, as it should be."""
    made = [(kind, body) for kind, body in objects.kept(job.job)]
    claim = objects.claim(job.job)
    if claim is not None:
        made.append(claim)
    return {kind.plural: msgspec.convert(body, Child) for kind, body in made}


def see(obj: Json, *pods: MasterPod, without: Sequence[str] = ()) -> Observed:
    """The job with these pods, and with everything else except `without`."""
    around = children(observe(obj))
    for plural in without:
        del around[plural]
    return observe(obj, pods, around)
