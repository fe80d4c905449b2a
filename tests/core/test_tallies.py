# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a job in numbers: each thing counted once, whoever comes, goes or restarts."""

import asyncio

import pytest

from holdfast.agent.vault.tally import TallyBook
from holdfast.core.job import events as ev
from holdfast.core.job.accounting.tallies import Tallies
from holdfast.core.job.flow import build
from holdfast.core.node.saver import SavedStep
from holdfast.model.checkpoint import NONE, Shape, Version
from holdfast.model.ids import Generation, NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.model.world import World
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import Tally
from tests.core.ledger import member


def world(*nodes: int) -> ev.WorldFormed:
    members = tuple(member(node) for node in nodes)
    formed = World(round=Round(1), generation=Generation(1), members=members)
    return ev.WorldFormed(formed, "a test", planned=False)


def told(node: int, tally: Tally | None) -> ev.BeatReceived:
    return ev.BeatReceived(NodeId(node), m.Beat(1, 0, -1, -1.0, -1.0, 0.0, 0, tally))


def lost(node: int) -> ev.NodeLost:
    return ev.NodeLost(NodeId(node), NodeRank(node), ExitReason.LOST, "gone", proven=True)


def agreed(step: int, directory: str = "/ckpt") -> ev.RestoreAgreed:
    version = Version(0, step)
    return ev.RestoreAgreed(directory, Round(2), version, 1, fresh=False, notes=())


def in_memory(tallies: Tallies, now: float) -> tuple[int, bool]:
    view = tallies.view(now)
    return view["memory_step"], view["memory_confirmed"]


def tally(saves: int, step: int, written: int = 0, **restored: int) -> Tally:
    return Tally(saves, saves / 10, step, 1.0, written, written / 100, restored)


def test_nodes_are_added_up_and_the_newest_tally_of_each_counts() -> None:
    tallies = Tallies()
    tallies.handle(world(0, 1), 0.0)
    tallies.handle(told(0, tally(3, 3, 100)), 1.0)
    tallies.handle(told(0, tally(5, 5, 200, memory=1)), 2.0)
    tallies.handle(told(1, tally(0, 4, 50, memory=2, peer=1)), 3.0)
    tallies.handle(told(1, None), 4.0)
    view = tallies.view(10.0)
    assert (view["saves"], view["waited_s"]) == (5, 0.5)
    assert (view["written_bytes"], view["written_s"]) == (250, 2.5)
    assert view["restored"] == {"memory": 3, "peer": 1}


def test_memory_has_what_every_node_of_the_world_has() -> None:
    tallies = Tallies()
    tallies.handle(world(0, 1), 0.0)
    tallies.handle(told(0, tally(5, 5)), 2.0)
    assert tallies.view(10.0)["memory_step"] == -1
    assert tallies.view(10.0)["memory_age_s"] == -1
    tallies.handle(told(1, tally(0, 4)), 3.0)
    tallies.handle(told(2, tally(0, 1)), 3.0)
    assert tallies.view(10.0)["memory_step"] == 4
    assert tallies.view(10.0)["memory_age_s"] == 9


def test_what_a_lost_node_has_done_still_counts() -> None:
    tallies = Tallies()
    tallies.handle(world(0, 1), 0.0)
    for node in (0, 1):
        tallies.handle(told(node, tally(5, 5, 100, storage=1)), 1.0)
    tallies.handle(lost(0), 2.0)
    tallies.handle(lost(1), 2.0)
    tallies.handle(lost(7), 2.0)
    view = tallies.view(10.0)
    assert (view["saves"], view["written_bytes"], view["restored"]) == (10, 200, {"storage": 2})
    assert (view["memory_step"], view["memory_confirmed"]) == (5, False)
    tallies.handle(agreed(3), 11.0)
    assert tallies.view(11.0)["memory_step"] == -1, "what came back is older: that step is gone"


def failed(count: int, step: int, why: str = "no room") -> Tally:
    return Tally(0, 0.0, -1, 1.0, 0, 0.0, {}, count, step, why)


