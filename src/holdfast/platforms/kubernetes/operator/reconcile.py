# SPDX-License-Identifier: Apache-2.0
"""What to do about a job, given what exists. Pure: the same observation, the same decision.

A lost master is made again: at once the first time, then after growing pauses if one master after
another is lost soon. Kills, evictions and lost machines may go on forever. A master that fails by
itself counts against `restartCount`, unless it had run for long. All counts are in the cluster: on
the master's newest pod, and in the job's status for when there is no pod.

While a master may still run there is no second one. The exception is a deleted pod whose machine
does not confirm the end in time; a machine that is cut off cannot.
"""

from dataclasses import dataclass
from typing import Any

from holdfast.model.node import OF_THE_PROGRAM, Phase
from holdfast.platforms.kubernetes import names, pods
from holdfast.platforms.kubernetes.kinds import PODS, Kind
from holdfast.platforms.kubernetes.manifest import RESTARTS
from holdfast.platforms.kubernetes.operator import objects
from holdfast.platforms.kubernetes.operator.observed import Condition, MasterPod, Observed
from holdfast.platforms.kubernetes.status import (
    FAILED,
    FINAL,
    PENDING,
    RUNNING,
    SUCCEEDED,
    SUSPENDED,
)
from holdfast.platforms.kubernetes.times import seconds_of, stamp

CREATED = "Created"
MALFORMED = "Malformed"
MASTER_RUNNING = "MasterRunning"

SOUND = "nothing is wrong with the manifest"

SOON_S = 600.0
"""A master that is lost within this time was lost soon."""
LONG_S = 3600.0
"""An error after this long is the first of its kind: earlier ones are forgiven."""
PAUSE_MAX_S = 300.0
OVERDUE_S = 30.0
"""A pod that still exists this long after its grace period is on a machine that is cut off."""
SECRET_LOOK_S = 600.0
"""How often the operator asks whether a running job's Secret exists. It may not watch Secrets: the
right to watch them is also the right to read them."""
KEPT_PODS = 2
"""How many of the newest pods of masters stay, for their logs."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The job must still be as the operator saw it: a master may have written in its last moment
    that the job is over, and that write arrives by another way than the end of its pod."""


@dataclass(frozen=True, slots=True)
class Apply:
    """This object must exist in exactly this form."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Create:
    """This object must exist; if it does, it stays as it is."""

    kind: Kind
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CreateSecret:
    """The job needs its token and certificate; if they exist, they stay."""


@dataclass(frozen=True, slots=True)
class CheckSecret:
    """Report it if the job's Secret is gone: new nodes cannot start without it."""


@dataclass(frozen=True, slots=True)
class RemovePod:
    """Remove an old pod of a master that is no longer needed."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class StopNodes:
    """The job is over, and it has no master to stop its nodes."""


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Write everything that the operator owns in the job's status."""

    status: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tell:
    """Make an Event."""

    reason: str
    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """The job has been over for its `ttl_s`: delete it."""


