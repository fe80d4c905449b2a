# SPDX-License-Identifier: Apache-2.0
"""What decides in a simulated job: the real core of the master, or a few rules for other policies.

Both are told the same things about machines, and answer with the same kind of decision. The rules
exist for policies that are not Holdfast's, and because they are fast: a test compares them with the
core.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Protocol

from holdfast.core.job import events as ev
from holdfast.core.job.flow import build
from holdfast.core.job.membership.admission import rules_of
from holdfast.core.job.rendezvous.rendezvous import GROW_AFTER_S
from holdfast.core.kernel import Event, Tick
from holdfast.model.ids import NodeId
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.model.world import World
from holdfast.protocol import messages as m

FOREVER_S = 1e12
"""Longer than any simulation: agents do not beat in it, and a job never gives up."""

LAST_CALL_S = JobSpec().last_call_s

WORKERS = 8
"""Per node, as in the published data."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the control decides after an event."""

    broken: bool = False
    formed: tuple[int, ...] | None = None
    """The machines of a new world, in order."""
    orders: tuple[int, ...] = ()
    """New nodes wanted from the platform, by number."""


NOTHING = Decision()


class Control(Protocol):
    """The deciding side of a job."""

    events: int
    """How many messages it was given, and how many it gave."""

    def start(self) -> Decision:
        """Order the nodes of the job."""

    def arrived(self, order: int, machine: int, now: float) -> Decision:
        """The platform has started an ordered node on this machine."""

    def lost(self, machine: int, now: float) -> Decision:
        """The connection to the machine's agent broke."""

    def failed(self, machine: int, now: float) -> Decision:
        """A worker on the machine has ended; its agent has not."""

    def started(self, now: float) -> None:
        """The workers of the world run."""

    def deadline(self) -> float | None:
        """When it next needs a call of `tick`."""

    def tick(self, now: float) -> Decision:
        """Time has passed."""


def spec_without_beats(nodes: int, min_nodes: int, spares: int, grace_s: float) -> JobSpec:
    """The spec of a job whose agents report only changes, and whose budgets never end.

    The core hears of no steps here, so it would never give back what a job uses of its budgets.
    """
    return JobSpec(
        min_nodes=min_nodes,
        max_nodes=nodes,
        spare_nodes=spares,
        managed=True,
        reconnect_s=grace_s,
        join_timeout_s=FOREVER_S,
        silence_s=FOREVER_S,
        lease_s=FOREVER_S,
        worker_restarts=dict.fromkeys(ExitReason, 1 << 40),
        node_relaunches=dict.fromkeys(ExitReason, 1 << 40),
    )


def failed_worker() -> m.FailureInfo:
    """What an agent reports of a worker that ended by itself."""
    return m.FailureInfo(
        rank=0,
        local_rank=0,
        pid=0,
        exit_code=1,
        signal=None,
        reason=ExitReason.ERROR,
        message="has failed",
    )


class CoreControl:
    """The real core of a master, with agents that report only changes.

    Beats are left out: the core waits for them forever, and the time that silence costs is a stage
    of the policy. Requests of workers to the ledgers are left out too. One node of each world
    reports that the workers have started, a node of the previous world if possible: this tells the
    core that the previous world is over.
    """

    def __init__(
        self, nodes: int, min_nodes: int, spares: int, grace_s: float, rack_machines: int
    ) -> None:
        spec = spec_without_beats(nodes, min_nodes, spares, grace_s)
        self._rules = rules_of(spec)
        self._core = build(spec, "simulated").core
        self._rack_machines = rack_machines
        self._node_on: dict[int, NodeId] = {}
        self._machine_of: dict[int, int] = {}
        self._round = 0
        self._world: frozenset[NodeId] = frozenset()
        self._reporter = NodeId(0)
        self.events = 0

    def start(self) -> Decision:
        return self._handle(ev.MasterStarted("simulated"), 0.0)

    def arrived(self, order: int, machine: int, now: float) -> Decision:
        self._node_on[machine] = NodeId(order)
        self._machine_of[order] = machine
        attach = m.Attach(
            agent_key=f"agent of node {order}",
            rules=self._rules,
            nproc=WORKERS,
            host=f"machine-{machine}",
            store_port=29500,
            node_id=order,
            topology=f"rack-{machine // self._rack_machines}",
        )
        return self._handle(ev.AttachRequested(order, 1, attach), now)

    def lost(self, machine: int, now: float) -> Decision:
        return self._handle(ev.NodeAbsent(self._node_on[machine]), now)

    def failed(self, machine: int, now: float) -> Decision:
        node_id = self._node_on[machine]
        report = m.WorkersFailed(self._round, (failed_worker(),))
        return self._handle(ev.FailureReported(node_id, node_id, 1, report), now)

    def started(self, now: float) -> None:
        report = m.WorkersStarted(self._round, 29500, "zygote", 0.05)
        self._handle(ev.StartReported(self._reporter, self._reporter, 1, report), now)

    def deadline(self) -> float | None:
        at = self._core.deadline()
        return None if at is None or at >= FOREVER_S else at

    def tick(self, now: float) -> Decision:
        return self._handle(Tick(), now)

    def _handle(self, event: Event, now: float) -> Decision:
        outcome = self._core.handle(event, now)
        self.events += 1 + len(outcome.commands)
        broken, formed, orders = False, None, []
        for fact in outcome.facts:
            match fact:
                case ev.WorldBroken():
                    broken = True
                case ev.WorldFormed():
                    formed = self._formed(fact.world)
                case ev.NodeOrdered():
                    orders.append(int(fact.node_id))
                case ev.NodeLost():
                    del self._node_on[self._machine_of.pop(fact.node_id)]
        return Decision(broken, formed, tuple(orders))

    def _formed(self, world: World) -> tuple[int, ...]:
        nodes = [member.node_id for member in world.members]
        self._reporter = next((node for node in nodes if node in self._world), nodes[0])
        self._round, self._world = world.round, frozenset(nodes)
        return tuple(self._machine_of[node] for node in nodes)


