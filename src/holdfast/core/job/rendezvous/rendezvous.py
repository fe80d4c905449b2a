# SPDX-License-Identifier: Apache-2.0
"""Forming worlds: which nodes train together, in which order, and when that changes.

The rules, in the order in which they are asked:

1. A world holds at most `max_nodes`, at least `min_nodes`, and a multiple of `node_unit` nodes. It
   is never empty. Nodes beyond that wait as spares and step in when a place is free.
2. Without a running world, one forms as soon as every expected node is there; if one is missing,
   the last call gives it `last_call_s` from the moment a world became possible.
3. A running world is replaced when it breaks, or, if it is healthy, when a larger one is possible
   with nodes whose workers start warm: it is not stopped to wait for imports.
4. A world none of whose nodes is left may still be computing behind a network partition: its
   successor waits until those nodes are proven dead or their leases have expired. If some are left,
   they have the first places in the successor, which cannot go on before they have left the other.
5. Nodes that are to go have no place in the next world, and a healthy world is replaced because
   of them. If all its nodes are to go it is over, and rule 4 holds for its successor.
6. Where workers fail at once again and again, the next world waits for a pause (verdicts.py).

A world is agreed once and pushed; a node that missed the push gets it again when it returns.
"""

from collections import Counter
from collections.abc import Iterable
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import Push, Reply
from holdfast.core.job.rendezvous.candidates import Candidates
from holdfast.core.job.rendezvous.join_clock import JoinClock
from holdfast.core.job.rendezvous.mistakes import Failure, Mistakes
from holdfast.core.job.rendezvous.world_state import WorldState
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick, commit
from holdfast.model.ids import Generation, NodeId, NodeRank, Round
from holdfast.model.node import ExitReason
from holdfast.model.world import World
from holdfast.protocol import messages as m

GROW_AFTER_S = 1.0
"""A healthy world that could grow, but not to its maximum, waits this long for more to come."""

OTHERS_NAMED = 8
"""So many nodes that started in another way than most are named."""

Handled = (
    ev.NodeReady
    | ev.NodeAbsent
    | ev.NodeSilent
    | ev.NodeExpected
    | ev.NodeLost
    | ev.FailureReported
    | ev.DoneReported
    | ev.StartReported
    | ev.StoreOffered
    | ev.NodeWarmed
    | ev.LeaseExpired
    | ev.JobOpened
    | ev.RulesChanged
    | ev.JoinClockSet
    | ev.JobResumed
    | ev.NodesLeaving
    | ev.MasterStarted
    | ev.WorldBroken
    | ev.JobFinished
    | Tick
)


