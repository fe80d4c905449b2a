# SPDX-License-Identifier: Apache-2.0
"""Hints for schedulers that place the pods of a job all at once or not at all.

`ElasticJob.gang` names the scheduler. Volcano and coscheduling know a gang by a separate object, a
PodGroup; Kueue by labels and annotations of the pods.
"""

from collections.abc import Mapping
from typing import Any

from holdfast.model.order import Order
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.manifest import ElasticJob
from holdfast.platforms.kubernetes.plain_roles import sizes

VOLCANO, COSCHEDULING, KUEUE = "volcano", "coscheduling", "kueue"

_VOLCANO_GROUP = "scheduling.k8s.io/group-name"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
_COSCHEDULING_GROUP = "scheduling.x-k8s.io/pod-group"
_KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
_KUEUE_SIZE = "kueue.x-k8s.io/pod-group-total-count"
_KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"

_SCHEDULERS = {VOLCANO: "volcano", COSCHEDULING: "scheduler-plugins-scheduler"}
"""The names under which these are installed; a schedulerName in the template wins."""
_API_VERSIONS = {
    VOLCANO: "scheduling.volcano.sh/v1beta1",
    COSCHEDULING: "scheduling.x-k8s.io/v1alpha1",
}


def join_gang(job: ElasticJob, metadata: dict[str, Any], spec: dict[str, Any]) -> None:
    """Put the marks of its job's gang into a pod."""
    gang, group = job.gang, group_name(job)
    if gang in _SCHEDULERS:
        spec.setdefault("schedulerName", _SCHEDULERS[gang])
    if gang == VOLCANO:
        metadata["annotations"][_VOLCANO_GROUP] = group
    elif gang == COSCHEDULING:
        metadata["labels"][_COSCHEDULING_GROUP] = group
    elif gang == KUEUE:
        # All pods of a group must have the same number, so it cannot follow the job's size.
        metadata["annotations"][_KUEUE_SIZE] = str(sum(sizes(job).values()))
        metadata["labels"][_KUEUE_GROUP] = group
        if _KUEUE_QUEUE in job.labels:
            metadata["labels"].setdefault(_KUEUE_QUEUE, job.labels[_KUEUE_QUEUE])


def pod_group(job: ElasticJob, order: Order) -> Mapping[str, Any] | None:
    """The object with the name and size of the job's gang; None if the scheduler uses none."""
    if job.gang not in _SCHEDULERS:
        return None
    counts = sizes(job)
    if order.size:
        counts[order.role] = order.size
    spec: dict[str, Any] = {"minMember": sum(counts.values())}
    if job.gang == VOLCANO and _VOLCANO_QUEUE in job.annotations:
        spec["queue"] = job.annotations[_VOLCANO_QUEUE]
    return {
        "apiVersion": _API_VERSIONS[job.gang],
        "kind": "PodGroup",
        "metadata": {
            "name": group_name(job),
            "namespace": job.namespace,
            "labels": {names.APP_LABEL: names.APP, names.JOB_LABEL: job.name},
            "ownerReferences": [names.owner_reference(job.name, job.uid)],
        },
        "spec": spec,
    }


def group_name(job: ElasticJob) -> str:
    """The name of the gang. A later job of the same name has another one."""
    return f"{job.name}-{job.uid[:8]}"
