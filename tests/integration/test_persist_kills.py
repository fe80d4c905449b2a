# SPDX-License-Identifier: Apache-2.0
"""A saver killed before every single system call, and a machine that loses its power.

Whatever the moment: the directory has exactly the old checkpoints or exactly the new ones, all of
them whole, and doing the work again finishes it.
"""

import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec
import pytest

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.places import clean_leftovers
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.retention import apply_retention
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import HIDDEN, Storage
from holdfast.checkpoint.verify import directory_problems, verify_checkpoint
from holdfast.model.checkpoint import Series, Version
from tests.power import disk
from tests.soaking import WHOLE
from tests.storages import load, make_state, order_for, s3_server, save, write_state

OLDER, OLD, NEW = Version(1, 50), Version(1, 100), Version(2, 100)
STATES = {version: make_state(number + 1) for number, version in enumerate((OLDER, OLD, NEW))}
CALLS = frozenset({"open", "pwrite", "fsync", "rename", "mkdir", "rmdir", "unlink", "remove"})


class WithoutExchange(PosixStorage):
    """A file system on which two directories cannot swap names, as with NFS."""

    def exchange(self, one: str, other: str) -> bool:
        return False


def prepare(storage: Storage, series: Series, scratch: Path) -> None:
    save(storage, series, OLDER, STATES[OLDER], "a1", scratch)
    save(storage, series, OLD, STATES[OLD], "a2", scratch)


def replace_step(storage: Storage, series: Series, scratch: Path) -> None:
    """Save step 100 again, then remove what the rules do not keep: all that a saver ever does."""
    entries = write_state(storage, series, NEW, STATES[NEW], "a3", scratch)
    commit(storage, series, order_for(series, NEW, "a3", entries))
    apply_retention(storage, series)


def check(storage: Storage, series: Series, scratch: Path) -> Version:
    """All that is listed is whole, and is what was saved; returns the newest."""
    said: list[str] = []
    committed = list_committed(storage, series, said.append)
    assert said == []
    versions = [one.version for one in committed]
    assert versions in ([OLD, OLDER], [NEW, OLDER], [NEW])
    for one in committed:
        assert verify_checkpoint(storage, one).problems == ()
        assert load(storage, series, one.version, scratch) == STATES[one.version]
    return versions[0]


def check_finished(storage: Storage, series: Series, scratch: Path) -> None:
    assert check(storage, series, scratch) == NEW
    assert len(list_committed(storage, series)) == 1
    assert directory_problems(storage) == []


# ---- real kills, on disk -------------------------------------------------------------------------


def killed_at(number: int, work: Callable[[], None]) -> bool:
    """Do the work in a child that dies right before its n-th system call; False if it got through.

    The profiler sees every call of Python into the kernel, whatever code it is in.
    """
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(frame: FrameType, event: str, function: Any) -> None:
            nonlocal seen
            if event != "c_call" or getattr(function, "__module__", "") != "posix":
                return
            if function.__name__ in CALLS:
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.setprofile(watch)
            work()
            sys.setprofile(None)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Hundreds of cases: a disk would take a minute for their syncs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("kind", [PosixStorage, WithoutExchange])
def test_a_kill_before_every_system_call(in_memory: Path, kind: type[PosixStorage]) -> None:
    """Prior art: files and tracker were written in place, the old directory removed first.

    Where two directories cannot swap names, every run tries every third call; `make soak` tries
    all, and tests/contract/test_late_committers.py dies there at every call of the storage.
    """
    stride = 3 if kind is WithoutExchange and not WHOLE else 1
    start, scratch = in_memory / "start", in_memory / "scratch"
    scratch.mkdir()
    prepare(kind(str(start)), Series(str(start)), scratch)
    newest: list[Version] = []
    for number in itertools.count(1, stride):
        folder = in_memory / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        storage, series = kind(str(folder)), Series(str(folder), keep_last=1)
        was_killed = killed_at(number, lambda: replace_step(storage, series, scratch))  # noqa: B023
        for left in scratch.iterdir():
            left.unlink()
        newest.append(check(storage, series, scratch))
        # A new agent does the same again, with what the dead one left lying around.
        replace_step(storage, series, scratch)
        clean_leftovers(storage, (), older_than_s=-60)
        check_finished(storage, series, scratch)
        assert os.listdir(folder / HIDDEN) == []
        if not was_killed:
            break
    assert number > 50
    # Once it is new it stays new: there is one moment of commit.
    assert newest == sorted(newest)
    assert newest[0] == OLD


# ---- objects: dead at every operation ------------------------------------------------------------


class Died(BaseException):
    """Nobody handles this: to the storage it is the same as a kill."""


class Mortal:
    """A storage whose user dies at the n-th operation."""

    def __init__(self, storage: Storage, number: int) -> None:
        self._storage = storage
        self._left = number

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        if not callable(value) or name in ("full", "free_bytes"):
            return value
        self._left -= 1
        if self._left == 0:
            raise Died
        return value


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A URL, and every how many-th operation is tried."""
    if request.param == "memory":
        yield f"memory://{tmp_path}", 1
        fsspec.filesystem("memory").store.clear()
    else:
        with s3_server() as url:
            yield url, 31


def test_a_death_at_every_operation_on_objects(objects: tuple[str, int], tmp_path: Path) -> None:
    url, stride = objects
    newest: list[Version] = []
    number = 1
    while True:
        directory = f"{url}/{number}"
        storage: Any = open_storage(directory)
        series = Series(directory, keep_last=1)
        prepare(storage, series, tmp_path)
        has_died = False
        try:
            replace_step(Mortal(storage, number), series, tmp_path)
        except Died:
            has_died = True
        newest.append(check(storage, series, tmp_path))
        replace_step(storage, series, tmp_path)
        clean_leftovers(storage, (), older_than_s=-60)
        check_finished(storage, series, tmp_path)
        if not has_died:
            break
        number += stride
    assert number > 25
    assert newest == sorted(newest)
    assert newest[0] == OLD


# ---- no power ------------------------------------------------------------------------------------


def test_what_is_committed_survives_a_loss_of_power(tmp_path: Path) -> None:
    """Prior art: neither files nor directories were synced."""
    with disk(tmp_path) as mounted:
        series = Series(str(mounted.path / "runs" / "ckpt"), keep_last=1)
        storage = open_storage(series.directory)
        prepare(storage, series, tmp_path)
        replace_step(storage, series, tmp_path)
        with mounted.after_a_loss_of_power() as after:
            seen = Series(str(after / "runs" / "ckpt"))
            check_finished(open_storage(seen.directory), seen, tmp_path)
