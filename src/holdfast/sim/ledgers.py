# SPDX-License-Identifier: Apache-2.0
"""Both ledgers of the real core under the load of a whole cluster: 10,000 nodes save, commit, read
data, fail and restore.

Of a node, only its messages to the ledgers are modelled. The messages of one node arrive in order;
which node's message comes next is drawn. All messages that are under way at one time are heard
before time goes on. A fault is the exception: it comes in the middle, so that versions stay
incomplete and messages come too late. There are no beats, streams, disks or journals: scenarios of
few nodes have those (docs/simulation.md).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from holdfast.core.job import events as ev
from holdfast.core.job.commands import Push, Reply
from holdfast.core.job.flow import build
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.kernel import Event, Tick
from holdfast.model.checkpoint import NONE, FileEntry, Shape, Stored, Version, rank_part
from holdfast.model.dataset import Dataset, Lease
from holdfast.model.ids import NodeId
from holdfast.model.world import World
from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from holdfast.runtime.collector import without_collector
from holdfast.sim.checkers import Violation
from holdfast.sim.control import FOREVER_S, failed_worker, spec_without_beats
from holdfast.sim.failures import Fault
from holdfast.sim.ledger_checker import LedgerChecker
from holdfast.sim.scenario import DIRECTORY
from holdfast.sim.vault import Memory

SHARD_SIZE = 8
GRACE_S = 3.0
RACK_MACHINES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A job and how often it saves."""

    nodes: int
    spares: int
    saves: int
    save_every_s: float
    persist_every: int
    """One of this many saves goes to storage."""


@dataclass(frozen=True, slots=True)
class Result:
    """How much happened."""

    events: int
    """How many events the core handled, and how many commands it gave."""
    rounds: int
    restores: int
    commits: int
    samples: int
    """Samples consumed, including those of models that were rolled back."""


@dataclass(slots=True)
class _Node:
    """The state of one node, and the messages it has sent."""

    node_id: NodeId
    memory: Memory = field(default_factory=Memory)
    rank: int = 0
    lineage: int = -1
    term: int = -1
    epoch: int = 0
    seq: int = 0
    peers: tuple[c.Peer, ...] = ()
    #: The rest of a piece: its lease, where the rest begins and where it ends.
    rest: tuple[int, int, int] | None = None
    #: By lease: progress that is not reported yet, and progress since the last save.
    news: dict[int, int] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    #: Messages that it has sent and the master has not heard yet.
    sent: deque[Event] = field(default_factory=deque)