class Rendezvous:
    """The present world and the nodes that stand ready for the next."""

    OWNS = (rec.GenerationSet, rec.WorldAgreed, rec.RoundBroken, rec.NodeDone)

    def __init__(self) -> None:
        self._rules: m.JobRules | None = None
        self._state = WorldState()
        self._candidates = Candidates()
        #: Whose workers of the present round run, and how they were started.
        self._started: dict[NodeId, str] = {}
        #: The verdict on the present world is on its way, in this very step.
        self._hurt = False
        #: What the next world will be formed for.
        self._next_why = "the job starts"
        self._clock = JoinClock()
        self._mistakes = Mistakes()
        #: Whether the job begins: as many nodes as the maximum are expected.
        self._begins = True
        self._ended = False

    # ---- decisions ------------------------------------------------------------------------------

    def handle(self, event: Handled, now: float) -> Outcome:
        match event:
            case ev.NodeReady():
                return self._node_ready(event, now)
            case ev.NodeAbsent() | ev.NodeSilent():
                self._candidates.away(event.node_id)
            case ev.NodeExpected():
                self._candidates.absent.add(event.node_id)
            case ev.NodeLost():
                return self._node_lost(event, now)
            case ev.FailureReported() | ev.DoneReported() | ev.StartReported():
                return self._reported(event, now)
            case ev.StoreOffered():
                self._candidates.set_ports(event.node_id, hosted_port=self._state.unused(event))
                return Outcome(commands=[Reply(event.link, event.call, m.Done())])
            case ev.NodeWarmed():
                self._candidates.cold.discard(event.node_id)
                outcome = Outcome(commands=[Reply(event.link, event.call, m.Done())])
                outcome.add(self._form(now))
                return outcome
            case ev.LeaseExpired():
                self._candidates.stopped(event.node_id)
                return self._form(now)
            case ev.JobOpened():
                self._rules = event.rules
                if not self._state.is_healthy:
                    self._clock.wait(now, event.rules.join_timeout_s)
            case ev.RulesChanged():
                self._rules = event.rules
                return self._form(now)
            case ev.JoinClockSet():
                timeout_s = 0.0 if self._rules is None else self._rules.join_timeout_s
                self._clock.set(now, timeout_s, runs=event.runs)
            case ev.JobResumed():
                self._begins, self._next_why = True, "the job is resumed"
            case ev.NodesLeaving():
                return self._leaving(event, now)
            case ev.MasterStarted():
                return self._began()
            case ev.WorldBroken():
                return self._broke(event, now)
            case ev.JobFinished():
                self._ended = True
                return self._over(event)
            case Tick():
                return self._tick(now)
            case _:
                assert_never(event)
        return NOTHING

    def _began(self) -> Outcome:
        """A new master serves: with a generation of its own, and the world that it found."""
        outcome = Outcome()
        commit(self, outcome, rec.GenerationSet(self._state.generation + 1))
        outcome.facts.append(ev.GenerationRaised(self._state.generation, self._state.round))
        if self._state.world is not None:
            outcome.facts.append(_found(self._state, self._state.world))
        return outcome

    def _node_ready(self, event: ev.NodeReady, now: float) -> Outcome:
        member = event.member
        self._candidates.arrived(member, is_cold=event.cold, replaces=event.replaces)
        if event.round in (0, self._state.round):
            self._candidates.stopped(member.node_id)
        outcome = Outcome()
        if self._ended:
            return outcome  # It has been told of that, and stops its workers by itself.
        if self._state.holds(member):
            if self._state.broken:
                outcome.commands.append(Push(member.node_id, self._state.stop_work()))
            elif event.round != self._state.round and member.node_id not in self._state.done:
                outcome.commands.append(Push(member.node_id, self._state.run_world(member.node_id)))
        elif event.round:
            # It runs workers of a world it has no place in any more.
            outcome.commands.append(Push(member.node_id, self._state.stop_work()))
        if not event.returned and self._state.world is not None and not self._state.broken:
            self._next_why = f"node rank {member.node_rank} joined"
        outcome.add(self._form(now))
        return outcome

    def _node_lost(self, event: ev.NodeLost, now: float) -> Outcome:
        is_done = event.node_id in self._state.done
        self._candidates.lost(event.node_id, proven=event.proven or is_done)
        if event.node_id not in self._state.index or is_done:
            return self._form(now)
        outcome = Outcome()
        if not self._state.broken:
            self._hurt = True
            message = f"node rank {event.node_rank} was lost: {event.message}"
            outcome.facts.append(
                ev.WorldHurt(self._state.round, event.reason, message, event.node_rank, None, -1.0)
            )
            return outcome
        outcome.add(self._form(now))
        return outcome

    def _broke(self, event: ev.WorldBroken, now: float) -> Outcome:
        outcome = Outcome(commands=[*self._mistakes.answers()])
        if event.round != self._state.round or self._state.broken or self._ended:
            return outcome
        commit(self, outcome, rec.RoundBroken(self._state.round, event.reason, event.by_plan))
        assert self._rules is not None
        self._clock.wait(now, self._rules.join_timeout_s, event.pause_s)
        formed = self._form(now)
        if not formed.facts:
            # No worker may go on computing in a world that is over. Nodes that are to go end by
            # themselves, and with grace.
            for node_id in self._candidates.ready:
                if node_id not in self._candidates.leaving:
                    outcome.commands.append(Push(node_id, self._state.stop_work()))
        outcome.add(formed)
        return outcome

    def _over(self, event: ev.JobFinished) -> Outcome:
        """If the job goes on later, it is in another world than this one, which did not break."""
        outcome = Outcome(commands=[*self._mistakes.answers()])
        if event.stopped and self._state.is_healthy:
            commit(self, outcome, rec.RoundBroken(self._state.round, event.reason, by_plan=True))
        return outcome

    def _leaving(self, event: ev.NodesLeaving, now: float) -> Outcome:
        self._candidates.leave(event.node_ids)
        index = self._state.index
        if self._state.is_healthy and self._candidates.leaving.issuperset(index):
            over = (self._state.round, event.reason, NodeRank(-1), -1.0)
            return Outcome(facts=[ev.WorldBroken(*over, by_plan=True)])
        if self._state.is_healthy and not self._candidates.leaving.isdisjoint(index):
            self._next_why = event.reason
        return self._form(now)

    def _reported(
        self, event: ev.FailureReported | ev.DoneReported | ev.StartReported, now: float
    ) -> Outcome:
        """Only what is said of the present round counts; a late report is acknowledged, no more."""
        outcome = Outcome()
        is_present = event.report.round == self._state.round and not self._state.broken
        current = is_present and event.node_id in self._state.index
        if current:
            self._candidates.stopped(event.node_id)
        if isinstance(event, ev.StartReported):
            self._candidates.set_ports(event.node_id, store_port=event.report.store_port)
            if current:
                self._started[event.node_id] = event.report.how
                if len(self._started) == len(self._state.index):
                    how = _how_started(self._state.world, self._started)
                    outcome.facts.append(ev.WorldStarted(self._state.round, *how))
        elif isinstance(event, ev.DoneReported) and current:
            commit(self, outcome, rec.NodeDone(event.node_id, self._state.round))
            if len(self._state.done) == len(self._state.index):
                outcome.facts.append(ev.WorldDone(self._state.round))
        elif isinstance(event, ev.FailureReported) and current:
            failure = self._mistakes.take(event, len(self._state.index), now)
            if failure is None:
                return outcome  # It is answered when more is known.
            outcome.facts.append(_hurt_by(failure, self._state))
        outcome.commands.append(Reply(event.link, event.call, m.Done()))
        return outcome

    def _tick(self, now: float) -> Outcome:
        if (failure := self._mistakes.give_up(now)) is not None:
            return Outcome(facts=[_hurt_by(failure, self._state)])
        if self._clock.is_up(now):
            assert self._rules is not None
            reason = _why_given_up(self._rules, len(self._candidates.ready))
            return Outcome(facts=[ev.WorldImpossible(reason)])
        return self._form(now)

    # ---- forming a world ------------------------------------------------------------------------

    def _form(self, now: float) -> Outcome:
        """Form a world if the rules allow it; arm the last call if only patience is missing."""
        if self._clock.is_held(now):
            return NOTHING
        rules, growing = self._rules, self._state.is_healthy
        size = 0 if rules is None else self._candidates.possible_size(rules, growing=growing)
        if rules is None or size == 0 or self._must_not_form(size, growing=growing):
            self._clock.last_call_at = None
            return NOTHING
        if not self._candidates.is_complete(rules, size, growing=growing, begins=self._begins):
            patience_s = GROW_AFTER_S if growing else rules.last_call_s
            if not self._clock.call(now, patience_s):
                return NOTHING
        return self._agree(size, planned=growing)

    def _must_not_form(self, size: int, *, growing: bool) -> bool:
        if self._ended:
            return True
        if growing:
            # A verdict is on its way; or nothing is to be gained; or work that is finished would
            # be started again for a newcomer; or no node of the present world would be in the next.
            index = self._state.index
            is_same = size <= len(index) and self._candidates.leaving.isdisjoint(index)
            is_judged_soon = self._hurt or self._mistakes.is_open
            must_wait = is_judged_soon or is_same or bool(self._state.done)
            return must_wait or not self._candidates.keeps_one_of(index)
        # Rule 4: a world that lost all its nodes may not be dead at all, and neither may one before
        # it whose last node went silent before it was told of the next.
        return self._candidates.is_leased(self._state.index) or self._candidates.has_unstopped()

    def _agree(self, size: int, *, planned: bool) -> Outcome:
        before = self._state.index
        chosen = self._candidates.choose(size, growing=planned, world=before)
        outcome = Outcome()
        commit(
            self,
            outcome,
            rec.WorldAgreed(
                World(
                    round=Round(self._state.round + 1),
                    generation=Generation(self._state.generation + 1),
                    members=tuple(chosen),
                ),
                self._next_why,
                planned,
                self._state.breaks,
                self._candidates.unstopped_with(before),
            ),
        )
        world = self._state.world
        assert world is not None
        self._clock.formed()
        # A store serves one round: the keys of a dead one would lead the next astray.
        self._candidates.set_ports(world.members[0].node_id, hosted_port=0)
        outcome.facts.append(ev.WorldFormed(world, self._state.why, planned))
        outcome.commands.extend(self._state.pushes(before, self._candidates.ready))
        return outcome

    def deadline(self) -> float | None:
        if self._ended:
            return None
        times = (self._clock.deadline(), self._mistakes.deadline)
        return min((at for at in times if at is not None), default=None)

    # ---- durable state --------------------------------------------------------------------------

    def apply(self, record: Record) -> None:
        self._state.apply(record)
        match record:
            case rec.WorldAgreed():
                self._started.clear()
                self._begins = False
                self._candidates.set_unstopped(record.unstopped)
                self._hurt = False
            case rec.RoundBroken():
                self._next_why = record.reason

    def validate(self) -> None:
        self._state.validate()
        self._candidates.validate()
        assert self._started.keys() <= self._state.index.keys(), self._started

    def snapshot(self) -> Iterable[Record]:
        return self._state.snapshot()

    def view(self, now: float) -> dict[str, object]:
        """The world as people see it, who waits outside, and for how long the next one waits."""
        pause_s = self._clock.pause_left(now)
        held = {"starts_in_s": round(pause_s, 3)} if pause_s > 0 and not self._ended else {}
        return {**self._state.view(), "spares": self._candidates.spares(self._state.index), **held}


