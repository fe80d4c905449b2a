# SPDX-License-Identifier: Apache-2.0
"""Runs a scenario file: a conversation with the whole job core.

A line is an input with `key=value` words; the indented lines below it are what came out:

    NodeLost node=1 ...     a fact
    * NodeAdmitted ...      the records of the step, journaled before any command of it leaves
    > a Attached ...        an answer or a push, with the agent that gets it
    ! launch node=3 ...     another command to the driver
    @15.0                   what follows came out of a tick at this time, before the input itself
    deadline=32.0           when the core next wants a tick

`restart` makes a new core out of the journal's bytes and starts it as a new master; `compact` does
the same out of a snapshot. `view` prints the state as people see it.
"""

import dataclasses
import enum
import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.kernel import Command, Outcome, Tick
from holdfast.model.checkpoint import NONE, FileEntry, Shape, Version
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Move, Order
from holdfast.model.world import Member, World
from holdfast.protocol import messages as m
from tests.core.harness import Job, checkpoint, replayed
from tests.scenarios import checkpoint_inputs

INDENT = "    "

SPEC_KEYS = {
    "min": "min_nodes",
    "max": "max_nodes",
    "unit": "node_unit",
    "last_call": "last_call_s",
    "join_timeout": "join_timeout_s",
    "beat": "beat_s",
    "silence": "silence_s",
    "lease": "lease_s",
    "reconnect": "reconnect_s",
    "hang_after": "hang_after_s",
    "first_step": "first_step_s",
    "restart_timeout": "restart_timeout_s",
    "attach_timeout": "attach_timeout_s",
    "spares": "spare_nodes",
    "memory": "node_memory_mib",
}
RULES_KEYS = {name: field for name, field in SPEC_KEYS.items() if field.startswith(("m", "node_"))}

UNTOLD = frozenset(
    {
        *("job", "journal", "life", "beat_s", "lease_s", "host", "store_host", "session", "seq"),
        *("cause", "directory"),
    }
)
"""Fields that are the same everywhere."""

SILENT_IF_0 = frozenset(
    {"pause_s", "failed_starts", "broken", "by_plan", "finished", "is_everywhere"}
)

SHORT_NAMES = {"node_id": "node", "node_rank": "rank"}

Words = dict[str, str]


