# SPDX-License-Identifier: Apache-2.0
"""The data ledger: which worker reads which samples, so that each counts once.

Workers take leases on pieces, report how far they have come, and wait here while work may still
come back to them. What a lost node or an old round had not consumed is dealt again.

A dataset can follow the checkpoints of a directory. Then every rank says with each save how far it
was, the position belongs to the saved version (fact VersionMarked), and when that version is
restored the data goes back with it, in the same step (RestoreAgreed).

A request is known by its session and number: a repeat gets the leases that it got before.
"""

from collections.abc import Iterable
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Reply
from holdfast.core.job.data.dataset_state import DatasetState
from holdfast.core.job.data.following import Following
from holdfast.core.job.data.positions import position, summary
from holdfast.core.job.data.registration import addition, difference, mistake
from holdfast.core.job.data.restart_barrier import RestartBarrier
from holdfast.core.job.data.shard_state import ShardState
from holdfast.core.job.data.shard_view import Rate, describe
from holdfast.core.job.data.takers import Takers
from holdfast.core.kernel import Outcome, Record, Tick
from holdfast.model.dataset import Dataset, Position
from holdfast.protocol import data as d
from holdfast.protocol import messages as m

WANT_MAX = 64
"""Pieces given for one request at most: a worker with more would leave none for the others."""

Handled = (
    ev.DataRequested
    | ev.DataMarks
    | ev.RestoreAgreed
    | ev.WorldFormed
    | ev.WorldFound
    | ev.NodeReady
    | ev.NodeAbsent
    | ev.NodeLost
    | ev.RequestDropped
    | ev.MasterStarted
    | Tick
)


