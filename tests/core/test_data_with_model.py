# SPDX-License-Identifier: Apache-2.0
"""Data that follow a model, through the whole core: after every restore they are where it is.

Two nodes of one rank each read a dataset of 40 samples in shards of 10. What a rank has read and
saved is in the model; what it has only reported is not.
"""

from collections.abc import Iterable

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.kernel import Outcome
from holdfast.model.checkpoint import NONE, Holding, Shape, Version, rank_part
from holdfast.model.dataset import Dataset, Lease
from holdfast.protocol import checkpoints as c
from holdfast.protocol import data as d
from holdfast.protocol import messages as m
from tests.core.harness import Job, answers, checkpoint, of_kind, running_pair

DIR = "/ckpt"
SHAPE = Shape(2, shared=False)
SIZE = 40
TRAIN = Dataset("train", size=SIZE, shard_size=10, series=DIR)
AGENTS = ("a", "b")
V1, V2 = Version(0, 1), Version(0, 2)


class Training:
    """Two ranks that read and save; rank 0 is on node a."""

    def __init__(self) -> None:
        self.job: Job = running_pair()
        self.round = 1
        self.term = 0
        self._seq = 0
        self.open()
        self.load()

    def open(self) -> None:
        for agent in AGENTS:
            (opened,) = answers(self.request(agent, d.DatasetOpen(self.round, TRAIN)))
            assert isinstance(opened, d.DatasetOpened), opened
            self.term = opened.term

    def request(self, agent: str, body: d.DataCall) -> Outcome:
        self._seq += 1
        job, session = self.job, f"{agent}-{self.round}"
        return job.feed(
            ev.DataRequested(job.node_of[agent], job.link(agent), 1, session, self._seq, body)
        )

    def take(self, agent: str, **reported: int) -> Lease | None:
        """One more lease; `reported`: what else is consumed, as lease_3=25."""
        consumed = tuple(d.Consumed(int(name[6:]), upto) for name, upto in reported.items())
        body = d.ShardsTake(self.round, "train", self.term, 0, 1, consumed)
        for answer in answers(self.request(agent, body)):
            assert isinstance(answer, d.ShardsTaken), answer
            return answer.leases[0] if answer.leases else None
        return None

    def mark(self, agent: str, version: Version, uptos: dict[int, int]) -> Outcome:
        """A rank saves; `uptos`: how far it is in its leases."""
        job, rank = self.job, AGENTS.index(agent)
        marks = (d.Mark("train", self.term, tuple(d.Consumed(*said) for said in uptos.items())),)
        body = d.DataMarked(DIR, self.round, version, {rank: marks}, 2, (version,))
        return job.feed(ev.DataMarks(job.node_of[agent], job.link(agent), 1, body))

    def break_world(self) -> None:
        """A worker dies, and the next round begins."""
        self.job.failed("a", self.round)
        self.round = self.job.round()

    def load(self, *held: Version, fresh: bool = False, lineage: int = -1) -> ev.RestoreAgreed:
        """Both nodes load what they hold; what they agreed on."""
        prepared = NONE
        for _ in range(4):
            for rank, agent in enumerate(AGENTS):
                holdings = tuple(Holding(v, SHAPE, rank_part(rank), 1) for v in held)
                body = c.NodeRestore(
                    DIR, self.round, holdings, (), prepared, (), fresh=fresh, lineage=lineage
                )
                outcome = checkpoint(self.job, body, agent)
            agreed = of_kind(ev.RestoreAgreed, outcome.facts)
            if agreed:
                self.term += not fresh
                return agreed[0]
            (prepared,) = {p.version for p in of_kind(c.RestorePlan, answers(outcome))}
        raise AssertionError("they did not agree")

    def rest(self) -> list[int]:
        """Every sample that is dealt out from now on, to node a."""
        samples: list[int] = []
        while (lease := self.take("a")) is not None:
            samples += range(lease.piece.begin, lease.piece.end)
            self.take_report("a", lease)
        return samples

    def take_report(self, agent: str, lease: Lease) -> None:
        done = (d.Consumed(lease.number, lease.piece.end),)
        self.request(agent, d.ShardsTake(self.round, "train", self.term, 0, 0, done))


def all_but(consumed: Iterable[int]) -> list[int]:
    return sorted(set(range(SIZE)) - set(consumed))


def begun() -> tuple[Training, Lease, Lease]:
    """Each rank has a lease: the samples 0..9 and 10..19."""
    training = Training()
    one, two = training.take("a"), training.take("b")
    assert one is not None
    assert two is not None
    return training, one, two


