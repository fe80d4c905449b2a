# SPDX-License-Identifier: Apache-2.0
"""Nodes that run the user's program without an agent: parameter servers and those who use them.

What is known of them is what the platform sees. A rank that is lost is launched again by the rules
of its role, under the same address; the job is over when all who work have ended well, and it fails
when a rank that it cannot do without is not launched again any more.
"""

from collections.abc import Iterable

from holdfast.core.job import events as ev
from holdfast.core.job import role_records as rec
from holdfast.core.job.commands import AnswerPlan, LaunchNode, RemoveNode
from holdfast.core.job.launch_queue import LaunchQueue
from holdfast.core.job.role_rules import (
    OF_OTHERS,
    asked_by,
    is_at_work,
    longest_waiting,
    name_of,
    order_of,
    over_budget,
    plan_node,
    problem_of,
    resized,
)
from holdfast.core.job.role_table import Place, RoleNodeState, RoleTable, changed
from holdfast.core.kernel import NOTHING, Event, Outcome, Record, Tick, commit
from holdfast.model.ids import NodeId, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER, Plan
from holdfast.model.role import RoleSpec, raised_memory_mib

FIRST_NODE_ID = 1_000_000
"""Beside nodes with agents, which count from 0: nobody has two nodes of one id."""


class Roles:
    """The table of nodes without agents."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        first = spec.first_node_id if WORKER in spec.roles else FIRST_NODE_ID + spec.first_node_id
        self._table = RoleTable(first)
        #: A queue for each role, because their ranks count from 0 each.
        self._launches = {role: LaunchQueue() for role in spec.roles}
        self._is_over = False

    def handle(self, event: Event, now: float) -> Outcome:
        if not self._spec.roles:
            return NOTHING
        match event:
            case ev.NodeSeen():
                return self._seen(event, now)
            case ev.MasterStarted():
                return self._start(now)
            case Tick():
                return self._look(now)
            case ev.PlanAsked() if event.plan.role in self._spec.roles:
                return self._plan(event.plan, now)
            case ev.JobSuspended() if WORKER not in self._spec.roles:
                return self._suspend()
            case ev.JobResumed() if WORKER not in self._spec.roles:
                return self._resume(now)
            case ev.JobFinished():
                self._is_over = True
                return self._remove(self._table.live(), "the job is over")
        return NOTHING

    def deadline(self) -> float | None:
        times = [queue.deadline() for queue in self._launches.values()]
        waiting = longest_waiting(self._table, self._spec)
        if waiting is not None and not self._is_over:
            times.append(waiting.planned.at_s + self._spec.pending_timeout_s)
        return min((at for at in times if at is not None), default=None)

    # ---- the life of a node ---------------------------------------------------------------------

    def _start(self, now: float) -> Outcome:
        """Order what a new job needs; do again what may not have been done."""
        outcome = Outcome()
        if self._table.has_begun:
            for node in self._table.nodes.values():
                if node.leaves:
                    outcome.commands.append(RemoveNode(node.node_id))
                elif node.phase is Phase.INITIAL:
                    outcome.commands.append(LaunchNode(order_of(node, self._table, self._spec)))
            return outcome
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
                self._launch(outcome, place, reason, now)

    def _launch(
        self,
        outcome: Outcome,
        place: Place,
        reason: str,
        now: float,
        *,
        pause_s: float = 0.0,
        memory_mib: int = 0,
        cpu_milli: int = 0,
    ) -> None:
        planned = plan_node(place, self._table, now, memory_mib, cpu_milli)
        commit(self, outcome, planned)
        role, rank = place
        node_id = NodeId(planned.node_id)
        outcome.facts.append(ev.NodeOrdered(node_id, rank, f"{role}: {reason}", pause_s))
        self._launches[role].put(node_id, now + pause_s)
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
        was_live = node.is_live
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
            self._replace(outcome, node, reason, message, now)
        return outcome

    def _replace(
        self, outcome: Outcome, node: RoleNodeState, reason: ExitReason, message: str, now: float
    ) -> None:
        place, asked = node.place, self._spec.roles[node.planned.role]
        memory_mib = node.planned.memory_mib
        why_not = over_budget(place, self._table, asked, reason)
        if reason is ExitReason.OOM and not why_not:
            before_mib = memory_mib or asked.node_memory_mib
            memory_mib = raised_memory_mib(before_mib, asked.memory_max_mib)
            if before_mib and not memory_mib:
                why_not = f"it has {before_mib} MiB of memory and may not have more"
        if why_not:
            self._give_up(outcome, place, asked, f"{name_of(place)}: {message}; {why_not}")
            return
        if reason not in OF_OTHERS:
            commit(self, outcome, rec.RoleRelaunched(*place, reason))
        pause_s = self._launches[place[0]].pause_s(place[1], now)
        why = f"it was lost ({reason}: {message})"
        self._launch(outcome, place, why, now, pause_s=pause_s, memory_mib=memory_mib)

    def _give_up(self, outcome: Outcome, place: Place, asked: RoleSpec, why: str) -> None:
        is_wanted = place in self._table.wanted
        commit(self, outcome, rec.RoleRankSet(*place, is_wanted, is_given_up=True))
        if asked.critical_limit(place[1]) is not None:
            outcome.facts.append(ev.WorldImpossible(why))
        else:
            self._check_end(outcome, why)

    def _check_end(self, outcome: Outcome, why: str = "") -> None:
        """The job is over when nobody works any more; it was of use if somebody ended well."""
        # Beside agents, their workers say when the job is over.
        if self._is_over or WORKER not in self._spec.roles or is_at_work(self._table, self._spec):
            return
        if any(self._table.has_ended_well(place) for place in self._table.wanted):
            outcome.facts.append(ev.WorkSettled(Round(0)))
        else:
            outcome.facts.append(ev.WorldImpossible(why or "no node is left that works"))

    # ---- nodes that cannot be placed ------------------------------------------------------------

    def _look(self, now: float) -> Outcome:
        outcome, waiting = self._launch_due(now), longest_waiting(self._table, self._spec)
        waits_s = -1.0 if waiting is None else now - waiting.planned.at_s
        if waiting is not None and waits_s >= self._spec.pending_timeout_s and not self._is_over:
            why = f"{name_of(waiting.place)} has been waiting for a machine for {waits_s:.0f} s"
            outcome.facts.append(ev.WorldImpossible(f"{why}: {waiting.message or 'it is pending'}"))
        return outcome

    # ---- what people ask for --------------------------------------------------------------------

    def _plan(self, plan: Plan, now: float) -> Outcome:
        outcome = Outcome()
        settled = self._table.settled.get(plan.plan_id)
        if settled is None:
            problem = "the job is over" if self._is_over else problem_of(plan, self._table)
            if not problem:
                self._carry_out(outcome, plan, now)
            text = problem or "it is done"
            settled = rec.RolePlanSettled(plan.plan_id, not problem, text)
            commit(self, outcome, settled)
        outcome.facts.append(ev.PlanSettled(settled.plan_id, settled.ok, settled.text))
        outcome.commands.append(AnswerPlan(settled.plan_id, settled.ok, settled.text))
        return outcome

    def _carry_out(self, outcome: Outcome, plan: Plan, now: float) -> None:
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
            outcome.add(self._remove([node], "another takes its place"))
            self._launch(
                outcome,
                node.place,
                "it takes another's place",
                now,
                memory_mib=move.memory_mib,
                cpu_milli=move.cpu_milli,
            )
        self._launch_missing(outcome, "somebody asked for more nodes", now)

    def _resize(self, outcome: Outcome, role: str, nodes: int) -> None:
        come, go = resized(self._table.wanted_of(role), role, nodes)
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

    def view(self) -> list[dict[str, object]]:
        """The table as people see it."""
        return self._table.view()

    def wanted(self) -> dict[str, int]:
        """How many nodes of each role there shall be."""
        return {role: len(self._table.wanted_of(role)) for role in self._spec.roles}