class Shards:
    """All datasets of the job."""

    OWNS = (
        rec.DatasetRegistered,
        rec.ShardsListed,
        rec.ShardsLeased,
        rec.ShardsReported,
        rec.LeasesReturned,
        rec.MarksFolded,
        rec.PositionsAdopted,
        rec.DatasetKept,
        rec.AnswerKept,
        rec.StreamGrown,
    )

    def __init__(self) -> None:
        self._state = ShardState()
        # Volatile: agents repeat what was not answered.
        self._takers, self._restart_barrier = Takers(), RestartBarrier()
        self._following = Following(self._state)
        self._rates: dict[str, Rate] = {}
        #: Lost nodes: their late requests are refused.
        self._lost: set[int] = set()
        #: The last request of each session that was answered with nothing.
        self._seen: dict[str, int] = {}
        #: The present round, also when the datasets are too young to know it.
        self._round = 0

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
        out = Outcome()
        match event:
            case ev.DataRequested():
                if not self._restart_barrier.holds(event):
                    answer = self._requested(out, event, now)
                    if answer is not None:
                        _reply(out, event, answer)
            case ev.DataMarks():
                self._marked(out, event)
            case ev.RestoreAgreed():
                self._restored(out, event)
            case ev.WorldFormed():
                self._new_round(out, event.world.round)
                out.facts.extend(self._restart_barrier.end())
            case ev.WorldFound():
                self._round = event.world.round
                self._restart_barrier.begin(event)
            case ev.NodeReady():
                self._takers.drop_node(event.member.node_id)
                out.facts.extend(self._restart_barrier.came(event.member.node_id))
            case ev.NodeAbsent():
                self._takers.drop_node(event.node_id)
            case ev.NodeLost():
                self._node_lost(out, event.node_id)
            case ev.RequestDropped():
                self._takers.drop(event.session, event.seq)
                self._restart_barrier.drop(event.session, event.seq)
            case ev.MasterStarted():
                out.facts.extend(ev.DatasetFollows(path) for path in self._state.followers)
            case Tick():
                for taker in self._takers.take_late(now):
                    _reply(out, taker.request, self._nothing(taker.request))
            case _:
                assert_never(event)
        return out

    def _requested(self, out: Outcome, event: ev.DataRequested, now: float) -> m.Answer | None:
        body = event.body
        if 0 < body.scope < max(self._round, self._state.round):
            return m.Refused("fenced", f"round {body.scope} is over")
        if event.node_id in self._lost:
            return m.Refused("fenced", "the node is no longer part of the job")
        if isinstance(body, d.DatasetOpen):
            return self._open(out, body.dataset)
        dataset = self._state.datasets.get(body.name)
        if dataset is None:
            return m.Refused("usage", f"no dataset {body.name!r} is registered: open it first")
        if dataset.problem:
            return m.Refused("usage", dataset.problem)
        if isinstance(body, d.ShardsAdd | d.ShardsGrown):
            return self._add(out, dataset, body)
        return self._take(out, dataset, event, body, now)

    # ---- registration ---------------------------------------------------------------------------

    def _open(self, out: Outcome, wanted: Dataset) -> m.Answer:
        dataset = self._state.datasets.get(wanted.name)
        problem = mistake(wanted) if dataset is None else difference(dataset.dataset, wanted)
        if problem:
            return m.Refused("usage", problem)
        if dataset is None:
            self._state.commit(out, rec.DatasetRegistered(wanted))
            out.facts.append(ev.DatasetRegistered(wanted))
            if wanted.series:
                out.facts.append(ev.DatasetFollows(wanted.series))
            dataset = self._state.datasets[wanted.name]
        if dataset.problem:
            return m.Refused("usage", dataset.problem)
        return d.DatasetOpened(summary(dataset), dataset.term)

    def _add(
        self, out: Outcome, dataset: DatasetState, body: d.ShardsAdd | d.ShardsGrown
    ) -> m.Answer:
        record, problem = addition(dataset.dataset, dataset.cutter, body)
        if problem:
            return m.Refused("usage", problem)
        if record is not None:
            self._state.commit(out, record, (dataset,))
            self._serve(out, dataset)
        return m.Done()

    # ---- leases ---------------------------------------------------------------------------------

    def _take(
        self,
        out: Outcome,
        dataset: DatasetState,
        event: ev.DataRequested,
        body: d.ShardsTake,
        now: float,
    ) -> m.Answer | None:
        if body.term != dataset.term:
            return m.Refused("stale", f"dataset {body.name!r} was set back: open it again")
        if body.want > 0 and (problem := dataset.too_early(body.scope)):
            return m.Refused("usage", problem)
        if (echo := self._echo(event)) is not None:
            return echo
        if problem := dataset.wrong_report(body.consumed):
            return m.Refused("rejected", problem)
        # The same request again, or its asker has given up: only the newest is answered.
        self._takers.drop(event.session, event.seq)
        self._report(out, dataset, body.consumed, now)
        if body.want < 1 or dataset.is_over(body.epoch):
            return self._nothing(event)
        if self._grant(out, dataset, event, body) or self._takers.hold(event, body, now):
            return None
        return self._nothing(event)

    def _echo(self, event: ev.DataRequested) -> m.Answer | None:
        """The answer to a request that was answered before; None for a new one."""
        answer, seen = self._state.answers.get(event.session), self._seen.get(event.session, -1)
        answered = seen if answer is None else max(seen, answer.seq)
        if event.seq < max(answered, self._takers.waiting(event.session)):
            # From a lost stream: its asker has had its answer, or does not want it any more.
            return m.Refused("stale", "there is a later request of this session")
        if answer is not None and event.seq == answer.seq:
            return d.ShardsTaken(answer.leases)
        return self._nothing(event) if event.seq == seen else None

    def _report(
        self, out: Outcome, dataset: DatasetState, consumed: tuple[d.Consumed, ...], now: float
    ) -> None:
        news = tuple(said for said in consumed if dataset.is_news(said))
        if not news:
            return
        before = dataset.reported
        self._state.commit(out, rec.ShardsReported(dataset.dataset.name, news), (dataset,))
        rate = self._rates.setdefault(dataset.dataset.name, Rate(now))
        rate.add(dataset.reported - before, now)
        self._serve(out, dataset)

    def _grant(
        self, out: Outcome, dataset: DatasetState, event: ev.DataRequested, body: d.ShardsTake
    ) -> bool:
        """Give pieces to the worker that asks; False if there are none now."""
        pieces, from_open = dataset.available(body.epoch, min(body.want, WANT_MAX))
        if not pieces:
            return False
        leases = tuple(dataset.lease_on(piece, ahead) for ahead, piece in enumerate(pieces))
        record = rec.ShardsLeased(
            body.name, event.node_id, body.scope, leases, from_open, event.session, event.seq
        )
        self._state.lease(out, record)
        self._takers.served(body.name)
        _reply(out, event, d.ShardsTaken(leases))
        return True

    def _serve(self, out: Outcome, dataset: DatasetState) -> None:
        """Something came back or is over: answer the requests that wait, the oldest first."""
        name = dataset.dataset.name
        for epoch in self._takers.epochs(name):
            while (taker := self._takers.first(name, epoch)) is not None:
                if dataset.is_over(epoch):
                    _reply(out, taker.request, self._nothing(taker.request))
                elif not self._grant(out, dataset, taker.request, taker.body):
                    break
                self._takers.take_first(name, epoch)

    def _nothing(self, event: ev.DataRequested) -> d.ShardsTaken:
        """An answer without leases: says if the epoch is over, and which leases others wait for."""
        body = event.body
        assert isinstance(body, d.ShardsTake)
        if event.session:
            self._seen[event.session] = event.seq
        dataset = self._state.datasets[body.name]
        wanted: tuple[int, ...] = ()
        if self._takers.have_nothing(body.name, dataset.epoch):
            wanted = dataset.held_by(event.node_id)
        return d.ShardsTaken((), dataset.is_over(body.epoch), wanted)

    # ---- nodes and rounds come and go -----------------------------------------------------------

    def _new_round(self, out: Outcome, round_number: int) -> None:
        for taker in self._takers.take_rounds_before(round_number):
            over = f"round {taker.body.scope} is over"
            _reply(out, taker.request, m.Refused("fenced", over))
        if self._state.datasets:
            self._state.commit(out, rec.LeasesReturned(round_number))
        self._round = round_number
        self._seen.clear()
        self._serve_all(out)

    def _node_lost(self, out: Outcome, node_id: int) -> None:
        self._lost.add(node_id)
        self._takers.drop_node(node_id)
        if any(node_id in dataset.live for dataset in self._state.datasets.values()):
            self._state.commit(out, rec.LeasesReturned(node_id=node_id))
        self._serve_all(out)

    def _serve_all(self, out: Outcome) -> None:
        for dataset in self._state.datasets.values():
            self._serve(out, dataset)

    # ---- positions go with the model ------------------------------------------------------------

    def _marked(self, out: Outcome, call: ev.DataMarks) -> None:
        for dataset in self._following.marked(out, call):
            self._serve(out, dataset)

    def _restored(self, out: Outcome, event: ev.RestoreAgreed) -> None:
        for dataset in self._following.restored(out, event):
            name = dataset.dataset.name
            for taker in self._takers.take_dataset(name):
                stale = m.Refused("stale", f"dataset {name!r} was set back: open it again")
                _reply(out, taker.request, stale)

    # ---- time, durable state, looking -----------------------------------------------------------

    def deadline(self) -> float | None:
        return self._takers.deadline()

    def validate(self) -> None:
        for dataset in self._state.datasets.values():
            dataset.validate()
        self._takers.validate()

    def apply(self, record: Record) -> None:
        self._state.apply(record)

    def snapshot(self) -> Iterable[Record]:
        return self._state.snapshot()

    def position(self, name: str) -> Position | None:
        """How far a dataset is; None if there is none of that name."""
        dataset = self._state.datasets.get(name)
        return None if dataset is None else position(dataset)

    def view(self, now: float) -> list[dict[str, object]]:
        """Each dataset as people see it."""
        return [
            describe(dataset, self._rates.get(name), now)
            for name, dataset in self._state.datasets.items()
        ]


def _reply(out: Outcome, request: ev.DataRequested, answer: m.Answer) -> None:
    out.commands.append(Reply(request.link, request.call, answer))
