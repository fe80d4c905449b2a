# SPDX-License-Identifier: Apache-2.0
"""The agent's core: one worker group, always heading somewhere, never two rounds at once."""

import pytest

from holdfast.core.kernel import Command, Event, Tick
from holdfast.core.node import events as ev
from holdfast.core.node.environment import Launch, worker_environment
from holdfast.core.node.workers import STOPPED_S, Workers
from holdfast.protocol import messages as m


def world(round_number: int, *, planned: bool = False, hosted: bool = False) -> m.RunWorld:
    return m.RunWorld(
        round=round_number,
        generation=round_number + 1,
        group_rank=1,
        group_size=2,
        rank_offset=4,
        world_size=8,
        store_host="10.0.0.1",
        store_port=4000,
        store_hosted=hosted,
        restarts=round_number - 1,
        reason="a test",
        planned=planned,
    )


class Node:
    """A group of two workers and what its core asked for."""

    def __init__(self, nproc: int = 2) -> None:
        self.nproc = nproc
        self.core = Workers(nproc)
        self.now = 0.0

    def tell(self, event: object, at: float | None = None) -> list[Command]:
        self.now = self.now if at is None else at
        return self.core.handle(event, self.now).commands  # type: ignore[arg-type]

    def started(self, round_number: int, ranks: set[int] | None = None) -> list[Command]:
        ranks = set(range(self.nproc)) if ranks is None else ranks
        return self.tell(ev.StartFinished(round_number, frozenset(ranks), "zygote", 0.02, ""))

    def exited(self, rank: int, code: int | None = 0, number: int | None = None) -> list[Command]:
        return self.tell(ev.WorkerExited(rank, 100 + rank, code, number, "", "", 0.1))

    def running(self, round_number: int = 1) -> "Node":
        self.tell(ev.WorldReceived(world(round_number)))
        self.started(round_number)
        return self


def reports(commands: list[Command]) -> list[object]:
    return [command.body for command in commands if isinstance(command, ev.Report)]


def test_a_world_is_started_and_reported() -> None:
    node = Node()
    assert node.tell(ev.WorldReceived(world(1))) == [ev.StartWorkers(world(1))]
    assert reports(node.started(1)) == [m.WorkersStarted(1, 0, "zygote", 0.02)]
    assert node.core.round == 1


def test_a_repeated_or_older_world_changes_nothing() -> None:
    node = Node().running(3)
    assert node.tell(ev.WorldReceived(world(3))) == []
    assert node.tell(ev.WorldReceived(world(2))) == []


def test_all_workers_done_is_reported_once_all_are() -> None:
    node = Node().running()
    assert node.exited(0) == []
    assert reports(node.exited(1)) == [m.WorkersDone(1)]


def test_workers_that_finish_before_the_start_is_reported_are_done_too() -> None:
    node = Node()
    node.tell(ev.WorldReceived(world(1)))
    node.exited(0)
    node.exited(1)
    assert [type(body) for body in reports(node.started(1))] == [m.WorkersStarted, m.WorkersDone]


@pytest.mark.parametrize(
    ("code", "number", "reason", "words"),
    [
        (1, None, "error", "exited with code 1"),
        (None, 9, "killed", "was ended by SIGKILL"),
        (None, 11, "error", "was ended by SIGSEGV"),
        (247, None, "oom", "exited with code 247"),
        (201, None, "hardware", "exited with code 201"),
        (77, None, "unknown", "exited with code 77"),
    ],
)
def test_the_first_failure_is_reported_and_ends_the_group(
    code: int | None, number: int | None, reason: str, words: str
) -> None:
    node = Node().running()
    commands = node.exited(1, code, number)
    (report,) = reports(commands)
    assert isinstance(report, m.WorkersFailed)
    assert report.failures[0].rank == 5
    assert report.failures[0].reason == reason
    assert report.failures[0].message == words
    assert commands[1:] == [ev.EndWorkers(gently=False)]
    assert node.exited(0, None, 9) == [], "the others are its consequences, and nobody's news"
    assert node.core.round == 0


def test_the_next_world_waits_until_every_process_of_the_last_has_ended() -> None:
    node = Node().running()
    assert node.tell(ev.WorldReceived(world(2))) == [ev.EndWorkers(gently=False)]
    assert node.exited(0, None, 9) == []
    assert node.exited(1, None, 9) == [ev.StartWorkers(world(2))]


def test_workers_of_a_healthy_world_get_their_grace() -> None:
    node = Node().running()
    assert node.tell(ev.WorldReceived(world(2, planned=True))) == [ev.EndWorkers(gently=True)]


