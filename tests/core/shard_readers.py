# SPDX-License-Identifier: Apache-2.0
"""Virtual workers and agents that read data, and a journaled master: see shard_histories.py."""

import random
from collections import Counter
from dataclasses import dataclass, field

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Reply
from holdfast.core.job.data.shards import Shards
from holdfast.core.kernel import Event, Record
from holdfast.model.checkpoint import Version
from holdfast.model.dataset import (
    BY_SAMPLE,
    BY_SHARD,
    IN_ORDER,
    LINES,
    LISTED,
    RANGE,
    STREAM,
    Dataset,
    Extent,
    Lease,
    Piece,
    Position,
)
from holdfast.model.ids import NodeId
from holdfast.protocol import data as d
from holdfast.protocol import messages as m

DIRECTORY = "/ckpt"
LAST_STEP = 1_000_000
Sample = tuple[int, int, int]


def samples(piece: Piece, begin: int, end: int) -> list[Sample]:
    return [(piece.epoch, piece.extent, at) for at in range(begin, end)]


LISTED_SIZES = (4, 1, 7, 3, 5)


@dataclass
class Held:
    """A lease in the hands of a virtual worker."""

    lease: Lease
    upto: int
    end: int = -1
    """Where its worker has promised to stop; -1: at the end of the piece."""

    def said(self) -> d.Consumed:
        return d.Consumed(self.lease.number, self.upto, end=self.end)

    def cut(self, end: int) -> None:
        """From now on its worker does not read beyond this, whoever knows of it."""
        piece = Piece(self.lease.piece.epoch, self.lease.piece.extent, self.lease.piece.begin, end)
        self.lease, self.end = Lease(self.lease.number, piece, self.lease.key), end


@dataclass
class Worker:
    """One rank of one round. It has at most one request under way."""

    rank: int
    node: int
    round: int
    session: str
    state: str = "new"
    """new, opening, reading, finished; a stopped one is a ghost of a round that is over."""
    seq: int = 0
    term: int = -1
    epoch: int = 0
    held: dict[int, Held] = field(default_factory=dict)
    #: To be said with the next request, and said with the one under way.
    news: dict[int, d.Consumed] = field(default_factory=dict)
    #: Since the last save: how far each lease is.
    marks: dict[int, int] = field(default_factory=dict)
    trained: list[Sample] = field(default_factory=list)
    step: int = 0
    asked: d.DataCall | None = None
    call: int = 0
    may_train: bool = False
    #: Of a slow one others get the tail of what it reads.
    pace: float = 1.0

    def forget_data(self) -> None:
        self.held, self.news, self.marks, self.trained = {}, {}, {}, []
        self.asked, self.state, self.epoch = None, "new", 0

    def let_go(self, held: Held, said: d.Consumed) -> None:
        """The rest of a lease goes back."""
        self.marks[said.lease] = held.upto
        self.news[said.lease] = said
        del self.held[said.lease]


class Master:
    """The ledger, its journal, and what has not reached the disk yet."""

    def __init__(self) -> None:
        self.shards = Shards()
        self.journal: list[bytes] = []
        self.versions: dict[Version, tuple[Position, ...]] = {}
        self._records: list[Record] = []
        self._marked: list[ev.VersionMarked] = []
        self._replies: list[Reply] = []

    def feed(self, event: Event, now: float) -> None:
        out = self.shards.handle(event, now)
        self._records += out.records
        self._marked += [fact for fact in out.facts if isinstance(fact, ev.VersionMarked)]
        self._replies += [reply for reply in out.commands if isinstance(reply, Reply)]
        for fact in out.facts:
            if isinstance(fact, ev.DataRequested):
                self.feed(fact, now)

    def write(self) -> list[Reply]:
        """All that was decided is durable: the answers may leave."""
        self.journal += [rec.encode_record(record) for record in self._records]
        for fact in self._marked:
            self.versions[fact.version] = fact.positions
        replies = self._replies
        self._records, self._marked, self._replies = [], [], []
        return replies

    def die(self, *, compacts: bool) -> None:
        """Only the journal is left of it; a new one replays that."""
        self._records, self._marked, self._replies = [], [], []
        self.shards = self._replayed()
        if compacts:
            self.journal = [rec.encode_record(record) for record in self.shards.snapshot()]
            again = self._replayed()
            self._same(again)
            self.shards = again

    def compare(self) -> None:
        """What is replayed is what a living master has written."""
        if not self._records:
            self._same(self._replayed())

    def _same(self, other: Shards) -> None:
        assert list(other.snapshot()) == list(self.shards.snapshot())
        assert other.position("train") == self.shards.position("train")

    def _replayed(self) -> Shards:
        shards = Shards()
        for payload in self.journal:
            shards.apply(rec.decode_record(payload))
        return shards


