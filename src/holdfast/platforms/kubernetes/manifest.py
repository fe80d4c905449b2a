# SPDX-License-Identifier: Apache-2.0
"""An ElasticJob as its author wrote it, read into frozen values.

`read_job` never raises for a mistake in the manifest. It returns the job, as far as it is readable,
and every problem in one sentence each. A *fatal* problem must keep the job from starting, because
what runs would not be what the author meant. The others are notes: fields of the prior art that
mean nothing here, with the reason.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.model.order import WORKER
from holdfast.model.resources import NO_LIMITS, NOTHING, Limits, Resources
from holdfast.platforms.kubernetes import names, quantities
from holdfast.platforms.kubernetes.fields import Fields, Problem, show, suggestion
from holdfast.platforms.kubernetes.master_security import without_effect
from holdfast.platforms.kubernetes.templates import read_limits, read_template

PS, CHIEF, EVALUATOR = "ps", "chief", "evaluator"
ROLES = (WORKER, PS, CHIEF, EVALUATOR)
"""The roles that train. The master's own template is `ElasticJob.master`."""
MASTER_ROLES = (names.MASTER_ROLE, "master")
"""Both spellings of the master's role."""

GANG_ANNOTATION = "holdfast.io/gang"
SECURITY_ANNOTATION = "holdfast.io/master-security"
GANGS = ("volcano", "coscheduling", "kueue")

RESTARTS = 3
PENDING_TIMEOUT_S = 900.0
STATE_SIZE = "1Gi"


class Strategy(enum.StrEnum):
    """How the nodes of a job train together."""

    ALLREDUCE = "AllreduceStrategy"
    PARAMETER_SERVER = "ParameterServerStrategy"
    CUSTOM = "CustomStrategy"
    LOCAL = "Local"


class OptimizeMode(enum.StrEnum):
    """Who may change the resources of nodes: people alone, the master, or a brain for all jobs."""

    MANUAL = "manual"
    SINGLE_JOB = "single-job"
    CLUSTER = "cluster"
    """There is no brain yet: the master decides, and a note says so."""


class PendingStrategy(enum.StrEnum):
    """What to do when nodes stay pending for too long; the prior art numbers them 0, 1, 2."""

    SKIP = "skip"
    NECESSARY = "necessary"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateVolume:
    """Where the master keeps its state: a volume claim, or the pod's own disk."""

    ephemeral: bool = False
    """True: an emptyDir, which is lost with the master's pod."""
    size: str = STATE_SIZE
    storage_class: str | None = None
    """None: the cluster's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The nodes of one kind."""

    replicas: int = 1
    template: Mapping[str, Any] = field(default_factory=dict)
    """The pod template, untouched; a chief or evaluator without one has the worker's."""
    resources: Resources = NOTHING
    """What the main container asks for: its requests, else its limits."""
    restart_count: int = RESTARTS
    """How often a node of this role is launched again."""
    restart_timeout_s: int = 0
    """How long to wait for a rank that does not run, over all its relaunches; 0: forever."""
    auto_scale: bool = True
    """Whether the master may change the resources of these nodes; see also `optimize_mode`."""
    priority: str = ""
    """high", "low", "" for the template's own, or the share of the nodes with high priority."""
    critical_nodes: str = ""
    """all", "none", "" for the strategy's default, or ranks as in `critical_ranks`."""
    critical_ranks: Mapping[int, int] = field(default_factory=dict)
    """How often each of these ranks may be launched again; without such a rank the job ends."""
    batch_scheduler: str = ""
    """"volcano" for gang scheduling; empty for the cluster's own scheduler."""
    restart_policy: str = ""
    """As written; a node's pod always has Never, because the job replaces nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticJob:
    """One job, as its manifest has it."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    annotations: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    strategy: Strategy = Strategy.ALLREDUCE
    optimize_mode: OptimizeMode = OptimizeMode.SINGLE_JOB
    brain_service: str = ""
    resource_limits: Limits = NO_LIMITS
    """Limits of all nodes together."""
    envs: tuple[Mapping[str, Any], ...] = ()
    """Environment variables for every node, in the form of a container's `env`."""
    suspend: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)
    """The roles, by their names in `ROLES`."""
    master: Role | None = None
    """The user's description of the master's pod; None if there is none."""

    ttl_s: int | None = None
    """How long a job stays after its end; None: forever."""
    state_volume: StateVolume = field(default_factory=StateVolume)
    master_image: str = ""

    pending_timeout_s: float = PENDING_TIMEOUT_S
    pending_strategy: PendingStrategy = PendingStrategy.NECESSARY
    groups: Mapping[int, int] = field(default_factory=dict)
    """Nodes by group (rack); empty for none."""
    own_security: bool = False
    """The securityContext of the master's template wins over the safe one."""
    gang: str = ""
    """The scheduler that places all nodes at once or none, one of `GANGS`; empty for none."""

    def may_scale(self, role: Role) -> bool:
        """Whether the master may change the resources of this role's nodes by itself."""
        return role.auto_scale and self.optimize_mode is not OptimizeMode.MANUAL