def test_a_world_that_ends_while_it_starts_is_ended_when_it_has_started() -> None:
    node = Node()
    node.tell(ev.WorldReceived(world(1)))
    assert node.tell(ev.WorldReceived(world(2))) == [ev.EndWorkers(gently=False)]
    assert node.started(1) == [ev.EndWorkers(gently=False)]
    node.exited(0, None, 9)
    assert node.exited(1, None, 9) == [ev.StartWorkers(world(2))]


def test_a_start_that_fails_is_a_failure_of_the_round() -> None:
    node = Node()
    node.tell(ev.WorldReceived(world(1)))
    failed = ev.StartFinished(1, frozenset({0}), "cold", 0.1, "could not be started: no memory")
    (report,) = reports(node.tell(failed))
    assert isinstance(report, m.WorkersFailed)
    assert report.failures[0].message == "could not be started: no memory"


def test_stop_ends_the_workers_and_the_node_waits() -> None:
    node = Node(1).running()
    assert node.tell(ev.StopReceived(m.StopWork(1, "a node was lost"))) == [
        ev.EndWorkers(gently=False)
    ]
    assert node.exited(0, None, 9) == []
    assert node.tell(ev.WorldReceived(world(2))) == [ev.StartWorkers(world(2))]


def test_workers_are_held_when_the_lease_runs_out_and_go_on_when_it_is_renewed() -> None:
    node = Node().running()
    node.tell(ev.LeaseRenewed(60.0))
    assert node.core.deadline() == 60.0
    held = node.tell(Tick(), at=60.0)
    assert held[0] == ev.HoldWorkers()
    assert node.core.deadline() is None
    renewed = node.tell(ev.LeaseRenewed(120.0), at=70.0)
    assert renewed[:2] == [ev.KeepLease(120.0), ev.ResumeWorkers()], "the guardian is told first"


def test_an_agent_that_stood_still_finds_its_workers_held_whatever_it_hears_first() -> None:
    """The guardian has held them by then: a planned end is no gentle one any more."""
    node = Node().running()
    assert node.tell(ev.LeaseRenewed(60.0)) == [ev.KeepLease(60.0)]
    assert node.tell(ev.LeaseRenewed(50.0)) == [], "a late answer does not shorten it"
    told = node.tell(ev.WorldReceived(world(2, planned=True)), at=90.0)
    assert told[0] == ev.HoldWorkers()
    assert ev.EndWorkers(gently=False) in told

    node = Node().running()
    node.tell(ev.LeaseRenewed(60.0))
    told = node.tell(ev.LeaseRenewed(120.0), at=90.0)
    assert [one for one in told if not isinstance(one, ev.Tell)] == [
        ev.HoldWorkers(),
        ev.KeepLease(120.0),
        ev.ResumeWorkers(),
    ]


def test_a_stop_by_the_guardian_is_no_stall() -> None:
    """It may be seen a moment before the end of the lease, or after an agent stood still."""
    for seen_at in (59.999, 60.0, 90.0):
        node = Node().running()
        node.tell(ev.LeaseRenewed(60.0))
        node.tell(ev.WorkerStopped(0, 19), at=seen_at)
        node.tell(Tick(), at=max(60.0, seen_at))
        assert node.core.deadline() is None
        node.tell(ev.LeaseRenewed(200.0), at=150.0)
        assert node.core.deadline() == 200.0


def test_a_node_without_workers_has_nothing_to_hold() -> None:
    node = Node()
    node.tell(ev.LeaseRenewed(60.0))
    assert node.core.deadline() is None


def test_held_workers_that_are_void_are_ended() -> None:
    node = Node().running()
    node.tell(ev.LeaseRenewed(60.0))
    node.tell(Tick(), at=60.0)
    commands = node.tell(ev.FencedOff("a newer agent has this place"))
    assert commands[:2] == [ev.EndWorkers(gently=False), ev.ResumeWorkers()]


def test_a_worker_that_stays_stopped_is_a_stall() -> None:
    node = Node().running()
    node.tell(ev.WorkerStopped(1, 19), at=5.0)
    assert node.core.deadline() == 5.0 + STOPPED_S
    (report,) = reports(node.tell(Tick(), at=5.0 + STOPPED_S))
    assert isinstance(report, m.WorkersFailed)
    assert (report.failures[0].rank, report.failures[0].reason) == (5, "stalled")


def test_a_worker_that_goes_on_in_time_is_none() -> None:
    node = Node().running()
    node.tell(ev.WorkerStopped(1, 19), at=5.0)
    node.tell(ev.WorkerContinued(1), at=6.0)
    assert node.core.deadline() is None


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_the_end_of_the_job_ends_the_agent(ok: bool, code: int) -> None:
    end = m.JobEnded(ok, "because")
    node = Node(1).running()
    assert node.tell(ev.EndReceived(end)) == [ev.EndWorkers(gently=True)]
    assert node.exited(0, None, 15) == [ev.ExitAgent(code, "because", end)]
    assert node.tell(ev.WorldReceived(world(9))) == []


