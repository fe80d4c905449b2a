# SPDX-License-Identifier: Apache-2.0
"""What a vault does when it is told, and what it tells the master of copies that cannot be used."""

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.agent.vault import storage as storage_module
from holdfast.checkpoint.manifest import MANIFEST, list_committed
from holdfast.checkpoint.owner import GONE_S, Claim
from holdfast.checkpoint.posix import PosixReader, PosixStorage
from holdfast.checkpoint.slots import Slot
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.verify import verify_checkpoint
from holdfast.model.checkpoint import NONE, Series, Version, rank_part
from holdfast.model.errors import FencedError, RejectedError
from holdfast.protocol import checkpoints as c
from holdfast.protocol import messages as m
from tests.disks import remove_slots
from tests.integration.vault_node import SHAPE, Node, node
from tests.storages import Failing, Later, make_state, order_for, save
from tests.waiting import until

LIMIT_S = 120.0
FIRST, SECOND = rank_part(0), rank_part(1)
VERSION = Version(0, 1)
NOTE = ".holdfast/owner.json"
Run = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(memory))
    return asyncio.run


def test_a_node_that_writes_gets_the_parts_of_a_lost_node_as_well(tmp_path: Path, run: Run) -> None:
    """Found by the simulator: a second order in an attempt was taken for a repeat of the first, and
    nothing reached storage for an hour."""
    directory = f"{tmp_path}/checkpoints"

    def order(part: str) -> c.PersistOrder:
        return c.PersistOrder(directory, VERSION, SHAPE, "t1", (part,), "a node was lost")

    async def orders() -> None:
        async with node(tmp_path, directory) as here:
            for rank in (0, 1):
                await here.save(rank, 1, None)
            here.vault.pushed(order(FIRST))
            await here.master.hears(c.PartsPersisted, 1)
            # Its report is held until the attempt is over: it is still writing.
            here.vault.pushed(order(SECOND))
            reports = await here.master.hears(c.PartsPersisted, 2)
            assert [(r.attempt, r.parts, r.problem) for r in reports] == [
                ("t1", (FIRST,), ""),
                ("t1", (SECOND,), ""),
            ]
            # A stream broke: what is sent again is not written again.
            here.vault.pushed(order(FIRST))
            here.vault.pushed(order(SECOND))
            series = Series(directory)
            files = tuple(file for report in reports for file in report.files)
            here.vault.pushed(order_for(series, VERSION, "t1", files))
            (done,) = await here.master.hears(c.CommitDone, 1)
            assert done.problem == ""
            here.master.answer(done, m.Done())
            for report in reports:
                here.master.answer(report, c.PersistState(VERSION, ""))
            await here.vault.settle(LIMIT_S)
            assert here.vault.is_idle
            assert len(here.master.said(c.PartsPersisted)) == 2
            storage = open_storage(directory)
            (committed,) = list_committed(storage, series)
            assert verify_checkpoint(storage, committed).is_whole

    run(orders())


async def persisted(here: Node, attempt: str, step: int = 1, count: int = 1) -> c.CommitOrder:
    """Both parts are on storage; the order to commit them, which is this test's `count`-th."""
    version, both = Version(0, step), (FIRST, SECOND)
    for rank in (0, 1):
        await here.save(rank, step, None)
    here.vault.pushed(c.PersistOrder(here.directory, version, SHAPE, attempt, both, "a test"))
    report = (await here.master.hears(c.PartsPersisted, count))[-1]
    return order_for(Series(here.directory), version, attempt, report.files)


def test_a_node_that_was_given_up_commits_nothing(tmp_path: Path, run: Run) -> None:
    """Its orders are void: another node may be at it."""
    directory = f"{tmp_path}/checkpoints"

    async def orders() -> None:
        async with node(tmp_path, directory) as here:
            order = await persisted(here, "t1")
            here.vault.pushed(order)
            here.vault.given_up()
            (done,) = await here.master.hears(c.CommitDone, 1)
            assert done.problem == "the master has given this node up"
            assert list_committed(open_storage(directory), Series(directory)) == []
            here.master.answer(done, m.Done())
            # What it is told under its new number is its business again, of another attempt.
            here.vault.pushed(replace(order, attempt="t2"))
            (_, done) = await here.master.hears(c.CommitDone, 2)
            assert "is missing" in done.problem

    run(orders())