class Scenario:
    """One file, one job."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._job: Job | None = None
        self._seq = 0
        self._inputs: dict[str, Callable[[Words], Outcome]] = {
            "tick": lambda words: Outcome(),
            "attach": self._attach,
            "absent": lambda words: self.job.absent(words.pop("agent")),
            "leave": lambda words: self.job.leave(words.pop("agent")),
            "beat": self._beat,
            "started": lambda words: self.job.started(words.pop("agent"), int(words.pop("round"))),
            "done": lambda words: self.job.done(words.pop("agent"), int(words.pop("round"))),
            "failed": self._failed,
            "warmed": lambda words: self.job.warmed(words.pop("agent")),
            "offer": lambda words: self.job.offer_store(words.pop("agent"), int(words.pop("port"))),
            "seen": self._seen,
            "plan": self._plan,
            "stop": lambda words: self.job.feed(ev.StopRequested(0, 1, words.pop("reason"))),
            "restart": lambda words: self._restart(compacted=False),
            "compact": lambda words: self._restart(compacted=True),
            "set": lambda words: self._ask(words, m.KvSet(*_scoped(words), _value(words))),
            "get": lambda words: self._ask(words, m.KvGet(*_scoped_keys(words), _limit(words))),
            "add": lambda words: self._ask(words, m.KvAdd(*_scoped(words), int(words.pop("n")))),
            "push": lambda words: self._ask(words, m.QueuePush(*_scoped(words), _value(words))),
            "pop": lambda words: self._ask(words, m.QueuePop(*_scoped(words), _limit(words))),
            "barrier": self._barrier,
            **{name: partial(self._checkpoint, name) for name in checkpoint_inputs.CALLS},
        }

    @property
    def job(self) -> Job:
        assert self._job is not None, "the first input must be `job`"
        return self._job

    def run(self) -> str:
        """The file again, with what comes out now as its output."""
        lines: list[str] = []
        for number, line in enumerate(self._text.splitlines(), start=1):
            if line.startswith(INDENT):
                continue
            lines.append(line)
            if line and not line.startswith("#"):
                try:
                    lines += [f"{INDENT}{output}" for output in self._input(line)]
                except (ValueError, KeyError) as exc:
                    raise ValueError(f"line {number}: {exc}") from exc
        return "\n".join(lines) + "\n"

    def _input(self, line: str) -> list[str]:
        name, *rest = shlex.split(line)
        words = dict(word.split("=", 1) for word in rest)
        if name == "job":
            return self._open(words)
        at = float(words.pop("at", self.job.now))
        lines = self._pass_time(at, including=name == "tick")
        if name == "view":
            return [*lines, *_described_view(self.job)]
        if name not in self._inputs:
            raise ValueError(f"unknown input {name!r}")
        outcome = self._inputs[name](words)
        if words:
            raise ValueError(f"unknown keys: {', '.join(sorted(words))}")
        return [*lines, *self._described(outcome), self._deadline()]

    def _open(self, words: Words) -> list[str]:
        restarts = words.pop("relaunches", None)
        relaunches = JobSpec().node_relaunches
        if restarts is not None:
            relaunches = dict.fromkeys(ExitReason, int(restarts))
        worker_restarts = JobSpec().worker_restarts
        if "restarts" in words:
            worker_restarts[ExitReason.ERROR] = int(words.pop("restarts"))
        sized = words.pop("sized", "no") == "yes"
        managed = words.pop("managed", "no") == "yes" or sized
        given = {SPEC_KEYS[key]: _number(value) for key, value in words.items()}
        given.setdefault("first_step_s", math.inf)
        spec = JobSpec(
            managed=managed,
            size_from_platform=sized,
            node_relaunches=relaunches,
            worker_restarts=worker_restarts,
            **given,  # type: ignore[arg-type]
        )
        self._job = Job(spec, started=False)
        return [*self._described(self.job.start()), self._deadline()]

    def _pass_time(self, at: float, *, including: bool) -> list[str]:
        """Ticks at every deadline on the way, each with its time if anything came out."""
        lines: list[str] = []
        while (due := self.job.deadline) is not None and (due < at or (including and due == at)):
            self.job.now = max(self.job.now, due)
            output = self._described(self.job.feed(Tick()))
            if output:
                lines += [f"@{_short(self.job.now)}", *output]
        self.job.now = at
        return lines

    def _deadline(self) -> str:
        return f"deadline={_short(self.job.deadline)}"

    # ---- inputs ---------------------------------------------------------------------------------

    def _attach(self, words: Words) -> Outcome:
        rules = m.JobRules(*msgspec.structs.astuple(_rules(self.job, words)))
        return self.job.attach(
            words.pop("agent"),
            job_rules=rules,
            peer_port=int(words.pop("peer", 0)),
            cold=words.pop("cold", "") == "1",
            nproc=int(words.pop("nproc", 1)),
            host=words.pop("host", ""),
            round=int(words.pop("round", 0)),
            node=int(words.pop("node", -1)),
            rank=int(words.pop("rank", -1)),
            topology=words.pop("switch", ""),
            was=words.pop("was", ""),
        )

    def _beat(self, words: Words) -> Outcome:
        return self.job.beat(
            words.pop("agent"),
            round=int(words.pop("round", 0)),
            steps=int(words.pop("steps", 0)),
            step=int(words.pop("step", -1)),
            first=float(words.pop("first", -1)),
            last=float(words.pop("last", -1)),
        )

    def _failed(self, words: Words) -> Outcome:
        return self.job.failed(
            words.pop("agent"),
            int(words.pop("round")),
            reason=words.pop("reason", "error"),
            last=float(words.pop("last", -1)),
        )

    def _seen(self, words: Words) -> Outcome:
        reason = words.pop("reason", None)
        return self.job.seen(
            int(words.pop("node")),
            Phase(words.pop("phase")),
            ExitReason(reason) if reason is not None else None,
        )

    def _plan(self, words: Words) -> Outcome:
        changes: dict[str, object] = {
            key: int(words.pop(key)) for key in ("nodes", "memory_mib") if key in words
        }
        if "suspend" in words:
            changes["suspend"] = words.pop("suspend") == "yes"
        if "remove" in words:
            changes["remove"] = tuple(map(NodeId, map(int, words.pop("remove").split(","))))
        if "move" in words:
            changes["migrate"] = (Move(node_id=NodeId(int(words.pop("move")))),)
        return self.job.plan(plan_id=words.pop("id"), **changes)

    def _restart(self, *, compacted: bool) -> Outcome:
        before = self.job.snapshot()
        if replayed(self.job.spec, self.job.records).core.snapshot() != before:
            raise ValueError("the journal leads to another state than the one that wrote it")
        return self.job.restart(compacted=compacted)

    def _barrier(self, words: Words) -> Outcome:
        body = m.Barrier(
            int(words.pop("scope", 0)),
            words.pop("name"),
            words.pop("member", words["agent"]),
            int(words.pop("size", 0)),
            _limit(words),
        )
        return self._ask(words, body)

    def _checkpoint(self, name: str, words: Words) -> Outcome:
        return checkpoint(self.job, checkpoint_inputs.call(name, words), words.pop("agent"))

    def _ask(self, words: Words, body: m.KvCall) -> Outcome:
        self._seq += 1
        return self.job.ask(
            body,
            words.pop("agent"),
            session=words.pop("session", f"s{self._seq}"),
            seq=int(words.pop("seq", 1)),
        )

    # ---- output ---------------------------------------------------------------------------------

    def _described(self, outcome: Outcome) -> list[str]:
        records = " ".join(type(record).__name__ for record in outcome.records)
        return [
            *(_described(fact) for fact in outcome.facts),
            *([f"* {records}"] if records else []),
            *(self._described_command(command) for command in outcome.commands),
        ]

    def _described_command(self, command: Command) -> str:
        match command:
            case cmd.Reply():
                who = self.job.agent_of_link.get(command.link, "somebody")
                return f"> {who} {_described(command.body)}"
            case cmd.Push():
                return f"> {self._agent(command.node_id)} {_described(command.body)}"
            case cmd.Bind():
                return f"! bind node={command.node_id} {self.job.agent_of_link[command.link]}"
            case cmd.Drop():
                return f"! drop {self._agent(command.node_id)}"
            case cmd.LaunchNode():
                return _launch(command.order)
            case cmd.RemoveNode():
                return f"! remove node={command.node_id}"
            case cmd.AnswerPlan():
                return f"! answer {command.plan_id} {'yes' if command.ok else 'no'}"
            case cmd.FinishJob():
                return f"! finish {_described(command.end)}"
        raise ValueError(f"no words for {command!r}")

    def _agent(self, node_id: NodeId) -> str:
        names = [name for name, node in self.job.node_of.items() if node == node_id]
        return names[-1] if names else f"node-{node_id}"


def _launch(order: Order) -> str:
    words = f"! launch node={order.node_id} rank={order.node_rank}"
    extras = {
        "relaunches": order.relaunches,
        "memory": order.memory_mib,
        "cpu": order.cpu_milli,
        "priority": order.priority,
        "group": order.group + 1 and order.group,
        "avoid": ",".join(order.avoid_hosts),
    }
    return " ".join([words, *(f"{key}={value}" for key, value in extras.items() if value)])


def _rules(job: Job, words: Words) -> m.JobRules:
    """What this agent was started with: the job's rules unless the line says otherwise."""
    changed = {RULES_KEYS[key]: _number(words.pop(key)) for key in list(words) if key in RULES_KEYS}
    spec = dataclasses.replace(job.spec, **changed)  # type: ignore[arg-type]
    return m.JobRules(
        spec.min_nodes,
        spec.max_nodes,
        spec.node_unit,
        spec.last_call_s,
        spec.join_timeout_s,
        spec.worker_restarts[ExitReason.ERROR],
    )


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _scoped(words: Words) -> tuple[int, str]:
    return int(words.pop("scope", 0)), words.pop("key")


