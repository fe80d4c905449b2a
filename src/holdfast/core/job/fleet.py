# SPDX-License-Identifier: Apache-2.0
"""The nodes of a managed job as its platform is asked for them: orders, successors and plans.

A part of `nodes`. A rank that is wanted gets a node; what was ordered and never seen is ordered
again by a restarted master.
"""

from dataclasses import replace

from holdfast.core.job import events as ev
from holdfast.core.job import pending, scaling
from holdfast.core.job import records as rec
from holdfast.core.job.admission import sized
from holdfast.core.job.commands import AnswerPlan, RemoveNode
from holdfast.core.job.departures import Departures
from holdfast.core.job.failed_hosts import blame
from holdfast.core.job.last_words import LastWords, Loss
from holdfast.core.job.node_table import NodeState, NodeTable
from holdfast.core.job.ordering import Orders, moved_node
from holdfast.core.job.relaunching import Relaunch, judge, memory_of
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import Plan


class Fleet:
    """What the platform is asked for. Everything durable is in the node table."""

    def __init__(self, spec: JobSpec, table: NodeTable) -> None:
        self._spec = spec
        self._table = table
        self.orders = Orders(spec, table)
        self._words = LastWords()
        self._ended = False
        self.departures = Departures(table)
        self._clock_runs = True

    @property
    def _min_nodes(self) -> int:
        rules = self._table.rules
        return self._spec.min_nodes if rules is None else rules.min_nodes

    # ---- the start and the end of a master ------------------------------------------------------

    def begin(self, outcome: Outcome, now: float) -> None:
        """The first orders of a new job."""
        spec = self._spec
        if spec.size_from_platform:
            self._table.commit(outcome, rec.JobSized(spec.max_nodes, spec.suspended))
        for rank in map(NodeRank, range(spec.max_nodes + spec.spare_nodes)):
            if spec.suspended:
                self._table.commit(outcome, rec.RankWanted(rank, is_wanted=True))
            else:
                self.orders.order(outcome, rank, "the job starts", now)

    def resume(self, outcome: Outcome, now: float) -> None:
        """What an earlier master had decided and nobody may have heard of."""
        self.orders.give_again(outcome, now)
        if self._table.wanted.suspended:
            outcome.facts.append(ev.JobSuspended())
        elif self._spec.size_from_platform:
            # The last master may have waited for a word: so does this one.
            for node in self._table.vacant():
                self._words.wait(Loss(node, ExitReason.LOST), now)
        self.departures.resume(outcome, now)

    def finish(self, outcome: Outcome) -> None:
        """The job is over: agents go by themselves, nodes without one are removed."""
        self._ended = True
        self.orders.clear()
        for node_id in self._words.clear():
            outcome.commands.append(RemoveNode(node_id))
        for node in list(self._table.nodes.values()):
            if node.is_ordered and not node.phase.is_final and not node.agent_key:
                self._table.commit(outcome, rec.NodePhaseChanged(node.node_id, Phase.GONE))
                outcome.commands.append(RemoveNode(node.node_id))

    # ---- nodes that are lost --------------------------------------------------------------------

    def lost(self, outcome: Outcome, loss: Loss, now: float, *, proven: bool) -> None:
        """A node has ended: whatever follows for its rank, unless it is better to wait for why."""
        if self._ended:
            return
        if not proven and self._spec.size_from_platform and not loss.was_leaving:
            self._words.wait(loss, now)
            return
        if not proven:
            outcome.commands.append(RemoveNode(loss.node.node_id))
        self._follow(outcome, loss, now)

    def explained(
        self, outcome: Outcome, node_id: NodeId, reason: ExitReason | None, now: float
    ) -> None:
        """The platform says why a node ended; None: it lives, or nobody says anything."""
        loss = self._words.take(node_id)
        if loss is None:
            return
        if reason is None:
            outcome.commands.append(RemoveNode(node_id))
        if loss.node.node_rank in self._table.wanted.ranks:
            self._follow(outcome, replace(loss, reason=reason or loss.reason), now)

    def _follow(self, outcome: Outcome, loss: Loss, now: float) -> None:
        table, rank, reason = self._table, loss.node.node_rank, loss.reason
        if not (loss.was_leaving or loss.ended_well):
            self._blame(outcome, loss.node, reason, now)
        if rank in table.live_by_rank:
            return  # Two were to change places, and the other is there.
        if loss.was_leaving or table.wanted.suspended:
            if rank in table.wanted.ranks and not table.wanted.suspended:
                self.orders.order(outcome, rank, f"the node before it on rank {rank} has left", now)
            return
        refusal = f"node rank {rank} ended by itself"
        if not loss.ended_well:
            relaunch = judge(table, self._spec, loss.node, reason, has_run=loss.has_run)
            if not relaunch.refusal:
                self._relaunch(outcome, loss.node, reason, relaunch, now)
                return
            refusal = relaunch.refusal
        table.commit(outcome, rec.RankWanted(rank, is_wanted=False))
        left = table.staying
        if self._spec.critical_limit(rank) is not None and not loss.ended_well:
            why = f"critical node rank {rank} was lost ({reason}), and {refusal}"
            outcome.facts.append(ev.WorldImpossible(why))
        elif left < self._min_nodes:
            why = f"{left} of at least {self._min_nodes} nodes are left, and {refusal}"
            outcome.facts.append(ev.WorldImpossible(why))

    def _relaunch(
        self,
        outcome: Outcome,
        node: NodeState,
        reason: ExitReason,
        relaunch: Relaunch,
        now: float,
    ) -> None:
        rank = node.node_rank
        if relaunch.counts:
            self._table.commit(outcome, rec.RelaunchCounted(rank, reason))
        if relaunch.memory_mib:
            before_mib = memory_of(self._table, self._spec, node)
            outcome.facts.append(ev.MemoryRaised(rank, before_mib, relaunch.memory_mib))
        pause_s, why = self.orders.pause_s(rank, now), f"node rank {rank} was lost ({reason})"
        memory_mib = relaunch.memory_mib
        self.orders.order(outcome, rank, why, now, pause_s=pause_s, memory_mib=memory_mib)

    def _blame(self, outcome: Outcome, node: NodeState, reason: ExitReason, now: float) -> None:
        record = blame(node.machine, reason, now)
        if record is None:
            return
        before = self._table.hosts.avoided(self._table.machines, now)
        self._table.commit(outcome, record)
        avoided = self._table.hosts.avoided(self._table.machines, now)
        if node.machine in avoided and node.machine not in before:
            outcome.facts.append(ev.HostAvoided(node.machine, reason))

    # ---- plans ----------------------------------------------------------------------------------

    def ask(self, outcome: Outcome, plan: Plan, now: float) -> None:
        """Carry a plan out once, and answer however often it is told."""
        table = self._table
        settled = table.wanted.plans.get(plan.plan_id)
        if settled is None:
            change = scaling.change_for(plan, table, self._spec, self.departures.world)
            if self._ended:
                change = "the job has ended"
            if isinstance(change, scaling.Change):
                self._carry_out(outcome, plan, change, now)
                settled = rec.PlanSettled(plan.plan_id, ok=True, text=change.text)
            else:
                settled = rec.PlanSettled(plan.plan_id, ok=False, text=change)
            table.commit(outcome, settled)
        outcome.facts.append(ev.PlanSettled(settled.plan_id, settled.ok, settled.text))
        outcome.commands.append(AnswerPlan(settled.plan_id, settled.ok, settled.text))

    def _carry_out(self, outcome: Outcome, plan: Plan, change: scaling.Change, now: float) -> None:
        table, wanted = self._table, self._table.wanted
        was_suspended = wanted.suspended
        suspended = was_suspended if plan.suspend is None else plan.suspend
        memory_mib, cpu_milli = plan.memory_mib, plan.cpu_milli
        table.commit(
            outcome,
            rec.JobSized(
                change.nodes,
                suspended,
                memory_mib or wanted.memory_mib,
                cpu_milli or wanted.cpu_milli,
            ),
        )
        for rank in change.drop:
            table.commit(outcome, rec.RankWanted(rank, is_wanted=False))
        for rank in change.want:
            table.commit(outcome, rec.RankWanted(rank, is_wanted=True))
        if table.rules is not None and table.rules.max_nodes != change.nodes:
            table.commit(outcome, rec.RulesSet(sized(table.rules, change.nodes)))
            outcome.facts.append(ev.RulesChanged(table.rules))
        if suspended:
            if not was_suspended:
                outcome.facts.append(ev.JobSuspended())
            self.departures.leave(outcome, tuple(table.nodes), "the job is suspended")
            return
        if was_suspended:
            outcome.facts.append(ev.JobResumed())
        dropped = (table.live_by_rank.get(rank) for rank in change.drop)
        leaving = [node_id for node_id in dropped if node_id is not None]
        self.departures.leave(outcome, leaving, "a plan asks for fewer nodes")
        self.orders.fill(
            outcome, "the job is resumed" if was_suspended else "a plan asks for it", now
        )
        for move in change.move:
            planned = moved_node(table, table.nodes[move.node_id], move)
            why = f"it takes the place of node id {move.node_id}"
            self.orders.place(outcome, planned, why, now, pause_s=0.0)

    # ---- time -----------------------------------------------------------------------------------

    def tick(self, outcome: Outcome, now: float) -> None:
        for node_id in self._words.due(now):
            self.explained(outcome, node_id, None, now)
        self.orders.launch_due(outcome, now)
        self.departures.tick(outcome, now)
        stops_at = self._stops_at()
        if stops_at is not None and stops_at <= now:
            why = pending.why_stopped(self._table, self._spec, self._min_nodes)
            outcome.facts.append(ev.WorldImpossible(why))
        stuck = pending.stuck_group(self._table, self._spec)
        if stuck is not None and stuck[0] <= now and not self._ended:
            self._move_group(outcome, stuck[1].group, now)

    def _stops_at(self) -> float | None:
        return None if self._ended else pending.stops_at(self._table, self._spec, self._min_nodes)

    def _move_group(self, outcome: Outcome, group: int, now: float) -> None:
        """Launch every node of a group again, under a number of its own."""
        table, successor = self._table, self._table.wanted.next_group()
        table.commit(outcome, rec.GroupMoved(group, successor))
        nodes = [n.node_id for n in table.nodes.values() if n.group == group]
        live = [node_id for node_id in nodes if not table.nodes[node_id].phase.is_final]
        outcome.facts.append(ev.GroupMoved(group, successor, len(live)))
        why = f"its group {group} is launched again elsewhere"
        self.departures.leave(outcome, live, why, at_once=True)
        self.orders.fill(outcome, f"group {group} is launched again as group {successor}", now)

    def deadline(self) -> float | None:
        stuck = None if self._ended else pending.stuck_group(self._table, self._spec)
        times = (
            self._words.deadline(),
            self.orders.deadline(),
            self.departures.deadline(),
            self._stops_at(),
            None if stuck is None else stuck[0],
        )
        return min((at for at in times if at is not None), default=None)

    def note_clock(self, outcome: Outcome) -> None:
        """Say so when the time in which a world must form begins or ceases to count."""
        runs = not (self._table.wanted.suspended or self._table.pending)
        if self._spec.size_from_platform and runs is not self._clock_runs:
            self._clock_runs = runs
            outcome.facts.append(ev.JoinClockSet(runs))
