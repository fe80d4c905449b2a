# SPDX-License-Identifier: Apache-2.0
"""Memory without room for checkpoints: 64 MiB is what container runtimes give by default.

What is due on storage gets there all the same, what is not saved is said, and nothing ends for it.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch

from holdfast.model.errors import RejectedError
from holdfast.torch import MEMORY, STORAGE, Checkpointer
from tests.disks import remove_slots, small_disk
from tests.integration.control import observe
from tests.integration.jobs import LIMIT_S, SCRIPTS, Jobs
from tests.waiting import until

MIB = 1024 * 1024
SAVES = str(SCRIPTS / "saves.py")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a short path, which the socket of the saver of a plain program needs."""
    made = Path(tempfile.mkdtemp(prefix="m"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where that saver puts what finds no room in memory: 64 MiB."""
    with small_disk(folder / "disk", "size=64m") as place:
        monkeypatch.setenv("TMPDIR", str(place))
        yield place


@pytest.fixture
def memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """8 MiB of memory for its checkpoints."""
    with small_disk(folder / "memory", "size=8m") as place:
        monkeypatch.setenv("HOLDFAST_MEMORY_DIR", str(place))
        yield place


def state(step: int, mib: int = 16) -> dict[str, torch.Tensor]:
    return {"w": torch.full((mib * MIB,), step, dtype=torch.uint8)}


def slots_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("holdfast-*/job-*/*/*/*") if path.is_file()]


# ---- a plain program ----------------------------------------------------------------------------


def test_what_is_due_on_storage_gets_there_through_the_disk(
    memory: Path, disk: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(folder / "saves") as checkpointer, caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            saved = checkpointer.save(step, state(step), to=MEMORY)
            assert not saved.taken
            assert "no room for part shared" in saved.why
        said = [line.getMessage() for line in caplog.records if "was not saved" in line.msg]
        assert [line.split()[1] for line in said] == ["1", "2", "4"], "it is said seldom"

        for step in range(6, 12):
            assert checkpointer.save(step, state(step), to=STORAGE).taken
        assert checkpointer.wait(LIMIT_S) == 11
        until(lambda: not slots_in(disk), LIMIT_S, "an end of the slots on disk")
        found = state(0)
        assert checkpointer.load(found) == 11
        assert torch.equal(found["w"], state(11)["w"])
        until(lambda: not slots_in(disk), LIMIT_S, "an end of what was read from there")
    assert not list(memory.glob("holdfast-*/job-*/*/*/shared*"))


def test_what_fits_is_kept_in_memory_again(memory: Path, disk: Path, folder: Path) -> None:
    with Checkpointer(folder / "saves") as checkpointer:
        assert not checkpointer.save(1, state(1), to=MEMORY).taken
        assert checkpointer.save(2, state(2), to=STORAGE).taken
        assert checkpointer.save(3, state(3, mib=1), to=MEMORY).taken
        found = state(0, mib=1)
        assert checkpointer.load(found) == 3
        assert torch.equal(found["w"], state(3, mib=1)["w"])


@pytest.mark.parametrize("overlap", [False, True])
def test_saves_go_on_when_others_remove_the_memory(
    memory: Path, disk: Path, folder: Path, overlap: bool
) -> None:
    """Also the worker's mappings of it, and what it had made ready for the first saves."""
    with Checkpointer(folder / "saves", overlap=overlap) as checkpointer:
        found = state(0, mib=1)
        assert checkpointer.load(found) is None
        for step in range(1, 13, 3):
            remove_slots(memory)
            assert checkpointer.save(step, state(step, mib=1), to=MEMORY).taken
            assert checkpointer.load(found) == step
            assert torch.equal(found["w"], state(step, mib=1)["w"])
            assert checkpointer.save(step + 1, state(step + 1, mib=1), to=STORAGE).taken
            assert checkpointer.save(step + 2, state(step + 2, mib=1), to=MEMORY).taken
            assert checkpointer.wait(LIMIT_S) == step + 1
        remove_slots(memory)
        assert checkpointer.load(found) == 11
        assert torch.equal(found["w"], state(11, mib=1)["w"])


def test_without_room_anywhere_waiting_for_storage_says_why(
    memory: Path, disk: Path, folder: Path
) -> None:
    with Checkpointer(folder / "saves") as checkpointer:
        assert checkpointer.save(1, state(1, mib=1), to=STORAGE).taken
        assert checkpointer.wait(LIMIT_S) == 1
        saved = checkpointer.save(2, state(2, mib=65), to=STORAGE)
        assert not saved.taken
        assert f"the size of {memory} is 8.0 MiB" in saved.why
        assert f"the size of {disk} is 64.0 MiB" in saved.why.partition("nor is there any")[2]
        with pytest.raises(RejectedError, match="step 2 is not on storage: no room for part"):
            checkpointer.wait(LIMIT_S)
        assert checkpointer.save(3, state(3, mib=1), to=STORAGE).taken
        assert checkpointer.wait(LIMIT_S) == 3


def test_a_state_without_room_for_it_is_no_new_beginning(
    memory: Path, disk: Path, folder: Path
) -> None:
    """Nor is it an older state: the training would lose steps that are on storage."""
    with Checkpointer(folder / "saves") as checkpointer:
        assert checkpointer.save(1, state(1, mib=1), to=STORAGE).taken
        assert checkpointer.save(2, state(2), to=STORAGE).taken
        assert checkpointer.wait(LIMIT_S) == 2
        until(lambda: not slots_in(disk), LIMIT_S, "an end of the slots on disk")
        filler = disk / "filler"
        # What this process has mapped of the slot may become free: less than it takes again.
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(MIB))
        with pytest.raises(RejectedError, match="step 2 cannot be restored here: no room"):
            checkpointer.load(state(0))
        filler.unlink()
        found = state(0)
        assert checkpointer.load(found) == 2
        assert torch.equal(found["w"], state(2)["w"])


# ---- jobs ---------------------------------------------------------------------------------------


def test_a_job_without_room_in_memory_loses_nothing_that_is_on_storage_and_says_the_rest(
    jobs: Jobs,
) -> None:
    with small_disk(jobs.folder / "memory", "size=8m") as memory:
        master = jobs.master("--beat", "0.3")
        words = ("--nproc-per-node", "1", "--no-spares", SAVES)
        env = {"HOLDFAST_MEMORY_DIR": str(memory), "FAULTS": "kill after-13 0", "MIB": "16"}
        node = jobs.node(master, *words, **env)
        (again,) = jobs.wait_for("loaded", lambda event: event.round == 2)
        assert again.step == 10
        node.wait_line("checkpoints go to storage through .* which is slower: no room for part")
        master.wait_line(r"node rank 0 could not make \d+ saves?, the last of step \d+: no room")
        taken = {event.step for event in jobs.events("taken")}
        assert taken
        assert all(step % 5 == 0 for step in taken)

        until(lambda: observe(master)["saving"]["failed_saves"] > 10, LIMIT_S, "failed saves")
        saving = observe(master)["saving"]
        assert "no room for part shared" in saving["failed_why"]
        assert saving["failed_step"] % 5 != 0
        assert "holdfast_checkpoint_failed_saves_total" in scraped(jobs)
        seen = jobs.start("status", "--state", str(jobs.folder / "state"))
        seen.succeeds()
        assert "not saved" in seen.text
        assert "no room for part shared" in " ".join(seen.text.split())

        jobs.finish()
        node.succeeds()
        assert master.wait(LIMIT_S) == 0
        assert node.count("was not saved") < 10, "it is said seldom"
    assert not slots_in(jobs.temporary)
    jobs.expect_nothing_left()


def scraped(jobs: Jobs) -> str:
    (note,) = jobs.folder.glob("holdfast-*/jobs/test.*.json")
    address = json.loads(note.read_text())["http"]
    return httpx.get(f"http://{address}/metrics", timeout=LIMIT_S).text


def test_a_memory_that_cannot_be_made_ends_nothing(jobs: Jobs) -> None:
    """Without inodes not even its directory can be made."""
    with small_disk(jobs.folder / "memory", "size=64m,nr_inodes=3") as memory:
        env = {"HOLDFAST_MEMORY_DIR": str(memory), "FAULTS": "kill after-13 0", "MIB": "1"}
        job = jobs.run("--nproc-per-node", "1", "--no-spares", SAVES, **env)
        (again,) = jobs.wait_for("loaded", lambda event: event.round == 2)
        assert again.step == 10
        jobs.finish()
        job.succeeds()
        assert job.count("no checkpoint can be kept in memory: .* No space left") >= 1
    jobs.expect_nothing_left()


def test_a_job_that_is_known_only_by_its_saves_is_found_hanging(jobs: Jobs) -> None:
    job = jobs.run("--nproc-per-node", "1", "--hang-after", "5", SAVES, STUCK="1", MIB="1")
    job.wait_line("round 1 is over: no worker has made a step for .* where 5 s are allowed")
    (again,) = jobs.wait_for("loaded", lambda event: event.round == 2)
    assert again.step == 13
    jobs.finish()
    job.succeeds()
    jobs.expect_nothing_left()
