# SPDX-License-Identifier: Apache-2.0
"""What must hold in every run, whatever goes wrong. The checkers know the truth: they are told by
the models what really happened, not by the cores what these believe."""

from collections import Counter
from collections.abc import Sequence

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.flow import JobCore
from holdfast.core.job.records import encode_record
from holdfast.core.kernel import Event, Record
from holdfast.model.checkpoint import NONE, SHARED, Shape, Version
from holdfast.model.dataset import Position
from holdfast.model.job import NODE_RELAUNCHES, WORKER_RESTARTS
from holdfast.model.node import ExitReason
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import RestorePlan
from holdfast.sim.history import History
from holdfast.sim.scenario import Scenario

Sample = tuple[int, int]

ROUNDS_PER_FAULT = 4
"""What one fault may cost at most: a round without the node, one with it again, and some room for
nodes that come back one by one."""


class Violation(AssertionError):
    """Something that must never happen has happened."""


class Checkers:
    """Told of everything; raises Violation at once."""

    def __init__(self, scenario: Scenario, history: History) -> None:
        self._scenario = scenario
        self._history = history
        #: By round: its generation, and who holds which place.
        self._worlds: dict[int, tuple[int, int, int]] = {}
        self._places: dict[tuple[int, int], tuple[str, int]] = {}
        self._stepping = 0
        self._restarts: Counter[str] = Counter()
        self._relaunches: Counter[tuple[int, str]] = Counter()
        self.rounds = self.planned_rounds = 0
        self.newest = NONE
        self.commits = self.restores = 0
        self._agreed: dict[tuple[int, int], Version] = {}
        #: By version and rank: what the rank had trained on in its lineage.
        self._models: dict[Version, dict[int, list[Sample]]] = {}
        #: By lineage: what the model had been trained on before it began.
        self._bases: dict[int, Counter[Sample]] = {}
        self._lines: dict[int, Counter[Sample]] = {}
        self.end: rec.JobClosed | None = None

    def fail(self, what: str) -> None:
        raise Violation(what)

    # ---- worlds ---------------------------------------------------------------------------------

    def world_received(self, place: str, node_id: int, run: m.RunWorld) -> None:
        """A node begins a round: there is one world per round, and one holder of each place."""
        world = (run.generation, run.group_size, run.world_size)
        if self._worlds.setdefault(run.round, world) != world:
            self.fail(f"round {run.round} has two worlds: {self._worlds[run.round]} and {world}")
        holder = self._places.setdefault((run.generation, run.group_rank), (place, node_id))
        if holder != (place, node_id):
            self.fail(
                f"place {run.group_rank} of generation {run.generation} is held by {holder} "
                f"and by {(place, node_id)}"
            )

    def stepped(self, place: str, run: m.RunWorld, rank: int, step: int) -> None:
        """A worker finished a step: nobody of a newer generation may have done so before."""
        self._history.note(f"{place} rank {rank} steps {step} in round {run.round}")
        if run.generation < self._stepping:
            self.fail(
                f"{place} steps in generation {run.generation} after generation "
                f"{self._stepping} has stepped"
            )
        self._stepping = run.generation

    # ---- the master -----------------------------------------------------------------------------

    def durable(self, records: Sequence[Record], facts: Sequence[Event]) -> None:
        """The master has written this, and acts upon it."""
        for record in records:
            self._count(record)
        for fact in facts:
            self._history.note(f"master {type(fact).__name__}")
            if isinstance(fact, ev.RestoreAgreed):
                self._restore_agreed(fact)

    def _count(self, record: Record) -> None:
        match record:
            case rec.RestartCounted():
                self._restarts[record.reason] += record.count
                limit = max(WORKER_RESTARTS[ExitReason(record.reason)], self._scenario.max_restarts)
                if self._restarts[record.reason] > limit:
                    self.fail(f"restarted more than {limit} times for {record.reason!s}")
            case rec.RelaunchCounted():
                key = (record.node_rank, record.reason)
                self._relaunches[key] += record.count
                if self._relaunches[key] > NODE_RELAUNCHES[ExitReason(record.reason)]:
                    self.fail(f"node rank {record.node_rank} relaunched too often")
            case rec.WorldAgreed():
                self.rounds += 1
                self.planned_rounds += record.planned
                limit = 2 + ROUNDS_PER_FAULT * len(self._scenario.faults)
                if self.rounds > limit:
                    self.fail(f"{self.rounds} rounds for {len(self._scenario.faults)} faults")
                if self.rounds - self.planned_rounds - 1 > self._restarts.total():
                    self.fail("a world was replaced without a restart being counted")
            case rec.CheckpointCommitted():
                self.commits += 1
                if record.version < self.newest:
                    self.fail(f"the newest committed version went back to {record.version}")
                self.newest = record.version
            case rec.JobClosed():
                self.end = record

    def replay_is_exact(self, live: JobCore, replayed: JobCore) -> None:
        """What the journal leads to is what the living master had."""
        ours = Counter(encode_record(record) for record in live.core.snapshot())
        theirs = Counter(encode_record(record) for record in replayed.core.snapshot())
        if ours != theirs:
            had, has = list((ours - theirs).elements()), list((theirs - ours).elements())
            self.fail(f"the master had {had}, a replay gives {has}")

    # ---- checkpoints ----------------------------------------------------------------------------

    def committed(
        self,
        version: Version,
        shape: Shape,
        parts: frozenset[str],
        positions: tuple[Position, ...],
    ) -> None:
        """A checkpoint got its name: all of it must be there."""
        needed = {SHARED} if shape.shared else set(shape.parts())
        if not needed <= parts:
            self.fail(f"{version} is committed without {sorted(needed - parts)[0]}")
        if self._scenario.samples and not positions:
            self.fail(f"{version} is committed without saying how far its data were")

    def _restore_agreed(self, fact: ev.RestoreAgreed) -> None:
        self.restores += fact.version != NONE
        self._history.note(f"restored {fact.version}")
        if fact.version < self.newest:
            self.fail(f"{fact.version} is restored, but {self.newest} is committed")
        base: Counter[Sample] = Counter()
        if fact.version != NONE:
            base += self._bases[fact.version.lineage]
            for trained in self._models[fact.version].values():
                base.update(trained)
        self._bases[fact.lineage] = base
        self._lines[fact.lineage] = Counter(base)

    def restored(self, run: m.RunWorld, rank: int, prepared: Version, plan: RestorePlan) -> None:
        """A rank goes on from a version: the same for all ranks, and it must have it."""
        if prepared != plan.version:
            self.fail(f"rank {rank} goes on from {plan.version} but has {prepared}")
        agreed = self._agreed.setdefault((run.round, plan.lineage), plan.version)
        if agreed != plan.version:
            self.fail(f"in round {run.round} ranks restore {agreed} and {plan.version}")

    def saved(self, version: Version, rank: int, trained: list[Sample]) -> None:
        """A rank saves: a version names one state."""
        ranks = self._models.setdefault(version, {})
        if ranks.setdefault(rank, list(trained)) != trained:
            self.fail(f"rank {rank} has two states of {version}")

    # ---- data -----------------------------------------------------------------------------------

    def consumed(self, run: m.RunWorld, lineage: int, epoch: int, at: int) -> None:
        """A sample goes into the model: it must not be there yet."""
        line = self._lines[lineage]
        line[epoch, at] += 1
        if line[epoch, at] > 1:
            self.fail(f"sample {at} of epoch {epoch} is twice in the model of round {run.round}")

    def check_end(self, newest: Version, *, is_excused: bool) -> None:
        """The job is over. `newest` is what is on storage; that may be old if the storage was out
        of order at the end, or what should have gone there was rotten."""
        if self.end is None:
            self.fail("the job does not come to its end")
            return
        if not self.end.ok:
            self.fail(f"the job failed: {self.end.reason}")
        if is_excused:
            return
        if newest == NONE:
            self.fail("the job ended without a checkpoint on storage")
        if self._scenario.samples:
            self._check_data(newest)
        elif newest.step < self._scenario.steps:
            self.fail(f"the job ended with step {newest.step} on storage")

    def _check_data(self, newest: Version) -> None:
        """Every sample is in the last model, once."""
        model = Counter(self._bases[newest.lineage])
        for trained in self._models[newest].values():
            model.update(trained)
        twice = [sample for sample, times in model.items() if times > 1]
        if twice:
            self.fail(f"sample {twice[0]} is {model[twice[0]]} times in the last model")
        expected = self._scenario.samples * self._scenario.epochs
        if len(model) != expected:
            self.fail(f"{len(model)} of {expected} samples are in the last model")
