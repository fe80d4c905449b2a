# SPDX-License-Identifier: Apache-2.0
"""A mistake that every rank makes before any step is run once; everything else is retried."""

import pytest

from holdfast.core.job import commands as cmd
from holdfast.core.job.rendezvous.mistakes import WAIT_S
from holdfast.core.kernel import Command, Outcome, Tick
from holdfast.core.node import events as node_ev
from holdfast.core.node.workers import MISTAKE_S
from holdfast.model.job import JobSpec
from holdfast.model.node import ExitReason, classify_exit, is_mistake
from holdfast.protocol import messages as m
from tests.core.harness import Job, of_kind, rules, worlds
from tests.core.test_workers import Node, reports

TYPO = "failed with ModuleNotFoundError: No module named 'toch'"
LOADER = "RuntimeError: DataLoader worker (pid 41) is killed by signal: "


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (TYPO, True),
        ("failed with ImportError: cannot import name 'x'", True),
        ("failed with SyntaxError: invalid syntax (train.py, line 1)", True),
        ("failed with IndentationError: unexpected indent", True),
        ("failed with ArgumentError: unrecognized arguments: --lrr", True),
        ("failed with OSError: [Errno 98] Address already in use", False),
        ("failed with FileNotFoundError: [Errno 2] No such file: '/mnt/data'", False),
        ("failed with ConnectionRefusedError: [Errno 111]", False),
        ("failed with TimeoutError: timed out", False),
        ("failed with ValueError: ImportError: not really", False),
        ("exited with code 2", False),
        ("", False),
    ],
)
def test_only_what_would_be_the_same_again_is_a_mistake(message: str, expected: bool) -> None:
    assert is_mistake(message) is expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (f"{LOADER}Killed. ", ExitReason.KILLED),
        (f"{LOADER}Terminated. ", ExitReason.KILLED),
        (f"{LOADER}Segmentation fault. ", ExitReason.ERROR),
        (f"{LOADER}Bus error. ", ExitReason.ERROR),
        ("RuntimeError: DataLoader worker (pid(s) 41) exited unexpectedly", ExitReason.ERROR),
    ],
)
def test_a_killed_loader_process_is_a_kill(said: str, expected: ExitReason) -> None:
    assert classify_exit(1, None, said=said) is expected


# ---- on one node -----------------------------------------------------------------------------


def mistaken(
    node: Node, rank: int, message: str = TYPO, trace: str = "t", last_step_ago_s: float = -1.0
) -> list[Command]:
    exited = node_ev.WorkerExited(rank, 100 + rank, 1, None, message, trace, last_step_ago_s)
    return node.tell(exited)


def alike(commands: list[Command]) -> list[int]:
    failed = [body for body in reports(commands) if isinstance(body, m.WorkersFailed)]
    return [body.failures[0].alike for body in failed]


def test_a_mistake_of_all_workers_is_reported_when_the_last_has_made_it() -> None:
    node = Node(3).running()
    assert mistaken(node, 1) == mistaken(node, 0) == []
    commands = mistaken(node, 2)
    assert alike(commands) == [3]
    (report,) = reports(commands)
    assert isinstance(report, m.WorkersFailed)
    assert report.failures[0].local_rank == 1


def test_a_single_worker_that_makes_one_waits_for_no_other() -> None:
    assert alike(mistaken(Node(1).running(), 0)) == [1]


def test_the_others_are_waited_for_only_so_long() -> None:
    node = Node().running()
    assert mistaken(node, 0) == []
    assert node.core.deadline() == MISTAKE_S
    assert alike(node.tell(Tick(), at=MISTAKE_S)) == [0]


def test_a_worker_that_ends_in_another_way_ends_the_wait() -> None:
    for end in (
        lambda node: node.exited(1),
        lambda node: node.exited(1, None, 9),
        lambda node: mistaken(node, 1, trace="from another line"),
    ):
        node = Node().running()
        mistaken(node, 0)
        assert alike(end(node)) == [0]


def test_after_a_step_it_is_a_failure_like_any_other() -> None:
    assert alike(mistaken(Node().running(), 0, last_step_ago_s=3.0)) == [0]


