# SPDX-License-Identifier: Apache-2.0
"""Plays arbitrary histories against the whole job core and checks after every step what must hold.

A history is a list of small integers, so that hypothesis can shrink one that fails. Run as a
program, it prints one digest over the outcomes of many histories, whatever the hash seed is.
"""

import hashlib
import random
import sys
from collections.abc import Sequence
from typing import TypeVar

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import NONE, SHARED, Holding, Shape, Version, rank_part
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Move
from holdfast.model.resources import Limits
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from tests.core.harness import Job, checkpoint, of_kind, replayed

Step = tuple[int, int, int]
Word = TypeVar("Word", ExitReason, Phase)

DIRECTORY = "/ckpt"
SLOTS = 5
ACTIONS = 20

SPECS = (
    JobSpec(min_nodes=1, max_nodes=3, last_call_s=4.0, join_timeout_s=50.0),
    JobSpec(min_nodes=2, max_nodes=4, node_unit=2, last_call_s=2.0, reconnect_s=1.0),
    JobSpec(min_nodes=2, max_nodes=2, spare_nodes=1, managed=True, lease_s=20.0),
    JobSpec(min_nodes=1, max_nodes=4, managed=True, last_call_s=1.0),
    JobSpec(max_nodes=3, managed=True, size_from_platform=True, lease_s=20.0),
    JobSpec(
        max_nodes=4,
        managed=True,
        size_from_platform=True,
        node_memory_mib=1024,
        limits=Limits(memory_mib=7000),
        job_relaunches=9,
        critical={0: 2},
        groups={0: 2, 1: 2},
        group_pending_s=3.0,
        pending_timeout_s=40.0,
        pending_strategy="necessary",
    ),
)


