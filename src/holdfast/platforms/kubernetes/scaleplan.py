# SPDX-License-Identifier: Apache-2.0
"""A ScalePlan as its author wrote it, read into plans that the core understands.

A ScalePlan may be about several roles: one of them is the core's plan, with the others as its
parts, so that all of it is done or nothing. Like `manifest.read_job` this never raises for a
mistake of the author.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.order import WORKER, Move, Plan
from holdfast.model.resources import NOTHING, Resources
from holdfast.platforms.kubernetes import names
from holdfast.platforms.kubernetes.fields import Fields, Problem, show, suggestion
from holdfast.platforms.kubernetes.manifest import ROLES
from holdfast.platforms.kubernetes.templates import others, read_resources

OLD_JOB_LABEL = "elasticjob-name"
SCALE_TYPE_LABEL = "scale-type"
FINAL_PHASES = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """A change of a running job."""

    name: str
    namespace: str
    uid: str
    created: str
    """When the API server received it; plans are done in this order."""
    job: str
    """The name of the job that it is for; empty if unknown."""
    finished: bool
    """True once it was done or refused."""
    plan: Plan | None
    """The plan in it; None if it cannot be done."""


def read_plan(obj: Mapping[str, Any]) -> tuple[ScalePlan, tuple[Problem, ...]]:
    """The plan that a manifest describes, and everything that its author should know about it."""
    problems: list[Problem] = []
    top = Fields(obj, "", problems)
    if (top.raw("apiVersion"), top.raw("kind")) != (names.API_VERSION, "ScalePlan"):
        top.problem("kind", f"must be ScalePlan of apiVersion {names.API_VERSION}")
    metadata, spec, status = top.nested("metadata"), top.nested("spec"), top.nested("status")
    top.rest()
    uid = metadata.text("uid")
    job = _read_owner(metadata.nested("labels"), spec)
    changes = _read_changes(spec, job)
    if not problems and not changes:
        spec.problem("", "changes nothing")
    if not spec.flag("manualScaling", True):
        spec.note("manualScaling", "has no effect: a plan that somebody writes is done")
    if spec.raw("psHosts"):
        spec.note("psHosts", "is not used: the master knows its parameter servers' addresses")
    spec.rest()
    can_be_done = not any(problem.fatal for problem in problems)
    plan = ScalePlan(
        name=metadata.text("name"),
        namespace=metadata.text("namespace") or "default",
        uid=uid,
        created=metadata.text("creationTimestamp"),
        job=job,
        finished=status.text("phase") in FINAL_PHASES,
        plan=_plan(uid, changes) if can_be_done else None,
    )
    return plan, tuple(problems)


def _read_owner(labels: Fields, spec: Fields) -> str:
    """The spec decides before the labels; the prior art has an old and a new label."""
    scale_type = labels.text(SCALE_TYPE_LABEL)
    if scale_type not in ("", "manual"):
        labels.problem(SCALE_TYPE_LABEL, f"only manual plans are done, not {show(scale_type)}")
    labelled = labels.text(names.JOB_LABEL) or labels.text(OLD_JOB_LABEL)
    owner = spec.text("ownerJob")
    if not owner and not labelled:
        spec.problem("ownerJob", "a plan needs the name of its job")
    elif owner and labelled and owner != labelled:
        spec.note("ownerJob", f"decides: the label says {show(labelled)}")
    return owner or labelled


@dataclass(slots=True)
class _Change:
    """The change of one role, while it is being read."""

    nodes: int | None = None
    resources: Resources = NOTHING
    add: list[NodeRank] = field(default_factory=list)
    remove: list[NodeId] = field(default_factory=list)
    migrate: list[Move] = field(default_factory=list)


def _plan(uid: str, changes: Mapping[str, _Change]) -> Plan:
    first, *others = (
        Plan(
            plan_id=f"scaleplan/{uid}/{role}",
            role=role,
            nodes=change.nodes,
            add=tuple(change.add),
            remove=tuple(change.remove),
            migrate=tuple(change.migrate),
            memory_mib=change.resources.memory_mib,
            cpu_milli=change.resources.cpu_milli,
        )
        # The workers first: their part of the plan has the most fields.
        for role, change in sorted(changes.items(), key=lambda change: change[0] != WORKER)
    )
    return replace(first, others=tuple(others))


def _read_changes(spec: Fields, job: str) -> dict[str, _Change]:
    changes: defaultdict[str, _Change] = defaultdict(_Change)
    # An older version of the prior art has the singular.
    for name in ("replicaResourceSpecs", "replicaResourceSpec"):
        roles = spec.nested(name)
        for role in roles.names():
            fields = roles.nested(role)
            if role not in ROLES:
                roles.problem(role, f"there is no such role{suggestion(role, list(ROLES))}")
            changes[role].nodes = fields.number("replicas", changes[role].nodes)
            resources = _read_resources(fields)
            changes[role].resources = changes[role].resources if resources == NOTHING else resources
            fields.rest()
    for fields, _ in spec.items("createPods"):
        pod = _read_pod(fields, job)
        rank = pod.rank if pod.rank is not None else pod.node_id
        if rank is None:
            fields.problem("rankIndex", "a new node needs its rank")
        else:
            changes[pod.role].add.append(NodeRank(rank))
            if pod.node_id not in (None, rank):
                fields.note("id", "is not used: nodes get ids of their own")
        if pod.resources != NOTHING:
            changes[pod.role].resources = pod.resources
            fields.note("resource", f"is from now on that of every new {pod.role}")
    for fields, written in spec.items("removePods"):
        pod = _named(fields, written, job) if isinstance(written, str) else _read_pod(fields, job)
        changes[pod.role].remove.append(_existing(fields, pod))
        if pod.resources != NOTHING:
            fields.note("resource", "is not used: the node goes")
    for fields, _ in spec.items("migratePods"):
        pod = _read_pod(fields, job)
        move = Move(
            node_id=_existing(fields, pod),
            memory_mib=pod.resources.memory_mib,
            cpu_milli=pod.resources.cpu_milli,
        )
        changes[pod.role].migrate.append(move)
    return changes


@dataclass(frozen=True, slots=True)
class _Pod:
    """A node as a plan describes it."""

    role: str
    node_id: int | None
    rank: int | None = None
    resources: Resources = NOTHING


def _read_pod(fields: Fields, job: str) -> _Pod:
    """A node described by its id, by its name, or by both."""
    name = fields.text("name")
    named = _named(fields, name, job) if name else None
    role = fields.choice("type", {role: role for role in ROLES}, named.role if named else WORKER)
    node_id = fields.number("id", named.node_id if named else None)
    if named is not None and (role, node_id) != (named.role, named.node_id):
        fields.problem("name", f"{show(name)} is not the name of {role} {node_id}")
    if fields.raw("service"):
        fields.note("service", "is not used: the master knows the addresses of its nodes")
    pod = _Pod(role, node_id, fields.number("rankIndex", None), _read_resources(fields))
    fields.rest()
    return pod


def _named(fields: Fields, name: str, job: str) -> _Pod:
    """A node given by the name of its pod, which contains its role and its id."""
    rest = name.removeprefix(f"{job}-edljob-")
    role, _, number = rest.rpartition("-")
    if rest != name and role in ROLES and number.isascii() and number.isdigit():
        return _Pod(role, int(number))
    like = names.node_pod_name(job, WORKER, NodeId(0))
    fields.problem("", f"{show(name)} is not a pod of this job: their names are like {like}")
    return _Pod(WORKER, None)


def _existing(fields: Fields, pod: _Pod) -> NodeId:
    if pod.node_id is None:
        fields.problem("", "needs the id or the name of a pod")
    if pod.rank is not None:
        fields.note("rankIndex", "is not used: id or name say which node is meant")
    return NodeId(pod.node_id or 0)


def _read_resources(fields: Fields) -> Resources:
    written = fields.nested("resource")
    for name in others(written):
        written.note(name, "has no effect: a node has what its template says")
    resources = read_resources(written)
    if resources.gpus:
        fields.note("resource", "the number of GPUs of a node is what its template says")
    return replace(resources, gpus=0)
