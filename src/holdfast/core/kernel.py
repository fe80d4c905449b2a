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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct, field


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


class Machine(Protocol):
    """A part of the state and the decisions over it. Only `handle` and `apply` change it."""

    def handle(self, event: Any, now: float) -> Outcome:
        """Decide. Must not change durable state except through `apply` of a returned record."""

    def apply(self, record: Any) -> None:
        """Make a record true: the only place where durable state changes."""

    def snapshot(self) -> Iterable[Record]:
        """Records that rebuild the durable state from nothing."""

    def deadline(self) -> float | None:
        """When this machine next wants a Tick."""


def commit(machine: Machine, outcome: Outcome, record: Record) -> None:
    """Make a record true and durable: what a machine does with every change it decides."""
    machine.apply(record)
    outcome.records.append(record)


class Core:
    """Routes events to machines and facts back in. Knows nothing about what they mean."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = tuple(machines)
        self._routes: dict[type[Event], tuple[Machine, ...]] = {}
        self._owners: dict[type[Record], Machine] = {}
        #: The deadline of each machine, and who has been told something since.
        self._deadlines: dict[Machine, float | None] = dict.fromkeys(machines)
        self._told: dict[Machine, None] = dict.fromkeys(machines)
        self._earliest: float | None = None

    def route(self, kind: type[Event], *machines: Machine) -> None:
        """Deliver this kind of event to these machines, in this order."""
        if kind in self._routes:
            raise ValueError(f"{kind.__name__} is routed twice")
        self._routes[kind] = machines

    def own(self, machine: Machine, *kinds: type[Record]) -> None:
        """Say whose records these are."""
        for kind in kinds:
            self._owners[kind] = machine

    def routed(self) -> frozenset[type[Event]]:
        """Every kind of event that reaches a machine."""
        return frozenset(self._routes)

    def handle(self, event: Event, now: float) -> Outcome:
        """Run an event and all facts that follow from it; return everything that came out."""
        result = Outcome()
        queue: deque[Event] = deque((event,))
        while queue:
            current = queue.popleft()
            if type(current) is Tick:
                targets = tuple(machine for machine in self._machines if _is_due(machine, now))
            else:
                targets = self._routes[type(current)]
            for machine in targets:
                self._told[machine] = None
                outcome = machine.handle(current, now)
                if outcome is NOTHING:
                    continue
                result.add(outcome)
                queue.extend(outcome.facts)
        return result

    def replay(self, record: Record) -> None:
        """Apply a record of an earlier life."""
        owner = self._owners[type(record)]
        self._told[owner] = None
        owner.apply(record)

    def snapshot(self) -> list[Record]:
        """Records that lead an empty core to the present durable state."""
        return [record for machine in self._machines for record in machine.snapshot()]

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


def _is_due(machine: Machine, now: float) -> bool:
    at = machine.deadline()
    return at is not None and at <= now
