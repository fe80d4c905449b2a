# SPDX-License-Identifier: Apache-2.0
"""Who still answers: broken streams, silence and leases, and what a beat costs."""

import sys
import time

from holdfast.core.job import events as ev
from holdfast.core.job.membership.liveness import Liveness
from holdfast.core.kernel import NOTHING, Event, Tick
from holdfast.model.ids import Incarnation, NodeId, NodeRank, Round
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason
from holdfast.model.world import Member
from holdfast.protocol import messages as m

SPEC = JobSpec(beat_s=5.0, silence_s=15.0, lease_s=60.0, reconnect_s=0.5)
BEAT = m.Beat(0, 0, -1, -1.0, -1.0, 0.0, 0)


def ready(node: int) -> ev.NodeReady:
    member = Member(
        node_id=NodeId(node),
        incarnation=Incarnation(1),
        node_rank=NodeRank(node),
        nproc=1,
        host="h",
        store_port=1,
    )
    return ev.NodeReady(member, Round(0), returned=False)


def lost(node: int, *, proven: bool) -> ev.NodeLost:
    return ev.NodeLost(NodeId(node), NodeRank(node), ExitReason.LOST, "", proven=proven)


def beat(node: int) -> ev.BeatReceived:
    return ev.BeatReceived(NodeId(node), BEAT)


def ticked(liveness: Liveness, until: float) -> list[tuple[float, Event]]:
    """All facts that come out of ticks until then, with their times."""
    facts: list[tuple[float, Event]] = []
    while (at := liveness.deadline()) is not None and at <= until:
        facts += [(at, fact) for fact in liveness.handle(Tick(), at).facts]
    return facts


def beats_of(liveness: Liveness, node: int, *times: float) -> None:
    """Another node is heard all the time: the master is not cut off."""
    for at in times:
        assert liveness.handle(beat(node), at).facts == []


def test_silence_counts_from_the_last_beat() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(ready(2), 0.0)
    beats_of(liveness, 2, 5.0)
    liveness.handle(beat(1), 10.0)
    beats_of(liveness, 2, 15.0, 20.0)
    assert ticked(liveness, 24.9) == []
    assert ticked(liveness, 25.0) == [(25.0, ev.NodeSilent(NodeId(1), "it went silent"))]


def test_a_broken_stream_is_known_at_once_and_forgiven_for_a_moment() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(ready(2), 0.0)
    liveness.handle(ev.NodeAbsent(NodeId(1)), 3.0)
    assert liveness.deadline() == 3.5
    assert ticked(liveness, 4.0) == [(3.5, ev.NodeSilent(NodeId(1), "its stream broke"))]


def test_when_nobody_is_heard_the_master_waits_for_the_leases() -> None:
    """The switch of the master fails: all nodes train on, and none of them is lost."""
    liveness = Liveness(SPEC)
    for node in (1, 2, 3):
        liveness.handle(ready(node), 0.0)
    for node, at in ((1, 10.0), (2, 12.0), (3, 14.0)):
        liveness.handle(beat(node), at)
    assert ticked(liveness, 60.0) == [(25.0, ev.NobodyHeard(11.0))]
    assert ticked(liveness, 74.0) == [
        (74.0, ev.NodeSilent(NodeId(node), "it went silent")) for node in (1, 2, 3)
    ], "all in one step: that is one incident"


def test_when_the_first_is_heard_again_the_others_have_the_time_of_a_silence() -> None:
    liveness = Liveness(SPEC)
    for node in (1, 2, 3):
        liveness.handle(ready(node), 0.0)
    liveness.handle(beat(1), 1.0)
    liveness.handle(beat(2), 2.0)
    assert ticked(liveness, 15.5) == [(15.0, ev.NobodyHeard(13.0))], "node 3 was due"
    assert liveness.handle(beat(2), 15.5).facts == [ev.HeardAgain(NodeId(2), 13.5)]
    # On the way back streams break: of those who are not back yet that says nothing.
    liveness.handle(ev.NodeAbsent(NodeId(1)), 15.6)
    liveness.handle(ready(1), 20.0)
    beats_of(liveness, 2, 20.5, 25.5, 30.4)
    assert ticked(liveness, 30.4) == []
    assert ticked(liveness, 31.0) == [(30.5, ev.NodeSilent(NodeId(3), "it went silent"))]
    liveness.handle(ev.NodeAbsent(NodeId(1)), 31.0)
    assert ticked(liveness, 31.5) == [(31.5, ev.NodeSilent(NodeId(1), "its stream broke"))]