def test_a_node_whose_lease_is_over_commits_nothing(tmp_path: Path, run: Run) -> None:
    """Threads may go on before the event loop has noticed that the process stood still."""
    directory = f"{tmp_path}/checkpoints"

    async def orders() -> None:
        async with node(tmp_path, directory) as here:
            here.vault.leased(time.monotonic() - 1)
            order = await persisted(here, "t1")
            here.vault.pushed(order)
            (done,) = await here.master.hears(c.CommitDone, 1)
            assert done.problem == "the master has not answered for the whole lease"
            assert list_committed(open_storage(directory), Series(directory)) == []
            assert open_storage(directory).get(NOTE) is None

    run(orders())


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_node_that_is_given_up_after_its_commit_removes_nothing(
    tmp_path: Path, run: Run, is_given_up: bool
) -> None:
    """Another goes on from what is there, and has attempts of its own."""
    directory = f"{tmp_path}/checkpoints"
    storage, series = PosixStorage(directory), Series(directory)
    save(storage, series, Version(0, 0), make_state(3), "t0", tmp_path)
    dead = Path(directory, ".holdfast", "dead")
    dead.mkdir()
    os.utime(dead, (0, 0))

    async def orders() -> None:
        async with node(tmp_path, directory, keep_last=1) as here:
            here.vault.pushed(await persisted(here, "t1"))
            (done,) = await here.master.hears(c.CommitDone, 1)
            assert done.problem == ""
            if is_given_up:
                here.vault.given_up()
            here.master.answer(done, m.Done())
            (report,) = here.master.said(c.PartsPersisted)
            here.master.answer(report, c.PersistState(VERSION, ""))
            await here.vault.settle(LIMIT_S)
            assert here.vault.is_idle
            steps = [one.version.step for one in list_committed(storage, series)]
            assert (steps, dead.exists()) == (([1, 0], True) if is_given_up else ([1], False))

    run(orders())


def test_a_node_whose_lease_is_over_removes_no_step(tmp_path: Path, run: Run) -> None:
    directory = f"{tmp_path}/checkpoints"
    storage, series = PosixStorage(directory), Series(directory)
    for step in (2, 3, 4):
        save(storage, series, Version(0, step), make_state(3), f"t{step}", tmp_path)

    async def orders() -> None:
        async with node(tmp_path, directory) as here:
            await persisted(here, "t1")  # The directory is this job's.
            await asyncio.to_thread(here.workers[0].remove, (2,))
            here.vault.leased(time.monotonic() - 1)
            with pytest.raises(FencedError, match="for the whole lease"):
                await asyncio.to_thread(here.workers[0].remove, (3,))
            assert [one.version.step for one in list_committed(storage, series)] == [4, 3]

    run(orders())


class Looked(PosixStorage):
    """Counts the looks at the note of whose directory it is."""

    looks = 0

    def get(self, path: str) -> bytes | None:
        self.looks += path == NOTE
        return super().get(path)


