# SPDX-License-Identifier: Apache-2.0
"""A node cut off from its master by the network, with real network namespaces.

The cut-off node and the rest never see each other's packets, and no connection is closed: only
time can tell either side. The steps in the log have one clock, so they can be compared.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from tests.integration.control import observe
from tests.integration.faults import ip
from tests.integration.jobs import SCRIPTS, Command, Jobs, MasterCommand

QUICK = ("--http", "off", "--insecure", "--beat", "0.5", "--silence", "4", "--lease", "6")
PATIENT = ("--http", "off", "--insecure", "--beat", "0.5", "--silence", "20", "--lease", "30")
STEPS = str(SCRIPTS / "steps.py")


@dataclass(frozen=True)
class Island:
    """A network of its own with one link to ours."""

    name: str
    link: str
    address: str
    """Of our end of the link."""

    def cut(self) -> None:
        """From now on packets vanish on the way, in both directions."""
        ip("link", "set", self.link, "down")

    def heal(self) -> None:
        ip("link", "set", self.link, "up")

    def node(self, jobs: Jobs, master: MasterCommand, *words: str, name: str) -> Command:
        """As `Jobs.node`, on the island."""
        argv = ["ip", "netns", "exec", self.name, sys.executable, "-m", "holdfast.cli", "run"]
        argv += ["--master", master.address, "--token-file", str(master.token_file), *words]
        command = Command(argv, jobs.environment(STEPS_NODE=name), jobs.folder)
        jobs.commands.append(command)
        return command


@pytest.fixture
def island() -> Iterator[Island]:
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs network namespaces: run the tests as root, with iproute2 installed")
    name = f"hf{secrets.token_hex(4)}"
    link, far = f"{name}a", f"{name}b"
    subnet = f"10.231.{secrets.randbelow(256)}.{4 * secrets.randbelow(64)}".rpartition(".")
    ours, theirs = (f"{subnet[0]}.{int(subnet[2]) + host}" for host in (1, 2))
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode().strip()
        pytest.skip(f"needs network namespaces, e.g. a container with CAP_SYS_ADMIN: {why}")
    try:
        ip("link", "add", link, "type", "veth", "peer", "name", far, "netns", name)
        ip("addr", "add", f"{ours}/30", "dev", link)
        ip("link", "set", link, "up")
        ip("-n", name, "addr", "add", f"{theirs}/30", "dev", far)
        ip("-n", name, "link", "set", far, "up")
        ip("-n", name, "link", "set", "lo", "up")
        yield Island(name, link, ours)
    finally:
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", link)
        ip("netns", "del", name)


def last_step_of(jobs: Jobs, node: str) -> float:
    return max(event.t for event in jobs.events("step") if event.node == node)


def first_step_of(jobs: Jobs, node: str) -> float:
    return min(event.t for event in jobs.events("step") if event.node == node)


def steps_on(jobs: Jobs, node: str, more: int) -> None:
    """Wait until this node has made so many more steps."""
    made = sum(event.node == node for event in jobs.events("step"))
    jobs.wait_for("step", lambda event: event.node == node, count=made + more)


def test_a_whole_world_cut_off_stops_before_its_replacement_starts(
    island: Island, jobs: Jobs
) -> None:
    """Nobody is left who could refuse to go on with it: only its lease protects the job."""
    master = jobs.master(*QUICK, listen=f"{island.address}:0")
    options = ("--insecure", "--nnodes", "1", "--node-rank", "0", "--no-spares", STEPS)
    old = island.node(jobs, master, *options, name="old")
    steps_on(jobs, "old", 5)
    island.cut()
    new = jobs.node(master, *options, name="new")
    old.wait_line("the workers are held still")
    steps_on(jobs, "new", 5)
    assert last_step_of(jobs, "old") < first_step_of(jobs, "new")

    island.heal()
    assert old.wait() == 1
    assert "a newer agent has taken the place of node rank 0" in old.text
    jobs.finish()
    new.succeeds()
    master.succeeds()
    assert last_step_of(jobs, "old") < first_step_of(jobs, "new")
    assert {event.round for event in jobs.events("main") if event.node == "new"} == {2}
    jobs.expect_nothing_left()


def test_survivors_go_on_at_once_with_the_replacement(island: Island, jobs: Jobs) -> None:
    """A world that kept a node cannot be continued behind its back: no lease is waited for."""
    master = jobs.master(*PATIENT, listen=f"{island.address}:0")
    options = ("--insecure", "--nnodes", "2", "--no-spares", "--node-rank")
    stays = jobs.node(master, *options, "0", STEPS, name="stays")
    old = island.node(jobs, master, *options, "1", STEPS, name="old")
    steps_on(jobs, "old", 5)
    island.cut()
    new = jobs.node(master, *options, "1", STEPS, name="new")
    steps_on(jobs, "new", 5)
    assert last_step_of(jobs, "old") < first_step_of(jobs, "new")

    island.heal()
    assert old.wait() == 1
    assert "a newer agent has taken the place of node rank 1" in old.text
    jobs.finish()
    for command in (stays, new, master):
        command.succeeds()
    assert last_step_of(jobs, "old") < first_step_of(jobs, "new")
    jobs.expect_nothing_left()


def test_a_short_cut_changes_nothing(island: Island, jobs: Jobs) -> None:
    """Training does not need the master: a gap shorter than the silence is not even noticed."""
    master = jobs.master(*PATIENT, listen=f"{island.address}:0")
    options = ("--insecure", "--nnodes", "1", "--no-spares", STEPS)
    node = island.node(jobs, master, *options, name="node")
    steps_on(jobs, "node", 5)
    island.cut()
    steps_on(jobs, "node", 50)
    island.heal()
    steps_on(jobs, "node", 50)
    jobs.finish()
    node.succeeds()
    master.succeeds()
    assert len(jobs.events("main")) == 1
    assert "held still" not in node.text


def test_a_master_that_is_cut_off_alone_costs_nothing(island: Island, jobs: Jobs) -> None:
    """All nodes fall silent at once, for longer than a silence, and reach each other all the time:
    it is the master's network, so no node is lost and no worker starts again."""
    patience = ("--beat", "0.5", "--silence", "3", "--lease", "120")
    master = jobs.master("--http", "off", "--insecure", *patience, listen=f"{island.address}:0")
    options = ("--insecure", "--nnodes", "2", "--no-spares", "--node-rank")
    nodes = [island.node(jobs, master, *options, rank, STEPS, name=rank) for rank in "01"]
    steps_on(jobs, "1", 5)
    island.cut()
    master.wait_line("the master's own network may be down")
    island.heal()
    master.wait_line("is heard again")
    for rank in "01":
        steps_on(jobs, rank, 20)
    jobs.finish()
    for command in (*nodes, master):
        command.succeeds()
    assert "is lost" not in master.text
    assert len(jobs.events("main")) == 2
    jobs.expect_nothing_left()


def test_a_cut_off_node_comes_back_to_a_job_that_waited(island: Island, jobs: Jobs) -> None:
    """Given up for its silence and not replaced: it stops its workers and joins anew."""
    master = jobs.master(*QUICK, listen=f"{island.address}:0")
    options = ("--insecure", "--nnodes", "1", "--node-rank", "0", "--no-spares", STEPS)
    node = island.node(jobs, master, *options, name="node")
    steps_on(jobs, "node", 5)
    island.cut()
    master.wait_line("node rank 0 is lost")
    assert observe(master)["world"]["state"] != "running"
    island.heal()
    jobs.wait_for("step", lambda event: event.round == 2, count=5)
    ended = max(event.t for event in jobs.events("step") if event.round == 1)
    assert ended < min(event.t for event in jobs.events("main") if event.round == 2)
    jobs.finish()
    node.succeeds()
    master.succeeds()
    jobs.expect_nothing_left()
