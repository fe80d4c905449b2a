# SPDX-License-Identifier: Apache-2.0
"""A machine that fails under a job: the training goes on, and nothing that was saved is lost.

Every row of the table is one training of two nodes. While the fault lasts it makes steps, and a
worker is killed; then the fault ends. Every state that is loaded must be one that was saved, bit
for bit, of one step on all ranks, and not older than what all ranks had saved when the blow fell.
The job ends well, with its last step on storage.
"""

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.disks import small_disk
from tests.integration.control import observe
from tests.integration.faults import Disk, Switches, far_away
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Event, Jobs
from tests.waiting import until

VAULTED = str(SCRIPTS / "vaulted.py")
HOUR_S = 3600.0


@dataclass
class Machine:
    """Of one training."""

    folder: Path
    switches: Switches
    storage: Disk
    memory: Disk

    @property
    def state(self) -> Path:
        """Where the master's journal is."""
        return self.folder / "state"

    def mend(self) -> None:
        self.switches.clock(0.0)
        self.switches.eio(None)
        self.switches.no_locks(gone=False)
        for one in (self.storage, self.memory):
            one.clear()


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    begin: Callable[[Machine], None]
    ends_before_recovery: bool = False
    """The master cannot write down what it decides, so it decides nothing until this is over."""


FAULTS = {
    "the wall clock jumps ahead": Fault(lambda machine: machine.switches.clock(HOUR_S)),
    "the wall clock jumps back": Fault(lambda machine: machine.switches.clock(-HOUR_S)),
    "the storage gives EIO": Fault(lambda machine: machine.switches.eio(machine.storage.path)),
    "the storage is full": Fault(lambda machine: machine.storage.fill()),
    "the storage has no inodes": Fault(lambda machine: machine.storage.fill_inodes()),
    "the journal's disk gives EIO": Fault(
        lambda machine: machine.switches.eio(machine.state), ends_before_recovery=True
    ),
    "the memory is full": Fault(lambda machine: machine.memory.fill()),
    "the memory has no inodes": Fault(lambda machine: machine.memory.fill_inodes()),
    "the file systems lose their locks": Fault(
        lambda machine: machine.switches.no_locks(gone=True)
    ),
}


@pytest.fixture
def machine(jobs: Jobs, tmp_path: Path) -> Iterator[Machine]:
    size = "size=16m,nr_inodes=400"
    with (
        small_disk(tmp_path / "storage", size) as storage,
        small_disk(tmp_path / "memory", size) as memory,
    ):
        yield Machine(jobs.folder, Switches(tmp_path), Disk(storage), Disk(memory))


@pytest.mark.parametrize("name", FAULTS)
def test_training_outlives(machine: Machine, jobs: Jobs, name: str) -> None:
    fault = FAULTS[name]
    job = start(machine, jobs)
    world = jobs.wait_world(2, steps=6)
    until(lambda: committed(machine), LIMIT_S, "a checkpoint on storage")
    fault.begin(machine)
    goes_on(jobs)
    floor = saved_by_all(jobs)
    os.kill(world[1].pid, signal.SIGKILL)
    if fault.ends_before_recovery:
        machine.mend()
    jobs.wait_world(2, after=world, steps=6)
    machine.mend()
    before = committed(machine)
    until(lambda: committed(machine) > before, LIMIT_S, "a newer checkpoint on storage")
    jobs.finish()
    job.succeeds()
    check_loads(jobs, after=world[0].round, floor=floor)
    assert committed(machine) == max(event.step for event in jobs.events("saved"))
    jobs.expect_nothing_left()


def test_a_master_that_comes_back_with_another_wall_clock_counts_no_more_time(
    jobs: Jobs, tmp_path: Path
) -> None:
    """It is killed and comes back twice: an hour ahead, and right again."""
    switches = Switches(tmp_path)
    master = jobs.master("--http", "off", **switches.env)
    node = jobs.node(master, "--nproc-per-node", "2", "--no-spares", str(SCRIPTS / "awaits.py"))
    jobs.wait_for("awaits")
    for ahead_s in (HOUR_S, 0.0):
        before = observe(master)
        master.kill()
        switches.clock(ahead_s)
        master = jobs.master("--http", "off", listen=master.address, **switches.env)
        master.wait_line("came back")
        after = observe(master)
        assert before["time_s"] <= after["time_s"] < HOUR_S / 2
        assert sum(after["progress"]["seconds"].values()) < HOUR_S / 2
    jobs.finish()
    node.succeeds()
    master.succeeds()