def read_job(obj: Mapping[str, Any]) -> tuple[ElasticJob, tuple[Problem, ...]]:
    """The job that a manifest describes, and everything that its author should know about it."""
    problems: list[Problem] = []
    top = Fields(obj, "", problems)
    if (top.raw("apiVersion"), top.raw("kind")) != (names.API_VERSION, "ElasticJob"):
        top.problem("kind", f"must be ElasticJob of apiVersion {names.API_VERSION}")
    top.raw("status")
    metadata, spec = top.nested("metadata"), top.nested("spec")
    top.rest()
    annotations = _texts(metadata, "annotations")
    annotation_fields = Fields(annotations, "metadata.annotations", problems)
    role_fields = spec.nested("replicaSpecs")
    roles = {name: _read_role(role_fields, name) for name in ROLES if role_fields.has(name)}
    job = ElasticJob(
        name=_read_name(metadata),
        namespace=metadata.text("namespace") or "default",
        uid=metadata.text("uid"),
        generation=metadata.number("generation", 0),
        annotations=annotations,
        labels=_texts(metadata, "labels"),
        strategy=spec.choice("distributionStrategy", _STRATEGIES, _usual_strategy(roles)),
        optimize_mode=spec.choice("optimizeMode", _OPTIMIZE_MODES, OptimizeMode.SINGLE_JOB),
        brain_service=spec.text("brainService"),
        resource_limits=read_limits(spec.nested("resourceLimits")),
        envs=_read_envs(spec.nested("envs")),
        suspend=spec.flag("suspend", False),
        roles=_with_templates(roles),
        master=_read_master(role_fields),
        ttl_s=spec.number("ttlSecondsAfterFinished", None),
        state_volume=_read_state_volume(spec),
        master_image=spec.text("masterImage"),
        gang=_read_gang(annotation_fields, roles),
        **_read_annotations(annotation_fields),
    )
    role_fields.rest()
    spec.rest()
    _check_sense(job, spec, role_fields)
    places = sum(job.groups.values())
    if job.groups and WORKER in roles and places != roles[WORKER].replicas:
        said = f"has places for {places} nodes, and there are {roles[WORKER].replicas} workers"
        annotation_fields.note("group_affinity", said)
    if not any(problem.fatal for problem in problems):
        _check_limits(job, spec)
    return job, tuple(problems)


_STRATEGIES = {
    **{str(strategy): strategy for strategy in Strategy},
    "ParameterServer": Strategy.PARAMETER_SERVER,
}
_OPTIMIZE_MODES = {
    **{str(mode): mode for mode in OptimizeMode},
    # The prior art's own documents have both of these.
    "manunal": OptimizeMode.MANUAL,
    "mannual": OptimizeMode.MANUAL,
}
_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def _usual_strategy(roles: Mapping[str, Role]) -> Strategy:
    return Strategy.PARAMETER_SERVER if PS in roles else Strategy.ALLREDUCE


