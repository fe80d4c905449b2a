# SPDX-License-Identifier: Apache-2.0
"""Drives a whole job core in tests: agents by name, job time by hand, restarts from the journal."""

from collections.abc import Sequence
from typing import Any, TypeVar

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.flow import JobCore, build
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.kernel import Command, Event, Outcome, Record, Tick
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Order, Plan
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import CheckpointCall

OutcomePart = TypeVar("OutcomePart")

TICKS_MAX = 1000
"""More ticks than this in one wait mean that a deadline never goes away."""


def replayed(spec: JobSpec, records: Sequence[Record]) -> JobCore:
    """A core as a restarted master has it: out of the journal's bytes."""
    fresh = build(spec, "job")
    fresh.core.check_every_step()
    for record in records:
        fresh.core.replay(rec.decode_record(rec.encode_record(record)))
    return fresh


def rules(**changes: int | float) -> m.JobRules:
    """The rules of a default spec, with changes."""
    return m.JobRules(**{**_as_dict(rules_of(JobSpec())), **changes})  # type: ignore[arg-type]


def _as_dict(struct: m.JobRules) -> dict[str, int | float]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def of_kind(kind: type[OutcomePart], parts: Sequence[object]) -> list[OutcomePart]:
    """Those of `parts` that are of this class."""
    return [part for part in parts if isinstance(part, kind)]


