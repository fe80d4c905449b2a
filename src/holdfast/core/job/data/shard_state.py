# SPDX-License-Identifier: Apache-2.0
"""The durable part of the data ledger, and how records change it."""

from collections.abc import Iterable
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.data.dataset_state import DatasetState
from holdfast.core.job.data.positions import adopt, keep, restored
from holdfast.core.kernel import Outcome, Record
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.dataset import Lease, Position
from holdfast.protocol.data import Consumed


class AnswerState(Struct, frozen=True):
    """The last leases that a session was given: a repeated request gets them again."""

    seq: int
    name: str
    node_id: int
    scope: int
    leases: tuple[Lease, ...]


class ShardState:
    """All datasets of the job, and the last answer to each session."""

    def __init__(self) -> None:
        self.datasets: dict[str, DatasetState] = {}
        #: The datasets that go with the checkpoints of a directory, in the order of registration.
        self.followers: dict[str, list[DatasetState]] = {}
        self.answers: dict[str, AnswerState] = {}
        #: The newest version of each directory whose marks are folded into the leases.
        self._marked: dict[str, Version] = {}
        #: What was restored last: for datasets that are registered only after it.
        self.restored: dict[str, rec.PositionsAdopted] = {}
        #: Requests of rounds before this one are fenced.
        self.round = 0

    def marked(self, directory: str) -> Version:
        return self._marked.get(directory, NONE)

    def commit(self, out: Outcome, record: Record, changed: Iterable[DatasetState] = ()) -> None:
        """Make a record true and durable; say what people want to know of datasets it changed."""
        before = [(dataset, dataset.first_left, len(dataset.aside)) for dataset in changed]
        self.apply(record)
        out.records.append(record)
        for dataset, left, aside in before:
            what = dataset.dataset
            for piece, why in islice(dataset.aside.items(), aside, None):
                out.facts.append(ev.PieceSetAside(what.name, piece, what.attempts, why))
            if dataset.first_left > left:
                out.facts.append(ev.EpochOver(what.name, left, what.epochs))

    def lease(self, out: Outcome, record: rec.ShardsLeased) -> None:
        """Commit a lease; a report right before it and the lease become one record."""
        before = out.records[-1] if out.records else None
        self.commit(out, record)
        if isinstance(before, rec.ShardsReported) and before.name == record.name:
            out.records[-2:] = [replace(record, consumed=before.consumed)]

    def apply(self, record: Record) -> None:
        match record:
            case rec.ShardsReported():
                self._report(record.name, record.consumed)
            case rec.ShardsLeased():
                self._report(record.name, record.consumed)
                self._lease(record)
            case rec.DatasetRegistered():
                self._register(record)
            case rec.ShardsListed():
                cutter = self.datasets[record.name].cutter
                cutter.name(record.first, record.shards, is_last=record.is_last)
            case rec.StreamGrown():
                self.datasets[record.name].cutter.grow(record.ends)
            case rec.MarksFolded():
                self._marked[record.directory] = record.version
                for name, lease, upto in record.marks:
                    self.datasets[name].mark(lease, upto)
            case rec.PositionsAdopted():
                self._adopt(record)
            case rec.LeasesReturned():
                self._return(record)
            case _:
                self._keep(record)

    def _register(self, record: rec.DatasetRegistered) -> None:
        dataset = self._add(DatasetState(record.dataset))
        before = self.restored.get(record.dataset.series)
        if before is not None:
            adopt(dataset, _position_of(record.dataset.name, before.positions), before.round)

    def _add(self, dataset: DatasetState) -> DatasetState:
        self.datasets[dataset.dataset.name] = dataset
        if series := dataset.dataset.series:
            self.followers.setdefault(series, []).append(dataset)
        return dataset

    def _report(self, name: str, consumed: tuple[Consumed, ...]) -> None:
        dataset = self.datasets[name]
        for said in consumed:
            dataset.report(said)

    def _lease(self, record: rec.ShardsLeased) -> None:
        dataset = self.datasets[record.name]
        dataset.grant(record.leases, record.from_open, record.node_id, record.scope)
        if record.session:
            self.answers[record.session] = AnswerState(
                record.seq, record.name, record.node_id, record.scope, record.leases
            )

    def _adopt(self, record: rec.PositionsAdopted) -> None:
        self.restored[record.directory] = record
        self._marked[record.directory] = Version(record.lineage, -1)
        for dataset in self.followers.get(record.directory, ()):
            adopt(dataset, _position_of(dataset.dataset.name, record.positions), record.round)

    def _return(self, record: rec.LeasesReturned) -> None:
        self.round = max(self.round, record.before)
        for dataset in self.datasets.values():
            numbers = dataset.abandoned(before=record.before, node_id=record.node_id)
            dataset.give_back(numbers)
        self.answers = {
            session: answer
            for session, answer in self.answers.items()
            if answer.node_id != record.node_id and not 0 < answer.scope < record.before
        }

    def _keep(self, record: Record) -> None:
        match record:
            case rec.DatasetKept():
                self._add(restored(record))
            case rec.AnswerKept():
                self.answers[record.session] = AnswerState(
                    record.seq, record.name, record.node_id, record.scope, record.leases
                )
            case _:
                raise TypeError(f"{record!r} is not a record of the shards")

    def snapshot(self) -> Iterable[Record]:
        if self.round:
            yield rec.LeasesReturned(self.round)
        yield from self.restored.values()
        for directory, version in self._marked.items():
            yield rec.MarksFolded(directory, version)
        for dataset in self.datasets.values():
            yield from keep(dataset)
        for session, answer in self.answers.items():
            yield rec.AnswerKept(
                session, answer.seq, answer.name, answer.node_id, answer.scope, answer.leases
            )


def _position_of(name: str, positions: tuple[Position, ...]) -> Position | None:
    return next((position for position in positions if position.name == name), None)