def test_saves_that_fail_are_told_seldom_and_counted_always() -> None:
    """A job whose every save fails makes thousands of them in an hour."""
    tallies = Tallies()
    tallies.handle(world(0, 1), 0.0)
    facts = [
        fact
        for count in range(1, 1001)
        for fact in tallies.handle(told(1, failed(count, count)), float(count)).facts
    ]
    assert [fact.failed for fact in facts if isinstance(fact, ev.SavesFailed)] == [
        2**power for power in range(10)
    ]
    assert facts[0] == ev.SavesFailed(NodeId(1), 1, 1, 1, "no room")
    tallies.handle(told(0, failed(5, 2000, "no memory")), 1001.0)
    view = tallies.view(1002.0)
    assert (view["failed_saves"], view["failed_step"]) == (1005, 2000)
    assert view["failed_why"] == "no memory"
    tallies.handle(lost(1), 1003.0)
    assert tallies.view(1004.0)["failed_saves"] == 1005


def test_a_node_that_comes_again_is_told_of_again() -> None:
    tallies = Tallies()
    assert tallies.handle(told(0, failed(8, 8)), 1.0).facts
    tallies.handle(lost(0), 2.0)
    (fact,) = tallies.handle(told(0, failed(1, 9)), 3.0).facts
    assert fact == ev.SavesFailed(NodeId(0), -1, 1, 9, "no room")
    assert not tallies.handle(told(0, tally(5, 5)), 4.0).facts


def test_commits_and_failures_are_counted_and_the_last_commit_has_an_age() -> None:
    tallies = Tallies()
    assert tallies.view(5.0)["storage_age_s"] == -1
    tallies.handle(ev.CheckpointCommitted("/ckpt", Version(0, 5), "x-1"), 6.0)
    tallies.handle(ev.AttemptFailed("/ckpt", Version(0, 6), "x-2", "no space"), 7.0)
    tallies.handle(ev.CheckpointCommitted("/other", Version(0, 7), "x-3"), 8.0)
    view = tallies.view(10.0)
    assert (view["commits"], view["failures"], view["storage_age_s"]) == (2, 1, 2)


def test_after_a_loss_the_step_of_before_is_shown_as_not_confirmed() -> None:
    """At the worst moment people must not read that nothing is in memory."""
    tallies = Tallies()
    tallies.handle(world(0, 1), 0.0)
    tallies.handle(told(0, tally(5, 544)), 10.0)
    tallies.handle(told(1, tally(5, 544)), 10.0)
    assert tallies.view(11.0)["memory_confirmed"] is True
    tallies.handle(lost(1), 12.0)
    for event in (None, world(0, 2), told(2, tally(0, -1))):
        if event is not None:
            tallies.handle(event, 13.0)
        view = tallies.view(20.0)
        assert (view["memory_step"], view["memory_confirmed"]) == (544, False)
        assert view["memory_age_s"] == 11.0
    tallies.handle(told(0, tally(6, 545)), 21.0)
    tallies.handle(told(2, tally(6, 545)), 21.0)
    view = tallies.view(21.0)
    assert (view["memory_step"], view["memory_confirmed"]) == (545, True)


def survivor() -> Tallies:
    """Of two nodes at step 544 one is lost, and the other forms a world."""
    tallies = Tallies()
    tallies.handle(world(0, 1), 0.0)
    for node in (0, 1):
        tallies.handle(told(node, tally(5, 544)), 10.0)
    tallies.handle(lost(1), 12.0)
    tallies.handle(world(0), 13.0)
    return tallies


def beat_of_old(tallies: Tallies, now: float, step: int) -> None:
    """A beat of node 0, whose last save was at 9.0."""
    old = Tally(5, 0.5, step, now - 9.0, 0, 0.0, {})
    tallies.handle(told(0, old), now)


def test_a_step_that_the_ranks_went_back_behind_is_not_shown_any_more() -> None:
    tallies = survivor()
    assert in_memory(tallies, 13.0) == (544, False), "the part of node 1 may be gone"
    tallies.handle(agreed(500), 14.0)
    assert in_memory(tallies, 14.0) == (-1, False)
    assert tallies.view(14.0)["memory_age_s"] == -1
    beat_of_old(tallies, 15.0, 544)  # It was on its way already.
    assert in_memory(tallies, 15.0) == (-1, False)
    beat_of_old(tallies, 16.0, 500)  # The agent has heard of it.
    assert in_memory(tallies, 16.0) == (500, True)
    # The same step, saved again.
    tallies.handle(told(0, tally(6, 544)), 60.0)
    assert in_memory(tallies, 60.0) == (544, True)