def _read_name(metadata: Fields) -> str:
    name = metadata.text("name")
    limit = names.JOB_NAME_LENGTH_MAX
    if not name:
        metadata.problem("name", "a job needs a name")
    elif not _JOB_NAME.fullmatch(name):
        metadata.problem(
            "name",
            f"must begin with a letter and have only small letters, digits and '-', "
            f"because Services are named after it, not {show(name)}",
        )
    elif len(name) > limit:
        metadata.problem(
            "name",
            f"has {len(name)} characters, at most {limit} are possible: "
            f"the Service {names.master_name('NAME')} is named after it",
        )
    return name


def _texts(fields: Fields, name: str) -> dict[str, str]:
    """A mapping of texts, such as labels."""
    nested = fields.nested(name)
    return {key: nested.text(key) for key in nested.names()}


# ---- roles ---------------------------------------------------------------------------------------


def _read_role(role_fields: Fields, name: str) -> Role:
    fields = role_fields.nested(name)
    template = fields.raw("template")
    # Nodes of these roles run the worker's program if the role has none.
    borrows = name in (CHIEF, EVALUATOR) and not template
    resources = NOTHING if borrows else read_template(fields.nested("template"))
    role = _role(fields, template=template, resources=resources)
    fields.rest()
    return role


def _read_master_as(role_fields: Fields, name: str) -> Role:
    fields = role_fields.nested(name)
    template = fields.raw("template")
    if template:
        read_template(fields.nested("template"), is_master=True)
    role = _role(fields, template=template, resources=NOTHING)
    if role.replicas != 1:
        fields.problem("replicas", f"a job has one master, not {role.replicas}")
    account = _named_account(role.template)
    if account:
        fields.note(
            "template",
            f"the serviceAccountName {account} has no effect: a master has an account of its own",
        )
    for unused, usual in _UNUSED_BY_MASTERS.items():
        if fields.has(unused) and fields.raw(unused) not in usual:
            fields.note(unused, "has no effect on the job's master")
    fields.rest()
    return role


def _named_account(template: Mapping[str, Any]) -> str:
    spec = template.get("spec")
    return str(spec.get("serviceAccountName") or "") if isinstance(spec, Mapping) else ""


_UNUSED_BY_MASTERS: dict[str, tuple[object, ...]] = {
    "restartTimeout": (0,),
    "autoScale": (True,),
    "criticalNodes": ("",),
    "batchScheduler": ("", "default"),
    "BatchScheduler": ("", "default"),
}
"""For each field, the values that mean nothing: the API server fills in these defaults."""


def _role(fields: Fields, *, template: object, resources: Resources) -> Role:
    """The parts that all roles have."""
    critical = fields.text("criticalNodes")
    role = Role(
        replicas=fields.number("replicas", 1),
        template=template if isinstance(template, Mapping) else {},
        resources=resources,
        restart_count=fields.number("restartCount", RESTARTS),
        restart_timeout_s=fields.number("restartTimeout", 0),
        auto_scale=fields.flag("autoScale", True),
        priority=_read_priority(fields),
        critical_nodes=critical,
        critical_ranks=_read_critical(fields, critical),
        batch_scheduler=_read_batch_scheduler(fields),
        restart_policy=fields.choice("restartPolicy", _RESTART_POLICIES, ""),
    )
    if role.restart_policy not in ("", "Never"):
        fields.note(
            "restartPolicy",
            "pods always have Never: restartCount says how often a node is replaced",
        )
    return role


_RESTART_POLICIES = {name: name for name in ("Always", "OnFailure", "Never", "ExitCode")}