def test_streams_that_all_break_at_once_break_at_the_master() -> None:
    """A proxy before the master is restarted: every stream ends, and the way back takes seconds."""
    liveness = Liveness(SPEC)
    for node in (1, 2):
        liveness.handle(ready(node), 0.0)
    for node in (1, 2):
        liveness.handle(ev.NodeAbsent(NodeId(node)), 3.0)
    assert ticked(liveness, 6.0) == [(3.5, ev.NobodyHeard(3.5))]
    assert liveness.handle(ready(1), 6.0).facts == [ev.HeardAgain(NodeId(1), 6.0)]
    liveness.handle(ready(2), 9.0)
    beats_of(liveness, 1, 10.0, 15.0, 20.0)
    assert ticked(liveness, 23.9) == []


def test_one_node_that_the_platform_calls_gone_is_gone() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    assert ticked(liveness, 20.0) == [(15.0, ev.NobodyHeard(15.0))]
    liveness.handle(lost(1, proven=True), 21.0)
    assert ticked(liveness, 100.0) == []


def test_a_newcomer_ends_the_wait_for_those_who_are_gone() -> None:
    """All nodes died, and the master cannot know: it does when another comes and they do not."""
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(ev.NodeAbsent(NodeId(1)), 3.0)
    ticked(liveness, 10.0)
    liveness.handle(ready(2), 10.0)
    beats_of(liveness, 2, 15.0, 20.0, 24.0)
    assert ticked(liveness, 25.0) == [(25.0, ev.NodeSilent(NodeId(1), "its stream broke"))]


def test_who_comes_back_in_time_is_watched_as_before() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(ev.NodeAbsent(NodeId(1)), 3.0)
    liveness.handle(ready(1), 3.4)
    assert ticked(liveness, 18.0) == []
    assert [at for at, _ in ticked(liveness, 30.0)] == [18.4]


def test_a_node_expected_by_a_new_master_has_the_time_of_a_silence() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ev.NodeExpected(NodeId(1)), 100.0)
    liveness.handle(ready(2), 101.0)
    beats_of(liveness, 2, 106.0, 111.0)
    why = "it did not come back to the restarted master"
    assert ticked(liveness, 115.0) == [(115.0, ev.NodeSilent(NodeId(1), why))]


def test_the_lease_runs_from_the_last_thing_heard() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(beat(1), 10.0)
    liveness.handle(lost(1, proven=False), 25.0)
    assert ticked(liveness, 100.0) == [(70.0, ev.LeaseExpired(NodeId(1)))]


def test_a_proven_death_has_no_lease() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(lost(1, proven=True), 5.0)
    assert ticked(liveness, 100.0) == []


def test_a_lease_ends_when_the_node_returns_or_is_proven_dead() -> None:
    for end in (ready(1), ev.LeaseExpired(NodeId(1))):
        liveness = Liveness(SPEC)
        liveness.handle(ready(1), 0.0)
        liveness.handle(lost(1, proven=False), 5.0)
        liveness.handle(end, 6.0)
        leases = [f for _, f in ticked(liveness, 100.0) if isinstance(f, ev.LeaseExpired)]
        assert leases == []


def test_what_is_not_watched_does_not_become_watched_by_a_beat_or_a_closed_stream() -> None:
    liveness = Liveness(SPEC)
    liveness.handle(ready(1), 0.0)
    liveness.handle(lost(1, proven=True), 1.0)
    assert liveness.handle(beat(1), 2.0) is NOTHING
    liveness.handle(ev.NodeAbsent(NodeId(1)), 2.0)
    liveness.handle(beat(7), 2.0)
    assert ticked(liveness, 100.0) == []


def test_beats_do_not_make_the_heap_grow() -> None:
    """A beat is a dict write: however many come, there is one tick per node and silence."""
    liveness = Liveness(SPEC)
    nodes = 50
    for node in range(nodes):
        liveness.handle(ready(node), 0.0)
    for number in range(100):
        for node in range(nodes):
            liveness.handle(beat(node), number * 0.1)
    ticks = 0
    while (at := liveness.deadline()) is not None and at < 20.0:
        liveness.handle(Tick(), at)
        ticks += 1
    assert ticks <= 2, "one surfaces for all at 15 s, the next is due after the last beat"


def test_a_beat_costs_the_same_with_10_and_with_10_000_nodes() -> None:
    def cost(nodes: int) -> float:
        liveness = Liveness(SPEC)
        for node in range(nodes):
            liveness.handle(ready(node), 0.0)
        event, best = beat(3), sys.float_info.max
        for _ in range(20):
            start = time.thread_time()
            for _ in range(2000):
                liveness.handle(event, 1.0)
            best = min(best, time.thread_time() - start)
        return best

    assert cost(10_000) < 20 * cost(10)


def test_it_keeps_nothing_durable() -> None:
    assert list(Liveness(SPEC).snapshot()) == []
