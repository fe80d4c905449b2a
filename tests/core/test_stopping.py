# SPDX-License-Identifier: Apache-2.0
"""A job that is stopped from outside is not over: a new master on its journal goes on with it."""

import signal

import pytest

from holdfast.core.job import commands as cmd
from holdfast.core.job import events as ev
from holdfast.core.job import records as rec
from holdfast.model.checkpoint import NONE, Shape, rank_part
from holdfast.model.job import JobSpec
from holdfast.protocol import messages as m
from holdfast.protocol.checkpoints import FlushAsk, PersistOrder
from tests.core.harness import Job, checkpoint, of_kind, orders, pushes
from tests.core.ledger import V5, holding

TWO = JobSpec(min_nodes=2, max_nodes=2)


def stop(job: Job) -> m.JobEnded:
    """What the nodes are told when the master gets SIGTERM."""
    reason = "it was stopped by SIGTERM"
    outcome = job.feed(ev.StopRequested(-1, 0, reason, stopped=signal.SIGTERM))
    (finish,) = of_kind(cmd.FinishJob, outcome.commands)
    return finish.end


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("left", ["ab", "a", ""], ids=["all left", "one left", "all were killed"])
def test_a_job_that_was_stopped_goes_on(left: str, compacted: bool) -> None:
    job = Job(TWO)
    job.attach("a")
    job.attach("b")
    assert stop(job) == m.JobEnded(False, "it was stopped by SIGTERM", stopped=signal.SIGTERM)
    assert job.state() == "stopped"
    for name in left:
        job.leave(name)
    started = job.restart(at=5.0, compacted=compacted)
    assert of_kind(rec.JobContinued, started.records) == [rec.JobContinued()]
    assert not of_kind(cmd.FinishJob, started.commands)
    assert job.state() == "running"
    # The nodes that did not say that they left may still compute, for as long as their lease.
    job.attach("c", at=6.0)
    job.attach("d", at=6.0)
    while job.round() == 1 and job.now < 6.0 + job.spec.silence_s + job.spec.lease_s:
        job.beat("c", job.now + 5.0)
        job.beat("d")
    assert job.round() == 2
    assert job.now == 6.0 or left != "ab"
    assert job.state() == "running"
    assert job.machines.view(job.now)["restarts"] == {}
    job.done("c", 2)
    job.done("d", 2)
    assert job.state() == "succeeded"


def test_a_second_stop_says_nothing_new() -> None:
    job = Job(JobSpec())
    job.attach("a")
    stop(job)
    again = job.feed(ev.StopRequested(-1, 0, "again", stopped=signal.SIGTERM))
    assert not of_kind(cmd.FinishJob, again.commands)
    assert not again.records


@pytest.mark.parametrize("compacted", [False, True])
def test_a_job_that_a_person_ended_stays_ended(compacted: bool) -> None:
    job = Job(JobSpec())
    job.attach("a")
    job.feed(ev.StopRequested(9, 1, "the user asked"))
    assert job.state() == "failed"
    (finish,) = of_kind(cmd.FinishJob, job.restart(compacted=compacted).commands)
    assert finish.end == m.JobEnded(False, "the user asked")
    assert job.state() == "failed"


def test_a_job_that_was_stopped_orders_its_nodes_again() -> None:
    job = Job(JobSpec(min_nodes=2, max_nodes=2, managed=True))
    job.attach("a", node=0)
    job.attach("b", node=1)
    stop(job)
    job.leave("a")
    job.leave("b")
    assert not orders(job.wait(job.now + 60.0))
    assert [order.node_rank for order in orders(job.restart())] == [0, 1]


def test_a_node_that_comes_back_to_a_stopped_job_brings_its_memory_to_storage() -> None:
    """The master died about when the job was stopped, and the next one stops it at once."""
    job = Job(JobSpec())
    job.attach("a")
    job.restart(at=5.0)
    stop(job)
    job.attach("a", at=6.0, round=1)
    flush = FlushAsk("/ckpt", (holding(V5, rank_part(0), Shape(1, shared=False)),), NONE)
    asked = checkpoint(job, flush, "a")
    assert job.state() == "stopped"
    (order,) = [body for _, body in pushes(asked) if isinstance(body, PersistOrder)]
    assert order.version == V5