def _with_templates(roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles, with the worker's template for those that have none."""
    worker = roles.get(WORKER)
    if worker is None:
        return dict(roles)
    return {
        name: role
        if role.template
        else replace(role, template=worker.template, resources=worker.resources)
        for name, role in roles.items()
    }


def _read_priority(fields: Fields) -> str:
    """Words stay words; a share may be written as a number or as text."""
    value = fields.raw("priority")
    if value is None or value in ("", "high", "low"):
        return str(value or "")
    fraction = quantities.amount(value)
    if fraction is not None and 0 < fraction <= 1:
        return str(fraction)
    fields.problem(
        "priority",
        f"must be high, low, or the part of nodes that are high, such as 0.5, not {show(value)}",
    )
    return ""


def _read_critical(fields: Fields, text: str) -> dict[int, int]:
    if text in ("", "all", "none"):
        return {}
    ranks = _pairs(text)
    if ranks is None:
        fields.problem(
            "criticalNodes",
            f'must be all, none, or ranks and relaunches such as "0:3,1:3", not {show(text)}',
        )
    return ranks or {}


def _pairs(text: str) -> dict[int, int] | None:
    """ "0:3,1:3" or "{0: 3, 1: 3}"; None if it is neither."""
    pairs = {}
    for part in text.strip().removeprefix("{").removesuffix("}").split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*:\s*(\d{1,6})\s*", part, re.ASCII)
        if match is None or int(match[1]) in pairs:
            return None
        pairs[int(match[1])] = int(match[2])
    return pairs


def _read_batch_scheduler(fields: Fields) -> str:
    """The prior art writes it with a capital B, other programs in the usual form."""
    capital = fields.choice("BatchScheduler", _BATCH_SCHEDULERS, "")
    small = fields.choice("batchScheduler", _BATCH_SCHEDULERS, "")
    if capital and small and capital != small:
        fields.problem("batchScheduler", f"is {small}, but BatchScheduler is {capital}")
    return (capital or small).replace("default", "")


_BATCH_SCHEDULERS = {name: name for name in ("default", "volcano")}


def _read_master(role_fields: Fields) -> Role | None:
    given = [name for name in MASTER_ROLES if role_fields.has(name)]
    masters = [_read_master_as(role_fields, name) for name in given]
    if len(given) > 1:
        role_fields.problem(given[1], f"is another name of {given[0]}, which is there as well")
    return masters[0] if masters else None


def _check_security(job: ElasticJob, role_fields: Fields) -> None:
    if job.master is None or job.own_security or not (paths := without_effect(job.master.template)):
        return
    given = next(name for name in MASTER_ROLES if role_fields.has(name))
    role_fields.note(
        f"{given}.template",
        f"{', '.join(paths)}: no effect on the job's master, unless it is said by name: annotation "
        f"{SECURITY_ANNOTATION}: template",
    )


def _check_sense(job: ElasticJob, spec: Fields, role_fields: Fields) -> None:
    """Check the rules that involve more than one field."""
    if job.strategy is Strategy.PARAMETER_SERVER:
        if PS not in job.roles or job.roles[PS].replicas == 0:
            role_fields.problem(PS, f"a job of {job.strategy} needs parameter servers")
    elif WORKER not in job.roles:
        role_fields.problem(WORKER, "a job needs workers")
    elif job.roles[WORKER].replicas == 0:
        role_fields.problem(
            f"{WORKER}.replicas", "a job needs at least 1 worker; to pause it set spec.suspend"
        )
    for name, role in job.roles.items():
        if name != WORKER and role.critical_nodes not in ("", "all"):
            role_fields.note(f"{name}.criticalNodes", f"has no effect: every {name} is critical")
            continue
        beyond = [rank for rank in role.critical_ranks if rank >= role.replicas]
        if beyond:
            role_fields.note(
                f"{name}.criticalNodes",
                f"rank {beyond[0]} does not exist: there are {role.replicas} replicas",
            )
    _check_security(job, role_fields)
    if job.optimize_mode is OptimizeMode.CLUSTER:
        spec.note("optimizeMode", "there is no brain to ask yet: cluster works as single-job does")
    if job.brain_service:
        spec.note("brainService", f"has no effect: {job.brain_service} is not asked by anybody yet")


def _check_limits(job: ElasticJob, spec: Fields) -> None:
    """Check the limits at the start; in a running job the master checks them."""
    asked = sum((role.resources.times(role.replicas) for role in job.roles.values()), NOTHING)
    if refusal := job.resource_limits.refusal(asked):
        spec.problem("resourceLimits", refusal, at_start_only=True)


# ---- the rest of the spec ------------------------------------------------------------------------


def _read_envs(fields: Fields) -> tuple[Mapping[str, Any], ...]:
    """The prior art lists them by name, each a container's `env` entry that may repeat its name."""
    envs: list[dict[str, Any]] = []
    for name in fields.names():
        entry = fields.nested(name)
        written = entry.text("name") or name
        if written != name:
            entry.problem("name", f"is {show(written)}, but its key is {show(name)}")
        value, source = entry.text("value"), entry.raw("valueFrom")
        if value and source:
            entry.problem("value", "cannot stand beside valueFrom")
        entry.rest()
        envs.append(
            {"name": name, "valueFrom": source} if source else {"name": name, "value": value}
        )
    return tuple(envs)


def _read_state_volume(spec: Fields) -> StateVolume:
    fields = spec.nested("stateVolume")
    ephemeral = fields.has("emptyDir")
    fields.raw("emptyDir")
    claim = fields.nested("claim")
    if ephemeral and fields.has("claim"):
        fields.problem("claim", "cannot stand beside emptyDir")
    size = claim.raw("size") or STATE_SIZE
    if not quantities.amount(size):
        claim.problem("size", f"must be an amount such as {STATE_SIZE}, not {show(size)}")
    volume = StateVolume(
        ephemeral=ephemeral,
        size=str(size),
        storage_class=claim.text("storageClassName") or None,
    )
    claim.rest()
    fields.rest()
    return volume


# ---- annotations: how the prior art tells its master what to do ----------------------------------

_PENDING_STRATEGIES = {
    **{str(strategy): strategy for strategy in PendingStrategy},
    **{str(number): strategy for number, strategy in enumerate(PendingStrategy)},
}
_NO_PAGE = f"there is no page yet: port {names.HTTP_PORT} of its Service has JSON and metrics"
_NOT_NEEDED = {
    "service_type": "there is one protocol between master and agents",
    "pre_check_ops": "pre-checks are classes of the prior art; pending_timeout and the rendezvous "
    "time-out find the same",
    "pre_check_bypass": "there are no pre-checks to bypass",
    "training_elastic_mode": "checkpoints are always restored into worlds of another size",
    "enable_dashboard": _NO_PAGE,
    "dashboard_port": _NO_PAGE,
}


def _read_annotations(fields: Fields) -> dict[str, Any]:
    """The settings of the job in annotations; all other annotations are ignored."""
    known = ["pending_timeout", "pending_fail_strategy", "group_affinity", *_NOT_NEEDED]
    for name in fields.names():
        if name in _NOT_NEEDED:
            fields.note(name, f"has no effect: {_NOT_NEEDED[name]}")
        elif name not in known and "/" not in name and suggestion(name, known):
            fields.note(name, f"has no effect{suggestion(name, known)}")
    seconds = quantities.amount(fields.text("pending_timeout") or PENDING_TIMEOUT_S)
    if seconds is None or seconds < 0:
        fields.problem("pending_timeout", "must be a number of seconds, such as 900")
    affinity = fields.text("group_affinity")
    groups = _pairs(affinity) if affinity else {}
    if groups is None:
        fields.problem("group_affinity", f'must be like "0:10,1:15", not {show(affinity)}')
    return {
        "pending_timeout_s": float(seconds or 0),
        "pending_strategy": fields.choice(
            "pending_fail_strategy", _PENDING_STRATEGIES, PendingStrategy.NECESSARY
        ),
        "groups": groups or {},
        "own_security": fields.choice(SECURITY_ANNOTATION, {"template": True}, False),
    }


def _read_gang(fields: Fields, roles: Mapping[str, Role]) -> str:
    by_role = next((role.batch_scheduler for role in roles.values() if role.batch_scheduler), "")
    return fields.choice(GANG_ANNOTATION, {gang: gang for gang in GANGS}, by_role)
