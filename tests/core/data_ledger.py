# SPDX-License-Identifier: Apache-2.0
"""Drives the ledger of shards in tests: workers by name, each on the node of its first letter."""

from typing import TypeVar

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Reply
from holdfast.core.job.data.shards import Shards
from holdfast.core.kernel import Event, Record, Tick
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.dataset import Dataset, Lease, Position
from holdfast.model.ids import Generation, Incarnation, NodeId, NodeRank, Round
from holdfast.model.node import ExitReason
from holdfast.model.world import Member, World
from holdfast.protocol import data as d
from holdfast.protocol import messages as m

DIRECTORY = "/ckpt"
EventKind = TypeVar("EventKind", bound=Event)


class DataLedger:
    """One ledger. Every call is one event; answers are kept by the worker who waits for them."""

    def __init__(self, *datasets: Dataset) -> None:
        self.shards = Shards()
        self.now = 0.0
        self.round = 0
        self.term = 0
        self.journal: list[bytes] = []
        self.facts: list[Event] = []
        #: The last answer to each worker; None while it waits.
        self.answer: dict[str, m.Answer | None] = {}
        self._seqs: dict[str, int] = {}
        self._calls: dict[int, str] = {}
        self._marked: dict[int, str] = {}
        for dataset in datasets:
            self.open("a", dataset)

    # ---- what workers and agents do -------------------------------------------------------------

    def open(self, worker: str, dataset: Dataset) -> m.Answer | None:
        answer = self.ask(worker, d.DatasetOpen(self.round, dataset))
        if isinstance(answer, d.DatasetOpened):
            self.term = answer.term
        return answer

    def take(
        self, worker: str, *consumed: d.Consumed, want: int = 1, epoch: int = 0, name: str = "train"
    ) -> list[Lease]:
        """The leases that the worker gets; none while it waits or when the epoch is over."""
        body = d.ShardsTake(self.round, name, self.term, epoch, want, consumed)
        return self.leases(self.ask(worker, body))

    def report(self, worker: str, *consumed: d.Consumed) -> d.ShardsTaken:
        body = d.ShardsTake(self.round, "train", self.term, 0, 0, consumed)
        answer = self.ask(worker, body)
        assert isinstance(answer, d.ShardsTaken), answer
        return answer

    def ask(self, worker: str, body: d.DataCall, *, seq: int | None = None) -> m.Answer | None:
        """Ask under the worker's session, with its next number or with an older one again."""
        if seq is None:
            seq = self._seqs[worker] = self._seqs.get(worker, 0) + 1
        call = len(self._calls) + 1
        self._calls[call] = worker
        self.answer[worker] = None
        self.feed(ev.DataRequested(node(worker), 1, call, f"session of {worker}", seq, body))
        return self.answer[worker]

    def repeat(self, worker: str, body: d.DataCall) -> m.Answer | None:
        """The last request again."""
        return self.ask(worker, body, seq=self._seqs[worker])

    def mark(
        self, worker: str, version: Version, marks: dict[int, dict[int, int]], world_size: int = 2
    ) -> m.Answer | None:
        """An agent says how far ranks are in their leases; `worker` is on its node."""
        said = {
            rank: (d.Mark("train", self.term, tuple(d.Consumed(*one) for one in uptos.items())),)
            for rank, uptos in marks.items()
        }
        body = d.DataMarked(DIRECTORY, self.round, version, said, world_size)
        call, agent = len(self._calls) + 1, f"agent {worker} {version.step}"
        self._calls[call] = agent
        self.answer[agent] = None
        self.feed(ev.DataMarks(node(worker), 1, call, body))
        return self.answer[agent]

    # ---- what happens to the job ----------------------------------------------------------------

    def form(self, round_number: int) -> None:
        members = (member("a"), member("b"))
        world = World(
            round=Round(round_number), generation=Generation(round_number), members=members
        )
        self.round = round_number
        self.feed(ev.WorldFormed(world, "", False))

    def lose(self, worker: str) -> None:
        self.feed(ev.NodeLost(node(worker), NodeRank(0), ExitReason.KILLED, "", True))

    def restore(
        self, version: Version = NONE, *positions: Position, lineage: int = 1, worker: str = "a"
    ) -> None:
        """The model of the directory is restored, and whoever reads opens the dataset again."""
        agreed = ev.RestoreAgreed(
            DIRECTORY, Round(self.round), version, lineage, False, (), positions
        )
        self.feed(agreed)
        dataset = next(rec_.dataset for rec_ in self.registered())
        self.open(worker, dataset)

    def registered(self) -> list[rec.DatasetRegistered]:
        records = [rec.decode_record(payload) for payload in self.journal]
        return [record for record in records if isinstance(record, rec.DatasetRegistered)]

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    def restart(self, *, compact: bool = False) -> None:
        """A new master replays the journal, or a snapshot of it."""
        before, records = list(self.shards.snapshot()), self.journal
        if compact:
            records = [rec.encode_record(record) for record in before]
        self.shards = Shards()
        for payload in records:
            self.shards.apply(rec.decode_record(payload))
        assert list(self.shards.snapshot()) == before
        self.feed(ev.MasterStarted("n"))

    def feed(self, event: Event) -> list[Record]:
        out = self.shards.handle(event, self.now)
        self.journal += [rec.encode_record(record) for record in out.records]
        self.facts += out.facts
        for command in out.commands:
            assert isinstance(command, Reply)
            self.answer[self._calls[command.call]] = command.body
        return out.records

    # ---- looking --------------------------------------------------------------------------------

    @staticmethod
    def leases(answer: m.Answer | None) -> list[Lease]:
        if answer is None:
            return []
        assert isinstance(answer, d.ShardsTaken), answer
        return list(answer.leases)

    def is_over(self, worker: str) -> bool:
        answer = self.answer[worker]
        return isinstance(answer, d.ShardsTaken) and answer.is_over

    def refusal(self, worker: str) -> m.Refused:
        answer = self.answer[worker]
        assert isinstance(answer, m.Refused), answer
        return answer

    def said(self, kind: type[EventKind]) -> list[EventKind]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def position(self) -> Position:
        found = self.shards.position("train")
        assert found is not None
        return found

    def view(self) -> dict[str, object]:
        return self.shards.view(self.now)[0]


def node(worker: str) -> NodeId:
    return NodeId("abcdef".index(worker[0]))


def member(worker: str) -> Member:
    node_id = node(worker)
    return Member(
        node_id=node_id,
        incarnation=Incarnation(node_id + 1),
        node_rank=NodeRank(node_id),
        nproc=1,
        host="h",
        store_port=1,
    )


def done(lease: Lease) -> d.Consumed:
    return d.Consumed(lease.number, lease.piece.end)


def upto(lease: Lease, at: int) -> d.Consumed:
    return d.Consumed(lease.number, at)


def failed(lease: Lease, at: int, why: str = "unreadable") -> d.Consumed:
    return d.Consumed(lease.number, at, why)


def returned(lease: Lease, at: int) -> d.Consumed:
    return d.Consumed(lease.number, at, returned=True)


def span(lease: Lease) -> tuple[int, int]:
    return lease.piece.begin, lease.piece.end
