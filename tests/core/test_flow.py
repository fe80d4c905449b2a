# SPDX-License-Identifier: Apache-2.0
"""The map of the master is complete: nothing is defined that nobody handles, owns or executes."""

import inspect
import typing
from typing import Any

import pytest

from holdfast.core.job import commands, events, records
from holdfast.core.job.flow import build
from holdfast.core.kernel import Command, Event, Machine, Record, Tick
from holdfast.master.service import Service
from holdfast.model.job import JobSpec
from tests.wire.samples import RECORDS


def defined_in(module: object, base: type) -> set[type]:
    return {
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base) and kind is not base
    }


ALL_RECORDS = defined_in(records, Record)


CORE = build(JobSpec(), "job").core
ROUTES, MACHINES = CORE.routes(), CORE.machines


def handled_by(machine: Machine[Any]) -> set[type[Event]]:
    """What the machine says that it handles; mypy sees to it that it handles all of that."""
    union = typing.get_type_hints(type(machine).handle)["event"]
    return set(typing.get_args(union))


def test_every_event_is_routed() -> None:
    bases = {events.Asked, events.Relayed}
    assert ROUTES.keys() == defined_in(events, Event) - bases


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: type(machine).__name__)
def test_a_machine_is_told_what_it_handles_and_nothing_else(machine: Machine[Any]) -> None:
    told = {kind for kind, to in ROUTES.items() if type(machine) in map(type, to)}
    assert handled_by(machine) - {Tick} == told


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: type(machine).__name__)
def test_a_machine_handles_the_ticks_that_it_may_ask_for(machine: Machine[Any]) -> None:
    may_ask = typing.get_type_hints(type(machine).deadline)["return"] is not type(None)
    assert (Tick in handled_by(machine)) == may_ask


def test_every_command_is_executed() -> None:
    source = inspect.getsource(Service.execute)
    for kind in defined_in(commands, Command):
        assert f"case cmd.{kind.__name__}()" in source, kind


def test_every_record_can_be_read_back_and_has_an_owner() -> None:
    owned = [kind for machine in MACHINES for kind in machine.OWNS]
    assert set(records.KINDS) == set(owned) == ALL_RECORDS


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_round_trips_and_has_an_owner(record: Record) -> None:
    payload = records.encode_record(record)
    assert records.decode_record(payload) == record
    core = build(JobSpec(), "job").core
    for earlier in RECORDS[: RECORDS.index(record) + 1]:
        core.replay(earlier)


def test_every_record_class_has_a_sample() -> None:
    assert {type(record) for record in RECORDS} == ALL_RECORDS


def test_a_foreign_record_is_refused_by_every_machine() -> None:
    class Foreign(Record, frozen=True):
        """Nobody's."""

    for machine in build(JobSpec(), "job").core.machines:
        with pytest.raises(TypeError):
            machine.apply(Foreign())