def start(machine: Machine, jobs: Jobs) -> Command:
    return jobs.run(
        *("--local-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "50"),
        *("--job", "faults", "--state", str(machine.state)),
        VAULTED,
        VAULT_DIRECTORY=str(machine.storage.path / "saves"),
        # Not more often than a storage that fails is given up: two steps that wait for it leave
        # one slot in memory, and the training would wait with them.
        VAULT_EVERY="50",
        VAULT_SLOTS="3",
        VAULT_KEEP="3",
        VAULT_REPLICAS="1",
        HOLDFAST_MEMORY_DIR=str(machine.memory.path),
        **machine.switches.env,
    )


def goes_on(jobs: Jobs, steps: int = 10) -> None:
    """Wait until all ranks have made so many more steps."""
    reached = max(event.step for event in jobs.steps())
    jobs.wait_for("step", lambda event: event.step >= reached + steps, count=2)


def committed(machine: Machine) -> int:
    """The newest step on storage."""
    manifests = (machine.storage.path / "saves").glob("step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in manifests), default=0)


def saved_by_all(jobs: Jobs) -> int:
    newest: dict[int, int] = {}
    for event in jobs.events("saved"):
        newest[event.rank] = max(event.step, newest.get(event.rank, 0))
    return min(newest.values())


def check_loads(jobs: Jobs, *, after: int, floor: int) -> None:
    saved = {(event.step, event.rank, event.state) for event in jobs.events("saves")}
    loads: dict[int, list[Event]] = {}
    for event in jobs.events("loaded"):
        if event.round > after:
            loads.setdefault(event.round, []).append(event)
            assert (event.step, event.rank, event.state) in saved, f"{event}\n{jobs.story()}"
    assert loads
    for of_round in loads.values():
        assert len({event.step for event in of_round}) == 1, of_round
        assert min(event.step for event in of_round) >= floor, jobs.story()


def test_training_goes_on_over_a_bad_line(jobs: Jobs) -> None:
    """0.2 s there and back, and 5 % of the packets are lost, in both directions."""
    with far_away(late_s=0.1, lost=0.05) as (island, address):
        master = jobs.master("--http", "off", "--insecure", listen=f"{address}:0")
        options = ("--insecure", "--nnodes", "2", "--max-restarts", "50", VAULTED)
        env = {
            "VAULT_DIRECTORY": str(jobs.folder / "saves"),
            "VAULT_EVERY": "5",
            "VAULT_SLOTS": "3",
            "VAULT_SIZE": "20000",
            "VAULT_REPLICAS": "1",
        }
        here = jobs.node(master, *options, name="here", **env)
        prefix = ("ip", "netns", "exec", island)
        there = jobs.node(master, *options, name="there", prefix=prefix, **env)
        world = jobs.wait_world(2, steps=6)
        floor = saved_by_all(jobs)
        os.kill(world[1].pid, signal.SIGKILL)
        jobs.wait_world(2, after=world, steps=6)
        jobs.finish()
        for command in (here, there, master):
            command.succeeds()
        check_loads(jobs, after=world[0].round, floor=floor - 1)
        # No node was given up: a late beat is no death.
        assert {event.round for event in jobs.events("main")} == {1, 2}
        jobs.expect_nothing_left()


@contextmanager
def few_processes(limit: int) -> Iterator[Path]:
    """A control group that holds so many processes and threads at most."""
    for root in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        group = root / f"holdfast-{secrets.token_hex(4)}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "pids.max").exists():
                (group / "pids.max").write_text(str(limit))
                yield group
                return
        finally:
            until(partial(is_empty, group), LIMIT_S, "an empty group")
            group.rmdir()
    pytest.skip("needs a control group with pids.max: run the tests as root, with /sys/fs/cgroup")


def is_empty(group: Path) -> bool:
    return not (group / "cgroup.procs").read_text()


def test_a_worker_that_multiplies_until_it_may_not_leaves_nothing(jobs: Jobs) -> None:
    """The processes take every place that the job has. It can start none until they are gone."""
    with few_processes(120) as group:
        join = f'echo $$ > "{group}/cgroup.procs"; exec "$@"'
        job = jobs.run(
            *("--nproc-per-node", "2", "--max-restarts", "5"),
            str(SCRIPTS / "multiplies.py"),
            prefix=("sh", "-c", join, "sh"),
        )
        first = jobs.wait_world(2, steps=4)
        jobs.wait_for("multiplied")
        jobs.wait_world(2, after=first, steps=6)
        assert int((jobs.folder / "children").read_text()) > 10
        jobs.finish()
        job.succeeds()
        jobs.expect_nothing_left()
