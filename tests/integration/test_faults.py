# SPDX-License-Identifier: Apache-2.0
"""A machine that fails under a job: the training goes on, and nothing that was saved is lost.

Every row of the table is one training of two nodes. While the fault lasts it makes steps, and a
worker, or a node, is killed; then the fault ends. Every state that is loaded must be one that was
saved, bit for bit, of one step on all ranks, and not older than what all ranks had saved when the
blow fell. The workers also draw numbers from the master, all the time: none is given twice, so no
acknowledged change was lost; and the journal tells one story from the first entry to the last.
The job ends well, with its last step on storage.
"""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.disks import small_disk
from tests.integration.control import observe
from tests.integration.faults import Disk, Switches, far_away
from tests.integration.jobs import LIMIT_S, SCRIPTS, Command, Event, Jobs
from tests.integration.journals import check_journal
from tests.waiting import until

VAULTED = str(SCRIPTS / "vaulted.py")
HOUR_S = 3600.0
EVERY = 50
"""Steps between two that go to storage."""


@dataclass
class Machine:
    """Of one training."""

    switches: Switches
    states: Disk
    storage: Disk
    memory: Disk
    logs: Disk
    held: ExitStack

    @property
    def state(self) -> Path:
        """Where the master's journal is."""
        return self.states.path / "state"

    def fill_inodes_of_state(self) -> None:
        """So that also the end of a node, whose birth is forgotten then, leaves none."""
        for birth in (self.state / "nodes").iterdir():
            self.held.enter_context(birth.open())
        self.states.fill_inodes()

    def mend(self) -> None:
        self.held.close()
        self.switches.clock(0.0)
        self.switches.eio(None)
        self.switches.no_locks(None)
        for one in (self.states, self.storage, self.memory, self.logs):
            one.clear()


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    begin: Callable[[Machine], None]
    ends_before_recovery: bool = False
    """The master cannot write down what it decides, so it decides nothing until this is over."""
    acts: str = ""
    """What of `Switches.acted` must have happened."""
    blocks_commits: bool = False
    """Nothing can be brought to storage before this is over."""
    kills_master: bool = False
    """The next one finds its state out of reach, and comes back when the fault is over."""
    kills_node: bool = False
    """With its agent, instead of a worker alone."""
    says: str = ""
    """What people read before the fault is over."""


FAULTS = {
    "the wall clock jumps ahead": Fault(
        lambda machine: machine.switches.clock(HOUR_S), acts="clock"
    ),
    "the wall clock jumps back": Fault(
        lambda machine: machine.switches.clock(-HOUR_S), acts="clock"
    ),
    "the storage gives EIO": Fault(
        lambda machine: machine.switches.eio(machine.storage.path), acts="eio", blocks_commits=True
    ),
    "the storage is full": Fault(lambda machine: machine.storage.fill(), blocks_commits=True),
    "the storage has no inodes": Fault(
        lambda machine: machine.storage.fill_inodes(), blocks_commits=True
    ),
    "the journal's disk gives EIO": Fault(
        lambda machine: machine.switches.eio(machine.state),
        acts="eio",
        ends_before_recovery=True,
    ),
    "the state is full, node killed": Fault(
        lambda machine: machine.states.fill(),
        ends_before_recovery=True,
        kills_node=True,
        says="is full; free some space",
    ),
    # Its journal has room, so the master orders another node, and can note no start.
    "the state has no inodes, node killed": Fault(
        lambda machine: machine.fill_inodes_of_state(),
        ends_before_recovery=True,
        kills_node=True,
        says="takes no note of it now",
    ),
    "the memory is full": Fault(lambda machine: machine.memory.fill()),
    "the memory has no inodes": Fault(lambda machine: machine.memory.fill_inodes()),
    "the log folder is full": Fault(lambda machine: machine.logs.fill()),
    "the log folder has no inodes": Fault(lambda machine: machine.logs.fill_inodes()),
    # Of a job that runs all locks are taken: only a new master asks for one.
    "locks gone, master killed": Fault(
        lambda machine: machine.switches.no_locks(machine.state),
        acts="locks",
        ends_before_recovery=True,
        kills_master=True,
    ),
    "EIO, master killed": Fault(
        lambda machine: machine.switches.eio(machine.state),
        acts="eio",
        ends_before_recovery=True,
        kills_master=True,
    ),
}


