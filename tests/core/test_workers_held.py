# SPDX-License-Identifier: Apache-2.0
"""Workers that are held still because the lease has ended: what may let them go on."""

import pytest

from holdfast.core.kernel import Command, Event, Tick
from holdfast.core.node import events as ev
from holdfast.core.node.workers import Workers
from holdfast.protocol import messages as m

RUN = m.RunWorld(1, 1, 0, 1, 0, 1, "host", 1, False, 0, "", False)
NEXT = m.RunWorld(2, 2, 0, 1, 0, 1, "host", 1, False, 0, "", True)


def running(until: float) -> Workers:
    workers = Workers(1)
    workers.handle(ev.LeaseRenewed(until), 0.0)
    workers.handle(ev.WorldReceived(RUN), 0.0)
    workers.handle(ev.StartFinished(1, frozenset({0}), "cold", 0.1, ""), 1.0)
    return workers


def held() -> Workers:
    workers = running(10.0)
    assert ev.HoldWorkers() in workers.handle(Tick(), 10.0).commands
    return workers


def test_an_answer_that_arrives_late_takes_nothing_of_the_lease() -> None:
    workers = running(20.0)
    workers.handle(ev.LeaseRenewed(15.0), 3.0)
    assert ev.HoldWorkers() not in workers.handle(Tick(), 15.0).commands
    assert ev.HoldWorkers() in workers.handle(Tick(), 20.0).commands


ENDS: dict[str, Event] = {
    "a world that was planned": ev.WorldReceived(NEXT),
    "the end of the job": ev.EndReceived(m.JobEnded(True, "done")),
    "a signal": ev.ShutdownRequested("SIGTERM", 143, flush=True),
}


@pytest.mark.parametrize("how", ENDS)
def test_workers_that_are_held_are_not_told_gently_to_end(how: str) -> None:
    """To act on SIGTERM they would have to go on, and a newer world may compute by now."""
    assert ends(running(10.0).handle(ENDS[how], 2.0).commands) == [ev.EndWorkers(gently=True)]
    assert ends(held().handle(ENDS[how], 30.0).commands) == [ev.EndWorkers(gently=False)]


def ends(commands: list[Command]) -> list[Command]:
    return [command for command in commands if isinstance(command, ev.EndWorkers)]