class Job:
    """One job under test. Every call is one event; `now` moves by `at` only.

    `is_small`: the invariants of the machines are looked at after every step.
    """

    def __init__(
        self, spec: JobSpec | None = None, *, started: bool = True, is_small: bool = True
    ) -> None:
        self.spec = spec or JobSpec()
        self.machines = build(self.spec, "job")
        if is_small:
            self.machines.core.check_every_step()
        self.now = 0.0
        self.records: list[Record] = []
        self.node_of: dict[str, NodeId] = {}
        self.agent_of_link: dict[int, str] = {}
        self._incarnation_of: dict[str, int] = {}
        self._links = self._seqs = self._starts = self._plans = 0
        if started:
            self.start()

    # ---- time -----------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        return self.machines.core.deadline()

    def feed(self, event: Event, at: float | None = None) -> Outcome:
        """One event. Deadlines before `at` are met first, as a driver would."""
        result = Outcome()
        if at is not None:
            result.add(self.wait(at, including=False))
        result.add(self._handle(event))
        return result

    def wait(self, at: float, *, including: bool = True) -> Outcome:
        """Let job time pass until `at`, with a tick at every deadline on the way."""
        assert at >= self.now, "job time never goes back"
        result = Outcome()
        for _ in range(TICKS_MAX):
            due = self.deadline
            if due is None or due > at or (due == at and not including):
                break
            self.now = max(self.now, due)
            result.add(self._handle(Tick()))
        else:
            raise AssertionError(f"the deadline {self.deadline} does not go away")
        self.now = at
        return result

    def _handle(self, event: Event) -> Outcome:
        outcome = self.machines.core.handle(event, self.now)
        self.records += outcome.records
        for command in outcome.commands:
            self._learn(command)
        return outcome

    def _learn(self, command: Command) -> None:
        if isinstance(command, cmd.Reply) and isinstance(command.body, m.Attached):
            name = self.agent_of_link[command.link]
            self.node_of[name] = NodeId(command.body.node_id)
            self._incarnation_of[name] = command.body.incarnation

    def link(self, name: str) -> int:
        """A new link of this agent."""
        self._links += 1
        self.agent_of_link[self._links] = name
        return self._links

    def attach(
        self,
        name: str,
        *,
        at: float | None = None,
        job_rules: m.JobRules | None = None,
        nproc: int = 1,
        host: str = "",
        round: int = 0,
        node: int = -1,
        rank: int = -1,
        incarnation: int | None = None,
        topology: str = "",
        cold: bool = False,
        peer_port: int = 0,
        was: str = "",
    ) -> Outcome:
        """The agent process `name` reports on a new link; it remembers what it was called."""
        known = self._incarnation_of.get(name, 0)
        attach = m.Attach(
            agent_key=name,
            rules=job_rules or rules_of(self.spec),
            nproc=nproc,
            host=host or f"host-{name}",
            store_port=4000,
            round=round,
            node_id=node,
            node_rank=rank,
            incarnation=known if incarnation is None else incarnation,
            topology=topology,
            cold=cold,
            peer_port=peer_port,
            ended_key=was,
        )
        return self.feed(ev.AttachRequested(self.link(name), 1, attach), at)

    def absent(self, name: str, at: float | None = None) -> Outcome:
        return self.feed(ev.NodeAbsent(self.node_of[name]), at)

    def leave(self, name: str, at: float | None = None) -> Outcome:
        event = ev.LeaveRequested(self.node_of[name], self.link(name), 1, "it was told to go")
        return self.feed(event, at)

    def beat(
        self,
        name: str,
        at: float | None = None,
        *,
        round: int = 0,
        steps: int = 0,
        step: int = -1,
        first: float = -1.0,
        last: float = -1.0,
        warm: bool | None = None,
        total: int = 0,
    ) -> Outcome:
        beat = m.Beat(round, steps, step, first, last, 0.5, 1000, warm=warm, total_steps=total)
        return self.feed(ev.BeatReceived(self.node_of[name], beat), at)

    def started(self, name: str, round_number: int, at: float | None = None) -> Outcome:
        report = m.WorkersStarted(round_number, 5000 + round_number, "zygote", 0.05)
        return self.feed(ev.StartReported(self.node_of[name], self.link(name), 1, report), at)

    def offer_store(self, name: str, port: int, at: float | None = None) -> Outcome:
        event = ev.StoreOffered(self.node_of[name], self.link(name), 1, port)
        return self.feed(event, at)

    def warmed(self, name: str, at: float | None = None) -> Outcome:
        return self.feed(ev.NodeWarmed(self.node_of[name], self.link(name), 1), at)

    def failed(
        self,
        name: str,
        round_number: int,
        at: float | None = None,
        *,
        reason: ExitReason | str = ExitReason.ERROR,
        message: str = "exited with code 1",
        last: float = -1.0,
        alike: int = 0,
    ) -> Outcome:
        info = m.FailureInfo(
            0, 0, 77, 1, None, str(reason), message, last_step_ago_s=last, alike=alike
        )
        report = m.WorkersFailed(round_number, (info,))
        return self.feed(ev.FailureReported(self.node_of[name], self.link(name), 1, report), at)

    def done(self, name: str, round_number: int, at: float | None = None) -> Outcome:
        report = m.WorkersDone(round_number)
        return self.feed(ev.DoneReported(self.node_of[name], self.link(name), 1, report), at)

    def seen(
        self,
        node: int,
        phase: Phase,
        reason: ExitReason | None = None,
        at: float | None = None,
        *,
        host: str = "",
        message: str = "",
    ) -> Outcome:
        return self.feed(ev.NodeSeen(NodeId(node), phase, reason, message, host), at)

    def plan(self, at: float | None = None, **changes: Any) -> Outcome:
        """Somebody asks for a change: under a name of its own unless one is given."""
        self._plans += 1
        plan = Plan(**{"plan_id": f"plan-{self._plans}", **changes})
        return self.feed(ev.PlanAsked(plan), at)

    def ask(
        self,
        body: m.KvCall,
        name: str = "",
        *,
        at: float | None = None,
        session: str = "",
        seq: int = 0,
        link: int | None = None,
    ) -> Outcome:
        """A worker's request through the agent `name`, in a session of its own unless told."""
        self._seqs += 1
        node = self.node_of.get(name, NodeId(-1))
        return self.feed(
            ev.KvRequested(
                node,
                self.link(name) if link is None else link,
                1,
                session or f"session-{self._seqs}",
                seq or 1,
                body,
            ),
            at,
        )

    def answer(
        self,
        body: m.KvCall,
        name: str = "",
        *,
        at: float | None = None,
        session: str = "",
        seq: int = 0,
    ) -> m.Answer:
        """Ask, and return the one answer that came at once."""
        (answer,) = answers(self.ask(body, name, at=at, session=session, seq=seq))
        return answer

    def start(self) -> Outcome:
        """A master begins to serve: the first is m1, the next m2."""
        self._starts += 1
        return self.feed(ev.MasterStarted(nonce=f"m{self._starts}"))

    def restart(self, at: float | None = None, *, compacted: bool = False) -> Outcome:
        """The master dies and comes back from its journal, or from a snapshot of it."""
        if at is not None:
            self.now = at
        if compacted:
            self.records = list(self.machines.core.snapshot())
        self.machines = replayed(self.spec, self.records)
        return self.start()

    def world(self) -> list[int]:
        """The node ranks of the present world in order, by what is published to people."""
        nodes = self._view("world")["nodes"]
        assert isinstance(nodes, list)
        return nodes

    def round(self) -> int:
        number = self._view("world")["round"]
        assert isinstance(number, int)
        return number

    def state(self) -> str:
        return str(self.machines.view(self.now)["state"])

    def seconds(self) -> dict[str, float]:
        """Where the time went."""
        seconds = self._view("progress")["seconds"]
        assert isinstance(seconds, dict)
        return seconds

    def incidents(self) -> list[dict[str, object]]:
        incidents = self._view("progress")["incidents"]
        assert isinstance(incidents, list)
        return incidents

    def snapshot(self) -> list[Record]:
        return self.machines.core.snapshot()

    def _view(self, part: str) -> dict[str, object]:
        view = self.machines.view(self.now)[part]
        assert isinstance(view, dict)
        return view