def test_a_node_that_is_told_to_go_has_left_when_its_workers_have_ended() -> None:
    """It had left at once: the next world computed while its workers had their grace."""
    node = Node(1).running()
    assert node.tell(ev.ShutdownRequested("SIGTERM", 143)) == [ev.EndWorkers(gently=True)]
    left = [ev.Report(m.Leave("SIGTERM")), ev.ExitAgent(143, "SIGTERM", None)]
    assert node.exited(0, None, 15) == left


def test_a_node_that_a_person_tells_to_go_says_so_at_once() -> None:
    node = Node(1).running()
    commands = node.tell(ev.ShutdownRequested("SIGINT", 130, at_once=True))
    assert commands == [ev.Report(m.Leave("SIGINT")), ev.EndWorkers(gently=False)]
    assert node.exited(0, None, 9) == [ev.ExitAgent(130, "SIGINT", None)]


def test_a_node_that_is_told_to_go_goes_faster_for_a_person() -> None:
    node = Node(1).running()
    node.tell(ev.ShutdownRequested("SIGTERM", 143))
    assert node.core.is_leaving
    assert node.tell(ev.ShutdownRequested("SIGTERM", 143)) == []
    again = ev.ShutdownRequested("SIGINT", 130, at_once=True)
    assert node.tell(again) == [ev.EndWorkers(gently=False)]
    left = [ev.Report(m.Leave("SIGTERM")), ev.ExitAgent(143, "SIGTERM", None)]
    assert node.exited(0, None, 9) == left


def test_an_agent_that_was_given_up_ends_its_workers_before_it_joins_anew() -> None:
    node = Node(1).running(7)
    assert node.tell(ev.GivenUp("silent for too long")) == [ev.EndWorkers(gently=False)]
    assert node.exited(0, None, 9) == [ev.Rejoin()]
    assert node.tell(ev.WorldReceived(world(2))) == [ev.StartWorkers(world(2))]


def test_a_fenced_agent_exits() -> None:
    node = Node(1)
    assert node.tell(ev.FencedOff("taken")) == [ev.ExitAgent(1, "taken", None)]


# ---- the environment of a worker -----------------------------------------------------------------


def environment(**changes: object) -> dict[str, str]:
    launch = Launch(
        nproc=2,
        role="trainer",
        run_id="run",
        max_restarts=3,
        socket="unix:/x/agent.sock",
        token_file="/x/token",
        signals_to_handle="SIGTERM,SIGINT",
        **changes,  # type: ignore[arg-type]
    )
    return worker_environment(
        {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "4,5"},
        launch,
        world(3, hosted=True),
        1,
        error_file="/x/error.json",
        progress="/x/progress",
    )


def test_ranks_and_sizes_follow_from_the_world() -> None:
    env = environment()
    assert (env["RANK"], env["LOCAL_RANK"], env["GROUP_RANK"]) == ("5", "1", "1")
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_WORLD_SIZE"]) == ("8", "2", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "4000")
    assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
    assert env["TORCHELASTIC_RESTART_COUNT"] == "2"
    assert env["HOLDFAST_GENERATION"] == "4"
    assert env["PATH"] == "/bin"
    assert env["OMP_NUM_THREADS"] == "1"


def test_a_virtual_local_rank_sees_one_device_as_the_first() -> None:
    env = environment(virtual_local_rank=True)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", "5")


def test_memory_is_flushed_after_the_workers_and_before_the_node_leaves() -> None:
    node = Node().running()
    assert node.tell(ev.ShutdownRequested("SIGTERM", 143, flush=True)) == [ev.EndWorkers(True)]
    assert node.exited(0) == []
    assert node.exited(1) == [ev.Flush()]
    commands = node.tell(ev.Flushed())
    assert commands == [
        ev.Report(m.Leave("SIGTERM")),
        ev.ExitAgent(143, "SIGTERM", None),
    ]


END = m.JobEnded(False, "it was stopped by SIGTERM", stopped=15)
ASKED = [ev.ShutdownRequested("SIGTERM", 143, flush=True), ev.EndReceived(END, flush=True)]


