# SPDX-License-Identifier: Apache-2.0
"""What the master tells, for programs too: a sentence leads to its node, round and incident."""

from collections.abc import Sequence

import pytest

from holdfast.core.job import events as ev
from holdfast.core.kernel import Event
from holdfast.master.stories import describe_progress, fields_of, tell
from holdfast.model.checkpoint import Version
from holdfast.model.ids import NodeId, NodeRank, Round
from holdfast.model.node import ExitReason
from tests.core.harness import Job, of_kind, running_fleet, running_pair


def test_a_story_says_what_it_is_about() -> None:
    lost = ev.NodeLost(NodeId(7), NodeRank(3), ExitReason.LOST, "it went silent", proven=False)
    assert fields_of(lost) == {"node_id": 7, "node_rank": 3}
    closed = ev.IncidentClosed(Round(4), "why", 0.5, 0.0, 0.1, 0.2, number=9)
    assert fields_of(closed) == {"round": 4, "incident": 9}
    committed = ev.CheckpointCommitted("/ckpt", Version(1, 500), "x-1")
    assert fields_of(committed) == {"directory": "/ckpt", "step": 500}
    assert "step 500 is committed" in tell(committed)


def test_every_story_of_an_incident_has_its_number_from_the_first_on() -> None:
    """Also where the next incident has been noted by the time that a story is told."""
    job = running_pair(silence_s=1e4, lease_s=2e4)
    told = []
    for broken in (1, 2):
        told += job.failed("b", broken, at=100.0 * broken).facts
        # Workers that fail before their first step have their next round after a pause.
        told += job.wait(at=100.0 * broken + 50.0).facts
        for name in "ab":
            told += job.started(name, broken + 1, at=100.0 * broken + 51.0).facts
    numbers: dict[str, list[object]] = {}
    for fact in told:
        about = fields_of(fact, job.machines.progress.incident_of)
        numbers.setdefault(type(fact).__name__, []).append(about.get("incident"))
    for kind in ("WorldBroken", "WorldFormed", "WorldStarted"):
        assert numbers[kind] == [1, 2]


def test_a_round_that_no_incident_ended_has_none() -> None:
    """The first one, and the one after a suspension."""
    job = running_fleet(2)
    told = [*job.plan(at=10.0, suspend=True).facts]
    for name in ("n0", "n1"):
        told += job.leave(name, at=11.0).facts
    assert of_kind(ev.WorldBroken, told)
    for fact in told:
        assert "incident" not in fields_of(fact, job.machines.progress.incident_of)


def numbers_of(job: Job, facts: Sequence[Event]) -> dict[str, object]:
    """The incident that each kind of story is told with, if any."""
    incident_of = job.machines.progress.incident_of
    return {type(fact).__name__: fields_of(fact, incident_of).get("incident") for fact in facts}


@pytest.mark.parametrize("failures", [0, 1], ids=["the first round", "after an incident"])
def test_a_late_first_step_is_told_with_its_own_incident(failures: int) -> None:
    """One that is still open when the first step is late goes on, and no other is noted."""
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=7200.0)
    for broken in range(1, failures + 1):
        job.failed("a", broken, at=10.0)
        job.wait(60.0)
        for name in "ab":
            job.started(name, broken + 1, at=61.0)
        job.beat("a", at=70.0, round=broken + 1, steps=1, step=0, first=0.0, last=0.0)
    assert numbers_of(job, job.wait(9000.0).facts) == {"FirstStepLate": failures + 1}


def test_a_late_first_step_of_an_open_incident_is_told_with_that() -> None:
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=300.0)
    job.failed("a", 1, at=10.0)
    job.wait(60.0)
    for name in "ab":
        job.started(name, 2, at=61.0)
    assert numbers_of(job, job.wait(400.0).facts)["FirstStepLate"] == 1