# ---- on all nodes ----------------------------------------------------------------------------


def job_of(*names: str, retry_mistakes: bool = False) -> Job:
    count = len(names)
    spec = JobSpec(max_nodes=count, min_nodes=count, retry_mistakes=retry_mistakes)
    job = Job(spec)
    for name in names:
        job.attach(name, job_rules=rules(max_nodes=count, min_nodes=count), nproc=2)
    return job


def mistake(job: Job, name: str, message: str = TYPO) -> Outcome:
    return job.failed(name, 1, message=message, alike=2)


def answered(outcome: Outcome) -> int:
    replies = of_kind(cmd.Reply, outcome.commands)
    return sum(isinstance(reply.body, m.Done) for reply in replies)


def test_a_mistake_of_every_node_ends_the_job_at_once() -> None:
    job = job_of("a", "b")
    assert answered(mistake(job, "a")) == 0
    outcome = mistake(job, "b")
    assert job.state() == "failed"
    assert answered(outcome) == 2
    reason = str(job.machines.view(job.now)["reason"])
    assert reason.startswith(f"rank 0 on node rank 0 {TYPO}; the same on 4 ranks")
    assert reason.endswith("it is not tried again without --retry-mistakes")


ASKS = "failed with NeedsTerminal: train.py:3: breakpoint() needs a terminal"


def test_a_rank_that_asks_a_person_ends_the_job_though_it_is_alone_and_has_stepped() -> None:
    job = job_of("a", "b")
    job.beat("a", round=1, steps=1, step=0, first=0.0, last=0.0)
    job.failed("a", 1, message=ASKS, last=0.1)
    assert job.state() == "failed"
    assert str(job.machines.view(job.now)["reason"]) == f"rank 0 on node rank 0 {ASKS}"


def test_a_rank_that_asks_a_person_asks_again_on_request() -> None:
    job = job_of("a", retry_mistakes=True)
    assert worlds(job.failed("a", 1, message=ASKS)) == [[0]]


def test_retry_mistakes_restores_the_budget() -> None:
    job = job_of("a", retry_mistakes=True)
    assert worlds(mistake(job, "a")) == [[0]]


def test_a_mistake_of_one_node_alone_is_retried_after_a_moment() -> None:
    job = job_of("a", "b")
    mistake(job, "a")
    outcome = job.wait(job.now + WAIT_S)
    assert worlds(outcome) == [[0, 1]]
    assert answered(outcome) == 1


def test_another_failure_meanwhile_does_not_wait() -> None:
    job = job_of("a", "b", "c")
    mistake(job, "a")
    outcome = job.failed("b", 1)
    assert worlds(outcome) == [[0, 1, 2]]
    assert answered(outcome) == 2


def test_a_different_mistake_is_not_the_same() -> None:
    job = job_of("a", "b")
    mistake(job, "a")
    assert worlds(mistake(job, "b", "failed with ImportError: no x")) == [[0, 1]]


def test_a_node_that_is_lost_meanwhile_is_one_failure_and_the_report_is_answered() -> None:
    job = job_of("a", "b")
    mistake(job, "a")
    outcome = job.leave("b")
    assert job.state() == "running"
    assert answered(outcome) == 2


def test_after_a_restart_of_the_master_the_reports_come_again_and_count() -> None:
    job = job_of("a", "b")
    mistake(job, "a")
    job.restart()
    for name in ("a", "b"):
        job.attach(name, job_rules=rules(max_nodes=2, min_nodes=2), nproc=2)
    mistake(job, "b")
    mistake(job, "a")
    assert job.state() == "failed"


def test_in_a_job_that_has_trained_it_is_retried() -> None:
    """Something changed around the program: it ran before."""
    job = job_of("a")
    job.beat("a", round=1, steps=1, step=0, first=0.0, last=0.0)
    assert worlds(job.failed("a", 1, last=0.1)) == [[0]]
    outcome = job.failed("a", 2, message=TYPO, alike=2)
    assert worlds(outcome) == [[0]]