@pytest.mark.parametrize("first", ASKED, ids=["itself", "its master"])
@pytest.mark.parametrize("again", ASKED, ids=["itself", "its master"])
@pytest.mark.parametrize("when", ["at once", "one worker has ended", "during the flush"])
def test_who_is_asked_again_to_go_still_flushes(first: Event, again: Event, when: str) -> None:
    """SLURM sends SIGTERM twice within 10 ms, to every process of a job and to its master, too."""
    node = Node().running()
    assert node.tell(first) == [ev.EndWorkers(gently=True)]
    if when == "at once":
        assert node.tell(again) == []
    assert node.exited(0, None, 15) == []
    if when == "one worker has ended":
        assert node.tell(again) == []
    assert node.exited(1, None, 15) == [ev.Flush()]
    if when == "during the flush":
        assert node.tell(again) == []
    *said, exit = node.tell(ev.Flushed())
    assert [type(command.body) for command in said] == [m.Leave]
    assert isinstance(exit, ev.ExitAgent)
    assert exit.exit_code == 143


@pytest.mark.parametrize("when", ["at once", "during the flush", "after the exit"])
def test_a_job_that_ends_well_while_its_node_goes_has_ended_well(when: str) -> None:
    """SIGTERM came between the end of the workers and that of the job: both succeeded."""
    well = m.JobEnded(True, "all workers are done")
    end, succeeded = ev.EndReceived(well), ev.ExitAgent(0, "all workers are done", well)
    node = Node().running()
    node.exited(0)
    if when == "at once":
        node.tell(ev.ShutdownRequested("SIGTERM", 143, flush=True))
        assert node.tell(end) == []
        assert node.exited(1) == [ev.Flush()]
        assert node.tell(ev.Flushed()) == [succeeded]
        return
    assert reports(node.exited(1)) == [m.WorkersDone(1)]
    if when == "during the flush":
        asked = node.tell(ev.ShutdownRequested("SIGTERM", 143, flush=True))
        assert asked == [ev.EndWorkers(gently=True), ev.Flush()]
        assert node.tell(end) == []
        assert node.tell(ev.Flushed()) == [succeeded]
    else:
        exit = ev.ExitAgent(143, "SIGTERM", None)
        assert node.tell(ev.ShutdownRequested("SIGTERM", 143))[-1] == exit
        assert node.tell(end) == [succeeded]


def test_a_job_that_failed_changes_nothing_of_how_its_node_went() -> None:
    node = Node(1).running()
    node.tell(ev.ShutdownRequested("SIGTERM", 143))
    assert node.tell(ev.EndReceived(m.JobEnded(False, "it failed"))) == []
    assert node.exited(0)[-1] == ev.ExitAgent(143, "SIGTERM", None)


def test_a_person_who_asks_twice_does_not_wait_for_the_flush() -> None:
    node = Node().running()
    node.tell(ev.ShutdownRequested("SIGINT", 130, flush=True))
    node.tell(ev.ShutdownRequested("SIGINT", 130, flush=True, at_once=True))
    node.exited(0)
    commands = node.exited(1)
    assert ev.Flush() not in commands
    assert commands[-1] == ev.ExitAgent(130, "SIGINT", None)


def test_a_second_ctrl_c_that_overtakes_the_first_ends_all_at_once() -> None:
    """The agent hears of it by the lifeline, and of the first one by the master."""
    node = Node(1).running()
    commands = node.tell(ev.ShutdownRequested("SIGINT", 130, flush=True, at_once=True))
    assert commands == [ev.Report(m.Leave("SIGINT")), ev.EndWorkers(gently=False)]
    assert node.exited(0, None, 9) == [ev.ExitAgent(130, "SIGINT", None)]


def test_a_second_ctrl_c_ends_a_flush_that_takes_long() -> None:
    node = Node().running()
    node.tell(ev.ShutdownRequested("SIGINT", 130, flush=True))
    node.exited(0)
    assert node.exited(1) == [ev.Flush()]
    commands = node.tell(ev.ShutdownRequested("SIGINT", 130, flush=True, at_once=True))
    assert commands[-1] == ev.ExitAgent(130, "SIGINT", None)
    assert node.tell(ev.Flushed()) == []


@pytest.mark.parametrize("asked", ASKED, ids=["itself", "its master"])
def test_a_worker_that_sigterm_ends_right_before_its_agent_is_no_failure(asked: Event) -> None:
    """SIGTERM to every process of a job does not ask for new workers."""
    node = Node().running()
    assert node.exited(0, None, 15) == []
    assert node.exited(1, 1, None) == []  # The other one lost its peer.
    assert node.tell(asked) == [ev.EndWorkers(gently=True), ev.Flush()]
    assert node.core.deadline() is None


def test_a_worker_that_sigterm_ends_alone_is_a_failure_a_moment_later() -> None:
    node = Node().running()
    assert node.exited(0, None, 15) == []
    at = node.core.deadline()
    assert at is not None
    report, *rest = node.tell(Tick(), at=at)
    assert isinstance(report, ev.Report)
    assert isinstance(report.body, m.WorkersFailed)
    assert report.body.failures[0].signal == 15
    assert rest == [ev.EndWorkers(gently=False)]