class _Words:
    """The nodes and their messages to the ledgers."""

    def __init__(self, load: Load, seed: int) -> None:
        self._load = load
        self._random = Random(f"holdfast ledgers {seed}")
        size = 2 * load.nodes * load.saves * SHARD_SIZE
        self._dataset = Dataset("train", size=size, shard_size=SHARD_SIZE, series=DIRECTORY)
        self.checker = LedgerChecker(SHARD_SIZE)
        self._nodes: dict[int, _Node] = {}
        self._world: list[_Node] = []
        self._round = self._step = 0
        #: The senders of the messages under way: a node stands here once for each message.
        self._under_way: list[_Node] = []
        #: By call: the node that asked, and its request.
        self._calls: dict[int, tuple[_Node, object]] = {}
        self._call = 0

    def _send(self, node: _Node, body: object, make: Callable[[int], Event]) -> None:
        self._call += 1
        self._calls[self._call] = (node, body)
        node.sent.append(make(self._call))
        self._under_way.append(node)

    def _ask_checkpoints(self, node: _Node, body: c.CheckpointCall) -> None:
        own = node.node_id
        self._send(node, body, lambda call: ev.CheckpointRequested(own, own, call, body))

    def _ask_data(self, node: _Node, body: d.DataCall) -> None:
        node.seq += 1
        own, session, seq = node.node_id, f"{node.node_id}-{self._round}", node.seq
        self._send(node, body, lambda call: ev.DataRequested(own, own, call, session, seq, body))

    def _restore(self, node: _Node, prepared: Version) -> None:
        stored: tuple[Stored, ...] = ()
        if node.rank == 0:
            stored = tuple(
                Stored(version, shape, positions if version == prepared else ())
                for version, (shape, positions) in self.checker.committed.items()
            )
        ask = c.NodeRestore(
            DIRECTORY,
            self._round,
            node.memory.holdings(),
            stored,
            prepared,
            (rank_part(node.rank),),
        )
        self._ask_checkpoints(node, ask)

    def _take(self, node: _Node) -> None:
        """Consume what is left, report it, and ask for more."""
        if node.lineage < 0 or node.term < 0:
            return  # It is still restoring.
        self._consume(node, is_all=True)
        said = tuple(d.Consumed(lease, upto) for lease, upto in node.news.items())
        node.news.clear()
        take = d.ShardsTake(self._round, "train", node.term, node.epoch, 1, said, 60.0, True)
        self._ask_data(node, take)

    def _consume(self, node: _Node, *, is_all: bool) -> None:
        if node.rest is None:
            return
        lease, begin, end = node.rest
        upto = end if is_all else self._random.randrange(begin, end + 1)
        self.checker.consumed(node.lineage, node.rank, begin, upto)
        node.rest = None if upto == end else (lease, upto, end)
        node.news[lease] = node.marks[lease] = upto

    def _save(self, node: _Node) -> None:
        """Save into its own memory and a peer's, with its data position; sometimes to storage."""
        version, shape = Version(node.lineage, self._step), Shape(len(self._world), False)
        part = rank_part(node.rank)
        self.checker.saved(version, node.rank)
        node.memory.keep(version, part, shape)
        mark = d.Mark("train", node.term, tuple(d.Consumed(*one) for one in node.marks.items()))
        node.marks.clear()
        held = tuple(sorted(node.memory.versions()))
        marked = d.DataMarked(
            DIRECTORY, self._round, version, {node.rank: (mark,)}, len(self._world), held
        )
        own = node.node_id
        self._send(node, marked, lambda call: ev.DataMarks(own, own, call, marked))
        keepers = [self._nodes[p.node_id] for p in node.peers if p.node_id in self._nodes]
        for keeper in keepers:
            keeper.memory.keep(version, part, shape)
        if keepers:
            self._ask_checkpoints(node, c.Replicated(DIRECTORY, self._round, version))
        if self._step % self._load.persist_every == 0:
            node.memory.pins[version] += 1
            ask = c.PersistAsk(DIRECTORY, self._round, version, shape, (part,))
            self._ask_checkpoints(node, ask)

    def _persist(
        self, node: _Node, version: Version, shape: Shape, attempt: str, parts: tuple[str, ...]
    ) -> None:
        held = {part for one, part in node.memory.copies if one == version}
        if not held.issuperset(parts):
            raise Violation(f"node {node.node_id} shall write parts of {version} it does not hold")
        files = tuple(FileEntry(part, 1, 1, part) for part in parts)
        report = c.PartsPersisted(DIRECTORY, version, shape, attempt, parts, files)
        self._ask_checkpoints(node, report)