def test_a_step_that_the_ranks_go_on_from_is_still_there() -> None:
    tallies = survivor()
    tallies.handle(agreed(544), 15.0)
    assert in_memory(tallies, 15.0) == (544, True)
    tallies.handle(agreed(-1, "/other"), 16.0)
    assert in_memory(tallies, 16.0) == (544, True)


def test_the_step_of_the_job_goes_back_with_its_ranks() -> None:
    job = build(JobSpec(), "job")
    for now, event in (
        (0.0, world(0, 1)),
        (10.0, told(0, tally(5, 544))),
        (10.0, told(1, tally(5, 544))),
        (12.0, lost(1)),
        (13.0, world(0)),
        (14.0, agreed(500)),
        (15.0, told(0, Tally(5, 0.5, 544, 6.0, 0, 0.0, {}))),
    ):
        job.tallies.handle(event, now)
        if not isinstance(event, ev.NodeLost):
            job.progress.handle(event, now)
    beat = m.Beat(1, 1, 501, 0.0, 0.0, 0.0, 0, Tally(5, 0.5, 544, 7.0, 0, 0.0, {}))
    received = ev.BeatReceived(NodeId(0), beat)
    job.progress.handle(received, 16.0)
    job.tallies.handle(received, 16.0)
    progress = job.view(16.0)["progress"]
    assert isinstance(progress, dict)
    assert progress["step"] == 501


def test_the_step_of_the_job_is_the_saved_one_where_no_beat_has_told_it_yet() -> None:
    job = build(JobSpec(), "job")
    beats = (
        m.Beat(1, 5, 546, 4.0, 0.0, 0.0, 0, tally(5, 546)),
        m.Beat(1, 5, 546, 4.0, 0.0, 0.0, 0, tally(6, 558)),
    )
    seen = []
    told_by_beats = [ev.BeatReceived(NodeId(0), beat) for beat in beats]
    for now, event in enumerate((world(0), *told_by_beats)):
        job.progress.handle(event, 10.0 * now)
        job.tallies.handle(event, 10.0 * now)
        progress = job.view(10.0 * now)["progress"]
        assert isinstance(progress, dict)
        seen.append(progress["step"])
    assert seen == [-1, 546, 558]


@pytest.mark.parametrize(("back_to", "step"), [(Version(0, 3), 3), (Version(0, 9), 5), (NONE, -1)])
def test_an_agent_counts_no_step_that_its_ranks_went_back_behind(
    back_to: Version, step: int
) -> None:
    async def scene() -> None:
        book = TallyBook()
        assert book.read() is None
        saved = SavedStep(Version(0, 5), Shape(1, shared=False), ("rank-0",), persist=False)
        book.saved("/ckpt", saved, is_first_node=False)
        book.went_back("/other", NONE)
        told = book.read()
        assert told is not None
        assert told.step == 5
        book.went_back("/ckpt", back_to)
        told = book.read()
        assert told is not None, "what it said before must not stand"
        assert told.step == step

    asyncio.run(scene())


def test_a_new_master_does_not_say_that_memory_is_empty_before_it_knows() -> None:
    tallies = Tallies()
    tallies.handle(ev.WorldFound(world(0, 1).world, 0, done=False), 0.0)
    assert in_memory(tallies, 1.0) == (-1, False)
    assert tallies.view(1.0)["memory_age_s"] == -1
    tallies.handle(told(0, tally(5, 544)), 2.0)
    assert in_memory(tallies, 2.0) == (-1, False)
    tallies.handle(told(1, tally(5, 544)), 3.0)
    assert in_memory(tallies, 3.0) == (544, True)


def test_nodes_that_have_nothing_to_tell_have_told() -> None:
    tallies = Tallies()
    tallies.handle(ev.WorldFound(world(0, 1).world, 0, done=False), 0.0)
    for node in (0, 1):
        tallies.handle(told(node, None), 2.0)
    assert in_memory(tallies, 3.0) == (-1, True)
