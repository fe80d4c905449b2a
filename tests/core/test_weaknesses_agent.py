# SPDX-License-Identifier: Apache-2.0
"""Weaknesses of the prior art's agent, each made impossible here, by name.

Those that only real processes can show are in tests/integration: orphans and strays in
test_processes.py, unbounded exits in test_run_command.py, a master that is away in
test_master_kills.py, frames cut short in test_fuzz_server.py, forks in test_client.py, socket paths
that are too long in test_bad_input.py.
"""

from holdfast.core.kernel import Tick
from holdfast.core.node import events as ev
from holdfast.core.node.workers import STOPPED_S
from holdfast.protocol import messages as m
from holdfast.protocol.services import METHODS, Sender
from tests.core.test_workers import Node, reports, world


def test_weakness_new_workers_never_run_beside_those_of_the_round_before() -> None:
    """There: what a round left behind was still being saved while the next one loaded."""
    node = Node().running(1)
    node.tell(ev.WorldReceived(world(2)))
    started = [*node.exited(0, None, 9), *node.exited(1, None, 9)]
    assert started == [ev.StartWorkers(world(2))], "only after the last process had ended"


def test_weakness_the_exit_of_an_agent_waits_for_nothing_but_its_processes() -> None:
    """There: an unbounded wait for a saver thread that had died."""
    node = Node(1).running()
    node.tell(ev.EndReceived(m.JobEnded(True, "every worker finished")))
    assert isinstance(node.exited(0)[-1], ev.ExitAgent)


def test_weakness_a_failed_worker_does_not_end_its_node() -> None:
    """There: the agent exited with code 1, which the master took for an error of the node."""
    node = Node().running()
    commands = [*node.exited(0, 1), *node.exited(1, None, 9)]
    assert not any(isinstance(command, ev.ExitAgent) for command in commands)
    assert node.tell(ev.WorldReceived(world(2))) == [ev.StartWorkers(world(2))]


def test_weakness_a_stopped_worker_is_noticed_without_its_peers_time_outs() -> None:
    """There: everybody sat in a collective until its own time-out."""
    node = Node().running()
    node.tell(ev.WorkerStopped(0, 19), at=1.0)
    assert reports(node.tell(Tick(), at=1.0 + STOPPED_S))


def test_weakness_losing_the_master_is_not_losing_the_workers() -> None:
    """There: errors of the stream looked like "no node is waiting", or ended the agent."""
    node = Node().running()
    node.tell(ev.LeaseRenewed(60.0))
    assert node.tell(Tick(), at=59.0) == []
    assert node.tell(Tick(), at=61.0)[0] == ev.HoldWorkers(), "held, and not ended"


def test_weakness_the_budget_is_the_job_s_and_not_each_agent_s() -> None:
    """There: every agent counted its own fail-overs. Here an agent has nothing to count."""
    node = Node(1)
    for round_number in range(1, 50):
        node.running(round_number)
        assert reports(node.exited(0, 1)), "it reports, and the master decides"


def test_weakness_a_worker_cannot_speak_for_its_agent() -> None:
    """There: any local process could reach the agent's socket and act as anybody."""
    of_agents = {m.Attach, m.WorkersStarted, m.WorkersFailed, m.WorkersDone, m.Leave, m.Beat}
    assert not any(Sender.WORKER in METHODS[kind].senders for kind in of_agents)
