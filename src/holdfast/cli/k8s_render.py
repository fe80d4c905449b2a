# SPDX-License-Identifier: Apache-2.0
"""`holdfast k8s render`: every object that a job would have at its start, as YAML.

The operator's and the platform's own functions make the objects, and the master's core decides
which nodes there are, so that the output cannot differ from what happens.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from holdfast.cli.k8s_manifests import read
from holdfast.core.job import events as ev
from holdfast.core.job.commands import LaunchNode
from holdfast.core.job.flow import build
from holdfast.model.job import JobSpec
from holdfast.model.order import Order
from holdfast.platforms.kubernetes.gang import pod_group
from holdfast.platforms.kubernetes.kinds import ELASTICJOBS
from holdfast.platforms.kubernetes.manifest import ElasticJob, read_job
from holdfast.platforms.kubernetes.operator import objects
from holdfast.platforms.kubernetes.render import node_pod, node_service
from holdfast.platforms.kubernetes.spec import job_spec

Body = Mapping[str, Any]

UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"
NOT_SHOWN = "(made by the operator)"


def render(arguments: argparse.Namespace) -> int:
    """Print the objects."""
    bodies: list[Body] = []
    for document in read(arguments.files):
        bodies.append(document.obj)
        if document.kind is ELASTICJOBS:
            job, _ = read_job(document.obj)
            namespace = document.namespace or arguments.namespace or job.namespace
            if job.suspend:
                say = f"note: {document.title} is suspended: all this comes when it is resumed"
                print(say, file=sys.stderr)
            # Without an API server nothing has a uid.
            job = replace(job, suspend=False, uid=UNKNOWN_UID, namespace=namespace)
            bodies += _objects_of(job, arguments.master_image)
    print(yaml.dump_all(bodies, Dumper=_Dumper, sort_keys=False, width=100), end="")
    return 0


def _objects_of(job: ElasticJob, default_image: str) -> list[Body]:
    """The objects that the operator and then the master create."""
    secret = objects.secret(job)
    secret["data"] = dict.fromkeys(secret["data"], NOT_SHOWN)
    claim = objects.claim(job)
    return [
        *(body for _, body in objects.kept(job)),
        secret,
        *([claim[1]] if claim else []),
        objects.master_pod(job, 0, default_image=default_image, errors=0, quick_losses=0),
        *_nodes(job),
    ]


def _nodes(job: ElasticJob) -> Iterator[Body]:
    orders = list(_first_orders(job))
    group = pod_group(job, orders[-1]) if orders else None
    if group is not None:
        yield group
    for order in orders:
        service = node_service(job, order)
        if service is not None:
            yield service
        yield node_pod(job, order)


def _first_orders(job: ElasticJob) -> Iterator[Order]:
    """The first orders of a new master."""
    core = build(job_spec(job, JobSpec()), job.name).core
    for command in core.handle(ev.MasterStarted(), 0.0).commands:
        if isinstance(command, LaunchNode):
            yield command.order


class _Dumper(yaml.SafeDumper):
    """Writes every object out in full, even if it occurs several times."""

    def ignore_aliases(self, data: object) -> bool:
        return True
