# SPDX-License-Identifier: Apache-2.0
"""Drives the ledger of checkpoints in tests: nodes are numbers, each call is one event."""

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.checkpoints.checkpoints import Checkpoints
from holdfast.core.kernel import Event, Outcome, Record, Tick
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
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.node import ExitReason
from holdfast.model.world import Member, World
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from holdfast.protocol.data import DataMarked

DIR = "/ckpt"
SHARDED = Shape(2, shared=False)
COPIED = Shape(2, shared=True)
V5, V6 = Version(0, 5), Version(0, 6)
Answer = TypeVar("Answer")


def member(node: int, topology: str = "", peer_port: int = 7000, certificate: str = "") -> Member:
    return Member(
        node_id=NodeId(node),
        incarnation=Incarnation(node + 1),
        node_rank=NodeRank(node),
        nproc=1,
        host=f"host-{node}",
        store_port=4000,
        topology=topology,
        peer_port=peer_port,
        peer_certificate=certificate,
    )


def holding(version: Version, part: str, shape: Shape, *, parity: bool = False) -> Holding:
    return Holding(version, shape, part, length=4096, digest=version.step, parity=parity)


def positions(version: Version) -> tuple[Position, ...]:
    """How far the data are at a version: tests can tell one from the other."""
    return (Position("train", epoch=version.lineage, cut=(version.step,)),)


