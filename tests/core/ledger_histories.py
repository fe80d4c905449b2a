# SPDX-License-Identifier: Apache-2.0
"""Plays arbitrary histories against the ledger of checkpoints, with honest nodes and a true disk.

Nodes load, save, write and commit as real ones do; answers and pushes travel, and are lost when a
stream breaks or the master dies. After every event the player checks what must never happen.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.model.checkpoint import (
    NONE,
    SHARED,
    FileEntry,
    Holding,
    Shape,
    Stored,
    Version,
    rank_part,
)
from holdfast.model.dataset import Position
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from tests.core.ledger import DIR, Ledger, holding, positions

Step = tuple[int, int, int]
Copy = tuple[Version, str]
ACTIONS = 12
NODES = 3
POSITIONS_MAX = 4 * NODES
DURABLE = (rec.CheckpointCommitted, rec.LineageSet)


@dataclass
class Node:
    """One node as its agent knows it."""

    memory: set[Copy] = field(default_factory=set)
    #: Calls that have no answer yet, by number.
    calls: dict[int, c.CheckpointCall] = field(default_factory=dict)
    pushes: list[m.Push] = field(default_factory=list)
    prepared: Version = NONE
    lineage: int = -1
    is_loading: bool = False
    step: int = 0
    bad: list[c.BadCopy] = field(default_factory=list)
    #: What it is asked to write: attempt, version, shape, parts.
    writing: list[tuple[str, Version, Shape, tuple[str, ...]]] = field(default_factory=list)
    commits: list[c.CommitOrder] = field(default_factory=list)

    def holdings(self, shapes: dict[Version, Shape]) -> tuple[Holding, ...]:
        return tuple(holding(v, part, shapes[v]) for v, part in sorted(self.memory))

    def written(self) -> Iterator[c.Writing]:
        """What it writes, or has written and has no answer to."""
        for attempt, _, _, parts in self.writing:
            yield c.Writing(attempt, parts)
        for body in self.calls.values():
            if isinstance(body, c.PartsPersisted):
                yield c.Writing(body.attempt, body.parts)


class Player:
    """A ledger, its nodes, and the disk."""

    def __init__(self, *, shared: bool, follows: bool = False) -> None:
        self.ledger = Ledger(NODES)
        self.follows = follows
        if follows:
            self.ledger.follow()
        self.nodes = {number: Node() for number in range(NODES)}
        self.shared = shared
        #: What is in the temporary directory of every attempt.
        self.written: dict[str, set[str]] = {}
        self.on_disk: dict[Version, set[str]] = {}
        self.shapes: dict[Version, Shape] = {}
        self.rotten: set[tuple[int, Version, str]] = set()
        self.agreed: dict[tuple[int, int], Version] = {}
        self.attempts: list[str] = []
        self.newest = NONE
        self._facts_seen = 0

    def at(self, version: Version) -> tuple[Position, ...]:
        """Where the data are when the model is at this version."""
        return positions(version) if self.follows and version != NONE else ()

    def play(self, history: Sequence[Step]) -> None:
        for action, number, extra in history:
            self._act(action % ACTIONS, self.ledger.members[number % NODES], extra)
            self._facts_seen = check(self, self._facts_seen)

    def drain(self) -> None:
        """No more trouble: everybody loads, and what is under way comes to its end."""
        for _ in range(60):
            for number in self.ledger.members:
                for action in (0, 3, 4, 5, 6, 7):
                    self._act(action, number, 0)
                    self._facts_seen = check(self, self._facts_seen)
            if all(self.nodes[number].lineage >= 0 for number in self.ledger.members):
                return
        raise AssertionError("somebody never got to the end of the restore agreement")

    # ---- what can happen ------------------------------------------------------------------------

    def _act(self, action: int, number: int, extra: int) -> None:
        node = self.nodes[number]
        match action:
            case 0 if node.lineage < 0 and not node.is_loading:
                node.is_loading, node.prepared, node.bad = True, NONE, []
                self._ask_restore(number)
            case 1 | 2:
                self._save()
            case 3:
                self._deliver_answers(number)
            case 4:
                self._deliver_pushes(number)
            case 5 if node.writing:
                self._write(number, fails=extra % 7 == 6)
            case 6 if node.commits:
                self._commit(number)
            case 7:
                self.ledger.wait(self.ledger.now + 1.0 + extra)
            case 8 if extra % 6 == 0:
                self._break_stream(number)
            case 9 if extra % 8 == 0:
                self._restart_master(compacted=extra == 8)
            case 10 if extra % 12 == 0:
                self._lose(number)
            case 11 if extra % 12 < 2:
                self.rotten |= {(number, *copy) for copy in sorted(node.memory)[: extra % 3]}

    def _call(self, number: int, body: c.CheckpointCall) -> None:
        # As the stream of an agent does: the call is outstanding before it is sent.
        call = self.ledger.call(number, body)
        self.nodes[number].calls[call] = body

    def _ask_restore(self, number: int) -> None:
        node = self.nodes[number]
        stored = tuple(
            Stored(v, self.shapes[v], self.at(v) if v == node.prepared else ())
            for v in sorted(self.on_disk)
        )
        body = c.NodeRestore(
            DIR,
            self.ledger.round,
            node.holdings(self.shapes),
            stored if number == self.ledger.members[0] else (),
            node.prepared,
            self._wants(number),
            tuple(node.bad),
            breakpoint=True,
            lineage=node.lineage,
        )
        self._call(number, body)

    def _wants(self, number: int) -> tuple[str, ...]:
        own = rank_part(self.ledger.members.index(number))
        return (SHARED, own) if self.shared else (own,)

    def _save(self) -> None:
        """Training is in step: whoever is behind saves next, and every second step is kept."""
        ready = [n for n in self.ledger.members if self.nodes[n].lineage >= 0]
        if len(ready) < NODES:
            return
        number = min(ready, key=lambda n: (self.nodes[n].step, n))
        node = self.nodes[number]
        node.step += 1
        version, shape = Version(node.lineage, node.step), Shape(NODES, self.shared)
        self.shapes[version] = shape
        node.memory |= {(version, part) for part in self._wants(number)}
        pinned = {work[1] for work in node.writing}
        pinned |= {b.version for b in node.calls.values() if isinstance(b, c.PersistAsk)}
        kept = set(sorted({v for v, _ in node.memory}, reverse=True)[:2]) | pinned
        node.memory = {copy for copy in node.memory if copy[0] in kept}
        # The word of one node comes to nothing now and then: it was in a save that failed.
        if self.follows and (node.step + number) % 7:
            self.ledger.mark_by(number, version, {v for v, _ in node.memory})
        if node.step % 2 == 0:
            parts = self._wants(number)
            self._call(number, c.PersistAsk(DIR, self.ledger.round, version, shape, parts))

    def _deliver_answers(self, number: int) -> None:
        node = self.nodes[number]
        for call, body in list(node.calls.items()):
            answer = self.ledger.answers.pop(call, None)
            if answer is None:
                continue
            del node.calls[call]
            match answer:
                case c.RestorePlan(go=True):
                    self._go(number, answer)
                case c.RestorePlan():
                    self._prepare(number, answer)
                case c.PersistPlan() if isinstance(body, c.PersistAsk):
                    node.writing.append((answer.attempt, body.version, body.shape, answer.parts))
                case m.Refused() if isinstance(body, c.NodeRestore):
                    node.is_loading = False

    def _prepare(self, number: int, plan: c.RestorePlan) -> None:
        node, version = self.nodes[number], plan.version
        node.prepared = version
        for want in self._wants(number) if version != NONE else ():
            sources = [source for source in plan.sources if source.asked == want]
            if not all(self._fetch(number, version, source) for source in sources):
                node.prepared = NONE
            if not sources and (want == SHARED or not self.shared):
                node.prepared = NONE
        self._ask_restore(number)

    def _fetch(self, number: int, version: Version, source: c.Source) -> bool:
        node, copy = self.nodes[number], (version, source.part)
        if source.kind == "storage":
            is_good = source.part in self.on_disk.get(version, ())
        else:
            held = self.nodes[source.node_id].memory
            is_good = copy in held and (source.node_id, *copy) not in self.rotten
        if not is_good:
            node.bad.append(c.BadCopy(version, source.part, source.node_id, "it is rotten"))
            node.memory.discard(copy)
            return False
        node.memory.add(copy)
        return True

    def _go(self, number: int, plan: c.RestorePlan) -> None:
        node = self.nodes[number]
        assert node.is_loading
        assert node.prepared == plan.version, "go without having it at hand"
        key = (self.ledger.round, plan.lineage)
        assert self.agreed.setdefault(key, plan.version) == plan.version, "two versions in a round"
        node.lineage, node.is_loading = plan.lineage, False
        node.step = max(plan.version.step, 0)

    def _deliver_pushes(self, number: int) -> None:
        node = self.nodes[number]
        mine = [body for target, body in self.ledger.pushes if target == number]
        self.ledger.pushes = [push for push in self.ledger.pushes if push[0] != number]
        for body in mine:
            match body:
                case c.InventoryWanted():
                    held = node.holdings(self.shapes)
                    taken = c.InventoryTaken(DIR, body.number, held, tuple(node.written()))
                    self._call(number, taken)
                case c.PersistOrder():
                    work = (body.attempt, body.version, body.shape, body.parts)
                    if work not in node.writing:
                        node.writing.append(work)
                case c.CommitOrder():
                    node.commits.append(body)

    def _write(self, number: int, *, fails: bool) -> None:
        node = self.nodes[number]
        attempt, version, shape, parts = node.writing.pop(0)
        missing = [part for part in parts if (version, part) not in node.memory]
        problem = f"{missing[0]} is gone" if missing else "the disk is full" * fails
        if not problem:
            self.written.setdefault(attempt, set()).update(parts)
        files = () if problem else tuple(FileEntry(part, 1, 1) for part in parts)
        body = c.PartsPersisted(DIR, version, shape, attempt, parts, files, problem)
        self._call(number, body)

    def _commit(self, number: int) -> None:
        order = self.nodes[number].commits.pop(0)
        parts = self.written[order.attempt]
        indispensable = {SHARED} if order.shape.shared else set(order.shape.parts())
        assert indispensable <= parts, "a commit of an attempt that is not whole"
        assert {entry.name for entry in order.files} <= parts
        assert order.positions == self.at(order.version), "a commit without its position"
        self.on_disk[order.version] = set(parts)
        self._call(number, c.CommitDone(DIR, order.version, order.attempt))

    # ---- trouble --------------------------------------------------------------------------------

    def _break_stream(self, number: int) -> None:
        """What was under way to the node is lost; it comes back and sends its calls again."""
        self.ledger.absent(number)
        self.ledger.pushes = [push for push in self.ledger.pushes if push[0] != number]
        self._come_back(number)

    def _come_back(self, number: int) -> None:
        self.ledger.arrive(number)
        for call, body in list(self.nodes[number].calls.items()):
            self.ledger.answers.pop(call, None)
            self.ledger.call(number, body, call)

    def _restart_master(self, *, compacted: bool) -> None:
        self.ledger.pushes.clear()
        self.ledger.answers.clear()
        self.ledger.restart(compacted=compacted)
        for number in self.ledger.members:
            self._come_back(number)

    def _lose(self, number: int) -> None:
        """A node and its memory are gone; the others and a new one form the next round."""
        self.ledger.lose(number)
        self.nodes[number].calls.clear()
        self.ledger.pushes = [push for push in self.ledger.pushes if push[0] != number]
        newcomer = max(self.nodes) + 1
        self.nodes[newcomer] = Node()
        self.ledger.arrive(newcomer)
        for node in self.nodes.values():
            node.lineage, node.is_loading = -1, False
            node.calls = {n: b for n, b in node.calls.items() if not isinstance(b, c.NodeRestore)}
        self.ledger.form([n for n in self.ledger.members if n != number] + [newcomer])


def check(player: Player, facts_seen: int) -> int:
    """What must hold after every event, by the facts since the last look; how many there are."""
    ledger = player.ledger
    for fact in ledger.facts[facts_seen:]:
        match fact:
            case ev.AttemptOpened():
                assert fact.attempt not in player.attempts, "two attempts of one name"
                player.attempts.append(fact.attempt)
            case ev.CheckpointCommitted():
                assert fact.version >= player.newest, "the newest committed went back"
                assert fact.version in player.on_disk
                player.newest = fact.version
            case ev.RestoreAgreed(fresh=False):
                bad = {copy.version for node in player.nodes.values() for copy in node.bad}
                assert fact.version >= player.newest or player.newest in bad
                assert fact.positions == player.at(fact.version), "data without their model"
    nodes = [player.nodes[number] for number in ledger.members]
    writers = Counter(
        (one.attempt, part) for node in nodes for one in node.written() for part in one.parts
    )
    assert max(writers.values(), default=1) == 1, "a part of an attempt is written twice"
    due = ledger.machine.deadline()
    assert due is None or due > ledger.now, "a deadline that has passed"
    newest = {type(record): record for record in ledger.records}
    durable = [newest[kind] for kind in DURABLE if kind in newest]
    snapshot = list(ledger.machine.snapshot())
    assert [one for one in snapshot if isinstance(one, DURABLE)] == durable
    assert len(snapshot) <= len(durable) + POSITIONS_MAX, "positions of what is nowhere"
    return len(ledger.facts)
