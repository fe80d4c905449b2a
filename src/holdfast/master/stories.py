# SPDX-License-Identifier: Apache-2.0
"""Each fact as one sentence for people. Facts that are no news have none."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.model.checkpoint import NONE
from holdfast.runtime.observe import Level

_WARNINGS = (
    ev.NodeAbsent,
    ev.NodeLost,
    ev.NobodyHeard,
    ev.RankGivenUp,
    ev.WorldBroken,
    ev.FirstStepLate,
    ev.AttemptFailed,
    ev.CopyFailed,
    ev.SavesFailed,
    ev.PieceSetAside,
)


def level_of(event: Event) -> Level:
    """How much it matters to people."""
    match event:
        case ev.JobFinished(ok=False, stopped=0):
            return Level.ERROR
        case ev.PlanSettled(ok=False):
            return Level.WARNING
        case ev.DatasetRestored() if event.problem:
            return Level.WARNING
    return Level.WARNING if isinstance(event, _WARNINGS) else Level.INFO


def tell(event: Event) -> str:
    """What happened, in plain words; empty if it is not worth a line."""
    for tell_of in (_of_nodes, _of_plans, _of_worlds, _of_checkpoints, _of_data):
        if text := tell_of(event):
            return text
    return ""


def _of_nodes(event: Event) -> str:
    match event:
        case ev.GenerationRaised():
            return f"the master serves as generation {event.generation}"
        case ev.NodeReady():
            verb = "came back" if event.returned else "joined"
            member, workers = event.member, _count(event.member.nproc, "worker")
            return f"node rank {member.node_rank} {verb} from {member.host} ({workers})"
        case ev.NodeAbsent():
            return f"the stream of node id {event.node_id} broke; it may come back"
        case ev.NodeLost():
            return f"node rank {event.node_rank} is lost: {event.message}"
        case ev.NodeOrdered():
            after = f" after a pause of {event.pause_s:g} s" if event.pause_s else ""
            return f"node rank {event.node_rank} is ordered{after}: {event.reason}"
        case ev.LeaseExpired():
            return f"the lease of lost node id {event.node_id} is over"
        case ev.NobodyHeard():
            return (
                f"no node has been heard for {event.quiet_s:.1f} s: the master's own network may "
                "be down, so it waits for the first to come back until their leases end"
            )
        case ev.HeardAgain():
            return f"node id {event.node_id} is heard again after {event.quiet_s:.1f} s"
    return ""


def _of_plans(event: Event) -> str:
    match event:
        case ev.PlanSettled():
            word = "" if event.ok else " is refused"
            return f"plan {event.plan_id}{word}: {event.text}"
        case ev.JobSuspended():
            return "the job is suspended: its nodes save what they have and go"
        case ev.JobResumed() if event.stopped:
            return f"the job goes on; the last time {event.stopped}"
        case ev.JobResumed():
            return "the job is resumed: its nodes are ordered again"
        case ev.MemoryRaised():
            return (
                f"node rank {event.node_rank} was out of memory: it gets {event.memory_mib} MiB "
                f"instead of {event.before_mib}"
            )
        case ev.HostAvoided():
            return f"no node is put on {event.host} any more if there are others ({event.reason})"
        case ev.RankGivenUp():
            return f"{event.role} {event.node_rank} is not launched again: {event.why}"
        case ev.GroupMoved():
            nodes = _count(event.nodes, "node")
            return f"group {event.group} ({nodes}) is launched again as group {event.successor}"
    return ""


def _of_worlds(event: Event) -> str:
    match event:
        case ev.WorldFormed():
            world = event.world
            nodes, workers = _count(len(world.members), "node"), _count(world.size, "worker")
            return f"round {world.round}: {nodes}, {workers} ({event.reason})"
        case ev.WorldStarted():
            others = f", {event.others}" if event.others else ""
            return f"round {event.round}: all workers run ({event.how} start{others})"
        case ev.FirstStepLate():
            return (
                f"round {event.round}: not every worker has reported a step in "
                f"{event.waited_s:.0f} s; the workers are left alone"
            )
        case ev.WorldBroken():
            return f"round {event.round} is over: {event.reason}{_pause(event)}"
        case ev.WorldDone():
            return f"round {event.round}: every worker finished"
        case ev.IncidentClosed():
            total = event.detect_s + event.rendezvous_s + event.restart_s + event.restore_s
            return (
                f"steps again {total:.2f} s after the last one (detect {event.detect_s:.2f}, "
                f"rendezvous {event.rendezvous_s:.2f}, restart {event.restart_s:.2f}, "
                f"restore {event.restore_s:.2f})"
            )
        case ev.JobFinished():
            word = "succeeded" if event.ok else ("is stopped" if event.stopped else "failed")
            return f"the job {word}: {event.reason}"
    return ""


def _of_checkpoints(event: Event) -> str:
    match event:
        case ev.RestoreAgreed(fresh=False):
            what = f"step {event.version.step}" if event.version != NONE else "nothing"
            told = "; ".join((f"every rank restores {what} of {event.directory}", *event.notes))
            return f"round {event.round}: {told}"
        case ev.AttemptOpened():
            return f"step {event.version.step} goes to {event.directory}: {event.reason}"
        case ev.CheckpointCommitted():
            return f"step {event.version.step} is committed in {event.directory}"
        case ev.AttemptFailed():
            step, where = event.version.step, event.directory
            return f"step {step} did not reach {where}, older ones are untouched: {event.why}"
        case ev.CopyFailed():
            return f"copies of {event.directory} on other nodes: {event.why}"
        case ev.SavesFailed():
            which = f"node rank {event.node_rank}" if event.node_rank >= 0 else "a node"
            count = _count(event.failed, "save")
            return f"{which} could not make {count}, the last of step {event.step}: {event.why}"
        case ev.CopiesResumed():
            return f"step {event.version.step} of {event.directory} is safe on other nodes again"
    return ""


def _of_data(event: Event) -> str:
    match event:
        case ev.DatasetRegistered():
            what = event.dataset
            epochs = _count(what.epochs, "epoch") if what.epochs else "epochs without end"
            with_it = f", its position goes with {what.series}" if what.series else ""
            return f"dataset {what.name} ({what.kind}) is registered: {epochs}{with_it}"
        case ev.DatasetRestored():
            if event.problem:
                return f"nobody can read from dataset {event.name}: {event.problem}"
            return f"dataset {event.name} is back where the model is, in epoch {event.epoch}"
        case ev.EpochOver():
            of = f" of {event.epochs}" if event.epochs else ""
            return f"dataset {event.name}: epoch {event.epoch}{of} is over"
        case ev.PieceSetAside():
            piece = event.piece
            where = f"{piece.begin} to {piece.end} of extent {piece.extent}, epoch {piece.epoch}"
            return (
                f"dataset {event.name}: {where}, failed {_count(event.attempts, 'time')} and is "
                f"set aside: {event.why}"
            )
    return ""


_FIELDS = {
    "node_id": "node_id",
    "node_rank": "node_rank",
    "round": "round",
    "number": "incident",
    "generation": "generation",
    "directory": "directory",
}


class IncidentOf(Protocol):
    """The number of the incident that ended a round, or that its late first step is; 0 if none."""

    def __call__(self, round: int, *, late: bool = False) -> int: ...


def _no_incident(round: int, *, late: bool = False) -> int:
    return 0


def fields_of(event: Event, incident_of: IncidentOf = _no_incident) -> dict[str, str | int | float]:
    """What an event is about, for programs: the node, the round, the incident, the step.

    `incident_of` is asked because the event that opens an incident, and the round that follows, are
    told before it is known how the incident closes.
    """
    about: dict[str, str | int | float] = {
        name: value
        for attribute, name in _FIELDS.items()
        if isinstance(value := getattr(event, attribute, None), int | str)
    }
    if (member := getattr(event, "member", None)) is not None:
        about |= {"node_id": member.node_id, "node_rank": member.node_rank}
    if (world := getattr(event, "world", None)) is not None:
        about |= {"round": world.round, "generation": world.generation}
    if (version := getattr(event, "version", None)) is not None:
        about["step"] = version.step
    number = incident_of(event.round, late=True) if isinstance(event, ev.FirstStepLate) else 0
    if not number and (ended := _ended_round(event)):
        number = incident_of(ended)
    if number:
        about["incident"] = number
    return about


def dataset_of(event: Event) -> str:
    """The name of the dataset that a fact is about; empty if it is about none."""
    match event:
        case ev.DatasetRegistered():
            return event.dataset.name
        case ev.DatasetRestored() | ev.EpochOver() | ev.PieceSetAside():
            return event.name
    return ""


def _ended_round(event: Event) -> int:
    """The round whose end this event belongs to; 0 if there is none."""
    match event:
        case ev.WorldBroken():
            return event.round
        case ev.WorldFormed():
            return event.world.round - 1
        case ev.WorldStarted() | ev.FirstStepLate() | ev.RestoreAgreed():
            return event.round - 1
    return 0


def describe_progress(view: Mapping[str, Any]) -> str:
    """The status line of a running job. A narrow terminal cuts it: what matters most comes first.

    "warm": workers that had to be restarted now would start warm, on every node.
    """
    progress, incidents = view["progress"], view["progress"]["incidents"]
    open_one = incidents[-1] if incidents and not incidents[-1]["closed"] else None
    if open_one is not None:
        parts = [_recovery(open_one, view["world"]), _step(progress)]
    elif progress["stage"] in ("idle", "rendezvous", "restart", "start"):
        parts = [f"{progress['stage']} for {_short(progress['stage_s'])}", _step(progress)]
    else:
        parts = [_step(progress), _speed(progress), _left(view)]
    parts.append(_warmth(view["nodes"]))
    if open_one is None and incidents:
        parts.append(_last(incidents[-1], view["time_s"]))
    restarts = sum(view["restarts"].values())
    parts.append(_count(restarts, "restart") if restarts else "")
    if progress["goodput"] is not None:
        parts.append(f"goodput {progress['goodput']:.0%}")
    parts += [_world(view["world"]), view["job"]]
    return " | ".join(filter(None, parts))


def _step(progress: Mapping[str, Any]) -> str:
    done = progress["step"] if progress["step"] >= 0 else progress["steps_total"]
    of = f" of {progress['steps_wanted']:,}" if progress["steps_wanted"] else ""
    return f"step {done:,}{of}" if done else ""


def _speed(progress: Mapping[str, Any]) -> str:
    per_s = progress["steps_per_s"]
    if per_s is None:
        is_late = progress["step_age_s"] >= 0
        return f"no step for {_short(progress['step_age_s'])}" if is_late else ""
    return f"{per_s:.1f} steps/s" if per_s >= 1 else f"{1 / per_s:.1f} s/step"


def _left(view: Mapping[str, Any]) -> str:
    """For how long it still trains: by the script's own word, or by the only dataset it reads."""
    if (left_s := view["progress"]["left_s"]) is not None:
        return f"{_short(left_s)} left"
    reading = [one for one in view["datasets"] if not one["is_over"] and one["epoch_left_s"] >= 0]
    if len(reading) != 1:
        return ""
    (one,) = reading
    of = f" of {one['epochs']}" if one["epochs"] else ""
    return f"epoch {one['epoch'] + 1}{of}, {_short(one['epoch_left_s'])} left in it"