class Growth:
    """How far the partitions of a stream that grows are written, whoever knows of it."""

    def __init__(self, extents: tuple[Extent, ...]) -> None:
        self._extents = extents
        self._ends = [extent.begin for extent in extents]
        self.words = 0

    def go_on(self, rng: random.Random) -> tuple[int, ...]:
        """More is written: what somebody says of it may come after a later word."""
        self.words += 1
        for i, extent in enumerate(self._extents):
            self._ends[i] = min(extent.begin + extent.size, self._ends[i] + rng.randrange(4))
        return tuple(self._ends)

    def has(self, sample: Sample) -> bool:
        _, extent, at = sample
        return at < self._ends[extent]


class Readers:
    """The ranks of the present round, what they read, and what is under way between all."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.master = Master()
        self.follows = self.rng.random() < 0.75
        self.dataset = any_dataset(self.rng, DIRECTORY if self.follows else "")
        everything = all_samples(self.dataset)
        self.everything = set(everything)
        poisonous = self.rng.random() < 0.4
        self.poison = set(self.rng.choices(everything, k=2)) if poisonous else set()
        self.round = 0
        self.lineage = 0
        self.world: list[Worker] = []
        self.ghosts: list[Worker] = []
        self.next_node = 0
        self.nodes: list[int] = []
        self.next_call = 0
        #: What is under way to the master; an answer has no event.
        self.wire: list[tuple[int, Event]] = []
        self.answers: list[Reply] = []
        self.callers: dict[int, Worker] = {}
        #: The calls of each agent that are not answered, in order.
        self.marking: dict[int, list[ev.DataMarks]] = {}
        #: An agent either says with each version all that is not confirmed, in any order, or says
        #: each save of each rank once, in order. Both must do.
        self.merges = self.rng.random() < 0.5
        self.saved: dict[Version, dict[int, dict[int, int]]] = {}
        self.models: dict[Version, dict[int, list[Sample]]] = {}
        self.world_size = 0
        #: What the model has been trained on, before this lineage and in it.
        self.base: list[Sample] = []
        self.bases: dict[int, list[Sample]] = {}
        self.lines: Counter[Sample] = Counter()
        self.read: Counter[Sample] = Counter()
        self.faults = self.restored = self.cuts = 0
        self.timeout_s = self.rng.choice((5.0, 1e9))
        #: Nobody waits: ranks in step ask again and again.
        self.hurries = self.rng.random() < 0.2
        self.repeats = self.rng.choice((0.0, 0.05, 0.4))
        self.listed = 0
        self.growth = Growth(self.dataset.extents)

    # ---- workers --------------------------------------------------------------------------------

    def act(self, worker: Worker) -> None:
        if worker.state == "finished":
            return
        if worker.held and worker.may_train and self.rng.random() < 0.6 * worker.pace:
            self.consume(worker)
        if worker.state == "reading" and worker.may_train and self.rng.random() < 0.1:
            self.save(worker, worker.step + 1)
        if worker.asked is not None:
            if worker.news and self.rng.random() < 0.3:
                self.report(worker)
            if self.dataset.kind == LISTED and self.rng.random() < 0.2:
                self.name_shards(worker)
            if self.dataset.grows and self.rng.random() < 0.2:
                ends = self.growth.go_on(self.rng)
                self.tell_master(worker, d.ShardsGrown(worker.round, "train", ends))
            return
        if worker.state == "new":
            worker.state = "opening"
            self.ask(worker, d.DatasetOpen(worker.round, self.dataset))
        elif worker.state == "reading":
            self.take(worker)

    def ask(self, worker: Worker, body: d.DataCall) -> None:
        worker.seq += 1
        worker.asked = body
        self.send(worker)

    def send(self, worker: Worker) -> None:
        assert worker.asked is not None
        self.next_call += 1
        worker.call = self.next_call
        self.callers[worker.call] = worker
        event = ev.DataRequested(
            NodeId(worker.node), worker.node, worker.call, worker.session, worker.seq, worker.asked
        )
        self.wire.append((worker.node, event))

    def name_shards(self, worker: Worker) -> None:
        """Some of them, again and again, from any that is named already."""
        first, named, is_last = some_names(self.rng, self.listed)
        self.tell_master(worker, d.ShardsAdd(worker.round, "train", first, named, is_last))

    def tell_master(self, worker: Worker, body: d.DataCall) -> None:
        """Beside the request that may be held for long."""
        self.next_call += 1
        session = f"{worker.session} beside {self.next_call}"
        event = ev.DataRequested(NodeId(worker.node), worker.node, self.next_call, session, 1, body)
        self.wire.append((worker.node, event))

    def take(self, worker: Worker) -> None:
        want = self.rng.choice((0, 1, 1, 2)) if worker.held else self.rng.choice((1, 1, 2))
        if worker.held and not worker.news and self.rng.random() < 0.7:
            return
        consumed, epoch = tuple(worker.news.values()), worker.epoch
        if not worker.held and self.timeout_s < 10.0 and self.rng.random() < 0.05:
            epoch += 1  # Somebody who runs ahead has to wait.
        self.ask(
            worker,
            d.ShardsTake(
                worker.round,
                "train",
                worker.term,
                epoch,
                want,
                consumed,
                0.0 if self.hurries else self.timeout_s,
                is_idle=not worker.held,
            ),
        )

    def report(self, worker: Worker) -> None:
        """Others may wait for what this one has read."""
        said = tuple(worker.news.values())
        body = d.ShardsTake(worker.round, "train", worker.term, worker.epoch, 0, said)
        self.tell_master(worker, body)

    def consume(self, worker: Worker) -> None:
        held = worker.held[min(worker.held)]
        piece = held.lease.piece
        for at in range(held.upto, min(piece.end, held.upto + self.rng.randrange(1, 6))):
            sample = (piece.epoch, piece.extent, at)
            assert not self.dataset.grows or self.growth.has(sample), "dealt before it is written"
            if sample in self.poison or self.rng.random() < 0.005:
                worker.let_go(held, d.Consumed(held.lease.number, held.upto, "unreadable"))
                return
            held.upto = at + 1
            worker.trained.append(sample)
            self.read[sample] += 1
            if worker in self.world and self.follows:
                self.lines[sample] += 1
                assert self.lines[sample] == 1, f"{sample} is twice in the living model"
        number = held.lease.number
        worker.marks[number] = held.upto
        worker.news[number] = held.said()
        if held.upto == piece.end:
            del worker.held[number]
        elif self.rng.random() < 0.03:
            worker.let_go(held, d.Consumed(number, held.upto, returned=True))

    def share(self, worker: Worker, held: Held) -> None:
        """Others wait for it: all of what is not begun, else some of what is not read."""
        number, piece = held.lease.number, held.lease.piece
        if held.upto == piece.begin and self.rng.random() < 0.5:
            worker.let_go(held, d.Consumed(number, held.upto, returned=True))
        elif piece.end - held.upto > 1:
            held.cut(self.rng.randrange(held.upto + 1, piece.end))
            worker.news[number] = held.said()
            self.cuts += 1

    def save(self, worker: Worker, step: int) -> None:
        """The agent knows at once how far the rank is; it tells the master in its own time."""
        worker.step = step
        version = Version(self.lineage, step)
        if worker not in self.world:
            return
        marks = worker.marks
        worker.marks = {number: held.upto for number, held in worker.held.items()}
        if not self.follows:
            return
        self.models.setdefault(version, {})[worker.rank] = list(worker.trained)
        self.bases[self.lineage] = self.base
        ranks = self.saved.setdefault(version, {})
        ranks[worker.rank] = marks
        local = [other.rank for other in self.world if other.node == worker.node]
        if not self.merges:
            self.tell(worker, version, {worker.rank: marks})
        elif all(rank in ranks for rank in local):
            self.tell(worker, version, {rank: self.unconfirmed(rank, version) for rank in local})

    def unconfirmed(self, rank: int, version: Version) -> dict[int, int]:
        merged: dict[int, int] = {}
        for older in sorted(known for known in self.saved if known <= version):
            merged.update(self.saved[older].get(rank, {}))
        return merged

    def tell(self, worker: Worker, version: Version, marks: dict[int, dict[int, int]]) -> None:
        self.next_call += 1
        said = {
            rank: (d.Mark("train", worker.term, tuple(d.Consumed(*one) for one in of.items())),)
            for rank, of in marks.items()
        }
        body = d.DataMarked(DIRECTORY, self.round, version, said, self.world_size)
        call = ev.DataMarks(NodeId(worker.node), worker.node, self.next_call, body)
        self.marking[worker.node].append(call)
        self.wire.append((worker.node, call))

    # ---- answers --------------------------------------------------------------------------------

    def answer(self, reply: Reply) -> None:
        for node, calls in self.marking.items():
            for call in [call for call in calls if call.call == reply.call]:
                calls.remove(call)
                if isinstance(reply.body, m.Done):
                    self.confirmed(node, call.body.version)
        worker = self.callers.pop(reply.call, None)
        if worker is None or worker.call != reply.call or worker.asked is None:
            return
        asked, worker.asked = worker.asked, None
        match reply.body:
            case m.Refused(kind="fenced"):
                assert worker not in self.world
                worker.state = "finished"
            case m.Refused(kind="stale"):
                worker.state = "new"
                worker.held, worker.news = {}, {}
                assert not worker.may_train or worker not in self.world, reply.body
            case m.Refused():
                # It wanted to read before its model was restored.
                assert self.follows
                assert not worker.may_train
                assert "load them before you read" in reply.body.message
            case d.DatasetOpened(position, term):
                worker.state, worker.term, worker.epoch = "reading", term, position.epoch
                self.listed = position.first_listed
            case d.ShardsTaken():
                assert isinstance(asked, d.ShardsTake)
                self.taken(worker, asked, reply.body)

    def confirmed(self, node: int, version: Version) -> None:
        for older in [known for known in self.saved if known <= version]:
            for worker in self.world:
                if worker.node == node:
                    self.saved[older].pop(worker.rank, None)

    def taken(self, worker: Worker, asked: d.ShardsTake, body: d.ShardsTaken) -> None:
        for said in asked.consumed:
            if worker.news.get(said.lease) == said:
                del worker.news[said.lease]
        for lease in body.leases:
            assert lease.piece.epoch == asked.epoch
            worker.epoch = asked.epoch
            worker.held[lease.number] = Held(lease, lease.piece.begin)
            worker.marks.setdefault(lease.number, lease.piece.begin)
            check_owners(self.world, worker, lease)
        for number in body.wanted:
            if number in worker.held:
                self.share(worker, worker.held[number])
        if body.is_over and worker.epoch == asked.epoch:
            assert not worker.held, "the epoch is over while a worker has pieces of it"
            worker.epoch += 1
        if worker.epoch >= self.dataset.epochs and worker.may_train and not worker.news:
            self.save(worker, LAST_STEP)
            worker.state = "finished"


def some_names(rng: random.Random, named: int) -> tuple[int, tuple[tuple[str, int], ...], bool]:
    """Listed shards from any that is named already on, and whether there are no more."""
    first = rng.randrange(named + 1)
    end = rng.randrange(first, len(LISTED_SIZES)) + 1 if first < len(LISTED_SIZES) else first
    names = tuple((f"s{n}", LISTED_SIZES[n]) for n in range(first, end))
    return first, names, end == len(LISTED_SIZES)


def check_owners(world: list[Worker], worker: Worker, lease: Lease) -> None:
    """Nobody else of this world has any of these samples, or some of another epoch."""
    if worker not in world:
        return
    mine = set(samples(lease.piece, lease.piece.begin, lease.piece.end))
    for other in world:
        if other.term != worker.term:
            continue
        for number, held in other.held.items():
            if (other, number) != (worker, lease.number):
                theirs = samples(held.lease.piece, held.upto, held.lease.piece.end)
                assert mine.isdisjoint(theirs), f"{lease} is also in {other.session}"
                assert held.lease.piece.epoch == lease.piece.epoch, "epochs overlap"


def any_dataset(rng: random.Random, series: str) -> Dataset:
    kind = rng.choice((RANGE, RANGE, LINES, STREAM, LISTED))
    shuffle = {
        RANGE: rng.choice((IN_ORDER, BY_SHARD, BY_SAMPLE)),
        LINES: rng.choice((IN_ORDER, BY_SHARD)),
    }.get(kind, IN_ORDER)
    extents: tuple[Extent, ...] = ()
    if kind in (LINES, STREAM):
        begin = rng.randrange(5) if kind == STREAM else 0
        extents = tuple(
            Extent(f"e{i}", rng.randrange(1, 20), begin) for i in range(rng.randrange(1, 4))
        )
    return Dataset(
        "train",
        kind,
        rng.randrange(10, 60) if kind == RANGE else 0,
        rng.randrange(2, 9),
        1 if kind == STREAM else rng.choice((1, 1, 2, 3)),
        shuffle,
        rng.randrange(100),
        extents,
        series=series,
        grows=kind == STREAM and rng.random() < 0.7,
    )


def all_samples(dataset: Dataset) -> list[Sample]:
    match dataset.kind:
        case "range":
            extents = [(0, 0, dataset.size)]
        case "listed":
            extents = [(i, 0, size) for i, size in enumerate(LISTED_SIZES)]
        case _:
            extents = [(i, e.begin, e.begin + e.size) for i, e in enumerate(dataset.extents)]
    return [
        (epoch, extent, at)
        for epoch in range(dataset.epochs)
        for extent, begin, end in extents
        for at in range(begin, end)
    ]