class Ledger:
    """One ledger and its nodes, one rank each. Answers are kept by call number."""

    def __init__(self, nodes: int, *, spares: int = 0) -> None:
        self.machine = Checkpoints()
        self.now = 10.0
        self.round = 0
        self.members: list[int] = []
        self.records: list[Record] = []
        self.facts: list[Event] = []
        self.answers: dict[int, m.Answer] = {}
        self.asker: dict[int, int] = {}
        self.pushes: list[tuple[int, m.Push]] = []
        self._calls = 0
        self._starts = 0
        self._is_followed = False
        #: By version, the nodes that have said how far their data were.
        self._marked: dict[Version, set[int]] = {}
        self._start()
        self.form(range(nodes))
        for node in range(nodes, nodes + spares):
            self.arrive(node)

    # ---- events ---------------------------------------------------------------------------------

    def feed(self, event: Event) -> Outcome:
        outcome = self.machine.handle(event, self.now)
        for record in outcome.records:
            self.records.append(rec.decode_record(rec.encode_record(record)))
        self.facts += outcome.facts
        for command in outcome.commands:
            if isinstance(command, cmd.Reply):
                assert command.call not in self.answers, "a call is answered once"
                self.answers[command.call] = command.body
            elif isinstance(command, cmd.Push):
                self.pushes.append((command.node_id, command.body))
        return outcome

    def wait(self, until: float) -> None:
        """Let job time pass, with a tick at every deadline on the way."""
        for _ in range(100):
            due = self.machine.deadline()
            if due is None or due > until:
                break
            self.now = max(self.now, due)
            self.feed(Tick())
        else:
            raise AssertionError("a deadline does not go away")
        self.now = until

    def form(self, nodes: Iterable[int]) -> None:
        self.round += 1
        self.members = list(nodes)
        self.feed(ev.WorldFormed(self.world(), "a test", planned=False))

    def world(self) -> World:
        return World(
            round=Round(self.round),
            generation=Generation(self.round),
            members=tuple(member(node) for node in self.members),
        )

    def arrive(self, node: int) -> None:
        self.feed(ev.NodeReady(member(node), Round(0), returned=True))

    def absent(self, node: int) -> None:
        self.feed(ev.NodeAbsent(NodeId(node)))

    def lose(self, node: int) -> None:
        lost = ev.NodeLost(NodeId(node), NodeRank(node), ExitReason.LOST, "gone", proven=True)
        self.feed(lost)

    def _start(self) -> None:
        self._starts += 1
        self.feed(ev.MasterStarted(nonce=f"start{self._starts}"))
        if self._is_followed:
            self.feed(ev.DatasetFollows(DIR))

    def follow(self) -> None:
        """A dataset is registered whose position goes with the checkpoints."""
        self._is_followed = True
        self.feed(ev.DatasetFollows(DIR))

    def mark(self, version: Version, held: Sequence[Version] = ()) -> tuple[Position, ...]:
        """Every rank has said how far its data were at this version; where that is.

        `held`: what every node has in memory beside it.
        """
        for node in self.members:
            self.mark_by(node, version, {version, *held})
        return positions(version)

    def mark_by(self, node: int, version: Version, held: Collection[Version]) -> None:
        """One node says how far its data were; with the last one the version has a position."""
        known = tuple(sorted(held))
        body = DataMarked(DIR, self.round, version, {}, len(self.members), known)
        self.feed(ev.DataMarks(NodeId(node), 1, 0, body))
        said = self._marked.setdefault(version, set())
        said.add(node)
        if said.issuperset(self.members):
            self.feed(ev.VersionMarked(DIR, version, positions(version)))

    def restart(self, *, compacted: bool = False, done: bool = False) -> None:
        """The master dies and comes back from its journal; its nodes are not attached yet."""
        if compacted:
            self.records = list(self.machine.snapshot())
        self.machine = Checkpoints()
        for record in self.records:
            self.machine.apply(record)
        self._start()
        self.feed(ev.WorldFound(self.world(), 0, done))
        for node in self.members:
            self.feed(ev.NodeExpected(NodeId(node)))

    # ---- calls ----------------------------------------------------------------------------------

    def call(self, node: int, body: c.CheckpointCall, number: int = 0) -> int:
        """A node calls; with a number it sends a call that it made before again."""
        if not number:
            self._calls += 1
            number = self._calls
        self.asker[number] = node
        self.feed(ev.CheckpointRequested(NodeId(node), 1, number, body))
        return number

    def answer(self, number: int, kind: type[Answer]) -> Answer:
        answer = self.answers[number]
        assert isinstance(answer, kind), answer
        return answer

    def refusal(self, number: int) -> str:
        return self.answer(number, m.Refused).message

    def restore(
        self,
        node: int,
        *held: Holding,
        prepared: Version = NONE,
        stored: Sequence[Stored] = (),
        bad: Sequence[c.BadCopy] = (),
        wants: Sequence[str] = (),
        fresh: bool = False,
        step: int = -1,
        breakpoint: bool = False,
        lineage: int = -1,
        round: int | None = None,
        mixed: bool = False,
    ) -> int:
        body = c.NodeRestore(
            DIR,
            self.round if round is None else round,
            held,
            tuple(stored),
            prepared,
            tuple(wants) or (SHARED, rank_part(node)),
            tuple(bad),
            fresh,
            step,
            breakpoint,
            lineage,
            mixed,
        )
        return self.call(node, body)

    def go_fresh(self) -> int:
        """All members start to save without loading; their lineage."""
        calls = [self.restore(node, fresh=True) for node in self.members]
        return self.answer(calls[0], c.RestorePlan).lineage

    def ask(self, node: int, version: Version, shape: Shape, *parts: str) -> int:
        body = c.PersistAsk(DIR, self.round, version, shape, parts)
        return self.call(node, body)

    def persisted(
        self,
        node: int,
        attempt: str,
        version: Version,
        shape: Shape,
        *parts: str,
        problem: str = "",
    ) -> int:
        files = () if problem else tuple(FileEntry(f"{part}.bin", 1, 1) for part in parts)
        return self.call(
            node, c.PartsPersisted(DIR, version, shape, attempt, parts, files, problem)
        )

    def pushed(self, kind: type[Answer]) -> list[tuple[int, Answer]]:
        """What was pushed since the last look, of this kind; the rest is forgotten."""
        found: list[tuple[int, Answer]] = [
            (node, body) for node, body in self.pushes if isinstance(body, kind)
        ]
        self.pushes.clear()
        return found

    def commit(self, version: Version, shape: Shape) -> str:
        """Bring a sharded version to storage, everybody its own part; the attempt's name."""
        asks = [self.ask(n, version, shape, rank_part(n)) for n in self.members]
        attempt = self.answer(asks[0], c.PersistPlan).attempt
        for node in self.members:
            self.persisted(node, attempt, version, shape, rank_part(node))
        ((committer, order),) = self.pushed(c.CommitOrder)
        assert order.attempt == attempt
        self.call(committer, c.CommitDone(DIR, version, attempt))
        return attempt

    def committed(self) -> Version:
        """The newest committed version by what is durable."""
        found = [r.version for r in self.records if isinstance(r, rec.CheckpointCommitted)]
        return found[-1] if found else NONE


def begin(ledger: Ledger, version: Version = V5, shape: Shape = SHARDED) -> str:
    """Both nodes ask with all that they have; the name of the attempt."""
    common = (SHARED,) if shape.shared else ()
    for node in (0, 1):
        call = ledger.ask(node, version, shape, *common, rank_part(node))
    return ledger.answer(call, c.PersistPlan).attempt