def _scoped_keys(words: Words) -> tuple[int, tuple[str, ...]]:
    return int(words.pop("scope", 0)), tuple(words.pop("keys").split(","))


def _value(words: Words) -> bytes:
    return words.pop("value").encode()


def _limit(words: Words) -> float:
    return float(words.pop("limit", 60))


def _described(thing: object) -> str:
    """A class name and its fields, without those that say nothing or are the same everywhere."""
    if isinstance(thing, m.RunWorld):
        return (
            f"RunWorld {thing.round}/{thing.generation} "
            f"group={thing.group_rank}/{thing.group_size} "
            f"ranks_from={thing.rank_offset}/{thing.world_size} "
            f"store={thing.store_port}{' hosted' if thing.store_hosted else ''} "
            f"restarts={thing.restarts}{' planned' if thing.planned else ''}"
        )
    if isinstance(thing, msgspec.Struct):
        names: Sequence[str] = thing.__struct_fields__
    else:
        assert dataclasses.is_dataclass(thing)
        names = [field.name for field in dataclasses.fields(thing)]
    words = [type(thing).__name__]
    for name in names:
        value = getattr(thing, name)
        if name in UNTOLD:
            continue
        if value is None or value in ("", (), -1) or (name in SILENT_IF_0 and not value):
            continue
        words.append(f"{SHORT_NAMES.get(name, name)}={_short(value)}")
    return " ".join(words)


