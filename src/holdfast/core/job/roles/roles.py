# SPDX-License-Identifier: Apache-2.0
"""Nodes that run the user's program without an agent: parameter servers and their clients.

What is known of them is what the platform sees. A rank that is lost is launched again by the rules
of its role, under the same address. The job is over when all nodes that work have ended well. It
fails when a rank that it cannot do without is not launched again any more.
"""

from collections.abc import Iterable
from typing import assert_never

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import AnswerPlan, LaunchNode, RemoveNode
from holdfast.core.job.membership.demand import Demand, described
from holdfast.core.job.membership.launch_queue import LaunchQueue
from holdfast.core.job.membership.pending import LOOK_S
from holdfast.core.job.roles.role_rules import (
    OF_OTHERS,
    RoleLoss,
    asked_by,
    down_too_long,
    given_again,
    is_at_work,
    judge,
    name_of,
    next_overdue,
    of_places,
    order_of,
    plan_node,
    problem_of,
    resized,
    why_stopped,
)
from holdfast.core.job.roles.role_table import Place, RoleNodeState, RoleTable, changed
from holdfast.core.kernel import NOTHING, Outcome, Record, Tick, commit
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER, Plan
from holdfast.model.resources import NOTHING as NO_MORE
from holdfast.model.resources import Resources
from holdfast.model.role import RoleSpec

FIRST_NODE_ID = 1_000_000
"""Nodes with agents count from 0: beside them, no two nodes have the same id."""

Handled = (
    ev.NodeSeen
    | ev.MasterStarted
    | ev.PlanAsked
    | ev.PlanPartAgreed
    | ev.JobSuspended
    | ev.JobResumed
    | ev.JobFinished
    | Tick
)