def test_a_node_whose_lease_is_over_does_not_say_whose_the_directory_is(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = f"{tmp_path}/checkpoints"
    monkeypatch.setattr(storage_module, "RENEW_S", 0.01)
    storage, plain = Looked(directory), PosixStorage(directory)

    async def looks(more: int) -> None:
        """It looks before each time that it would write."""
        wanted = storage.looks + more
        await asyncio.to_thread(until, lambda: storage.looks >= wanted, LIMIT_S)

    async def orders() -> None:
        async with node(tmp_path, directory, open_storage=lambda _: storage) as here:
            await persisted(here, "t1")
            first = plain.get(NOTE)
            await looks(2)
            assert plain.get(NOTE) != first
            here.vault.leased(time.monotonic() - 1)
            await looks(2)  # One may have been on its way.
            last = plain.get(NOTE)
            await looks(3)
            assert plain.get(NOTE) == last

    run(orders())


class Standing(PosixStorage):
    """Stands still in a commit, when it looks at what was written for the attempt."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self.is_there, self.goes_on = threading.Event(), threading.Event()

    def files(self, path: str) -> dict[str, int]:
        if path.startswith(".holdfast/t1"):
            self.is_there.set()
            assert self.goes_on.wait(LIMIT_S)
        return super().files(path)


def test_a_commit_goes_no_further_when_the_agent_has_ended(tmp_path: Path, run: Run) -> None:
    """Its thread lives until the process does; the next agent may be at work by then."""
    directory = f"{tmp_path}/checkpoints"
    storage = Standing(directory)

    def content() -> list[str]:
        return sorted(str(path) for path in Path(directory).rglob("*"))

    def is_over() -> bool:
        return not any(thread.name.startswith("vault") for thread in threading.enumerate())

    async def orders() -> None:
        async with node(tmp_path, directory, open_storage=lambda _: storage) as here:
            here.vault.pushed(await persisted(here, "t1"))
            await asyncio.to_thread(storage.is_there.wait, LIMIT_S)

    run(orders())
    before = content()
    assert storage.is_there.is_set()
    assert not is_over()
    storage.goes_on.set()
    until(is_over, LIMIT_S)
    assert content() == before


def test_a_node_that_begins_to_write_mends_what_a_dead_one_has_left(
    tmp_path: Path, run: Run
) -> None:
    """It died between two renames: the tracker named a directory that was not there."""
    directory = f"{tmp_path}/checkpoints"
    storage, series = PosixStorage(directory), Series(directory)
    save(storage, series, Version(0, 0), make_state(3), "t0", tmp_path)
    name = storage.get("latest")
    assert name is not None
    storage.rename(name.decode(), f"{name.decode()}~0123456789abcdef")

    async def orders() -> None:
        async with node(tmp_path, directory) as here:
            await persisted(here, "t1")
            assert storage.get("latest") == name
            (committed,) = list_committed(storage, series)
            assert committed.name == name.decode()

    run(orders())


def test_a_storage_that_fails_is_said_once(tmp_path: Path, run: Run) -> None:
    """Until patience is over, newer steps may supersede each other without a word about it."""
    directory = f"{tmp_path}/checkpoints"

    async def orders() -> None:
        async with node(
            tmp_path, directory, open_storage=partial(Failing, code=errno.EIO, times=2)
        ) as here:
            await persisted(here, "t1")
            (said,) = [line for line in here.said if "Input/output error" in line]
            assert said.endswith("it is tried again")

    run(orders())


class Refusing(PosixStorage):
    """Takes every part and, as long as there is an error left, no manifest."""

    def __init__(self, directory: str, codes: list[int]) -> None:
        super().__init__(directory)
        self._codes = codes

    def put(self, path: str, content: bytes) -> None:
        if path.endswith(MANIFEST) and self._codes and (code := self._codes.pop(0)):
            raise OSError(code, os.strerror(code), path)
        super().put(path, content)


def test_a_storage_on_which_only_commits_fail_is_said_once_until_one_is_done(
    tmp_path: Path, run: Run
) -> None:
    directory = f"{tmp_path}/checkpoints"
    twice = [errno.EIO, errno.EROFS, errno.EIO, errno.EROFS]
    codes = [*twice, 0, errno.EIO]

    async def orders() -> None:
        async with node(tmp_path, directory, open_storage=partial(Refusing, codes=codes)) as here:

            def said() -> int:
                return sum(line.endswith("it is tried again") for line in here.said)

            for number, (step, problem, count) in enumerate(
                [
                    (1, "Read-only file system", 1),
                    (1, "Read-only file system", 1),
                    (1, "", 1),
                    (2, "", 2),
                ]
            ):
                order = await persisted(here, f"t{number}", step, number + 1)
                here.vault.pushed(order)
                done = (await here.master.hears(c.CommitDone, number + 1))[-1]
                assert problem in done.problem
                assert bool(done.problem) == bool(problem)
                here.master.answer(done, m.Done())
                assert said() == count

    run(orders())


class Shared(PosixStorage):
    """A directory in which another job is at work: its note is a new one at every look."""

    def __init__(self, directory: str) -> None:
        super().__init__(directory)
        self._plain, self._another = PosixStorage(directory), Claim("another")

    def get(self, path: str) -> bytes | None:
        if path.endswith("owner.json"):
            self._another.take(self._plain)
        return super().get(path)


def test_two_jobs_do_not_write_to_one_directory(tmp_path: Path, run: Run) -> None:
    """Their steps would replace each other, and retention of one remove those of the other."""
    directory = f"{tmp_path}/checkpoints"

    async def orders() -> None:
        async with node(tmp_path, directory, open_storage=Shared) as here:
            assert [line for line in here.said if "can read there" in line]
            order = await persisted(here, "t1")
            assert order.files == ()
            (report,) = await here.master.hears(c.PartsPersisted, 1)
            assert "another job writes to" in report.problem
            assert os.listdir(f"{directory}/.holdfast") == ["owner.json"]
            here.vault.pushed(order)
            (done,) = await here.master.hears(c.CommitDone, 1)
            assert "another job writes to" in done.problem
            assert list_committed(open_storage(directory), Series(directory)) == []

    run(orders())


def test_a_job_shows_that_it_is_there_until_another_takes_its_place(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = f"{tmp_path}/checkpoints"
    monkeypatch.setattr(storage_module, "RENEW_S", 0.05)
    storage = open_storage(directory)
    other = Claim("another")

    def note() -> bytes | None:
        return storage.get(NOTE)

    async def orders() -> None:
        async with node(tmp_path, directory) as here:
            await persisted(here, "t1")
            before = note()
            await asyncio.to_thread(until, lambda: note() != before, LIMIT_S)

            def is_told() -> bool:
                # As if this job had stood still until the other believed that it was over.
                other.look(storage)
                other.take(Later(storage, GONE_S))
                return any("nothing more goes to storage" in line for line in here.said)

            await asyncio.to_thread(until, is_told, LIMIT_S)

    run(orders())


def test_a_part_that_cannot_be_had_does_not_make_the_others_bad(tmp_path: Path, run: Run) -> None:
    """The copies that a rank had opened beside a bad one were called bad as well, and with them
    every version that needs them."""
    directory = f"{tmp_path}/checkpoints"

    async def restores() -> None:
        async with node(tmp_path, directory) as here:
            await here.save(0, 1, None)
            opening = asyncio.create_task(
                asyncio.to_thread(here.workers[0].open_parts, VERSION, (FIRST, SECOND))
            )
            (locate,) = await here.master.hears(c.PartsLocate, 1)
            sources = (c.Source(FIRST, FIRST, "memory", 0), c.Source(SECOND, SECOND, "storage"))
            here.master.answer(locate, c.PartsLocated(sources))
            with pytest.raises(RejectedError, match=f"part {SECOND} of step 1") as caught:
                await opening
            problem = str(caught.value)
            turns = [
                asyncio.to_thread(worker.restore, prepared=NONE, problem=why, tried=tried)
                for worker, why, tried in zip(
                    here.workers, (problem, ""), (VERSION, NONE), strict=True
                )
            ]
            await asyncio.gather(*turns)
            told = here.master.said(c.NodeRestore)[-1]
            assert [(copy.part, copy.node_id) for copy in told.bad] == [(SECOND, -1)]
            assert here.said == [f"local rank 0 cannot restore step 1: {problem}"]

    run(restores())


class Cleared(PosixStorage):
    """While the first file is read from it, another program removes what is in memory."""

    def __init__(self, directory: str, memory: Path) -> None:
        super().__init__(directory)
        self._memory = memory
        self._is_over = False

    def open(self, path: str) -> PosixReader:
        if not self._is_over:
            self._is_over = True
            remove_slots(self._memory)
        return super().open(path)


def test_a_slot_that_is_removed_while_it_is_filled_makes_no_copy_bad(
    tmp_path: Path, run: Run
) -> None:
    """Its step is on storage: the job must not go back to an older one."""
    directory = f"{tmp_path}/checkpoints"
    save(open_storage(directory), Series(directory), VERSION, make_state(1), "t0", tmp_path)

    async def restores() -> None:
        storage = Cleared(directory, tmp_path / "memory")
        async with node(tmp_path, directory, open_storage=lambda _: storage) as here:
            worker = here.workers[0]

            async def opens(count: int) -> tuple[c.OpenedPart, ...]:
                opening = asyncio.create_task(
                    asyncio.to_thread(worker.open_parts, VERSION, (FIRST,))
                )
                locate = (await here.master.hears(c.PartsLocate, count))[-1]
                sources = (c.Source(FIRST, FIRST, "storage"),)
                here.master.answer(locate, c.PartsLocated(sources))
                return tuple(await opening)

            with pytest.raises(RejectedError, match="another program removed its memory slot"):
                await opens(1)
            turns = [asyncio.to_thread(each.restore) for each in here.workers]
            for answer in await asyncio.gather(*turns, return_exceptions=True):
                assert "step 1 cannot be restored here: another program" in str(answer)
            (opened,) = await opens(2)
            assert (opened.part, opened.source) == (FIRST, "storage")
            await asyncio.gather(*(asyncio.to_thread(worker.restore) for worker in here.workers))
            assert here.master.said(c.NodeRestore)[-1].bad == ()

    run(restores())


def test_what_a_worker_restores_from_is_written_when_it_has_restored(
    tmp_path: Path, run: Run
) -> None:
    """The order to save what a failure endangered comes with the agreement on what to restore. Its
    writing took memory and disk from the very workers that everybody waits for."""
    directory = f"{tmp_path}/checkpoints"

    async def restores() -> None:
        async with node(tmp_path, directory) as here:
            for rank in (0, 1):
                await here.save(rank, 1, None)
            worker = here.workers[0]
            opening = asyncio.create_task(asyncio.to_thread(worker.open_parts, VERSION, (FIRST,)))
            (locate,) = await here.master.hears(c.PartsLocate, 1)
            here.master.answer(locate, c.PartsLocated((c.Source(FIRST, FIRST, "memory", 0),)))
            await opening
            here.vault.pushed(
                c.PersistOrder(directory, VERSION, SHAPE, "t1", (FIRST,), "a worker died")
            )
            # The answer to another question shows that the vault has had time to begin.
            await asyncio.to_thread(worker.reserve, FIRST, 1000)
            assert here.master.said(c.PartsPersisted) == []
            await asyncio.to_thread(worker.close_parts)
            (report,) = await here.master.hears(c.PartsPersisted, 1)
            assert (report.parts, report.problem) == ((FIRST,), "")
            here.master.answer(report, c.PersistState(VERSION, ""))
            await here.vault.settle(LIMIT_S)

    run(restores())


def test_a_worker_that_starts_is_told_where_its_newest_state_is(tmp_path: Path, run: Run) -> None:
    async def saves() -> None:
        async with node(tmp_path, f"{tmp_path}/checkpoints") as here:
            assert here.vault.newest_of(0) == ()
            for step in (1, 2):
                for rank in (0, 1):
                    await here.save(rank, step, None)
            for rank in (0, 1):
                (path,) = here.vault.newest_of(rank)
                with Slot.open(path, writable=False) as slot:
                    meta = slot.read()
                    assert meta is not None
                    assert (meta.part, meta.version) == (rank_part(rank), Version(0, 2))
            assert here.vault.newest_of(2) == ()

    run(saves())
