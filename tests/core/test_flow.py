# SPDX-License-Identifier: Apache-2.0
"""The map of the master is complete: nothing is defined that nobody handles, owns or executes."""

import inspect
import typing

import pytest

from holdfast.core.job import commands, events, records, role_records
from holdfast.core.job.flow import build
from holdfast.core.kernel import Command, Event, Record
from holdfast.master.service import Service
from holdfast.model.job import JobSpec
from tests.wire.samples import RECORDS


def defined_in(module: object, base: type) -> set[type]:
    return {
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base) and kind is not base
    }


ALL_RECORDS = defined_in(records, Record) | defined_in(role_records, Record)


def test_every_event_is_routed() -> None:
    assert build(JobSpec(), "job").core.routed() == defined_in(events, Event)


def test_every_command_is_executed() -> None:
    source = inspect.getsource(Service.execute)
    for kind in defined_in(commands, Command):
        assert f"case cmd.{kind.__name__}()" in source, kind


def test_every_record_can_be_read_back() -> None:
    assert set(typing.get_args(records.AnyRecord)) == ALL_RECORDS


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

    job = build(JobSpec(), "job")
    machines = (job.nodes, job.liveness, job.rendezvous, job.sync, job.verdicts, job.progress)
    for machine in (*machines, job.checkpoints, job.hangs):
        with pytest.raises(TypeError):
            machine.apply(Foreign())