class Roles:
    """The table of nodes without agents."""

    OWNS = (
        rec.RoleNodePlanned,
        rec.RoleNodeChanged,
        rec.RoleRankSet,
        rec.RoleRelaunched,
        rec.RoleAsked,
        rec.RolePlanSettled,
        rec.RolesSet,
    )

    def __init__(self, spec: JobSpec, demand: Demand) -> None:
        self._spec = spec
        self._demand = demand
        demand.count(lambda: of_places(self._table, spec), self._judge)
        first = spec.first_node_id if WORKER in spec.roles else FIRST_NODE_ID + spec.first_node_id
        self._table = RoleTable(first)
        #: A queue for each role, because their ranks count from 0 each.
        self._launches = {role: LaunchQueue() for role in spec.roles}
        self._is_over = False
        #: After a restart of the master: no wait for a node times out before this time.
        self._looks_until = 0.0

    def handle(self, event: Handled, now: float) -> Outcome:
        if not self._spec.roles:
            return NOTHING
        match event:
            case ev.NodeSeen():
                return self._seen(event, now)
            case ev.MasterStarted():
                return self._start(now)
            case ev.PlanAsked():
                if event.plan.role in self._spec.roles:
                    return self._plan(event.plan, now)
            case ev.PlanPartAgreed():
                if event.part.role in self._spec.roles:
                    outcome = Outcome()
                    self._carry_out(outcome, event.part, now)
                    return outcome
            case ev.JobSuspended():
                if WORKER not in self._spec.roles:
                    return self._suspend()
            case ev.JobResumed():
                if WORKER not in self._spec.roles and not event.stopped:
                    return self._resume(now)
            case ev.JobFinished():
                self._is_over = True
                return self._remove(self._table.live(), "the job is over")
            case Tick():
                return self._look(now)
            case _:
                assert_never(event)
        return NOTHING

    def deadline(self) -> float | None:
        times = [queue.deadline() for queue in self._launches.values()]
        overdue_at = None if self._is_over else next_overdue(self._table, self._spec)
        if overdue_at is not None:
            times.append(max(overdue_at, self._looks_until))
        return min((at for at in times if at is not None), default=None)

    def validate(self) -> None:
        self._table.validate()

    # ---- the life of a node ---------------------------------------------------------------------

    def _start(self, now: float) -> Outcome:
        """Order what a new job needs; in an older one, repeat what may not have been done."""
        if self._table.has_begun:
            self._looks_until = now + LOOK_S
            return Outcome(commands=list(given_again(self._table, self._spec)))
        if refusal := self._spec.limits.refusal(described(self._spec)):
            return Outcome(facts=[ev.WorldImpossible(refusal)])
        outcome = Outcome()
        for role, asked in self._spec.roles.items():
            for rank in range(asked.nodes):
                commit(self, outcome, rec.RoleRankSet(role, rank, is_wanted=True))
        commit(self, outcome, rec.RolesSet(self._spec.suspended))
        if not self._spec.suspended:
            self._launch_missing(outcome, "the job starts", now)
        return outcome

    def _launch_missing(self, outcome: Outcome, reason: str, now: float) -> None:
        for place in sorted(self._table.wanted - self._table.given_up):
            node = self._table.newest_of(place)
            if node is None or not (node.is_live or node.phase is Phase.SUCCEEDED):
                self._launch(outcome, plan_node(place, self._table, now), reason, now, 0.0)

    def _launch(
        self, outcome: Outcome, planned: rec.RoleNodePlanned, why: str, now: float, pause_s: float
    ) -> None:
        commit(self, outcome, planned)
        node_id, rank = NodeId(planned.node_id), NodeRank(planned.node_rank)
        reason = f"{planned.role}: {why}"
        outcome.facts.append(ev.NodeOrdered(node_id, rank, reason, pause_s))
        self._launches[planned.role].put(node_id, now + pause_s)
        outcome.add(self._launch_due(now))

    def _launch_due(self, now: float) -> Outcome:
        outcome = Outcome()
        for queue in self._launches.values():
            for node_id in queue.take_due(now):
                node = self._table.nodes.get(node_id)
                if node is not None and node.phase is Phase.INITIAL and not node.leaves:
                    outcome.commands.append(LaunchNode(order_of(node, self._table, self._spec)))
        return outcome

    def _seen(self, event: ev.NodeSeen, now: float) -> Outcome:
        node = self._table.nodes.get(event.node_id)
        if node is None or node.phase.after(event.phase) is node.phase:
            return NOTHING
        outcome = Outcome()
        was_live, down_since_s = node.is_live, node.planned.down_since_s
        if node.phase is Phase.RUNNING or down_since_s < 0:
            down_since_s = now
        record = changed(node, event.phase, message=event.message, machine=event.host)
        commit(self, outcome, record)
        role, rank = node.place
        if event.phase is Phase.RUNNING:
            self._launches[role].ready(rank, now)
        elif event.phase is Phase.SUCCEEDED and was_live:
            self._check_end(outcome)
        elif event.phase.is_final and was_live and not self._is_over:
            reason = event.reason or ExitReason.UNKNOWN
            message = event.message or f"the platform reports it as {event.phase}"
            self._replace(outcome, RoleLoss(node, reason, message, down_since_s), now)
        return outcome

    def _replace(self, outcome: Outcome, loss: RoleLoss, now: float) -> None:
        place, reason, table = loss.node.place, loss.reason, self._table
        asked = self._spec.roles[place[0]]
        why_not, memory_mib = judge(loss, table, asked, self._demand.memory_left_mib())
        if why_not:
            self._give_up(outcome, place, asked, f"{name_of(place)}: {loss.message}; {why_not}")
            return
        if reason not in OF_OTHERS:
            commit(self, outcome, rec.RoleRelaunched(*place, reason))
        pause_s = self._launches[place[0]].pause_s(place[1], now)
        why, since_s = f"it was lost ({reason}: {loss.message})", loss.down_since_s
        planned = plan_node(place, table, now, memory_mib=memory_mib, down_since_s=since_s)
        self._launch(outcome, planned, why, now, pause_s)

    def _give_up(self, outcome: Outcome, place: Place, asked: RoleSpec, why: str) -> None:
        is_wanted = place in self._table.wanted
        commit(self, outcome, rec.RoleRankSet(*place, is_wanted, is_given_up=True))
        outcome.facts.append(ev.RankGivenUp(*place, why))
        if asked.critical_limit(place[1]) is not None:
            outcome.facts.append(ev.WorldImpossible(why))
        else:
            self._check_end(outcome, why)

    def _check_end(self, outcome: Outcome, why: str = "") -> None:
        """The job is over when no node works any more; it succeeded if any node ended well."""
        # In a job with agents, their workers decide when it is over.
        if self._is_over or WORKER not in self._spec.roles or is_at_work(self._table, self._spec):
            return
        if any(self._table.has_ended_well(place) for place in self._table.wanted):
            outcome.facts.append(ev.WorkSettled(Round(0)))
        else:
            outcome.facts.append(ev.WorldImpossible(why or "no node is left that works"))

    # ---- nodes that do not come -----------------------------------------------------------------

    def _look(self, now: float) -> Outcome:
        outcome = self._launch_due(now)
        if self._is_over or now < self._looks_until:
            return outcome
        if why := why_stopped(self._table, self._spec, now):
            outcome.facts.append(ev.WorldImpossible(why))
        for node, why in down_too_long(self._table, self._spec, now):
            outcome.add(self._remove([node], why))
            self._give_up(outcome, node.place, self._spec.roles[node.planned.role], why)
        return outcome

    # ---- what people ask for --------------------------------------------------------------------

    def _plan(self, plan: Plan, now: float) -> Outcome:
        outcome = Outcome()
        self._demand.follow(plan)
        settled = self._table.settled.get(plan.plan_id)
        if settled is None:
            problem = "the job is over" if self._is_over else self._demand.refusal(plan)
            if not problem:
                self._carry_out(outcome, plan, now)
            text = problem or "it is done"
            settled = rec.RolePlanSettled(plan.plan_id, not problem, text)
            commit(self, outcome, settled)
        outcome.facts.append(ev.PlanSettled(settled.plan_id, settled.ok, settled.text))
        outcome.commands.append(AnswerPlan(settled.plan_id, settled.ok, settled.text))
        return outcome

    def _judge(self, plan: Plan) -> str | Resources:
        if plan.role not in self._spec.roles:
            return NO_MORE
        if problem := problem_of(plan, self._table, self._spec.roles[plan.role]):
            return problem
        asks_before = of_places(self._table, self._spec)
        return of_places(self._table, self._spec, plan).less(asks_before)

    def _carry_out(self, outcome: Outcome, plan: Plan, now: float) -> None:
        outcome.facts.extend(map(ev.PlanPartAgreed, plan.others))
        if plan.memory_mib or plan.cpu_milli:
            commit(self, outcome, asked_by(plan, self._table))
        for node_id in plan.remove:
            self._unwanted(outcome, self._table.nodes[node_id].place)
        if plan.nodes is not None:
            self._resize(outcome, plan.role, plan.nodes)
        for rank in plan.add:
            commit(self, outcome, rec.RoleRankSet(plan.role, rank, is_wanted=True))
        if plan.suspend is not None and plan.suspend != self._table.is_suspended:
            outcome.facts.append(ev.JobSuspended() if plan.suspend else ev.JobResumed())
            outcome.add(self._suspend() if plan.suspend else self._resume(now))
        if self._table.is_suspended:
            return
        for move in plan.migrate:
            node = self._table.nodes[move.node_id]
            # The old one first: both have the same address and task, and would answer for it.
            outcome.add(self._remove([node], "another takes its place"))
            asked = {"memory_mib": move.memory_mib, "cpu_milli": move.cpu_milli}
            planned = plan_node(node.place, self._table, now, **asked)
            self._launch(outcome, planned, "it takes another's place", now, 0.0)
        self._launch_missing(outcome, "somebody asked for more nodes", now)

    def _resize(self, outcome: Outcome, role: str, nodes: int) -> None:
        come, go = resized(self._table.wanted_of(role), self._table.given_up, role, nodes)
        for place in go:
            self._unwanted(outcome, place)
        for place in come:
            commit(self, outcome, rec.RoleRankSet(*place, is_wanted=True))

    def _unwanted(self, outcome: Outcome, place: Place) -> None:
        commit(self, outcome, rec.RoleRankSet(*place, is_wanted=False))
        node = self._table.newest_of(place)
        if node is not None and node.is_live:
            outcome.add(self._remove([node], "somebody asked for fewer nodes"))

    def _suspend(self) -> Outcome:
        outcome = self._remove(self._table.live(), "the job is suspended")
        commit(self, outcome, rec.RolesSet(is_suspended=True))
        return outcome

    def _resume(self, now: float) -> Outcome:
        outcome = Outcome()
        commit(self, outcome, rec.RolesSet(is_suspended=False))
        for place in sorted(self._table.given_up & self._table.wanted):
            commit(self, outcome, rec.RoleRankSet(*place, is_wanted=True))
        self._launch_missing(outcome, "the job goes on", now)
        return outcome

    def _remove(self, nodes: Iterable[RoleNodeState], why: str) -> Outcome:
        outcome = Outcome()
        for node in list(nodes):
            commit(self, outcome, changed(node, node.phase, message=why, leaves=True))
            outcome.commands.append(RemoveNode(node.node_id))
        return outcome

    def apply(self, record: Record) -> None:
        self._table.apply(record)

    def snapshot(self) -> Iterable[Record]:
        return self._table.snapshot()

    def name_of(self, node_id: NodeId) -> str:
        """As people ask for it, by its role and rank; empty if it is not of this table."""
        node = self._table.nodes.get(node_id)
        return "" if node is None else "/".join(map(str, node.place))

    def view(self) -> list[dict[str, object]]:
        """The table as people see it."""
        return self._table.view()

    def wanted(self) -> dict[str, int]:
        """How many nodes of each role are wanted."""
        return {role: len(self._table.wanted_of(role)) for role in self._spec.roles}
