# SPDX-License-Identifier: Apache-2.0
"""One simulated job on a failing cluster: what happens when, and what is left of the time.

The machines are the job's own, its warm spares and a reserve of the platform. The faults are drawn
beforehand; a control (the real core, or rules) decides what follows; the policy says how long each
stage takes. The seed decides everything: the same settings give the same result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.model.use import Use
from holdfast.sim.clock import Clock
from holdfast.sim.control import Control, Decision
from holdfast.sim.failures import CORRUPT, HANG, SLOW, Fault
from holdfast.sim.machines import MachinesState
from holdfast.sim.policies import Policy
from holdfast.sim.timeline import SavesState
from holdfast.sim.training import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the job runs on, and how it saves."""

    nodes: int
    min_nodes: int
    spares: int
    reserve: int
    """Further machines from which the platform replaces a lost one."""
    replace_s: float
    """How long a replacement takes, imports included."""
    rack_machines: int
    checkpoint_every_s: float
    persist_every_s: float
    span_s: float

    @property
    def machines(self) -> int:
        return self.nodes + self.spares + self.reserve


class Job:
    """A job while it is simulated."""

    def __init__(self, cluster: Cluster, policy: Policy, control: Control) -> None:
        self._cluster = cluster
        self._policy = policy
        self._control = control
        self._clock = Clock()
        self._platform = MachinesState(
            self._clock, cluster.machines, cluster.replace_s, self._arrived
        )
        self._tick_at: float | None = None
        self.training = TrainingState(
            policy,
            SavesState(policy, cluster.checkpoint_every_s, cluster.persist_every_s),
            cluster.nodes,
            cluster.rack_machines,
        )
        #: Seconds from each fault that stopped the training to the next step.
        self.recoveries: list[float] = []
        self.interruptions = 0
        self.growths = 0
        self.rounds = 0
        self.spares_used = 0
        self.size_min = cluster.nodes
        self._members: frozenset[int] = frozenset()
        #: The present round cannot step any more, whether the control knows it or not.
        self._hurt = True
        #: The fault behind the recovery under way.
        self._open: Fault | None = None

    @property
    def events(self) -> int:
        """How much happened: to machines, and to the control."""
        return self._clock.actions + self._control.events

    def run(self, faults: Sequence[Fault], progress: Callable[[float], None]) -> None:
        """Play all faults until the end of the span."""
        for fault in faults:
            self._clock.at(fault.at_s, partial(self._fault, fault))
        # After the faults of time 0, because those machines are away already.
        self._clock.at(0.0, self._start)
        span_s = self._cluster.span_s
        for percent in range(1, 101):
            self._clock.at(span_s * percent / 100, partial(progress, percent / 100))
        self._clock.run(span_s, lambda: False)
        self.training.enter(Use.IDLE, span_s)

    def _start(self) -> None:
        self._decided(self._control.start())

    # ---- what happens to machines ---------------------------------------------------------------

    def _fault(self, fault: Fault) -> None:
        if self._platform.is_broken(fault.machine):
            return
        is_member = fault.machine in self._members
        if fault.manner == SLOW:
            self.training.slow(fault.machine, fault.factor, self._clock.now)
            self._clock.after(fault.lasts_s, partial(self._fast_again, fault.machine))
            return
        if fault.manner == CORRUPT and is_member:
            trusted_s = self.training.stored_s(self._clock.now)
            known = partial(self._corruption_known, fault, trusted_s)
            self._clock.after(self._policy.corrupt_known_s, known)
            return
        if fault.takes_machine:
            self._platform.broke(fault.machine, fault.lasts_s)
        if is_member:
            self._hurt_by(fault)
        if self._platform.is_used(fault.machine) and (is_member or fault.takes_machine):
            self._clock.after(self._known_s(fault), partial(self._known, fault, self.rounds))

    def _known_s(self, fault: Fault) -> float:
        """How long it takes until the control knows of the fault."""
        policy = self._policy
        if fault.manner == HANG:
            return policy.hang_known_s
        if not fault.takes_machine:
            return policy.exit_known_s
        return policy.silent_known_s if fault.is_silent else policy.lost_known_s

    def _hurt_by(self, fault: Fault) -> None:
        self.interruptions += 1
        self._hurt = True
        if self._open is None:
            self._open = fault
        if self.training.use is not Use.IDLE:
            self._enter(Use.DETECT)

    def _known(self, fault: Fault, number: int) -> None:
        if not self._platform.is_used(fault.machine):
            return  # It was lost to something else in the meantime.
        if not fault.takes_machine:
            # The process of an older round is gone anyway.
            if fault.machine in self._members and number == self.rounds:
                self._decided(self._control.failed(fault.machine, self._clock.now))
            return
        if fault.machine in self._members:
            self._lose(fault.machine)
        else:
            self._platform.lost(fault.machine)
            self._decided(self._control.lost(fault.machine, self._clock.now))

    def _lose(self, machine: int) -> None:
        """The control learns that a machine of the world is gone."""
        self.training.lost(machine)
        self._platform.lost(machine)
        self._decided(self._control.lost(machine, self._clock.now))

    def _corruption_known(self, fault: Fault, trusted_s: float) -> None:
        if fault.machine not in self._members:
            return
        self._hurt_by(fault)
        self.training.distrust(trusted_s)
        self._platform.broke(fault.machine, fault.lasts_s)
        self._lose(fault.machine)

    def _fast_again(self, machine: int) -> None:
        self.training.slow(machine, 1.0, self._clock.now)

    def _arrived(self, order: int, machine: int) -> None:
        self._decided(self._control.arrived(order, machine, self._clock.now))

    # ---- what is decided ------------------------------------------------------------------------

    def _tick(self) -> None:
        self._tick_at = None
        self._decided(self._control.tick(self._clock.now))

    def _decided(self, decision: Decision) -> None:
        if decision.broken and decision.formed is None:
            self._enter(Use.IDLE)  # Until enough machines are there again.
        if decision.formed is not None:
            self._formed(decision.formed, planned=not decision.broken)
        for order in decision.orders:
            self._platform.order(order)
        at = self._control.deadline()
        if at is not None and (self._tick_at is None or at < self._tick_at):
            self._tick_at = at
            self._clock.at(at, self._tick)

    def _formed(self, world: tuple[int, ...], *, planned: bool) -> None:
        members, policy = frozenset(world), self._policy
        self.growths += planned and self.training.use is Use.PRODUCTIVE
        self._enter(Use.RENDEZVOUS)
        restore_s = 0.0
        if self.rounds:
            self.spares_used += len(members - self._members)
            restore_s = self.training.go_back(self._cause(), is_changed=members != self._members)
        self._members = members
        self.training.world = world
        self.size_min = min(self.size_min, len(world))
        self.rounds += 1
        self._hurt = False
        number, told_s = self.rounds, policy.rendezvous_s
        self._clock.after(told_s, partial(self._reached, Use.RESTART, number))
        begun_s = told_s + policy.restart_s
        self._clock.after(begun_s, partial(self._reached, Use.RESTORE, number))
        self._clock.after(begun_s + restore_s, partial(self._stepped, number))

    def _reached(self, use: Use, number: int) -> None:
        """Enter the next stage of a recovery, unless another fault or round came in between."""
        if number == self.rounds and not self._hurt:
            self._enter(use)

    def _stepped(self, number: int) -> None:
        """The first step of a round is done, unless another fault or round came in between."""
        if number != self.rounds or self._hurt:
            return
        if not self._platform.are_well(self._members):
            # A spare died silently. Its world cannot begin, and the control does not know why yet.
            self._enter(Use.DETECT)
            return
        now = self._clock.now
        if self._open is not None:
            stopped_s = self._open.at_s
            if self._open.manner == CORRUPT:
                stopped_s += self._policy.corrupt_known_s  # It trained on until then.
            self.recoveries.append(now - stopped_s)
            self._open = None
        self._control.started(now)
        self.training.resume(now)

    def _enter(self, use: Use) -> None:
        self.training.enter(use, self._clock.now, self._cause())

    def _cause(self) -> str:
        return self._open.cause if self._open is not None else ""