@pytest.fixture
def machine(jobs: Jobs, tmp_path: Path) -> Iterator[Machine]:
    size = "size=16m,nr_inodes=400"
    with (
        small_disk(tmp_path / "states", size) as states,
        small_disk(tmp_path / "storage", size) as storage,
        small_disk(tmp_path / "memory", size) as memory,
        small_disk(tmp_path / "logs", size) as logs,
        ExitStack() as held,
    ):
        disks = map(Disk, (states, storage, memory, logs))
        yield Machine(Switches(tmp_path), *disks, held)


@pytest.mark.parametrize("name", FAULTS)
def test_training_outlives(machine: Machine, jobs: Jobs, name: str) -> None:
    fault = FAULTS[name]
    job = start(machine, jobs)
    world = jobs.wait_world(2, steps=6)
    newest = begin_between(machine, jobs, job, fault)
    # One of so many steps should go to storage.
    goes_on(jobs, steps=EVERY if fault.blocks_commits else 10)
    if fault.kills_master:
        # One whose journal gave EIO meanwhile, at a number that a worker drew, has ended by itself.
        for master in jobs.running("master"):
            with suppress(psutil.NoSuchProcess):
                master.kill()
        job.wait_line("starting it again until it can use its state")
        goes_on(jobs)
    floor = saved_by_all(jobs)
    os.kill(world[1].agent if fault.kills_node else world[1].pid, signal.SIGKILL)
    if fault.says:
        job.wait_line(fault.says)
    if fault.ends_before_recovery:
        machine.mend()
    jobs.wait_world(2, after=world, steps=6)
    until(lambda: len(jobs.agents()) == 2, LIMIT_S, "one agent for each node")
    before, mended_at = committed(machine), time.monotonic()
    if fault.blocks_commits:
        assert before == newest, jobs.story()
        # The training did not wait until a storage that fails was given up.
        assert not job.count("did not reach"), jobs.story()
    machine.mend()
    assert not fault.acts or machine.switches.acted()[fault.acts] > 0
    until(lambda: committed(machine) > before, LIMIT_S, "a newer checkpoint on storage")
    jobs.finish()
    job.succeeds()
    # Tried again and again, and said once.
    assert job.count("starting it again until") <= 1
    check_loads(jobs, after=world[0].round, floor=floor)
    check_drawn(jobs, since=mended_at)
    assert committed(machine) == max(event.step for event in jobs.events("saved"))
    check_journal(machine.state)
    jobs.expect_nothing_left()


def test_training_goes_on_where_the_memory_never_had_locks(machine: Machine, jobs: Jobs) -> None:
    """No agent can own a folder there: what is due on storage goes through the disk."""
    machine.switches.no_locks(machine.memory.path)
    job = start(machine, jobs, VAULT_MAY_LACK="1", VAULT_REPLICAS="0", VAULT_EVERY="10")
    world = jobs.wait_world(2, steps=6)
    job.wait_line("no checkpoint can be kept in memory.*[Nn]o locks")
    until(lambda: committed(machine) > 0, LIMIT_S, "a checkpoint on storage")
    floor = committed(machine)
    os.kill(world[1].agent, signal.SIGKILL)
    jobs.wait_world(2, after=world, steps=6)
    until(lambda: committed(machine) > floor, LIMIT_S, "a newer checkpoint on storage")
    assert machine.switches.acted()["locks"] > 0
    mended_at = time.monotonic()
    until(lambda: drawn_since(jobs, mended_at) == {0, 1}, LIMIT_S, "numbers of both ranks")
    jobs.finish()
    job.succeeds()
    check_loads(jobs, after=world[0].round, floor=floor)
    check_drawn(jobs, since=mended_at)
    check_journal(machine.state)
    jobs.expect_nothing_left()


def test_a_state_that_never_had_locks_is_refused_with_a_way_out(
    machine: Machine, jobs: Jobs
) -> None:
    """Two masters at once could not be told from one there."""
    machine.switches.no_locks(machine.states.path)
    job = start(machine, jobs)
    assert job.wait() == 1
    assert "its file system has no locks" in job.text
    assert "choose a state directory on another one" in job.text
    assert not jobs.events()
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


