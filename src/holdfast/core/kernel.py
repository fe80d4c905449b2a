# SPDX-License-Identifier: Apache-2.0
"""The kernel: how events reach machines, and what comes out.

A *machine* owns a part of the state. `handle(event, now)` decides and answers with an `Outcome`:

- facts: things that are now true; they re-enter through the routing table, so that machines never
  call each other;
- records: the durable form of a change. Durable state changes *only* in `apply(record)`, in a live
  run and in a replay alike, so that a restarted master arrives at the same state;
- commands: what the driver does once all records of the step are durable.

`now` is job time in seconds: it never goes back, and it goes on across master restarts.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

WAIT_MAX_S = 10 * 365 * 86400.0
"""No wait is longer than any job: keeps odd numbers out of the arithmetic."""


@dataclass(frozen=True, slots=True)
class Event:
    """Base of everything a machine can be told."""


@dataclass(frozen=True, slots=True)
class Command:
    """Base of everything a driver can be asked to do."""


class Record(Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that is journaled. Fields are only ever added, and with a default."""


class Outcome(Struct, frozen=True):
    """What one event led to, in order."""

    facts: list[Event] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        """Append what another step led to."""
        self.facts.extend(other.facts)
        self.records.extend(other.records)
        self.commands.extend(other.commands)


NOTHING = Outcome()
"""For handlers that change nothing; never modified (see `Core.handle`)."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """A deadline has passed."""


E = TypeVar("E", bound=Event)
E_contra = TypeVar("E_contra", bound=Event, contravariant=True)


class Machine(Protocol[E_contra]):
    """A part of the state and the decisions over it. Only `handle` and `apply` change it.

    `E_contra` is the union of the events that the machine handles. Routing it any other event is a
    type error, and so is an event of the union that its `match` leaves out (`assert_never`).
    """

    @property
    def OWNS(self) -> tuple[type[Record], ...]:
        """The records that only this machine writes and applies."""

    def handle(self, event: E_contra, now: float) -> Outcome:
        """Decide. Must not change durable state except through `apply` of a returned record."""

    def apply(self, record: Any) -> None:
        """Make a record true: the only place where durable state changes."""

    def snapshot(self) -> Iterable[Record]:
        """Records that rebuild the durable state from nothing."""

    def deadline(self) -> float | None:
        """When this machine next wants a Tick."""

    def validate(self) -> None:
        """Raise AssertionError where the state breaks an invariant. For tests and the simulator:
        it may look at everything."""


def commit(machine: Machine[Any], outcome: Outcome, record: Record) -> None:
    """Make a record true and durable: what a machine does with every change it decides."""
    machine.apply(record)
    outcome.records.append(record)


class Core:
    """Routes events to machines and facts back in. Knows nothing about what they mean."""

    def __init__(self, machines: Sequence[Machine[Any]]) -> None:
        #: In the order in which they write themselves down.
        self.machines = tuple(machines)
        self._routes: dict[type[Event], tuple[Machine[Any], ...]] = {}
        self._owners: dict[type[Record], Machine[Any]] = {}
        for machine in machines:
            for record in machine.OWNS:
                if record in self._owners:
                    raise ValueError(f"{record.__name__} is owned twice")
                self._owners[record] = machine
        #: The deadline of each machine, and who has been told something since.
        self._deadlines: dict[Machine[Any], float | None] = dict.fromkeys(machines)
        self._told: dict[Machine[Any], None] = dict.fromkeys(machines)
        self._earliest: float | None = None
        self._is_checked = False

    def route(self, kind: type[E], *machines: Machine[E]) -> None:
        """Deliver this kind of event to these machines, in this order."""
        if kind in self._routes:
            raise ValueError(f"{kind.__name__} is routed twice")
        self._routes[kind] = machines

    def routes(self) -> Mapping[type[Event], Sequence[Machine[Any]]]:
        """Which machines each kind of event reaches, in order."""
        return self._routes

    def check_every_step(self) -> None:
        """Let `handle` raise AssertionError where a step has broken an invariant of a machine.

        For tests and the simulator: it takes as long as there is state.
        """
        self._is_checked = True

    def handle(self, event: Event, now: float) -> Outcome:
        """Run an event and all facts that follow from it; return everything that came out."""
        result = Outcome()
        queue: deque[Event] = deque((event,))
        while queue:
            current = queue.popleft()
            if type(current) is Tick:
                targets = tuple(machine for machine in self.machines if _is_due(machine, now))
            else:
                targets = self._routes[type(current)]
            for machine in targets:
                self._told[machine] = None
                outcome = machine.handle(current, now)
                if outcome is NOTHING:
                    continue
                result.add(outcome)
                queue.extend(outcome.facts)
        if self._is_checked:
            for machine in self.machines:
                machine.validate()
        return result

    def replay(self, record: Record) -> None:
        """Apply a record of an earlier life."""
        owner = self._owners[type(record)]
        self._told[owner] = None
        owner.apply(record)

    def snapshot(self) -> list[Record]:
        """Records that lead an empty core to the present durable state."""
        return [record for machine in self.machines for record in machine.snapshot()]

    def deadline(self) -> float | None:
        """The earliest deadline of any machine. This is asked after every event."""
        has_moved = False
        for machine in self._told:
            at = machine.deadline()
            has_moved = has_moved or at != self._deadlines[machine]
            self._deadlines[machine] = at
        self._told.clear()
        if has_moved:
            known = (at for at in self._deadlines.values() if at is not None)
            self._earliest = min(known, default=None)
        return self._earliest


def _is_due(machine: Machine[Any], now: float) -> bool:
    at = machine.deadline()
    return at is not None and at <= now