def test_a_suspension_is_not_told_with_the_late_first_step_of_its_round() -> None:
    """Nor is the round that follows, and nothing is recovered from meanwhile."""
    job = running_fleet(2, first_step_s=300.0)
    assert numbers_of(job, job.wait(400.0).facts)["FirstStepLate"] == 1
    told = [*job.plan(at=410.0, suspend=True).facts]
    for name in ("n0", "n1"):
        told += job.leave(name, at=411.0).facts
    assert numbers_of(job, told)["WorldBroken"] is None
    assert [one["closed"] for one in job.incidents()] == [True]


def test_of_a_script_without_steps_the_line_of_status_says_so() -> None:
    job = running_pair(silence_s=1e9, lease_s=1e9, first_step_s=300.0)
    job.wait(420.0)
    assert line(job, 420.0).startswith("no step reported for 7 min; the workers are left alone | ")


def line(job: Job, at: float) -> str:
    return describe_progress({"job": "j", "time_s": at, **job.machines.view(at)})


def stepping(*, total: int = 0, warm: bool | None = None) -> Job:
    """Steps 1 to 101 of both nodes, two a second, the last at 52.0."""
    job = running_pair()
    for at in range(7, 53, 5):
        since = at - 2.0  # The first step.
        steps = int(since * 2) + 1
        for name in "ab":
            told = {"steps": steps, "step": steps, "first": since, "last": 0.0, "total": total}
            job.beat(name, at=float(at), round=1, warm=warm, **told)
    return job


def test_before_the_first_step_the_line_of_status_has_no_goodput() -> None:
    job = running_pair()
    told = line(job, 5.0)
    assert told.startswith("start for ")
    assert told.endswith("round 1: 2 nodes, 2 workers | j")
    assert "goodput" not in told
    job.beat("a", at=9.0, round=1, steps=3, step=2, first=2.0, last=0.0)
    assert "goodput" in line(job, 9.0)


def test_the_line_of_status_has_the_speed_first() -> None:
    assert line(stepping(), 52.0).startswith("step 101 | 2.0 steps/s | goodput ")


def test_the_line_of_status_has_the_time_left_where_the_script_says_how_many_steps() -> None:
    told = line(stepping(total=3101, warm=True), 52.0)
    head = "step 101 of 3,101 | 2.0 steps/s | 25 min left | warm | "
    assert told.startswith(head)
    assert len(head) <= 60


def test_slow_steps_are_told_in_seconds_per_step() -> None:
    job = running_pair()
    job.beat("a", at=9.0, round=1, steps=3, step=3, first=5.0, last=0.0)
    assert line(job, 9.0).startswith("step 3 | 2.5 s/step | ")


def test_a_job_that_makes_no_steps_has_no_speed() -> None:
    told = line(stepping(total=3101), 52.0 + 31.0)
    assert told.startswith("step 101 of 3,101 | no step for 31 s | ")
    assert "left" not in told


def test_the_line_of_status_says_which_nodes_would_start_cold() -> None:
    job = stepping(warm=True)
    job.beat("b", at=53.0, round=1, steps=102, step=102, first=51.0, last=0.0, warm=False)
    assert "| 1 of 2 nodes warm |" in line(job, 53.0)
    job.beat("a", at=53.0, round=1, steps=102, step=102, first=51.0, last=0.0, warm=False)
    assert "| cold |" in line(job, 53.0)


def test_the_line_of_status_has_the_incident_and_then_the_last_one() -> None:
    job = stepping()
    job.failed("b", 1, at=53.0, last=0.5)
    told = line(job, 54.0)
    assert told.startswith("recovering for 1.5 s (restart): ")
    assert "| step 101 |" in told
    job.started("a", 2, at=54.2)
    job.started("b", 2, at=54.3)
    job.beat("a", at=56.0, round=2, steps=2, step=103, first=1.0, last=0.5)
    told = line(job, 57.0)
    assert told.startswith("step 103 | 2.0 steps/s | 4.0 s ago: ")
    assert "(2.5 s) | 1 restart | goodput " in told
