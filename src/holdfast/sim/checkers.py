# SPDX-License-Identifier: Apache-2.0
"""Invariants of every run, whatever goes wrong. The checkers know the truth: the models tell them
what really happened, not what the cores believe."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.flow import JobCore
from holdfast.core.job.membership.admission import BEHIND
from holdfast.core.job.records import encode_record
from holdfast.core.kernel import Event, Record
from holdfast.model.checkpoint import NONE, SHARED, Shape, Version
from holdfast.model.dataset import Position
from holdfast.model.node import OF_THE_PROGRAM, ExitReason
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import RestorePlan
from holdfast.sim.copy_checker import CopyChecker
from holdfast.sim.history import History
from holdfast.sim.plan_checker import PlanChecker
from holdfast.sim.scenario import LIE, OF_MANY, STILL, Scenario
from holdfast.sim.world_checker import WorldChecker

Sample = tuple[int, int]
"""The epoch and the number; of a stream the partition and the offset."""

RESTARTS_PER_FAULT = 2
"""The most restarts that one fault may cause; a fault of many nodes may cause one for each node."""

SETTLED_S = 60.0
"""A restart later than this after the last fault is a violation."""


_MOMENTS = {
    ev.WorldFormed: "world",
    ev.RestoreAgreed: "restore",
    ev.AttemptOpened: "attempt",
    ev.PlanSettled: "plan",
}


class Violation(AssertionError):
    """Something that must never happen has happened."""


class Checkers:
    """Hears of everything that happens, and raises Violation at once."""

    def __init__(self, scenario: Scenario, history: History) -> None:
        self._scenario = scenario
        self._history = history
        self._failed_rounds: set[int] = set()
        self._lost_nodes: set[int] = set()
        self.worlds = WorldChecker(self.fail)
        self.copies = CopyChecker(self.fail)
        self.plans = PlanChecker(self.fail, scenario.nodes)
        self.cuts = 0
        #: Called with each moment that scenario.MOMENTS names.
        self.at_moment: Callable[[str], None] = lambda moment: None
        self._spec = scenario.spec()
        self._restarts: Counter[ExitReason] = Counter()
        self._is_count_lost = False
        #: Restarts that cost no budget: an earlier restart already counts for nodes lost together.
        self._following = 0
        #: Restarts by reason that training progress gave back to the budget.
        self._back: defaultdict[ExitReason, float] = defaultdict(float)
        self._relaunches: Counter[tuple[int, ExitReason]] = Counter()
        self.rounds = 0
        self._planned: set[int] = set()
        self.newest = NONE
        self.commits = self.restores = 0
        self._agreed: dict[tuple[int, int], Version] = {}
        #: By version and rank: the samples that the rank had trained on in its lineage.
        self._models: dict[Version, dict[int, list[Sample]]] = {}
        #: By lineage: the samples that the model had been trained on before the lineage began.
        self._bases: dict[int, Counter[Sample]] = {}
        self._lines: dict[int, Counter[Sample]] = {}
        self.end: rec.JobClosed | None = None
        self._may_lie = any(fault.kind == LIE for fault in scenario.faults)

    def fail(self, what: str) -> None:
        raise Violation(what)

    # ---- worlds ---------------------------------------------------------------------------------

    def world_received(self, place: str, node_id: int, run: m.RunWorld) -> None:
        """A node begins a round: there is one world per round, and one holder of each place."""
        self.worlds.received(place, node_id, run)
        self.copies.began(run.round, run.group_size, place)

    def worker_failed(self, round_number: int) -> None:
        """A worker of this round has failed, or another program has stopped it with a signal."""
        self._failed_rounds.add(round_number)

    def stepped(self, place: str, run: m.RunWorld, rank: int, step: int) -> None:
        """A worker finished a step: no worker of a newer generation may have stepped before."""
        self._history.note(f"{place} rank {rank} steps {step} in round {run.round}")
        self.worlds.stepped(place, run, self._history.now)
        self.plans.stepped(self._history.now)

    # ---- the master -----------------------------------------------------------------------------

    def durable(self, records: Sequence[Record], facts: Sequence[Event]) -> None:
        """The master has written these records, and acts upon them."""
        for record in records:
            self._count(record)
            self.plans.durable(record, self._history.now)
        for fact in facts:
            self._history.note(f"master {type(fact).__name__}")
            match fact:
                case ev.RestoreAgreed():
                    self._restore_agreed(fact)
                case ev.NodeLost():
                    self._lost_nodes.add(fact.node_id)
                case ev.GenerationRaised():
                    self.copies.forgotten()
                case ev.WorldHurt() if fact.cause is not None:
                    if fact.round not in self._failed_rounds:
                        self.fail(f"no worker of round {fact.round} failed, but it is broken")
            if type(fact) in _MOMENTS:
                self.at_moment(_MOMENTS[type(fact)])

    def counts_forgotten(self) -> None:
        """The disk lied: counts of the master may be lost, and the master counts again."""
        self._is_count_lost = True

    def _count(self, record: Record) -> None:
        match record:
            case rec.RestartCounted():
                reason = ExitReason(record.reason)
                self._restarts[reason] += record.count
                self._following += record.count == 0
                self._back[reason] += record.back
                if self._restarts_left(reason) < 0 and not self._is_count_lost:
                    self.fail(f"restarted too often for the reason {reason!s}")
                self._check_storm()
            case rec.RelaunchCounted():
                key = (record.node_rank, ExitReason(record.reason))
                self._relaunches[key] += record.count
                limit = self._spec.node_relaunches[key[1]]
                if self._relaunches[key] > limit and not self._is_count_lost:
                    self.fail(f"node rank {record.node_rank} relaunched too often")
            case rec.WorldAgreed():
                # A lying disk may lose a round that no node heard of: it is agreed on again.
                self.rounds = max(self.rounds, record.world.round)
                self.worlds.agreed(record.world)
                if record.planned:
                    self._planned.add(record.world.round)
                # A plan may end a world, and the next one forms when the job is resumed.
                known = self._restarts.total() + self._following + self.plans.done
                if self.rounds - len(self._planned) - 1 > known:
                    self.fail("a world was replaced without a restart being counted")
            case rec.CheckpointCommitted():
                self.commits += 1
                if record.version < self.newest:
                    self.fail(f"the newest committed version went back to {record.version}")
                self.newest = record.version
            case rec.LineageSet() if record.lineage not in self._lines:
                self._lineage_began(record.lineage, record.version)
            case rec.JobClosed():
                self.end = record

    def _check_storm(self) -> None:
        """Restarts follow from faults, and end with them."""
        scenario, restarts = self._scenario, self._restarts.total() + self._following
        nodes = scenario.nodes + scenario.spares
        # Agents that stand still together go silent one after the other, as nodes that are cut off.
        of_many = (*OF_MANY, STILL)
        costs = (nodes if f.kind in of_many else RESTARTS_PER_FAULT for f in scenario.faults)
        if restarts > 2 + sum(costs) + RESTARTS_PER_FAULT * len(scenario.asks):
            self.fail(f"{restarts} restarts for {len(scenario.faults)} faults")
        if self._history.now > scenario.quiet_at() + SETTLED_S:
            self.fail(f"a restart {SETTLED_S:g} s after the last fault was over")

    def _restarts_left(self, reason: ExitReason) -> float:
        asked = self._scenario.max_restarts
        limit = max(asked, self._spec.worker_restarts[reason])
        if reason in OF_THE_PROGRAM or (asked == 0 and reason is not ExitReason.LOST):
            limit = asked
        return limit - self._restarts[reason] + self._back[reason]

    def _is_used_up(self) -> bool:
        """Whether some budget is used up."""
        if any(self._restarts_left(reason) < 1 for reason in ExitReason):
            return True
        limits = self._spec.node_relaunches
        return any(used >= limits[reason] for (_, reason), used in self._relaunches.items())

    def replay_is_exact(self, live: JobCore, replayed: JobCore) -> None:
        """A replay of the journal gives the state that the living master had."""
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
        if parts == {SHARED}:
            self.fail(f"{version} is committed without any rank's part")
        if self._scenario.samples and not positions:
            self.fail(f"{version} is committed without saying how far its data were")

    def written_twice(self, attempt: str, part: str, *node_ids: int) -> None:
        """Two nodes write a part of one attempt at once: allowed only if one of them is lost."""
        if self._lost_nodes.isdisjoint(node_ids):
            self.fail(f"{part} is written twice at once in {attempt}")

    def _restore_agreed(self, fact: ev.RestoreAgreed) -> None:
        self.restores += fact.version != NONE
        self._history.note(f"restored {fact.version}")
        if fact.version < self.newest:
            self.fail(f"{fact.version} is restored, but {self.newest} is committed")
        if not self._scenario.samples:
            # With data, the master passes over a version whose data position is not known yet.
            self.copies.restored(fact.round, fact.version)

    def _lineage_began(self, lineage: int, version: Version) -> None:
        """Compute what the model holds when a lineage begins. This follows the record, not the
        fact: if the master dies in between, no checker hears the fact, but the next master acts
        upon the record."""
        base: Counter[Sample] = Counter()
        if version != NONE:
            base += self._bases[version.lineage]
            for trained in self._models[version].values():
                base.update(trained)
        self._bases[lineage] = base
        self._lines[lineage] = Counter(base)

    def restored(self, run: m.RunWorld, rank: int, prepared: Version, plan: RestorePlan) -> None:
        """A rank goes on from a version: all ranks go on from the same one, and the rank has it."""
        if prepared != plan.version:
            self.fail(f"rank {rank} goes on from {plan.version} but has {prepared}")
        agreed = self._agreed.setdefault((run.round, plan.lineage), plan.version)
        if agreed != plan.version:
            self.fail(f"in round {run.round} ranks restore {agreed} and {plan.version}")

    def saved(self, version: Version, rank: int, trained: list[Sample]) -> None:
        """A rank saves: a rank has only one state under one version."""
        ranks = self._models.setdefault(version, {})
        if ranks.setdefault(rank, list(trained)) != trained:
            self.fail(f"rank {rank} has two states of {version}")

    def newest_saved(self) -> Version:
        return max(self._models, default=NONE)

    # ---- data -----------------------------------------------------------------------------------

    def consumed(self, run: m.RunWorld, lineage: int, of: int, at: int) -> None:
        """A sample goes into the model: the sample exists, and is not in the model yet."""
        line = self._lines[lineage]
        line[of, at] += 1
        if line[of, at] > 1:
            self.fail(f"sample {(of, at)} is twice in the model of round {run.round}")
        if self._scenario.grows and at >= self._scenario.written(self._history.now)[of]:
            self.fail(f"sample {(of, at)} is read before it is written")

    def check_end(self, newest: Version, refused: set[Version]) -> None:
        """The job is over. `newest` is the newest version on storage; versions in `refused` could
        not be written there."""
        if self.end is None:
            self.fail("the job does not come to its end")
            return
        if newest < self.newest:
            self.fail(f"{self.newest} is committed, but the newest on storage is {newest}")
        has_all = self._check_model(newest)
        if not self.end.ok:
            self._check_failure(self.end)
            return
        last = self.newest_saved()
        # A part that rotted in memory, or an outage to the very end, may cost the last checkpoint.
        if newest < last and (last in refused or self.copies.has_rotted(last)):
            return
        if not has_all:
            self.fail(f"the job ended with {newest} on storage, and that is not all")

    def _check_failure(self, end: rec.JobClosed) -> None:
        """A job fails only when it must, and says why."""
        if end.reason.startswith(BEHIND) and self._may_lie:
            return
        if self._scenario.budget is None:
            self.fail(f"the job failed: {end.reason}")
        if not end.reason:
            self.fail("the job failed and does not say why")
        if not self._is_used_up():
            self.fail(f"the job failed with budgets left: {end.reason}")

    def _check_model(self, newest: Version) -> bool:
        """Fail if the model on storage has a sample twice; whether it has all samples."""
        if newest == NONE:
            return False
        if not self._scenario.samples:
            return newest.step >= self._scenario.steps
        model = Counter(self._bases[newest.lineage])
        for trained in self._models[newest].values():
            model.update(trained)
        twice = [sample for sample, times in model.items() if times > 1]
        if twice:
            self.fail(f"sample {twice[0]} is {model[twice[0]]} times in the last model")
        return len(model) == self._scenario.samples * self._scenario.epochs