def _recovery(incident: Mapping[str, Any], world: Mapping[str, Any]) -> str:
    """What the job does while it does not train, as far as that is known."""
    if incident["late"]:
        return f"no step reported for {_short(incident['open_s'])}; the workers are left alone"
    text = f"recovering for {_short(incident['open_s'])} ({incident['part'] or incident['stage']})"
    if "starts_in_s" in world:
        text += f", the next round starts in {world['starts_in_s']:.0f} s"
    return f"{text}: {incident['reason']}"


def _last(incident: Mapping[str, Any], now: float) -> str:
    took = f" ({_short(incident['recovery_s'])})" if incident["recovery_s"] > 0 else ""
    return f"{_short(now - incident['at_s'])} ago: {incident['reason']}{took}"


def _warmth(nodes: Sequence[Mapping[str, Any]]) -> str:
    known = [node["warm"] for node in nodes if node.get("warm") is not None]
    if not known or len(set(known)) == 1:
        return "" if not known else "warm" if known[0] else "cold"
    return f"{sum(known)} of {len(known)} nodes warm"


def _world(world: Mapping[str, Any]) -> str:
    nodes, workers = _count(len(world["nodes"]), "node"), _count(world["world_size"], "worker")
    return f"round {world['round']}: {nodes}, {workers}" if world["nodes"] else ""


def _short(seconds: float) -> str:
    """Seconds in few letters."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def _pause(event: ev.WorldBroken) -> str:
    if not event.pause_s:
        return ""
    return (
        f"; round {event.round + 1} starts in {event.pause_s:g} s: the workers failed before their "
        f"first step {event.failed_starts} times in a row"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
