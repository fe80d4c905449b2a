# SPDX-License-Identifier: Apache-2.0
"""The kernel alone, with machines that do nothing but remember."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from holdfast.core.kernel import NOTHING, Command, Core, Event, Outcome, Record, Tick, commit


@dataclass(frozen=True, slots=True)
class Pinged(Event):
    number: int


@dataclass(frozen=True, slots=True)
class Echoed(Event):
    number: int


@dataclass(frozen=True, slots=True)
class Shout(Command):
    number: int


LIMIT = 100
"""No counter may reach it."""


class Counted(Record, frozen=True):
    by: int


class Counter:
    """Counts pings durably, and answers each with a fact and a command."""

    OWNS: tuple[type[Record], ...] = (Counted,)

    def __init__(self, due_at: float | None = None) -> None:
        self.total = 0
        self.due_at = due_at
        self.heard: list[tuple[Event, float]] = []

    def handle(self, event: Event, now: float) -> Outcome:
        self.heard.append((event, now))
        if not isinstance(event, Pinged):
            return NOTHING
        outcome = Outcome()
        commit(self, outcome, Counted(event.number))
        outcome.facts.append(Echoed(event.number))
        outcome.commands.append(Shout(event.number))
        return outcome

    def apply(self, record: Counted) -> None:
        self.total += record.by

    def snapshot(self) -> Iterable[Record]:
        yield Counted(self.total)

    def deadline(self) -> float | None:
        return self.due_at

    def validate(self) -> None:
        assert self.total < LIMIT, self.total


class Another(Counter):
    """Beside the one whose records are counted."""

    OWNS = ()


def wired(*machines: Counter) -> Core:
    core = Core(machines)
    core.route(Pinged, machines[0])
    core.route(Echoed, *machines)
    return core


def test_facts_re_enter_and_reach_every_machine_in_order() -> None:
    first, second = Counter(), Another()
    outcome = wired(first, second).handle(Pinged(3), 1.0)
    assert first.heard == [(Pinged(3), 1.0), (Echoed(3), 1.0)]
    assert second.heard == [(Echoed(3), 1.0)]
    assert (outcome.facts, outcome.records) == ([Echoed(3)], [Counted(3)])
    assert outcome.commands == [Shout(3)]


def test_a_tick_reaches_only_machines_that_are_due() -> None:
    due, later, never = Counter(5.0), Another(6.0), Another()
    core = wired(due, later, never)
    assert core.deadline() == 5.0
    core.handle(Tick(), 5.5)
    assert [bool(machine.heard) for machine in (due, later, never)] == [True, False, False]


def test_a_core_without_deadlines_has_none() -> None:
    assert wired(Counter(), Another()).deadline() is None


def test_replay_and_snapshot_lead_to_the_same_state() -> None:
    live, replayed, restored = Counter(), Counter(), Counter()
    core = wired(live)
    records = [r for n in (1, 2, 3) for r in core.handle(Pinged(n), float(n)).records]
    copy = wired(replayed)
    for record in records:
        copy.replay(record)
    again = wired(restored)
    for record in core.snapshot():
        again.replay(record)
    assert live.total == replayed.total == restored.total == 6
    assert not replayed.heard, "a replay decides nothing"


def test_nothing_is_never_changed() -> None:
    core = wired(Counter())
    core.handle(Echoed(1), 0.0)
    core.handle(Pinged(1), 0.0)
    assert Outcome() == NOTHING


def test_an_event_is_routed_once() -> None:
    core = wired(Counter())
    with pytest.raises(ValueError, match="Pinged is routed twice"):
        core.route(Pinged)


def test_a_record_has_one_owner() -> None:
    with pytest.raises(ValueError, match="Counted is owned twice"):
        wired(Counter(), Counter())


def test_a_step_that_breaks_an_invariant_is_an_error_where_that_is_looked_for() -> None:
    core = wired(Counter())
    core.handle(Pinged(LIMIT), 0.0)
    core.check_every_step()
    with pytest.raises(AssertionError, match="100"):
        core.handle(Echoed(1), 0.0)


def test_an_unrouted_event_or_record_is_an_error_and_not_silence() -> None:
    core = Core(())
    with pytest.raises(KeyError):
        core.handle(Pinged(1), 0.0)
    with pytest.raises(KeyError):
        core.replay(Counted(1))


def test_a_deadline_that_moves_is_noticed_whoever_was_told() -> None:
    """Only machines that were told something are asked again: what they say must not be old."""

    class Sleeper(Counter):
        """Wants to be woken so many seconds after a ping, and from a replay on at a fixed time."""

        def handle(self, event: Event, now: float) -> Outcome:
            self.due_at = now + event.number if isinstance(event, Pinged | Echoed) else None
            return super().handle(event, now)

        def apply(self, record: Counted) -> None:
            super().apply(record)
            self.due_at = 99.0 if record.by == 9 else self.due_at

    class OtherSleeper(Sleeper):
        OWNS = ()

    core = wired(Sleeper(), OtherSleeper())
    assert core.deadline() is None
    core.handle(Pinged(3), 1.0)
    assert core.deadline() == 4.0
    core.handle(Pinged(5), 2.0)
    assert core.deadline() == 7.0, "a later one takes the place of an earlier one"
    core.handle(Tick(), 7.0)
    assert core.deadline() is None
    core.replay(Counted(9))
    assert core.deadline() == 99.0
