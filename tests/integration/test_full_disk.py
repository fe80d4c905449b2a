# SPDX-License-Identifier: Apache-2.0
"""A journal without room: nothing is decided for the outside meanwhile, and nothing ends."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from holdfast.core.kernel import Command, Core, Event, Outcome, Record
from holdfast.model.errors import DiskFullError
from holdfast.runtime import loop as runtime_loop
from holdfast.runtime.journal import SqliteJournal
from holdfast.runtime.loop import Driver
from holdfast.runtime.observe import Level
from holdfast.worker.progress import CELL_BYTES, ProgressCell
from tests.disks import filled, small_disk
from tests.integration.jobs import SCRIPTS, Jobs

STEPS = str(SCRIPTS / "steps.py")
WAIT_S = 60.0


class Asked(Event):
    """Something that needs a record."""


class Decided(Event):
    """What follows from it, for people."""


class Answer(Command):
    """What follows from it, for others."""


class Note(Record, frozen=True):
    """Some bytes."""


class Notary:
    """A machine that writes everything down."""

    OWNS = (Note,)

    def handle(self, event: Event, now: float) -> Outcome:
        return Outcome(facts=[Decided()], records=[Note()], commands=[Answer()])

    def apply(self, record: Record) -> None:
        pass

    def snapshot(self) -> Iterable[Record]:
        yield Note()

    def deadline(self) -> float | None:
        return None

    def validate(self) -> None:
        pass


class Desk:
    """A driver with a real journal, and what came out of it."""

    def __init__(self, directory: Path) -> None:
        self.journal = SqliteJournal.open(directory, job="j")
        self.out: list[str] = []
        self.failures: list[Exception] = []
        self.said: asyncio.Queue[str] = asyncio.Queue()
        notary = Notary()
        core = Core([notary])
        core.route(Asked, notary)
        core.route(Decided)
        self.driver = Driver(
            core=core,
            journal=self.journal,
            clock=lambda: 0.0,
            wall=lambda: 0.0,
            encode=lambda record: bytes(5000),
            execute=lambda command: self.out.append(type(command).__name__),
            observe=lambda event, now: self.out.append(type(event).__name__),
            failed=self.failures.append,
            say=lambda text, level=Level.INFO: self.said.put_nowait(str(text)),
        )

    async def hear(self) -> str:
        return await asyncio.wait_for(self.said.get(), WAIT_S)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        yield disk


STEP = ["Asked", "Decided", "Answer"]


def test_nothing_leaves_and_no_one_is_told_before_there_is_room(disk: Path) -> None:
    async def scene() -> None:
        desk = Desk(disk / "state")
        with closing(desk.journal):
            desk.driver.feed(Asked())
            await desk.driver.drain()
            assert desk.out == STEP
            with filled(disk):
                desk.driver.feed(Asked())
                assert "is full; free some space" in await desk.hear()
                desk.driver.feed(Asked())
                desk.driver.follow(Answer())
                assert desk.out == STEP
            assert "there is room in the journal again" in await desk.hear()
            await asyncio.wait_for(desk.driver.drain(), WAIT_S)
            assert desk.out == [*STEP * 3, "Answer"]
            assert len(desk.journal.load()) == 3
            assert desk.failures == []

    asyncio.run(scene())


def test_a_master_that_is_to_end_waits_only_for_a_moment(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_loop, "FULL_AT_THE_END_S", 0.0)

    async def scene() -> None:
        desk = Desk(disk / "state")
        with closing(desk.journal), filled(disk):
            desk.driver.feed(Asked())
            await desk.hear()
            desk.driver.limit_patience()
            await asyncio.wait_for(desk.driver.drain(), WAIT_S)
            assert [type(failure) for failure in desk.failures] == [DiskFullError]
            assert desk.out == []

    asyncio.run(scene())


OPENS = """import sys
from holdfast.worker.progress import CELL_BYTES, ProgressCell
ProgressCell.open(sys.argv[1]).advance(5.0)
"""


@pytest.mark.parametrize("folder", ["full", "not there"])
def test_a_progress_cell_needs_no_room(disk: Path, folder: str) -> None:
    """A worker opens it by its path, and both see the same memory."""
    with filled(disk):
        path = disk / "cell" if folder == "full" else disk / "none" / "cell"
        cell = ProgressCell.create(str(path))
        subprocess.run([sys.executable, "-c", OPENS, cell.path], check=True, timeout=WAIT_S)
        assert cell.read().last_step_at == 5.0
        assert cell.read().reported_step == -1
        assert not path.exists()
        cell.close()


def test_what_is_no_progress_cell_is_not_written_to(tmp_path: Path) -> None:
    """The path of a cell in memory has the number of a descriptor, which may be given again."""
    other = tmp_path / "other"
    other.write_bytes(b"x" * (CELL_BYTES + 1))
    with pytest.raises(OSError, match="not the progress of a worker"):
        ProgressCell.open(str(other))
    assert other.read_bytes() == b"x" * (CELL_BYTES + 1)


def test_what_workers_print_in_vain_is_said_once(jobs: Jobs) -> None:
    """Also where their files can be made, but not a byte written."""
    with small_disk(jobs.folder / "logs", "size=1m,nr_inodes=1000") as logs, filled(logs):
        script = jobs.write("prints.py", "import sys; print('x' * 10000, file=sys.stderr)")
        job = jobs.run("--log-dir", str(logs), "--nproc-per-node", "2", script)
        job.succeeds()
        assert job.count("what the workers print is not kept: .*No space left on device") == 1


@pytest.mark.parametrize("killed", [False, True], ids=["", "and the master is killed meanwhile"])
def test_a_job_outlives_a_full_disk(jobs: Jobs, killed: bool) -> None:
    with ExitStack() as mounts:
        disk = mounts.enter_context(small_disk(jobs.folder / "disk", "size=3m"))
        mounts.callback(jobs.kill_all)
        job = jobs.run("--state", str(disk / "state"), "--nproc-per-node", "2", STEPS)
        before = jobs.wait_world(2)
        with filled(disk):
            psutil.Process(before[0].pid).kill()
            job.wait_line("is full; free some space: until then the master decides nothing")
            if killed:
                (master,) = jobs.running("master")
                master.kill()
                job.wait_line("is full; free some space: until then", after=1)
            assert job.count("round 2:") == 0
        job.wait_line("there is room in the journal again")
        jobs.wait_world(2, after=before)
        jobs.finish()
        job.succeeds()
        jobs.expect_nothing_left()


def test_a_master_that_breaks_off_is_started_again_in_place(jobs: Jobs) -> None:
    """Its disk refuses to write; that of the next master does not."""
    job = jobs.run("--nproc-per-node", "2", STEPS)
    before = jobs.wait_world(2)
    (master,) = jobs.running("master")
    resource.prlimit(master.pid, resource.RLIMIT_FSIZE, (1, 1))
    psutil.Process(before[0].pid).kill()
    job.wait_line("the master was ended: .*; starting it again")
    jobs.wait_world(2, after=before)
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()