def checkpoint(job: Job, body: CheckpointCall, name: str) -> Outcome:
    """What the agent `name` asks the ledger of checkpoints."""
    return job.feed(ev.CheckpointRequested(job.node_of[name], job.link(name), 1, body))


def orders(outcome: Outcome) -> list[Order]:
    """The nodes that the platform was asked for."""
    return [launch.order for launch in of_kind(cmd.LaunchNode, outcome.commands)]


def fail(job: Job, node: int, reason: ExitReason, host: str = "") -> Order | None:
    """A node runs and fails: the order of its successor, whatever the pause; None if none."""
    job.seen(node, Phase.RUNNING, host=host)
    outcome = job.seen(node, Phase.FAILED, reason)
    if of_kind(ev.NodeOrdered, outcome.facts) and not orders(outcome):
        assert job.deadline is not None
        outcome = job.wait(job.deadline)
    return next(iter(orders(outcome)), None)


def reason_of_the_end(job: Job) -> str:
    assert job.state() == "failed"
    return str(job.machines.view(job.now)["reason"])


def removed(outcome: Outcome) -> list[int]:
    """The ids of the nodes that the platform was asked to remove."""
    return [command.node_id for command in of_kind(cmd.RemoveNode, outcome.commands)]


def settled(outcome: Outcome) -> tuple[bool, str]:
    """What became of the one plan that was asked: said as a fact, and answered at the desk."""
    (fact,) = of_kind(ev.PlanSettled, outcome.facts)
    (answer,) = of_kind(cmd.AnswerPlan, outcome.commands)
    assert (answer.plan_id, answer.ok, answer.text) == (fact.plan_id, fact.ok, fact.text)
    return fact.ok, fact.text


def running_fleet(size: int, *, min_nodes: int = 1, **spec: Any) -> Job:
    """A job whose size comes from its platform, with all its nodes in a running world.

    The agent of the node with id 3 is called `n3`, and so on.
    """
    job = Job(
        JobSpec(
            max_nodes=size,
            managed=True,
            size_from_platform=True,
            last_call_s=5.0,
            silence_s=1e6,
            lease_s=1e6,
            **spec,
        )
    )
    for node in range(size):
        join(job, node, min_nodes=min_nodes)
    for node in range(size):
        job.started(f"n{node}", 1)
    assert job.world() == list(range(size))
    return job


def join(job: Job, node: int, *, min_nodes: int = 1, cold: bool = False) -> Outcome:
    """The agent of an ordered node attaches. It knows the size that its node was made with."""
    size = job.machines.view(job.now)["wanted"]["nodes"]  # type: ignore[index]
    job_rules = rules(min_nodes=min_nodes, max_nodes=max(size, min_nodes), last_call_s=5.0)
    return job.attach(f"n{node}", node=node, job_rules=job_rules, cold=cold)


def answers(outcome: Outcome) -> list[m.Answer]:
    """What was answered, in order."""
    return [reply.body for reply in of_kind(cmd.Reply, outcome.commands)]


def pushes(outcome: Outcome) -> list[tuple[int, m.Push]]:
    """What was pushed, with the node it went to."""
    return [(push.node_id, push.body) for push in of_kind(cmd.Push, outcome.commands)]


def worlds(outcome: Outcome) -> list[list[int]]:
    """The worlds that formed, each as its node ranks in order."""
    return [
        [member.node_rank for member in fact.world.members]
        for fact in of_kind(ev.WorldFormed, outcome.facts)
    ]


def running_pair(*, is_small: bool = True, **spec: int | float) -> Job:
    """Two nodes `a` and `b` (ranks 0 and 1) in a running world of round 1."""
    asked = JobSpec(**{"min_nodes": 1, "max_nodes": 2, **spec})  # type: ignore[arg-type]
    job = Job(asked, is_small=is_small)
    job.attach("a")
    job.attach("b")
    job.started("a", 1)
    job.started("b", 1)
    assert job.world() == [0, 1]
    return job
