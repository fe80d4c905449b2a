# SPDX-License-Identifier: Apache-2.0
"""The parts of the simulator itself: time, streams and the disk do what real ones do."""

from random import Random

import pytest

from holdfast.ports.journal import Entry
from holdfast.protocol import messages as m
from holdfast.sim.clock import Clock
from holdfast.sim.disk import Disk
from holdfast.sim.network import DOWN, UP, Link, Network


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


@pytest.mark.parametrize("seed", range(20))
def test_a_crash_keeps_whole_batches_only_and_everything_that_was_synced(seed: int) -> None:
    disk = Disk(Random(seed))
    disk.write([Entry(1.0, 1.0, b"one"), Entry(1.0, 1.0, b"two")], now=0.0)
    disk.sync()
    disk.write([Entry(2.0, 2.0, b"three"), Entry(2.0, 2.0, b"four")], now=0.0)
    disk.crash()
    found = [entry.payload for entry in disk.load()]
    assert found in ([b"one", b"two"], [b"one", b"two", b"three", b"four"])