class Player:
    """One job, the agents that play with it, and what must always be true of it."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.job = Job(spec, started=False)
        self.shadow = replayed(spec, [])
        self.trace = hashlib.sha256()
        self._process_of: dict[int, str] = {}
        self._processes: list[str] = []
        self._runs: dict[int, int] = {}
        self._launched: list[int] = []
        self._dropped: set[int] = set()
        self._last_round = 0
        self._last_generation = 0
        self._moves = 0
        self._memory_mib: dict[int, int] = {}
        self._leaving: set[int] = set()
        self._rules = rules_of(spec)
        self._check(self.job.start())

    def play(self, history: Sequence[Step]) -> None:
        for step in history:
            self._check(self._act(*step))

    # ---- what can happen ------------------------------------------------------------------------

    def _act(self, action: int, slot: int, number: int) -> Outcome:
        job, slot = self.job, slot % SLOTS
        name = self._process_of.get(slot, "")
        match action % ACTIONS:
            case 0 | 1:
                return self._attach_new(slot, number)
            case 2:
                return job.wait(job.now + number * 0.7)
            case 3 if self._processes:
                old = self._processes[number % len(self._processes)]
                return job.attach(old, round=number % 3, rank=slot)
            case 4 if number % 4 == 0:
                return self._restart(compacted=number % 8 == 0)
            case 5 | 18:
                return self._seen(number)
            case 19:
                return self._plan(slot, number)
            case _ if name not in job.node_of:
                return Outcome()
            case 6:
                return job.absent(name)
            case 7:
                return job.attach(name, round=self._runs.get(job.node_of[name], 0))
            case 8:
                return job.leave(name) if number % 2 else Outcome()
            case 9:
                return job.done(name, job.round() - number % 2)
            case 10:
                return job.failed(name, job.round() - number % 2, reason=_pick(ExitReason, number))
            case 11 | 12:
                steps = job.started if number % 2 else self._beat
                return steps(name, job.round())
            case 13 | 14:
                return checkpoint(job, _checkpoint_call(job, number, name), name)
            case _:
                return job.ask(_request(job, number), name, session=name, seq=1 + number % 5)

    def _attach_new(self, slot: int, number: int) -> Outcome:
        name = f"p{len(self._processes)}"
        self._processes.append(name)
        self._process_of[slot] = name
        node = -1
        if self._launched and number % 3:
            node = self._launched[number % len(self._launched)]
        rank = slot if number % 2 else -1
        return self.job.attach(name, node=node, rank=rank, topology="s"[: number % 2])

    def _beat(self, name: str, round_number: int) -> Outcome:
        return self.job.beat(name, round=round_number, steps=3, step=7, first=0.3, last=0.1)

    def _seen(self, number: int) -> Outcome:
        if not self._launched:
            return Outcome()
        node = self._launched[number % len(self._launched)]
        phase, reason = _pick(Phase, number), _pick(ExitReason, number // 2)
        return self.job.seen(node, phase, reason, host=f"machine-{number % 3}")

    def _plan(self, slot: int, number: int) -> Outcome:
        node = NodeId(self._launched[number % len(self._launched)]) if self._launched else NodeId(0)
        changes: dict[str, object] = (
            {"nodes": 1 + slot},
            {"nodes": 1 + slot, "memory_mib": 2048},
            {"suspend": True},
            {"suspend": False, "nodes": 3},
            {"suspend": False},
            {"remove": (node,)},
            {"add": (NodeRank(slot),)},
            {"migrate": (Move(node_id=node, memory_mib=1500),)},
        )[number % 8]
        outcome = self.job.plan(plan_id=f"plan-{number}-{slot}", **changes)
        is_done = of_kind(rec.PlanSettled, outcome.records)
        self._moves += "migrate" in changes and any(plan.ok for plan in is_done)
        return outcome

    def _restart(self, *, compacted: bool) -> Outcome:
        outcome = self.job.restart(compacted=compacted)
        # The records of MasterStarted itself are the last ones; `_check` gives them to the shadow.
        before = self.job.records[: len(self.job.records) - len(outcome.records)]
        self.shadow = replayed(self.spec, before)
        return outcome

    # ---- what must hold -------------------------------------------------------------------------

    def _check(self, outcome: Outcome) -> None:
        self.trace.update(repr(outcome).encode())
        for record in outcome.records:
            self.shadow.core.replay(rec.decode_record(rec.encode_record(record)))
        snapshot = self.job.snapshot()
        assert self.shadow.core.snapshot() == snapshot, "the journal leads to another state"
        assert replayed(self.spec, snapshot).core.snapshot() == snapshot, "the snapshot does"
        for opened in of_kind(rec.RulesSet, outcome.records):
            self._rules = opened.rules
        for fact in of_kind(ev.WorldFormed, outcome.facts):
            self._check_world(fact)
        self._check_commands(outcome)
        self._leaving |= {record.node_id for record in of_kind(rec.NodeLeaves, outcome.records)}
        self._check_limits()
        ranks = [row["node_rank"] for row in self.job.machines.nodes.view(0.0) if _is_live(row)]
        assert len(ranks) <= len(set(ranks)) + self._moves, "a rank has two live holders"
        self._check_stage(outcome)

    def _check_stage(self, outcome: Outcome) -> None:
        """A broken round costs one restart, and the stopwatch knows which stage the job is in."""
        broken = len(of_kind(rec.RoundBroken, outcome.records))
        if not of_kind(ev.NodesLeaving, outcome.facts):
            assert len(of_kind(rec.RestartCounted, outcome.records)) == broken
        view = self.job.machines.view(self.job.now)
        world, progress = view["world"], view["progress"]
        assert isinstance(world, dict)
        assert isinstance(progress, dict)
        assert isinstance(view["wanted"], dict)
        if view["state"] == "running" and not view["wanted"]["suspended"]:
            is_broken = world["state"] == "broken"
            assert (progress["stage"] == "rendezvous") is is_broken
            assert (progress["stage"] == "idle") is (world["round"] == 0)

    def _check_world(self, fact: ev.WorldFormed) -> None:
        world, rules = fact.world, self._rules
        assert world.round == self._last_round + 1, "one world per round"
        assert world.generation > self._last_generation, "the fence only rises"
        self._last_round, self._last_generation = world.round, world.generation
        size = len(world.members)
        assert size >= max(1, rules.min_nodes)
        assert size <= rules.max_nodes
        assert size % rules.node_unit == 0
        assert len({member.node_rank for member in world.members}) == size
        assert len({member.node_id for member in world.members}) == size

    def _check_limits(self) -> None:
        """Nobody has more than the job may ask for: one node of each rank counts, the newest."""
        newest: dict[object, int] = {}
        for row in self.job.machines.nodes.view(0.0):
            node_id = int(str(row["node_id"]))
            if _is_live(row) and node_id not in self._leaving:
                newest[row["node_rank"]] = max(node_id, newest.get(row["node_rank"], node_id))
        most = self.spec.limits.memory_mib
        asked = sum(self._memory_mib.get(node_id, 0) for node_id in newest.values())
        assert most is None or asked <= most

    def _check_commands(self, outcome: Outcome) -> None:
        for command in outcome.commands:
            match command:
                case cmd.LaunchNode():
                    asked_mib = max(command.order.memory_mib, self.spec.node_memory_mib)
                    self._memory_mib[command.order.node_id] = asked_mib
                    if command.order.node_id not in self._launched:
                        self._launched.append(command.order.node_id)
                case cmd.Drop():
                    self._dropped.add(command.node_id)
                case cmd.Bind():
                    self._dropped.discard(command.node_id)
                case cmd.Push():
                    assert command.node_id not in self._dropped, "a push to a fenced node"
                    if isinstance(command.body, m.RunWorld):
                        self._runs[command.node_id] = command.body.round
                    if isinstance(command.body, m.StopWork):
                        self._runs[command.node_id] = 0


def _is_live(row: dict[str, object]) -> bool:
    return not Phase(str(row["phase"])).is_final


def _pick(kind: type[Word], number: int) -> Word:
    return list(kind)[number % len(kind)]


def _request(job: Job, number: int) -> m.KvCall:
    scope, key = (job.round() - number % 2) * (number % 3 > 0), f"k{number % 3}"
    return (
        m.KvSet(scope, key, b"1"),
        m.KvAdd(scope, key, number),
        m.KvGet(scope, (key, "k0"), 2.0),
        m.KvDelete(scope, key),
        m.KvCompareSet(scope, key, b"1", b"2"),
        m.KvAppend(scope, key, b"0"),
        m.QueuePush(scope, key, b"e"),
        m.QueuePop(scope, key, float(number % 3)),
        m.Barrier(scope, key, str(number % 3), number % 4, 3.0),
    )[number % 9]


def _checkpoint_call(job: Job, number: int, name: str) -> c.CheckpointCall:
    round_number, version = job.round() - number % 2, Version(number % 3, number % 5)
    shape, part = Shape(1 + number % 2, shared=True), rank_part(job.node_of[name] % 2)
    held = (Holding(version, shape, SHARED, 8), Holding(version, shape, part, 8))
    attempt = f"m{1 + number % 2}-{round_number}-{number % 4}"
    return (
        c.NodeRestore(DIRECTORY, job.round(), held, (), version, (SHARED, part)),
        c.NodeRestore(DIRECTORY, round_number, held, (), NONE, (SHARED,), fresh=True),
        c.PersistAsk(DIRECTORY, job.round(), version, shape, (SHARED, part)),
        c.PartsPersisted(DIRECTORY, version, shape, attempt, (SHARED, part), ()),
        c.PartsPersisted(DIRECTORY, version, shape, attempt, (part,), (), "the disk is full"),
        c.CommitDone(DIRECTORY, version, attempt),
        c.FlushAsk(DIRECTORY, held, NONE),
        c.PartsLocate(DIRECTORY, version, (part,)),
        c.InventoryTaken(DIRECTORY, 1 + number % 3, held),
        c.Replicated(DIRECTORY, job.round(), version),
        c.PeersAsk(round_number, 1, number % 3),
        c.CopyFailed(DIRECTORY, job.round(), version, "no room", number % 3 - 1, number % 2),
    )[number % 12]


def digest_of(seeds: range, length: int) -> str:
    """One digest over the outcomes of histories drawn from these seeds."""
    total = hashlib.sha256()
    for seed in seeds:
        source = random.Random(seed)
        history = [
            (source.randrange(ACTIONS), source.randrange(SLOTS), source.randrange(24))
            for _ in range(length)
        ]
        player = Player(SPECS[seed % len(SPECS)])
        player.play(history)
        total.update(player.trace.digest())
    return total.hexdigest()


if __name__ == "__main__":
    print(digest_of(range(int(sys.argv[1])), int(sys.argv[2])))