class RulesControl:
    """The rules of worlds in short: members first, spares step in, grow when it pays."""

    def __init__(self, nodes: int, min_nodes: int, spares: int, grace_s: float) -> None:
        self._nodes = nodes
        self._min_nodes = min_nodes
        self._spares = spares
        self._grace_s = grace_s
        self._orders = 0
        self._rank_of_order: dict[int, int] = {}
        #: Machines that stand ready, with their node ranks.
        self._ready: dict[int, int] = {}
        self._world: frozenset[int] = frozenset()
        self._broken = True
        #: Machines whose connection broke, until they count as lost.
        self._leaving: list[tuple[float, int]] = []
        self._absent: dict[int, int] = {}
        #: When a world forms without the nodes that are still expected.
        self._form_at: float | None = None
        self.events = 0

    def start(self) -> Decision:
        ranks = range(self._nodes + self._spares)
        return Decision(orders=tuple(self._order(rank) for rank in ranks))

    def _order(self, rank: int) -> int:
        order = self._orders
        self._orders += 1
        self._rank_of_order[order] = rank
        return order

    def arrived(self, order: int, machine: int, now: float) -> Decision:
        self.events += 1
        self._ready[machine] = self._rank_of_order.pop(order)
        return Decision(formed=self._form(now))

    def lost(self, machine: int, now: float) -> Decision:
        self.events += 1
        self._absent[machine] = self._ready.pop(machine)
        heappush(self._leaving, (now + self._grace_s, machine))
        return NOTHING

    def failed(self, machine: int, now: float) -> Decision:
        self.events += 1
        broken, self._broken, self._form_at = not self._broken, True, None
        return Decision(broken, self._form(now))

    def started(self, now: float) -> None:
        self.events += 1

    def deadline(self) -> float | None:
        times = [at for at, _ in self._leaving[:1]]
        if self._form_at is not None:
            times.append(self._form_at)
        return min(times, default=None)

    def tick(self, now: float) -> Decision:
        self.events += 1
        broken, orders = False, []
        while self._leaving and self._leaving[0][0] <= now:
            _, machine = heappop(self._leaving)
            orders.append(self._order(self._absent.pop(machine)))
            if machine in self._world and not self._broken:
                broken = self._broken = True
                self._form_at = None
        return Decision(broken, self._form(now), tuple(orders))

    def _form(self, now: float) -> tuple[int, ...] | None:
        growing = not self._broken
        size = min(len(self._ready), self._nodes)
        if size < self._min_nodes or (growing and size <= len(self._world)):
            self._form_at = None
            return None
        is_full = size == self._nodes
        wait_s = 0.0
        if growing and (not is_full or self._absent):
            wait_s = GROW_AFTER_S
        elif not is_full and (self._absent or not self._world):
            wait_s = LAST_CALL_S
        if wait_s:
            if self._form_at is None:
                self._form_at = now + wait_s
            if now < self._form_at:
                return None
        chosen = self._chosen(size)
        self._world, self._broken, self._form_at = frozenset(chosen), False, None
        return tuple(chosen)

    def _chosen(self, size: int) -> list[int]:
        rank = self._ready.__getitem__
        # Members first: a newcomer never pushes one out.
        ready = sorted(self._ready, key=lambda machine: (machine not in self._world, rank(machine)))
        return sorted(ready[:size], key=rank)
