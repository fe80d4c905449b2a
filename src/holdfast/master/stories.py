# SPDX-License-Identifier: Apache-2.0
"""Each fact as one sentence for people. Facts that are nobody's news have none."""

from collections.abc import Mapping
from typing import Any

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.model.checkpoint import NONE


def tell(event: Event) -> str:
    """What happened, in plain words; empty if it is not worth a line."""
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
        case _:
            return _tell_of_plans(event)


def _tell_of_plans(event: Event) -> str:
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
    return _tell_of_worlds(event)


def _tell_of_worlds(event: Event) -> str:
    match event:
        case ev.WorldFormed():
            world = event.world
            nodes, workers = _count(len(world.members), "node"), _count(world.size, "worker")
            return f"round {world.round}: {nodes}, {workers} ({event.reason})"
        case ev.WorldStarted():
            others = f", {event.others}" if event.others else ""
            return f"round {event.round}: all workers run ({event.how} start{others})"
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
    return _tell_of_checkpoints(event)


def _tell_of_checkpoints(event: Event) -> str:
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
    return _tell_of_data(event)


def _tell_of_data(event: Event) -> str:
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


def fields_of(event: Event) -> dict[str, str | int | float]:
    """What an event is about, for programs: the node, the round, the incident, the step."""
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
    return about


def describe_progress(view: Mapping[str, Any]) -> str:
    """The status line of a running job."""
    world, progress = view["world"], view["progress"]
    nodes, workers = _count(len(world["nodes"]), "node"), _count(world["world_size"], "worker")
    done = progress["step"] if progress["step"] >= 0 else progress["steps_total"]
    parts = [f"round {world['round']}", nodes, workers, f"step {done}"]
    if world["state"] != "running":
        parts = [f"round {world['round']} is {world['state']}"]
        if "starts_in_s" in world:
            parts.append(f"the next starts in {world['starts_in_s']:.0f} s")
    restarts = sum(view["restarts"].values())
    if restarts:
        parts.append(_count(restarts, "restart"))
    if progress["goodput"] is not None:
        parts.append(f"goodput {progress['goodput']:.0%}")
    return f"{view['job']}: {', '.join(parts)}"


def _pause(event: ev.WorldBroken) -> str:
    if not event.pause_s:
        return ""
    return (
        f"; round {event.round + 1} starts in {event.pause_s:g} s: the workers failed before their "
        f"first step {event.failed_starts} times in a row"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