def _found(state: WorldState, world: World) -> ev.WorldFound:
    done = not state.broken and len(state.done) == len(state.index)
    broken = bool(state.broken)
    return ev.WorldFound(world, state.breaks, done, broken, frozenset(state.done))


def _how_started(world: World | None, started: dict[NodeId, str]) -> tuple[str, str]:
    """How most nodes started their workers, and which did it in another way."""
    assert world is not None
    usual, _ = Counter(started.values()).most_common(1)[0]
    others = [
        f"{how} on node rank {member.node_rank}"
        for member in world.members
        if (how := started[member.node_id]) != usual
    ]
    more = [f"and {len(others) - OTHERS_NAMED} more"] if len(others) > OTHERS_NAMED else []
    return usual, ", ".join([*others[:OTHERS_NAMED], *more])


def _why_given_up(rules: m.JobRules, ready: int) -> str:
    return (
        f"no world formed within {rules.join_timeout_s:g} s: "
        f"{ready} of at least {rules.min_nodes} nodes are ready"
    )


def _hurt_by(failure: Failure, state: WorldState) -> ev.WorldHurt:
    assert state.world is not None
    first = failure.first.report.failures[0]
    member = state.world.members[state.index[failure.first.node_id]]
    return ev.WorldHurt(
        state.round,
        _known_reason(first.reason),
        f"rank {first.rank} on node rank {member.node_rank} {first.message}",
        member.node_rank,
        first,
        first.last_step_ago_s,
        is_everywhere=failure.is_everywhere,
    )


def _known_reason(word: str) -> ExitReason:
    """An agent of a newer version may know classes of failure that we do not."""
    return ExitReason(word) if word in frozenset(ExitReason) else ExitReason.UNKNOWN
