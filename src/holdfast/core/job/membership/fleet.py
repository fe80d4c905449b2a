# SPDX-License-Identifier: Apache-2.0
"""The nodes of a managed job as its platform is asked for them: orders, successors and plans.

A part of `nodes`. A rank that is wanted gets a node; what was ordered and never seen is ordered
again by a restarted master. What follows from a loss is in losses.py.
"""

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import AnswerPlan, RemoveNode
from holdfast.core.job.membership import pending, scaling
from holdfast.core.job.membership.admission import sized
from holdfast.core.job.membership.demand import Demand, described, of_ranks
from holdfast.core.job.membership.departures import Departures
from holdfast.core.job.membership.losses import Losses
from holdfast.core.job.membership.node_table import NodeTable
from holdfast.core.job.membership.ordering import Orders, moved_node
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import Phase
from holdfast.model.order import Plan
from holdfast.model.resources import NOTHING, Resources


class Fleet:
    """What the platform is asked for. Everything durable is in the node table."""

    def __init__(self, spec: JobSpec, table: NodeTable, demand: Demand) -> None:
        self._spec = spec
        self._table = table
        self._demand = demand
        demand.count(lambda: of_ranks(table, spec, table.wanted.ranks), self._judge)
        self.orders = Orders(spec, table)
        self.losses = Losses(spec, table, demand, self.orders)
        self._ended = False
        self.departures = Departures(table)
        self._clock_runs = True

    # ---- the start and the end of a master ------------------------------------------------------

    def begin(self, outcome: Outcome, now: float) -> None:
        """The first orders of a new job."""
        spec = self._spec
        if refusal := spec.limits.refusal(described(spec)):
            outcome.facts.append(ev.WorldImpossible(refusal))
            return
        if spec.size_from_platform:
            self._table.commit(outcome, rec.JobSized(spec.max_nodes, spec.suspended))
        for rank in map(NodeRank, range(spec.max_nodes + spec.spare_nodes)):
            if spec.suspended:
                self._table.commit(outcome, rec.RankWanted(rank, is_wanted=True))
            else:
                self.orders.order(outcome, rank, "the job starts", now)

    def resume(self, outcome: Outcome, now: float) -> None:
        """Repeat what an earlier master had decided and may not have told the nodes or platform."""
        self.orders.give_again(outcome, now)
        if self._table.wanted.suspended:
            outcome.facts.append(ev.JobSuspended())
        self.losses.resume(now)
        self.departures.resume(outcome, now)

    def finish(self, outcome: Outcome) -> None:
        """The job is over: agents go by themselves, nodes without one are removed."""
        self._ended = True
        self.orders.clear()
        self.losses.finish(outcome)
        for node in list(self._table.nodes.values()):
            if node.is_ordered and not node.phase.is_final and not node.agent_key:
                self._table.commit(outcome, rec.NodePhaseChanged(node.node_id, Phase.GONE))
                outcome.commands.append(RemoveNode(node.node_id))

    # ---- plans ----------------------------------------------------------------------------------

    def ask(self, outcome: Outcome, plan: Plan, now: float) -> None:
        """Carry a plan out once, and answer it each time that it comes."""
        table = self._table
        self._demand.follow(plan)
        settled = table.wanted.plans.get(plan.plan_id)
        if settled is None:
            refusal = "the job has ended" if self._ended else self._demand.refusal(plan)
            text = refusal or self.carry_out(outcome, plan, now)
            settled = rec.PlanSettled(plan.plan_id, ok=not refusal, text=text)
            table.commit(outcome, settled)
        outcome.facts.append(ev.PlanSettled(settled.plan_id, settled.ok, settled.text))
        outcome.commands.append(AnswerPlan(settled.plan_id, settled.ok, settled.text))

    def _change(self, plan: Plan) -> scaling.Change | str:
        return scaling.change_for(plan, self._table, self._spec, self.departures.world)

    def _judge(self, plan: Plan) -> str | Resources:
        if plan.role in self._spec.roles:
            return NOTHING
        change = self._change(plan)
        return change if isinstance(change, str) else change.asks_more

    def carry_out(self, outcome: Outcome, plan: Plan, now: float) -> str:
        """Do this part of a plan, and have the other roles do theirs; returns what was done."""
        change = self._change(plan)
        assert isinstance(change, scaling.Change), f"{plan} was agreed to, but {change}"
        self._change_to(outcome, plan, change, now)
        outcome.facts.extend(map(ev.PlanPartAgreed, plan.others))
        return change.text

    def _change_to(self, outcome: Outcome, plan: Plan, change: scaling.Change, now: float) -> None:
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
        dropped = set(change.drop)
        # A rank has two nodes if one was about to replace the other.
        leaving = [node for node in table.nodes.values() if node.node_rank in dropped]
        leaving.sort(key=lambda node: node.node_rank)
        going = [node.node_id for node in leaving]
        self.departures.leave(outcome, going, "a plan asks for fewer nodes")
        self.orders.fill(
            outcome, "the job is resumed" if was_suspended else "a plan asks for it", now
        )
        for move in change.move:
            planned = moved_node(table, table.nodes[move.node_id], move, now)
            why = f"it takes the place of node id {move.node_id}"
            self.orders.place(outcome, planned, why, now, pause_s=0.0)

    # ---- time -----------------------------------------------------------------------------------

    def tick(self, outcome: Outcome, now: float) -> None:
        self.losses.tick(outcome, now)
        self.orders.launch_due(outcome, now)
        self.departures.tick(outcome, now)
        stuck = pending.stuck_group(self._table, self._spec)
        if stuck is not None and stuck[0] <= now and not self._ended:
            self._move_group(outcome, stuck[1].group, now)

    def _move_group(self, outcome: Outcome, group: int, now: float) -> None:
        """Launch every node of a group again, under a number of its own."""
        table, successor = self._table, self._table.wanted.next_group()
        table.commit(outcome, rec.GroupMoved(group, successor))
        nodes = [n.node_id for n in table.nodes.values() if n.group == group]
        live = [node_id for node_id in nodes if not table.nodes[node_id].phase.is_final]
        outcome.facts.append(ev.GroupMoved(group, successor, len(live)))
        why = f"its group {group} is launched again elsewhere"
        self.departures.leave(outcome, live, why, at_once=True)
        why = f"group {group} is launched again as group {successor}"
        self.orders.fill(outcome, why, now, is_relaunch=True)

    def deadline(self) -> float | None:
        stuck = None if self._ended else pending.stuck_group(self._table, self._spec)
        times = (
            self.losses.deadline(),
            self.orders.deadline(),
            self.departures.deadline(),
            None if stuck is None else stuck[0],
        )
        return min((at for at in times if at is not None), default=None)

    def note_clock(self, outcome: Outcome) -> None:
        """Say so when the time in which a world must form begins or ceases to count."""
        runs = not (self._table.wanted.suspended or self._table.pending)
        if self._spec.size_from_platform and runs is not self._clock_runs:
            self._clock_runs = runs
            outcome.facts.append(ev.JoinClockSet(runs))
