# SPDX-License-Identifier: Apache-2.0
"""Agents that are killed, stopped, replaced or late: the world shrinks, grows and goes on."""

import os
import signal

import psutil
import pytest

from tests.integration.control import observe
from tests.integration.jobs import LIMIT_S, SCRIPTS, Event, Jobs, wait_gone
from tests.waiting import until

STEPS = str(SCRIPTS / "steps.py")
ELASTIC = ("--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1")
SHORT_PATIENCE = ("--beat", "0.5", "--silence", "5", "--lease", "8")


def expect_ranks(world: list[Event], size: int) -> None:
    """Ranks without a gap, each on a node of its own."""
    assert [event.rank for event in world] == list(range(size))
    assert [event.world for event in world] == [size] * size
    assert len({event.agent for event in world}) == size


def test_a_lost_local_node_is_launched_again(jobs: Jobs) -> None:
    job = jobs.run("--local-nodes", "2", STEPS)
    first = jobs.wait_world(2)
    expect_ranks(first, 2)
    os.kill(first[1].agent, signal.SIGKILL)
    wait_gone([first[1].pid])
    second = jobs.wait_world(2, after=first)
    expect_ranks(second, 2)
    agents = {event.agent for event in second}
    assert first[0].agent in agents
    assert first[1].agent not in agents
    job.wait_line("is lost: its agent process ended by SIGKILL")
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_the_node_of_rank_0_is_launched_again(jobs: Jobs) -> None:
    job = jobs.run("--local-nodes", "2", "--nproc-per-node", "2", STEPS)
    first = jobs.wait_world(4)
    assert len({event.agent for event in first}) == 2
    os.kill(first[0].agent, signal.SIGKILL)
    wait_gone([event.pid for event in first if event.agent == first[0].agent])
    second = jobs.wait_world(4, after=first)
    assert [event.rank for event in second] == [0, 1, 2, 3]
    assert [event.local_rank for event in second] == [0, 1, 0, 1]
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_torch_goes_on_after_the_loss_of_the_node_of_rank_0(jobs: Jobs) -> None:
    """The node that the address of the process group's store points to."""
    job = jobs.run("--local-nodes", "2", str(SCRIPTS / "train.py"))
    first = jobs.wait_world(2)
    os.kill(first[0].agent, signal.SIGKILL)
    second = jobs.wait_world(2, after=first)
    expect_ranks(second, 2)
    assert min(event.step for event in jobs.steps(round=second[0].round)) >= first[0].step
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_a_spare_node_steps_in(jobs: Jobs) -> None:
    job = jobs.run("--local-nodes", "2", "--spare-nodes", "1", STEPS)
    first = jobs.wait_world(2)
    job.wait_line("node rank .* joined", after=2)
    before = {agent.pid for agent in jobs.agents()}
    assert len(before) == 3
    os.kill(first[1].agent, signal.SIGKILL)
    second = jobs.wait_world(2, after=first)
    expect_ranks(second, 2)
    spare = before - {event.agent for event in first}
    assert {event.agent for event in second} == {first[0].agent, *spare}
    # A new spare takes the place of the one that is at work now.
    job.wait_line("node rank .* joined", after=3)
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


def test_the_world_shrinks_and_grows_back(jobs: Jobs) -> None:
    """Without a platform that could launch a node again: somebody has to bring it back."""
    master = jobs.master()
    stays = jobs.node(master, *ELASTIC, STEPS, name="a")
    goes = jobs.node(master, *ELASTIC, STEPS, name="b")
    both = jobs.wait_world(2)
    expect_ranks(both, 2)
    goes.kill()
    wait_gone([event.pid for event in both if event.node == "b"])
    alone = jobs.wait_world(1, after=both)
    assert [(event.node, event.rank) for event in alone] == [("a", 0)]
    returns = jobs.node(master, *ELASTIC, STEPS, name="b")
    grown = jobs.wait_world(2, after=alone)
    expect_ranks(grown, 2)
    assert {event.node for event in grown} == {"a", "b"}
    jobs.finish()
    stays.succeeds()
    returns.succeeds()
    master.succeeds()
    jobs.expect_nothing_left()


def test_a_second_node_joins_late(jobs: Jobs) -> None:
    master = jobs.master()
    early = jobs.node(master, *ELASTIC, STEPS, name="a")
    alone = jobs.wait_world(1, steps=5)
    late = jobs.node(master, *ELASTIC, STEPS, name="b")
    both = jobs.wait_world(2, after=alone)
    expect_ranks(both, 2)
    # The work goes on where it was; nothing is done again.
    done = max(event.step for event in jobs.steps() if event.world == 1)
    assert min(event.step for event in jobs.steps() if event.world == 2) in (done, done + 1)
    jobs.finish()
    early.succeeds()
    late.succeeds()
    master.succeeds()


def test_fewer_nodes_than_the_minimum_wait(jobs: Jobs) -> None:
    master = jobs.master()
    first = jobs.node(master, "--nnodes", "2", STEPS, name="a")
    master.wait_line("node rank 0 joined")
    assert not jobs.events()
    second = jobs.node(master, "--nnodes", "2", STEPS, name="b")
    expect_ranks(jobs.wait_world(2), 2)
    assert {event.round for event in jobs.events()} == {1}
    jobs.finish()
    first.succeeds()
    second.succeeds()


