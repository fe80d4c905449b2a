# SPDX-License-Identifier: Apache-2.0
"""The parts of the simulator itself: time, streams and the disk do what real ones do."""

from random import Random

import pytest

from holdfast.core.job.events import NodeSeen
from holdfast.model.ids import NodeId, NodeRank
from holdfast.model.node import Phase
from holdfast.model.order import Order, Plan
from holdfast.ports.journal import Entry
from holdfast.protocol import messages as m
from holdfast.sim.clock import Clock
from holdfast.sim.desk import Desk
from holdfast.sim.disk import Disk
from holdfast.sim.network import DOWN, UP, Link, Network
from holdfast.sim.platform import Platform


def test_what_was_planned_first_comes_first_at_the_same_time() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: seen.append("second"))
    clock.at(1.0, lambda: seen.append("cancelled")).cancel()
    clock.run(10.0, lambda: False)
    assert seen == ["first", "second", "late"]
    assert clock.now == 2.0


def test_a_task_waits_for_time_and_for_promises() -> None:
    clock, seen = Clock(), []
    promise = clock.promise()

    async def waits() -> None:
        value = await promise
        seen.append((clock.now, value))
        await clock.pause(5.0)
        seen.append((clock.now, "slept"))

    task = clock.spawn(waits())
    clock.at(3.0, lambda: promise.keep("value"))
    clock.run(100.0, lambda: False)
    assert seen == [(3.0, "value"), (8.0, "slept")]
    assert task.is_over


class _End:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.is_closed = False
        self.link: Link | None = None

    def opened(self, link: Link) -> None:
        self.link = link

    def received(self, link: Link, frame: m.Frame) -> None:
        self.got.append(frame.call)

    def closed(self, link: Link) -> None:
        self.is_closed = True


def _linked() -> tuple[Clock, Network, _End, _End, Link]:
    clock = Clock()
    network = Network(clock, Random(1))
    agent, master = _End(), _End()
    network.master = master
    network.connect("host", agent)
    clock.run(1.0, lambda: False)
    assert master.link is not None
    return clock, network, agent, master, master.link


def test_a_stream_keeps_its_order_however_long_each_frame_takes() -> None:
    clock, _, _, master, link = _linked()
    for call in range(1, 30):
        link.send(UP, m.Done(), call)
    clock.run(10.0, lambda: False)
    assert master.got == list(range(1, 30))


def test_a_partition_holds_back_one_direction_and_lets_it_through_later() -> None:
    clock, network, agent, master, link = _linked()
    network.partition("host", (UP,), 20.0)
    link.send(UP, m.Done(), 1)
    link.send(DOWN, m.Done(), 2)
    clock.run(10.0, lambda: False)
    assert (master.got, agent.got) == ([], [2])
    clock.run(30.0, lambda: False)
    assert master.got == [1]


def test_a_stream_that_breaks_loses_what_is_under_way_and_both_ends_learn_of_it() -> None:
    clock, network, agent, master, link = _linked()
    network.slow_down("host", 100.0)
    link.send(UP, m.Done(), 1)
    network.break_streams("host")
    clock.run(10.0, lambda: False)
    assert master.got == []
    assert agent.is_closed
    assert master.is_closed


def test_a_stream_that_is_left_half_open_brings_its_last_frames_after_a_newer_one_is_open() -> None:
    clock, network, agent, master, link = _linked()
    link.send(UP, m.Done(), 1)
    network.break_streams("host", late_s=5.0)
    network.connect("host", agent)
    clock.run(3.0, lambda: False)
    newer = master.link
    assert newer is not None
    assert newer is not link
    assert agent.is_closed
    newer.send(UP, m.Done(), 2)
    clock.run(10.0, lambda: False)
    assert master.got == [2, 1]
    assert master.is_closed


