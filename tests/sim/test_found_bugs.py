# SPDX-License-Identifier: Apache-2.0
"""Bugs that the simulator found, as short as they get; docs/simulation.md tells of each."""

from msgspec.structs import replace

from holdfast.core.job.checkpoints.inventory import Inventory
from holdfast.core.kernel import Tick
from holdfast.core.node import events as ev
from holdfast.core.node.workers import Workers
from holdfast.model.checkpoint import SHARED, Holding, Shape, Stored, Version, rank_part
from holdfast.model.ids import NodeId
from holdfast.protocol import messages as m

RUN = m.RunWorld(1, 1, 0, 1, 0, 1, "host", 1, False, 0, "", False)


def test_an_answer_that_was_long_under_way_does_not_free_held_workers() -> None:
    workers = Workers(1)
    workers.handle(ev.LeaseRenewed(10.0), 0.0)
    workers.handle(ev.WorldReceived(RUN), 0.0)
    workers.handle(ev.StartFinished(1, frozenset({0}), "cold", 0.1, ""), 1.0)
    held = workers.handle(Tick(), 10.0).commands
    assert any(isinstance(command, ev.HoldWorkers) for command in held)
    assert workers.handle(ev.LeaseRenewed(12.0), 30.0).commands == []
    freed = workers.handle(ev.LeaseRenewed(40.0), 30.0).commands
    assert any(isinstance(command, ev.ResumeWorkers) for command in freed)


def test_an_older_answer_does_not_shorten_the_lease() -> None:
    workers = Workers(1)
    workers.handle(ev.WorldReceived(RUN), 0.0)
    workers.handle(ev.StartFinished(1, frozenset({0}), "cold", 0.1, ""), 1.0)
    workers.handle(ev.LeaseRenewed(20.0), 2.0)
    workers.handle(ev.LeaseRenewed(15.0), 3.0)
    assert workers.deadline() == 20.0


def test_what_is_committed_is_not_given_up_for_an_older_version_with_every_part() -> None:
    shape, older, committed = Shape(2, shared=True), Version(0, 20), Version(0, 25)

    def held(version: Version, *parts: str) -> list[Holding]:
        return [Holding(version, shape, part, 1, 1) for part in parts]

    memory = {
        NodeId(0): held(older, SHARED, rank_part(0)) + held(committed, SHARED, rank_part(0)),
        NodeId(1): held(older, SHARED, rank_part(1)),
    }
    # One rank's part of the newer version is lost everywhere.
    assert Inventory(memory).newest() == older
    bad_rank = Inventory(memory, [Stored(committed, shape)], bad=())
    assert bad_rank.newest() == committed


def test_held_workers_do_not_go_on_to_end_gently_for_a_world_that_came_late() -> None:
    workers = Workers(1)
    workers.handle(ev.LeaseRenewed(10.0), 0.0)
    workers.handle(ev.WorldReceived(RUN), 0.0)
    workers.handle(ev.StartFinished(1, frozenset({0}), "cold", 0.1, ""), 1.0)
    workers.handle(Tick(), 10.0)
    planned = replace(RUN, round=2, generation=2, planned=True)
    told = workers.handle(ev.WorldReceived(planned), 30.0).commands
    assert told[0] == ev.EndWorkers(gently=False), "a newer world may compute by now"
