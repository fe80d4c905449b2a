# SPDX-License-Identifier: Apache-2.0
"""What follows for the rank of a node that was lost, or that does not come.

A part of `fleet`. The rank gets another node as long as its budgets last and its time is not over.
A rank that is given up is not wanted any more: the job goes on without it, or ends if it cannot.
"""

from dataclasses import replace

from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.core.job.commands import RemoveNode
from holdfast.core.job.membership import pending
from holdfast.core.job.membership.awaiting_reason import AwaitingReason, Loss
from holdfast.core.job.membership.demand import Demand
from holdfast.core.job.membership.failed_hosts import blame
from holdfast.core.job.membership.node_table import NodeState, NodeTable
from holdfast.core.job.membership.ordering import Orders, down_since
from holdfast.core.job.membership.relaunching import Relaunch, judge, memory_of
from holdfast.core.kernel import Outcome
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, Phase
from holdfast.model.order import WORKER


class Losses:
    """Which ranks are launched again. Everything durable is in the node table."""

    def __init__(self, spec: JobSpec, table: NodeTable, demand: Demand, orders: Orders) -> None:
        self._spec = spec
        self._table = table
        self._demand = demand
        self._orders = orders
        self._words = AwaitingReason()
        #: After a restart of the master: no wait for a node times out before this time.
        self._looks_until = 0.0

    def resume(self, now: float) -> None:
        """A new master waits for the reasons that the last one waited for."""
        self._looks_until = now + pending.LOOK_S
        if self._spec.size_from_platform and not self._table.wanted.suspended:
            for node in self._table.vacant():
                self._words.wait(Loss(node, ExitReason.LOST), now)

    def finish(self, outcome: Outcome) -> None:
        """The job is over: no node's reason is waited for any more."""
        for node_id in self._words.clear():
            outcome.commands.append(RemoveNode(node_id))

    # ---- nodes that are lost --------------------------------------------------------------------

    def lost(self, outcome: Outcome, loss: Loss, now: float, *, proven: bool) -> None:
        """A node has ended: decide what follows for its rank, or wait for the reason first."""
        if not proven and self._spec.size_from_platform and not loss.was_leaving:
            self._words.wait(loss, now)
            return
        if not proven:
            outcome.commands.append(RemoveNode(loss.node.node_id))
        self._follow(outcome, loss, now)

    def explained(
        self, outcome: Outcome, node_id: NodeId, reason: ExitReason | None, now: float
    ) -> None:
        """The platform says why a node ended; None: it lives, or no reason has come."""
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
            return  # One node was to replace another, and the other is there.
        if loss.was_leaving or table.wanted.suspended:
            if rank in table.wanted.ranks and not table.wanted.suspended:
                why = f"the node before it on rank {rank} has left"
                self._orders.order(outcome, rank, why, now)
            return
        if loss.ended_well:
            self._give_up(outcome, rank, f"node rank {rank} ended by itself")
            return
        relaunch = judge(table, self._spec, self._demand, loss.node, reason, has_run=loss.has_run)
        if not relaunch.refusal:
            self._relaunch(outcome, loss.node, reason, relaunch, now)
            return
        why = f"{relaunch.refusal}; the last word on it: {loss.node.message}"
        self._give_up(outcome, rank, why, critical=f"was lost ({reason}), and {why}")

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
        self._orders.order(
            outcome,
            rank,
            f"node rank {rank} was lost ({reason})",
            now,
            pause_s=self._orders.pause_s(rank, now),
            memory_mib=relaunch.memory_mib,
            down_since_s=down_since(node, now),
        )

    def _give_up(self, outcome: Outcome, rank: NodeRank, why: str, *, critical: str = "") -> None:
        """Go on without a rank, or end; `critical` is the reason for the end if it is critical."""
        self._table.commit(outcome, rec.RankWanted(rank, is_wanted=False))
        outcome.facts.append(ev.RankGivenUp(WORKER, rank, why))
        left, least = self._table.staying, pending.least_nodes(self._table, self._spec)
        if critical and self._spec.critical_limit(rank) is not None:
            outcome.facts.append(ev.WorldImpossible(f"critical node rank {rank} {critical}"))
        elif left < least:
            why = f"{left} of at least {least} nodes are left, and {why}"
            outcome.facts.append(ev.WorldImpossible(why))

    def _blame(self, outcome: Outcome, node: NodeState, reason: ExitReason, now: float) -> None:
        record = blame(node.machine, reason, now)
        if record is None:
            return
        before = self._table.hosts.avoided(self._table.machines, now)
        self._table.commit(outcome, record)
        avoided = self._table.hosts.avoided(self._table.machines, now)
        if node.machine in avoided and node.machine not in before:
            outcome.facts.append(ev.HostAvoided(node.machine, reason))

    # ---- nodes that do not come -----------------------------------------------------------------

    def tick(self, outcome: Outcome, now: float) -> None:
        for node_id in self._words.due(now):
            self.explained(outcome, node_id, None, now)
        if now < self._looks_until:
            return
        stops_at = pending.stops_at(self._table, self._spec)
        if stops_at is not None and stops_at <= now:
            why = pending.why_stopped(self._table, self._spec)
            outcome.facts.append(ev.WorldImpossible(why))
        while (down := pending.longest_down(self._table, self._spec)) and down[0] <= now:
            self._stays_down(outcome, down[1], now)
        while (mute := pending.longest_mute(self._table, self._spec)) and mute[0] <= now:
            self._stays_mute(outcome, mute[1], now)

    def _stays_down(self, outcome: Outcome, node: NodeState, now: float) -> None:
        """A rank has had no agent for too long, whichever nodes were launched for it."""
        rank, why = node.node_rank, pending.why_given_up(self._table, self._spec, node)
        self._end(outcome, node, ExitReason.KILLED, why, now)
        if rank not in self._table.live_by_rank:  # Else it was to move, and stays where it is.
            self._give_up(outcome, rank, why, critical=f"is needed, and {why}")

    def _stays_mute(self, outcome: Outcome, node: NodeState, now: float) -> None:
        """A node runs and starts no agent: that is a failure like others, and has a budget."""
        self._end(outcome, node, ExitReason.STALLED, pending.why_mute(self._spec), now)
        self._follow(outcome, Loss(node, ExitReason.STALLED), now)

    def _end(
        self, outcome: Outcome, node: NodeState, reason: ExitReason, why: str, now: float
    ) -> None:
        self._table.end(outcome, node, Phase.FAILED, reason, why, proven=True, at_s=now)
        outcome.commands.append(RemoveNode(node.node_id))

    def deadline(self) -> float | None:
        down = pending.longest_down(self._table, self._spec)
        mute = pending.longest_mute(self._table, self._spec)
        waits = (pending.stops_at(self._table, self._spec), down and down[0], mute and mute[0])
        times = [max(at, self._looks_until) for at in waits if at is not None]
        word_at = self._words.deadline()
        return min(times if word_at is None else [*times, word_at], default=None)
