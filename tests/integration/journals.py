# SPDX-License-Identifier: Apache-2.0
"""What the journal of a job must tell, whatever its machines went through."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.core.job import records as rec
from holdfast.core.job.records import decode_record, encode_record
from holdfast.core.kernel import Record
from holdfast.master.process import replayed
from holdfast.model.checkpoint import NONE, Version
from holdfast.model.job import JobSpec
from holdfast.ports.journal import Entry
from holdfast.runtime.journal import read_left

DRAWN = "drawn"
"""The key whose values the workers of scripts/vaulted.py draw, one after the other."""


def check_journal(state: Path) -> None:
    """That of a job that ended well, in its state directory."""
    job, entries = read_left(state)
    times = [entry.at_s for entry in entries]
    assert times == sorted(times), "job time went back"
    check_records([decode_record(entry.payload) for entry in entries])
    snapshot = replayed(job, JobSpec(), entries).core.snapshot()
    kept = [Entry(0.0, 0.0, encode_record(record)) for record in snapshot]
    assert replayed(job, JobSpec(), kept).core.snapshot() == snapshot, "a snapshot tells otherwise"


def check_records(records: Sequence[Record]) -> None:
    """One world per round, nothing that only rises goes back, and one end."""
    generation = incarnation = last_round = drawn = 0
    committed: dict[str, Version] = {}
    ends = 0
    for record in records:
        match record:
            case rec.GenerationSet():
                assert record.generation > generation, record
                generation = record.generation
            case rec.NodeAdmitted():
                assert record.incarnation > incarnation, record
                incarnation = record.incarnation
            case rec.WorldAgreed():
                world = record.world
                assert world.round > last_round, record
                assert world.generation > generation, record
                for places in (
                    {member.node_rank for member in world.members},
                    {member.node_id for member in world.members},
                ):
                    assert len(places) == len(world.members) > 0, record
                last_round, generation = world.round, world.generation
            case rec.LineageSet():
                assert record.round == last_round, record
                assert record.version >= committed.get(record.directory, NONE), record
            case rec.CheckpointCommitted():
                assert record.version > committed.get(record.directory, NONE), record
                committed[record.directory] = record.version
            case rec.KvChanged() if DRAWN in record.keys:
                number = int(record.values[record.keys.index(DRAWN)])
                assert number == drawn + 1, record
                drawn = number
            case rec.JobClosed():
                ends += 1
                assert record.ok, record
    assert ends == 1