class LedgerRun(_Words):
    """A job that is being simulated."""

    def __init__(self, load: Load, faults: Sequence[Fault], seed: int) -> None:
        super().__init__(load, seed)
        self._faults = deque(sorted(faults, key=lambda fault: fault.at_s))
        self._now = 0.0
        spec = spec_without_beats(load.nodes, load.nodes, load.spares, GRACE_S)
        self._rules = rules_of(spec)
        self._core = build(spec, "simulated").core
        self._orders: list[NodeId] = []
        self._events = 0

    def run(self) -> Result:
        """Save as often as the load says, play the faults, and check everything."""
        with without_collector():
            self._live()
        commits, restores = len(self.checker.committed), self.checker.restores
        return Result(self._events, self._round, restores, commits, self.checker.samples)

    def _live(self) -> None:
        self._hear(ev.MasterStarted("simulated"))
        self._settle()
        for _ in range(self._load.saves):
            self._step += 1
            for node in self._world:
                self._take(node)
            self._settle(until_s=self._now + self._load.save_every_s)

    # ---- time -----------------------------------------------------------------------------------

    def _settle(self, until_s: float = 0.0) -> None:
        """Deliver everything under way; then let time pass, with its faults."""
        while True:
            fault = self._next_fault(until_s)
            self._drain(self._random.randrange(self._load.nodes * 4) if fault else -1)
            if fault is not None:
                self._now = max(self._now, fault.at_s)
                self._break(fault)
            elif self._orders:
                self._start_ordered()
            elif not self._tick(until_s):
                break
        self._now = max(self._now, until_s)

    def _next_fault(self, until_s: float) -> Fault | None:
        if self._faults and self._faults[0].at_s < until_s:
            return self._faults.popleft()
        return None

    def _drain(self, limit: int) -> None:
        """Deliver messages that are under way: at most `limit`, or all if it is negative."""
        while self._under_way and limit != 0:
            at = self._random.randrange(len(self._under_way))
            last = self._under_way.pop()
            node = last
            if at < len(self._under_way):
                node, self._under_way[at] = self._under_way[at], last
            if node.sent:  # A lost node says nothing more.
                self._hear(node.sent.popleft())
            limit -= 1

    def _tick(self, until_s: float) -> bool:
        """Wake the core if it asked for that before this time; whether it did."""
        at = self._core.deadline()
        if at is None or at > max(until_s, self._now + GRACE_S) or at >= FOREVER_S:
            return False
        self._now = max(self._now, at)
        self._hear(Tick())
        return True

    # ---- nodes come and go ----------------------------------------------------------------------

    def _start_ordered(self) -> None:
        orders, self._orders = self._orders, []
        for node_id in orders:
            self._nodes[node_id] = _Node(node_id)
            attach = m.Attach(
                agent_key=f"agent of node {node_id}",
                rules=self._rules,
                nproc=1,
                host=f"machine-{node_id}",
                store_port=29500,
                node_id=node_id,
                topology=f"rack-{node_id // RACK_MACHINES}",
                peer_port=29600,
            )
            self._hear(ev.AttachRequested(node_id, 0, attach))

    def _break(self, fault: Fault) -> None:
        """A machine of the world is lost, or its worker ends and its memory stays."""
        node = self._world[fault.machine % len(self._world)]
        if not fault.takes_machine:
            report = m.WorkersFailed(self._round, (failed_worker(),))
            node.sent.clear()
            self._hear(ev.FailureReported(node.node_id, node.node_id, 0, report))
            return
        node.sent.clear()
        node.memory.clear()
        self._nodes.pop(node.node_id, None)
        self._hear(ev.NodeAbsent(node.node_id))
        self._tick(self._now + GRACE_S)

    def _begin_round(self, world: World) -> None:
        self._round = world.round
        self._world = [self._nodes[member.node_id] for member in world.members]
        for rank, node in enumerate(self._world):
            node.rank, node.lineage = rank, -1
            node.rest = None
            node.news.clear()
            node.marks.clear()
            self._restore(node, NONE)

    # ---- what nodes hear ------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        """Let the core handle an event, and deliver what follows to the nodes and the checker."""
        if isinstance(event, ev.CheckpointRequested):
            self._done(event)
        outcome = self._core.handle(event, self._now)
        self._events += 1 + len(outcome.commands)
        for fact in outcome.facts:
            match fact:
                case ev.NodeOrdered():
                    self._orders.append(fact.node_id)
                case ev.RestoreAgreed():
                    self.checker.restored(fact.version, fact.lineage)
                case ev.WorldFormed():
                    self._begin_round(fact.world)
                    report = m.WorkersStarted(self._round, 29500, "zygote", 0.05)
                    reporter = self._world[0].node_id
                    self._hear(ev.StartReported(reporter, reporter, 0, report))
        for command in outcome.commands:
            match command:
                case Reply(call=call) if call in self._calls:
                    node, asked = self._calls.pop(call)
                    self._answered(node, asked, command.body)
                case Push(node_id=node_id) if node_id in self._nodes:
                    self._pushed(self._nodes[node_id], command.body)

    def _done(self, event: ev.CheckpointRequested) -> None:
        """Count a node's work as done when the core hears of it: perhaps it is done only now."""
        match event.body:
            case c.PartsPersisted():
                self.checker.written(event.body.attempt, event.body.parts)
            case c.Replicated():
                self.checker.copied(event.body.version, event.node_id)

    def _answered(self, node: _Node, asked: object, answer: object) -> None:
        match answer:
            case c.RestorePlan() if isinstance(asked, c.NodeRestore):
                if asked.round == self._round:
                    self._planned(node, answer)
            case c.Peers(peers):
                node.peers = peers
            case d.DatasetOpened(position, term):
                node.term, node.epoch = term, position.epoch
            case d.ShardsTaken(leases) if isinstance(asked, d.ShardsTake):
                if asked.scope == self._round and asked.term == node.term:
                    self._taken(node, leases)
            case c.PersistPlan() if isinstance(asked, c.PersistAsk):
                self._persist(node, asked.version, asked.shape, answer.attempt, answer.parts)
                node.memory.pins[asked.version] -= 1
            case m.Done() if isinstance(asked, c.Replicated):
                self.checker.safe(asked.version, len(self._world))
            case m.Refused(kind="rejected" | "stale" | "fenced"):
                pass  # Of a round that is over, or overtaken by another.
            case m.Refused():
                raise Violation(f"{type(asked).__name__} is refused: {answer.message}")

    def _planned(self, node: _Node, plan: c.RestorePlan) -> None:
        """Fetch the parts that the plan names, or go on from the version that all ranks have."""
        if not plan.go:
            if plan.version != NONE and not plan.sources:
                raise Violation(f"nobody says where rank {node.rank} finds its {plan.version}")
            if all(self._fetch(node, plan, source) for source in plan.sources):
                self._restore(node, plan.version)
            return
        if plan.version != NONE and (plan.version, rank_part(node.rank)) not in node.memory.copies:
            raise Violation(f"rank {node.rank} goes on from {plan.version} and does not have it")
        node.lineage = plan.lineage
        node.term = -1
        for key in [key for key in node.memory.copies if key[0] > plan.version != NONE]:
            del node.memory.copies[key]
        self._step = max(plan.version.step, 0)
        self._ask_checkpoints(node, c.PeersAsk(self._round, 1, 0))
        self._ask_data(node, d.DatasetOpen(self._round, self._dataset))

    def _fetch(self, node: _Node, plan: c.RestorePlan, source: c.Source) -> bool:
        """Take a part from its source; False if its node was just lost and a round follows."""
        key = (plan.version, source.part)
        if source.kind == "storage":
            is_there = plan.version in self.checker.committed
        elif source.node_id not in self._nodes:
            return False
        else:
            is_there = key in self._nodes[source.node_id].memory.copies
        if not is_there:
            raise Violation(f"{source.part} of {plan.version} is not where the ledger says")
        node.memory.keep(plan.version, source.part, plan.shape, safe=plan.version)
        return True

    def _taken(self, node: _Node, leases: tuple[Lease, ...]) -> None:
        """Read all of the pieces or a part of them, and save."""
        for lease in leases:
            node.rest = (lease.number, lease.piece.begin, lease.piece.end)
            self._consume(node, is_all=self._random.random() < 0.7)
        self._save(node)

    def _pushed(self, node: _Node, body: object) -> None:
        match body:
            case c.PersistOrder():
                self._persist(node, body.version, body.shape, body.attempt, body.parts)
            case c.CommitOrder():
                self.checker.commit(body.attempt, body.version, body.shape, body.positions)
                self._ask_checkpoints(node, c.CommitDone(DIRECTORY, body.version, body.attempt))
            case c.InventoryWanted():
                held = node.memory.holdings()
                self._ask_checkpoints(
                    node, c.InventoryTaken(DIRECTORY, body.number, held, writing=())
                )