Action = (
    Confirm
    | Apply
    | Create
    | CreateSecret
    | CheckSecret
    | RemovePod
    | StopNodes
    | WriteStatus
    | Tell
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, in this order, and when to look again even if nothing has changed."""

    actions: tuple[Action, ...] = ()
    again_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Master:
    """The state of a job's master."""

    runs: bool = False
    reason: str = "MasterPending"
    text: str = ""
    launch: bool = False
    """A new master is due now."""
    again_at: float | None = None
    end: str = ""
    """The phase in which this ends the job; empty if it does not."""
    errors: int = 0
    quick_losses: int = 0
    """How many masters in a row were lost soon; the next pod remembers it."""


def reconcile(seen: Observed, now: float, *, default_image: str = "") -> Decision:
    """What to do about this job."""
    if seen.is_going:
        return Decision()
    if seen.status.phase in FINAL:
        return _after_the_end(seen, now)
    if not has_run(seen):
        waits = _why_it_waits(seen)
        if waits is not None:
            return Decision(_report(seen, waits, now))
    master = _judge(seen, now)
    if master.end:
        return Decision(_end(seen, master, now))
    if master.launch:
        return Decision(_launch(seen, master, now, default_image), master.again_at)
    actions = (*_missing(seen), *_old_pods(seen), *_report(seen, master, now))
    if master.runs:
        return Decision((*actions, CheckSecret()), now + SECRET_LOOK_S)
    return Decision(actions, master.again_at)


def refused(seen: Observed, text: str, now: float) -> tuple[Action, ...]:
    """What to tell the user when the API server has refused a necessary action."""
    return _report(seen, _Master(reason="Refused", text=text), now)


def has_run(seen: Observed) -> bool:
    """Whether the job has, or had, a master."""
    return seen.status.master.launches > 0 or bool(seen.pods)


def _why_it_waits(seen: Observed) -> _Master | None:
    """What keeps a job from its first start; None if nothing does."""
    if any(problem.fatal for problem in seen.problems):
        return _Master(reason=MALFORMED, text="nothing is started until the manifest is mended")
    if seen.job.suspend:
        return _Master(reason=SUSPENDED, text="nothing is started until the job is resumed")
    if seen.foreign:
        taken = ", ".join(seen.foreign)
        return _Master(reason="NameTaken", text=f"waits until others of its name are gone: {taken}")
    return None


# ---- the master ----------------------------------------------------------------------------------


def _judge(seen: Observed, now: float) -> _Master:
    """The state of the newest master, and what follows from it."""
    if not seen.pods:
        return _none_left(seen)
    pod = seen.pods[0]
    if pod.is_leaving:
        return _leaving(pod, now)
    phase, _, message = pods.seen(pod)
    match phase:
        case Phase.RUNNING:
            return _Master(runs=True, reason=MASTER_RUNNING, text=f"pod {pod.metadata.name}")
        case Phase.SUCCEEDED:
            text = f"the master ended well: pod {pod.metadata.name}"
            return _Master(end=SUCCEEDED, reason="Finished", text=text)
        case Phase.FAILED:
            return _failed(seen, pod, now)
        case _:
            why = f"pod {pod.metadata.name}: {message or 'it is being started'}"
            return _Master(text=why)


def _none_left(seen: Observed) -> _Master:
    count = seen.status.master
    text = "the first one"
    if count.launches:
        text = f"pod {names.master_pod_name(seen.job.name, count.launches - 1)} is gone"
    return _Master(launch=True, reason="MasterLost", text=text, errors=count.errors)


def _leaving(pod: MasterPod, now: float) -> _Master:
    """The state of a pod that was deleted, by hand or with its machine."""
    deadline = (seconds_of(pod.metadata.deletion_timestamp) or now) + OVERDUE_S
    text = f"pod {pod.metadata.name} is going"
    errors = pod.count(objects.ERRORS_ANNOTATION)
    if now < deadline:
        return _Master(reason="MasterLost", text=text, again_at=deadline)
    text = f"{text}, and its machine {pod.spec.node_name} does not confirm it"
    return _Master(launch=True, reason="MasterLost", text=text, errors=errors)


def _failed(seen: Observed, pod: MasterPod, now: float) -> _Master:
    _, reason, message = pods.seen(pod)
    lived_s = pod.ended_at - pod.created_at
    errors = pod.count(objects.ERRORS_ANNOTATION) if lived_s < LONG_S else 0
    errors += reason in OF_THE_PROGRAM
    losses = pod.count(objects.QUICK_LOSSES_ANNOTATION) if lived_s < SOON_S else 0
    text = f"pod {pod.metadata.name}: {message}"
    limit = RESTARTS if seen.job.master is None else seen.job.master.restart_count
    if reason in OF_THE_PROGRAM and errors > limit:
        text = f"the master failed {errors} times, and its restartCount is {limit}; {text}"
        return _Master(end=FAILED, reason="MasterFailed", text=text, errors=errors)
    due = pod.ended_at + _pause_s(losses)
    if now < due:
        text = f"{text}; the next one starts at {stamp(due)}"
        return _Master(reason="MasterLost", text=text, again_at=due)
    losses += lived_s < SOON_S
    return _Master(launch=True, reason="MasterLost", text=text, errors=errors, quick_losses=losses)


def _pause_s(losses: int) -> float:
    """How long the next master waits after `losses` masters that were lost soon."""
    return min(2.0 ** min(losses, 10), PAUSE_MAX_S) if losses else 0.0


def _launch(seen: Observed, lost: _Master, now: float, default_image: str) -> tuple[Action, ...]:
    """Make the next master, with everything it needs."""
    job = seen.job
    number = seen.status.master.launches
    if seen.pods:
        number = max(number, seen.pods[0].number + 1)
    body = objects.master_pod(
        job,
        number,
        default_image=default_image,
        errors=lost.errors,
        quick_losses=lost.quick_losses,
    )
    is_told = seen.status.condition(MASTER_RUNNING).reason == lost.reason
    told = () if is_told or not has_run(seen) else (Tell(lost.reason, lost.text, warning=True),)
    starting = _Master(text=f"pod {body['metadata']['name']}: it is being started")
    return (
        Confirm(),
        *_missing(seen),
        CreateSecret(),
        Create(PODS, body),
        *told,
        *_old_pods(seen, but=KEPT_PODS - 1),
        *_report(seen, starting, now, launches=number + 1, errors=lost.errors),
    )


def _missing(seen: Observed) -> tuple[Action, ...]:
    """The objects that do not exist, or not in the right form."""
    there = seen.digests or {}
    actions: list[Action] = [
        Apply(kind, body)
        for kind, body in objects.kept(seen.job)
        if there.get(kind.plural) != body["metadata"]["annotations"][objects.DIGEST_ANNOTATION]
    ]
    claim = objects.claim(seen.job)
    if claim is not None and claim[0].plural not in there:
        actions.append(Create(*claim))
    return tuple(actions)


def _old_pods(seen: Observed, but: int = KEPT_PODS) -> tuple[Action, ...]:
    return tuple(
        RemovePod(pod.metadata.name, pod.metadata.uid)
        for pod in seen.pods[but:]
        if pods.seen(pod)[0].is_final and not pod.is_leaving
    )


# ---- the end -------------------------------------------------------------------------------------


def _end(seen: Observed, master: _Master, now: float) -> tuple[Action, ...]:
    """End a job that is over, whose master did not, or could not, write that."""
    stop = (StopNodes(),) if master.end == FAILED else ()
    over = tuple(
        Condition(type=kind, status=status, reason=master.reason, message=master.text)
        for kind, status in ((master.end, "True"), (RUNNING, "False"))
    )
    report = _report(seen, master, now, phase=master.end, more=over, errors=master.errors)
    return (Confirm(), *stop, *report)


def _after_the_end(seen: Observed, now: float) -> Decision:
    actions: tuple[Action, ...] = ()
    master_ended = all(pods.seen(pod)[0].is_final for pod in seen.pods)
    if master_ended and seen.status.condition(MASTER_RUNNING).status == "True":
        actions = _report(seen, _Master(reason="Finished", text="the job is over"), now)
    ended_at = seconds_of(seen.status.completion_time or "")
    if seen.job.ttl_s is None or ended_at is None:
        return Decision(actions)
    forget_at = ended_at + seen.job.ttl_s
    if now >= forget_at:
        return Decision((DeleteJob(),))
    return Decision(actions, forget_at)


# ---- what people see -----------------------------------------------------------------------------


def _report(
    seen: Observed,
    master: _Master,
    now: float,
    *,
    phase: str = "",
    more: tuple[Condition, ...] = (),
    launches: int | None = None,
    errors: int | None = None,
) -> tuple[Action, ...]:
    """The status that describes the master, and Events for what is new in it.

    It always has every field that the operator owns: fields that are left out are removed.
    """
    count = seen.status.master
    conditions = [
        Condition(type=CREATED, status="True", reason="Accepted", message="the operator sees it"),
        _malformed(seen),
        Condition(
            type=MASTER_RUNNING,
            status="True" if master.runs else "False",
            reason=master.reason,
            message=master.text,
        ),
        *more,
    ]
    if master.reason == SUSPENDED:
        conditions.append(
            Condition(type=SUSPENDED, status="True", reason="NotStarted", message=master.text)
        )
    status: dict[str, Any] = {
        "conditions": [_dated(condition, seen, now) for condition in conditions],
        "master": {
            "launches": count.launches if launches is None else launches,
            "errors": count.errors if errors is None else errors,
        },
    }
    phase = phase or _phase(seen, master, launches)
    if phase:
        status["phase"] = phase
    if phase in FINAL:
        status["completionTime"] = stamp(now)
    told = tuple(_news(condition) for condition in conditions if _is_news(condition, seen))
    # Events follow the write: a status that cannot be written would repeat them with every try.
    return (WriteStatus(status), *told) if _differs(status, seen) else told


def _phase(seen: Observed, master: _Master, launches: int | None) -> str:
    """The phase of a job whose master has not written one yet; empty if the master has."""
    is_begun = has_run(seen) or launches is not None
    is_ours = seen.status.phase in ("", CREATED, PENDING)
    if not is_ours and has_run(seen):
        return ""
    if is_begun:
        return PENDING
    return SUSPENDED if master.reason == SUSPENDED else CREATED


def _malformed(seen: Observed) -> Condition:
    fatal = [str(problem) for problem in seen.problems if problem.fatal]
    if not fatal:
        notes = "; ".join(str(problem) for problem in seen.problems) or SOUND
        return Condition(type=MALFORMED, status="False", reason="Accepted", message=notes)
    text = "; ".join(fatal)
    if has_run(seen):
        text = f"the job goes on as it was before this: {text}"
    return Condition(type=MALFORMED, status="True", reason=MALFORMED, message=text)


def _dated(condition: Condition, seen: Observed, now: float) -> dict[str, str]:
    before = seen.status.condition(condition.type)
    has_turned = before.status != condition.status or not before.last_transition_time
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": stamp(now) if has_turned else before.last_transition_time,
    }


def _is_news(condition: Condition, seen: Observed) -> bool:
    before = seen.status.condition(condition.type)
    if condition.type == MALFORMED:
        is_dull = condition.message == SOUND and before.status != "True"
        return condition.message != before.message and not is_dull
    if condition.type != MASTER_RUNNING:
        return False
    return (condition.status, condition.reason) != (before.status, before.reason)


def _news(condition: Condition) -> Tell:
    if condition.type == MASTER_RUNNING:
        usual = (MASTER_RUNNING, "MasterPending", SUSPENDED, "Finished")
        return Tell(condition.reason, condition.message, condition.reason not in usual)
    return Tell(condition.reason, condition.message, warning=condition.status == "True")


def _differs(status: dict[str, Any], seen: Observed) -> bool:
    """Whether the job's status differs from this one."""
    before = seen.status
    if status.get("phase", before.phase) != before.phase:
        return True
    if status["master"] != {"launches": before.master.launches, "errors": before.master.errors}:
        return True
    return any(
        condition != _dated(before.condition(condition["type"]), seen, 0.0)
        for condition in status["conditions"]
    )