def test_the_newer_of_two_agents_with_one_node_rank_wins(jobs: Jobs) -> None:
    master = jobs.master()
    other = jobs.node(master, *ELASTIC, "--node-rank", "0", STEPS, name="other")
    older = jobs.node(master, *ELASTIC, "--node-rank", "1", STEPS, name="older")
    before = jobs.wait_world(2)
    newer = jobs.node(master, *ELASTIC, "--node-rank", "1", STEPS, name="newer")
    assert older.wait() == 1
    older.wait_line("holdfast: stopped: .*newer agent")
    wait_gone([event.pid for event in before if event.node == "older"])
    after = jobs.wait_world(2, after=before)
    expect_ranks(after, 2)
    assert {event.node for event in after} == {"other", "newer"}
    # The fenced one made no step once the newer one had begun.
    began = min(event.t for event in jobs.events() if event.node == "newer")
    assert max(event.t for event in jobs.steps() if event.node == "older") < began
    jobs.finish()
    other.succeeds()
    newer.succeeds()


def test_an_agent_that_was_silent_too_long_stops_its_workers_and_rejoins(jobs: Jobs) -> None:
    master = jobs.master(*SHORT_PATIENCE)
    steady = jobs.node(master, *ELASTIC, STEPS, name="a")
    silent = jobs.node(master, *ELASTIC, STEPS, name="b")
    both = jobs.wait_world(2)
    silent.send(signal.SIGSTOP)
    alone = jobs.wait_world(1, after=both)
    assert [event.node for event in alone] == ["a"]
    master.wait_line("is lost")
    silent.send(signal.SIGCONT)
    wait_gone([event.pid for event in both if event.node == "b"])
    again = jobs.wait_world(2, after=alone)
    expect_ranks(again, 2)
    assert {event.agent for event in again} == {steady.pid, silent.pid}
    # What was left of the old world on the silent node made no step after the new one had begun.
    began = min(event.t for event in jobs.steps(round=alone[0].round))
    old_steps = [event for event in jobs.steps(round=both[0].round) if event.node == "b"]
    assert max(event.t for event in old_steps) < began
    jobs.finish()
    steady.succeeds()
    silent.succeeds()


def test_an_agent_that_was_silent_for_a_moment_goes_on(jobs: Jobs) -> None:
    master = jobs.master("--beat", "0.5", "--silence", "20")
    node = jobs.node(master, STEPS)
    before = jobs.wait_world(1)
    node.send(signal.SIGSTOP)
    until(lambda: psutil.Process(node.pid).status() == psutil.STATUS_STOPPED, LIMIT_S)
    jobs.wait_for("step", lambda event: event.step > before[0].step + 5)
    node.send(signal.SIGCONT)
    jobs.finish()
    node.succeeds()
    assert {event.round for event in jobs.events()} == {1}


def test_a_master_that_stood_still_takes_nobody_for_silent(jobs: Jobs) -> None:
    """As on a machine that was paused: what was said meanwhile is heard before anybody is lost."""
    master = jobs.master("--beat", "0.5", "--silence", "5", "--lease", "60")
    node = jobs.node(master, "--no-spares", STEPS)
    jobs.wait_world(1)
    master.send(signal.SIGSTOP)
    until(lambda: psutil.Process(master.pid).status() == psutil.STATUS_STOPPED, LIMIT_S)
    stopped_at = max(event.t for event in jobs.steps())
    jobs.wait_for("step", lambda event: event.t > stopped_at + 7.0)
    master.send(signal.SIGCONT)
    assert observe(master)["world"]["state"] == "running"
    jobs.finish()
    node.succeeds()
    master.succeeds()
    assert {event.round for event in jobs.events()} == {1}


@pytest.mark.parametrize("options", [(), ("--local-nodes", "2")], ids=["alone", "local nodes"])
def test_nothing_survives_a_killed_launcher(jobs: Jobs, options: tuple[str, ...]) -> None:
    """Grandchildren included, whether they stayed in the process group of the worker or not."""
    job = jobs.run(*options, str(SCRIPTS / "family.py"))
    jobs.wait_world(2 if options else 1)
    job.kill()
    jobs.expect_nothing_left()


def test_nothing_of_a_node_survives_its_agent(jobs: Jobs) -> None:
    job = jobs.run("--local-nodes", "2", str(SCRIPTS / "family.py"))
    first = jobs.wait_world(2)
    grandchildren = [e.step for e in jobs.events("grandchild") if e.agent == first[1].agent]
    assert len(grandchildren) == 2
    os.kill(first[1].agent, signal.SIGKILL)
    wait_gone([first[1].pid, *grandchildren])
    jobs.wait_world(2, after=first)
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_is_told_to_go_leaves_at_once(jobs: Jobs, number: signal.Signals) -> None:
    """The others do not wait for it to be missed: it says that it goes."""
    master = jobs.master("--silence", "600", "--lease", "600")
    stays = jobs.node(master, *ELASTIC, STEPS, name="a")
    leaves = jobs.node(master, *ELASTIC, STEPS, name="b")
    both = jobs.wait_world(2)
    leaves.send(number)
    assert leaves.wait() == 128 + number
    jobs.wait_world(1, after=both)
    jobs.finish()
    stays.succeeds()
    master.succeeds()


def test_nodes_on_one_switch_get_neighbouring_ranks(jobs: Jobs) -> None:
    master = jobs.master()
    options = ("--nnodes", "3", "--no-spares", "--node-rank")
    places = {"0": "east", "1": "west", "2": "east"}
    nodes = [
        jobs.node(master, *options, rank, STEPS, name=rank, HOLDFAST_TOPOLOGY=place)
        for rank, place in places.items()
    ]
    world = jobs.wait_world(3)
    assert [event.node for event in world] == ["0", "2", "1"]
    jobs.finish()
    for node in nodes:
        node.succeeds()