@pytest.mark.parametrize(("way", "lost"), [(UP, [1]), (DOWN, [2])])
def test_a_frame_is_lost_with_its_stream_when_that_was_asked_for(way: str, lost: list[int]) -> None:
    clock, network, agent, master, link = _linked()
    network.lose_next("host", way, 10.0)
    link.send(UP, m.Beat(0, 0, 0, 0.0, 0.0, 0.0, 0), 3)
    clock.run(5.0, lambda: False)
    assert (master.got, agent.is_closed) == ([3], False), "a beat does not count"
    link.send(way, m.Done(), lost[0])
    clock.run(9.0, lambda: False)
    assert (master.got, agent.got) == ([3], [])
    assert master.is_closed
    assert agent.is_closed


@pytest.mark.parametrize("seed", range(20))
def test_a_disk_that_lies_has_an_earlier_state_whole_and_in_order(seed: int) -> None:
    disk = Disk(Random(seed))
    said = [str(number).encode() for number in range(9)]
    for number in range(9):
        disk.write([Entry(1.0, 1.0, said[number])], now=0.0)
        disk.sync()
    disk.write([Entry(2.0, 2.0, b"never synced")], now=0.0)
    disk.crash()
    disk.lose_power()
    found = [entry.payload for entry in disk.load()]
    assert len(found) < len(said)
    assert found == said[: len(found)]


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_keeps_whole_batches_only_and_everything_that_was_synced(seed: int) -> None:
    disk = Disk(Random(seed))
    disk.write([Entry(1.0, 1.0, b"one"), Entry(1.0, 1.0, b"two")], now=0.0)
    disk.sync()
    disk.write([Entry(2.0, 2.0, b"three"), Entry(2.0, 2.0, b"four")], now=0.0)
    disk.crash()
    found = [entry.payload for entry in disk.load()]
    assert found in ([b"one", b"two"], [b"one", b"two", b"three", b"four"])


class _Machine:
    """Ends when it is asked to."""

    def __init__(self, platform: Platform, node_id: NodeId) -> None:
        self._platform = platform
        self._node_id = node_id

    def terminate(self) -> None:
        self._platform.agent_ended(self._node_id, 143)

    def kill(self) -> None:
        """It has gone already."""


def test_a_quota_keeps_orders_pending_and_preempts_when_it_shrinks() -> None:
    clock = Clock()
    platform = Platform(clock, Random(1))
    seen: dict[int, NodeSeen] = {}
    started: list[int] = []

    def start(node_id: NodeId, node_rank: NodeRank) -> _Machine:
        started.append(node_id)
        return _Machine(platform, node_id)

    platform.use(start)
    platform.watch(lambda sighting: seen.update({sighting.node_id: sighting}))
    for number in range(3):
        platform.launch(Order(node_id=NodeId(number), node_rank=NodeRank(number)))
    clock.run(5.0, lambda: False)
    assert sorted(started) == [0, 1, 2]
    platform.shrink_quota(2, 100.0)
    platform.launch(Order(node_id=NodeId(3), node_rank=NodeRank(2)))
    clock.run(50.0, lambda: False)
    assert seen[started[2]].phase is Phase.FAILED
    assert (len(started), seen[3].phase) == (3, Phase.PENDING)
    platform.remove(NodeId(started[0]))
    clock.run(60.0, lambda: False)
    assert started[3:] == [3], "it has the place of the one that went"
    platform.launch(Order(node_id=NodeId(4), node_rank=NodeRank(3)))
    clock.run(90.0, lambda: False)
    assert started[4:] == []
    clock.run(200.0, lambda: False)
    assert started[4:] == [4], "the quota is over"


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_is_told_until_its_answer_has_arrived_and_never_before_an_older_one(
    seed: int,
) -> None:
    clock = Clock()
    desk = Desk(clock, Random(seed))
    told: list[str] = []
    for plan_id in ("one", "two"):
        desk.ask(Plan(plan_id=plan_id))
    desk.watch(lambda plan: told.append(plan.plan_id))
    clock.run(5.0, lambda: False)
    assert told == ["one", "two"]

    def answered(plan: Plan) -> None:
        told.append(plan.plan_id)
        desk.answer(plan.plan_id)

    desk.watch(answered)
    clock.run(1000.0, lambda: False)
    assert told[2:4] == ["one", "two"]
    count = len(told)
    desk.watch(answered)
    clock.run(2000.0, lambda: False)
    assert len(told) == count, "every answer has arrived by now"