def _short(value: object) -> str:
    match value:
        case World():
            ranks = ",".join(str(member.node_rank) for member in value.members)
            ids = ",".join(str(member.node_id) for member in value.members)
            return f"{value.round}/{value.generation} ranks=[{ranks}] nodes=[{ids}]"
        case Member():
            return f"node={value.node_id} rank={value.node_rank} incarnation={value.incarnation}"
        case m.JobRules():
            return f"{value.min_nodes}..{value.max_nodes}/{value.node_unit}"
        case Version():
            return f"{value.lineage}.{value.step}" if value != NONE else "none"
        case Shape():
            return f"{value.world_size}{'s' if value.shared else ''}"
        case FileEntry():
            return value.name
        case enum.Enum():
            return str(value.value)
        case float():
            return f"{round(value, 3):g}"
        case bytes():
            return value.decode()
        case str():
            return f'"{value}"' if " " in value or not value else value
        case tuple():
            return "[" + ",".join(_short(part) for part in value) + "]"
        case msgspec.Struct():
            return f"({_described(value)})"
    return str(value)


def _described_view(job: Job) -> list[str]:
    view = job.machines.view(job.now)
    lines = [f"job {view['state']} {view['reason']}".rstrip()]
    world, nodes, progress = view["world"], view["nodes"], view["progress"]
    assert isinstance(world, dict)
    assert isinstance(nodes, list)
    assert isinstance(progress, dict)
    lines.append("world " + " ".join(f"{key}={_view_word(value)}" for key, value in world.items()))
    lines += [
        f"node {row['node_id']} rank={NodeRank(row['node_rank'])} {row['phase']} "
        f"incarnation={row['incarnation']}"
        for row in nodes
    ]
    checkpoints = view["checkpoints"]
    assert isinstance(checkpoints, list)
    for row in checkpoints:
        words = (f"{key}={_view_word(value)}" for key, value in row.items() if value != "")
        lines.append("checkpoints " + " ".join(words))
    spent = [f"{use}={seconds:g}" for use, seconds in progress["seconds"].items() if seconds]
    lines.append(f"step {progress['step']} of {progress['steps_total']} done: {' '.join(spent)}")
    for incident in progress["incidents"]:
        stages = " ".join(f"{name}={took:g}" for name, took in incident["stages"].items())
        word = "closed" if incident["closed"] else "open"
        lines.append(f"incident {incident['number']} {word} {stages}")
    return lines


def _view_word(value: object) -> str:
    if isinstance(value, list):
        return "[" + ",".join(str(part) for part in value) + "]"
    return _short(value)