def test_after_a_restore_exactly_what_the_model_has_not_seen_is_dealt() -> None:
    """Prior art: the position of data and the model go apart at every restore."""
    training, one, two = begun()
    training.mark("a", V1, {one.number: 3})
    training.mark("b", V1, {two.number: 12})
    # They read on, and say so, but do not save again.
    training.take("a", **{f"lease_{one.number}": 10})
    training.break_world()
    training.open()
    assert training.load(V1).version == V1
    assert training.rest() == all_but([0, 1, 2, 10, 11])


def test_a_version_that_one_rank_has_not_marked_is_not_restored() -> None:
    training, one, two = begun()
    training.mark("a", V1, {one.number: 3})
    training.mark("b", V1, {two.number: 12})
    training.mark("a", V2, {one.number: 8})
    training.break_world()
    training.open()
    agreed = training.load(V1, V2)
    assert agreed.version == V1
    assert "step 2 is passed over" in agreed.notes[0]
    assert training.rest() == all_but([0, 1, 2, 10, 11])


def test_the_word_of_a_node_counts_until_the_next_restore() -> None:
    """Each node has a stream of its own: the end of the round may overtake a word on the other.

    It is not lost. When a master was away, everything that was said meanwhile comes this way.
    """
    training, one, two = begun()
    training.mark("a", V1, {one.number: 3})
    before = training.round
    training.break_world()
    training.round, now = before, training.round
    # Node b had read on, and had reported less than it had saved.
    training.mark("b", V1, {two.number: 14})
    training.round = now
    training.open()
    assert training.load(V1).version == V1
    assert training.rest() == all_but([0, 1, 2, 10, 11, 12, 13])
    refusals = of_kind(m.Refused, answers(training.mark("b", V1, {two.number: 14})))
    assert [refusal.kind for refusal in refusals] == ["stale"]


def test_a_node_lost_before_the_others_have_spoken_leaves_its_word() -> None:
    """Its copy elsewhere has what it saved: the position must be of that, not of its reports."""
    training, one, two = begun()
    training.mark("b", V1, {two.number: 14})
    training.job.leave("b")
    outcome = training.mark("a", V1, {one.number: 3})
    (marked,) = of_kind(ev.VersionMarked, outcome.facts)
    (position,) = marked.positions
    assert [(piece.begin, piece.end) for piece in position.open] == [(3, 10), (14, 20)]


def test_saving_a_step_again_does_not_move_the_data() -> None:
    """It begins a lineage, but nothing is restored: the ranks go on reading where they are."""
    training, one, two = begun()
    assert training.load(fresh=True, lineage=0).fresh
    again = Version(1, 1)
    training.mark("a", again, {one.number: 3})
    training.mark("b", again, {two.number: 12})
    training.break_world()
    training.open()
    assert training.load(again).version == again
    assert training.rest() == all_but([0, 1, 2, 10, 11])


def test_reading_before_the_restore_is_refused() -> None:
    """What the workers that are gone had read is known once it is known which model is restored."""
    training, _, _ = begun()
    training.break_world()
    training.open()
    # Who only opens the dataset asks for nothing: it must be open before the load.
    (nothing,) = answers(training.request("a", take(training, want=0)))
    assert isinstance(nothing, d.ShardsTaken), nothing
    (refusal,) = answers(training.request("a", take(training, want=1)))
    assert isinstance(refusal, m.Refused)
    assert "load them before you read" in refusal.message


def take(training: Training, want: int) -> d.ShardsTake:
    return d.ShardsTake(training.round, "train", training.term, 0, want)


def test_a_new_master_between_the_word_and_the_restore() -> None:
    for compacted in (False, True):
        training, one, two = begun()
        training.mark("a", V1, {one.number: 3})
        training.mark("b", V1, {two.number: 12})
        training.job.restart(compacted=compacted)
        for agent in AGENTS:
            training.job.attach(agent, round=1)
        training.break_world()
        training.open()
        assert training.load(V1).version == V1
        assert training.rest() == all_but([0, 1, 2, 10, 11])


def test_the_commit_gets_the_position_that_the_ranks_marked() -> None:
    training, one, two = begun()
    training.mark("a", V1, {one.number: 3})
    training.mark("b", V1, {two.number: 12})
    for rank, agent in enumerate(AGENTS):
        ask = c.PersistAsk(DIR, training.round, V1, SHAPE, (rank_part(rank),))
        outcome = checkpoint(training.job, ask, agent)
    attempt = of_kind(c.PersistPlan, answers(outcome))[0].attempt
    for rank, agent in enumerate(AGENTS):
        report = c.PartsPersisted(DIR, V1, SHAPE, attempt, (rank_part(rank),), ())
        outcome = checkpoint(training.job, report, agent)
    (order,) = of_kind(c.CommitOrder, [p.body for p in of_kind(cmd.Push, outcome.commands)])
    (position,) = order.positions
    assert [(piece.begin, piece.end) for piece in position.open] == [(3, 10), (12, 20)]
    assert position.cut == (2,)