def start(machine: Machine, jobs: Jobs, **more: str) -> Command:
    env = {
        "VAULT_DIRECTORY": str(machine.storage.path / "saves"),
        "VAULT_EVERY": str(EVERY),
        "VAULT_SLOTS": "3",
        "VAULT_KEEP": "3",
        "VAULT_REPLICAS": "1",
        "VAULT_COUNTS": "1",
        "HOLDFAST_MEMORY_DIR": str(machine.memory.path),
        **machine.switches.env,
        **more,
    }
    return jobs.run(
        *("--local-nodes", "2", "--nproc-per-node", "1", "--max-restarts", "50"),
        *("--job", "faults", "--state", str(machine.state)),
        *("--log-dir", str(machine.logs.path)),
        VAULTED,
        **env,
    )


def goes_on(jobs: Jobs, steps: int = 10) -> None:
    """Wait until all ranks have made so many more steps."""
    reached = max(event.step for event in jobs.steps())
    jobs.wait_for("step", lambda event: event.step >= reached + steps, count=2)


def begin_between(machine: Machine, jobs: Jobs, job: Command, fault: Fault) -> int:
    """Begin it while nothing goes to storage; returns the newest step there."""
    while True:
        until(
            lambda: is_between(machine, jobs, job), LIMIT_S, "a checkpoint on storage, and none due"
        )
        before = committed(machine)
        fault.begin(machine)
        if committed(machine) == before:
            return before
        machine.mend()  # Beginning it took longer than the steps that were left.


def is_between(machine: Machine, jobs: Jobs, job: Command) -> bool:
    """Whether the last step that is due is on storage, and the next is not yet near.

    The master has said so: its name is there before the commit has come to its end.
    """
    step = max(event.step for event in jobs.steps())
    due = step - step % EVERY
    is_there = committed(machine) == due > 0 and job.count(f"step {due} is committed") > 0
    return is_there and step % EVERY < EVERY / 2


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


def check_drawn(jobs: Jobs, *, since: float) -> None:
    """Where an acknowledged change is lost, the next that draws a number gets one a second time."""
    drawn = jobs.events("drawn")
    numbers = [event.step for event in drawn]
    assert len(set(numbers)) == len(numbers)
    assert {event.rank for event in drawn if event.t < since} == {0, 1}
    assert drawn_since(jobs, since) == {0, 1}


def drawn_since(jobs: Jobs, since: float) -> set[int]:
    """The ranks that were given a number after this moment."""
    return {event.rank for event in jobs.events("drawn") if event.t > since}


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
            "VAULT_COUNTS": "1",
        }
        here = jobs.node(master, *options, name="here", **env)
        prefix = ("ip", "netns", "exec", island)
        there = jobs.node(master, *options, name="there", prefix=prefix, **env)
        world = jobs.wait_world(2, steps=6)
        floor = saved_by_all(jobs)
        os.kill(world[1].pid, signal.SIGKILL)
        again = jobs.wait_world(2, after=world, steps=6)
        killed_at = again[0].t
        until(lambda: drawn_since(jobs, killed_at) == {0, 1}, LIMIT_S, "numbers of both ranks")
        jobs.finish()
        for command in (here, there, master):
            command.succeeds()
        # One step older: where one slot is on its way to storage and one on its way over this line,
        # a rank may write over the newest before the other has saved the same step.
        check_loads(jobs, after=world[0].round, floor=floor - 1)
        check_drawn(jobs, since=killed_at)
        check_journal(jobs.folder / "state")
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
            *(
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "5",
                "--state",
                str(jobs.folder / "state"),
            ),
            VAULTED,
            prefix=("sh", "-c", join, "sh"),
            VAULT_DIRECTORY=str(jobs.folder / "saves"),
            VAULT_MULTIPLIES="1",
            VAULT_COUNTS="1",
        )
        first = jobs.wait_world(2, steps=4)
        jobs.wait_for("multiplied")
        floor = saved_by_all(jobs)
        again = jobs.wait_world(2, after=first, steps=6)
        assert int((jobs.folder / "children").read_text()) > 10
        until(lambda: drawn_since(jobs, again[0].t) == {0, 1}, LIMIT_S, "numbers of both ranks")
        jobs.finish()
        job.succeeds()
        check_loads(jobs, after=first[0].round, floor=floor)
        check_drawn(jobs, since=again[0].t)
        check_journal(jobs.folder / "state")
        jobs.expect_nothing_left()
