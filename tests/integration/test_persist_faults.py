# SPDX-License-Identifier: Apache-2.0
"""Storage that is full, broken, read-only, slow or gone: a sentence, and nothing is lost."""

import errno
import os
import random
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.commit import commit
from holdfast.checkpoint.digests import CHUNK, digest_of
from holdfast.checkpoint.manifest import list_committed
from holdfast.checkpoint.persist import write_part
from holdfast.checkpoint.places import abandon
from holdfast.checkpoint.retention import apply_retention
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import Patience, persistently
from holdfast.checkpoint.verify import verify_checkpoint
from holdfast.model.checkpoint import SHARED, Series, Version
from holdfast.model.errors import RejectedError, RetryableError
from tests.disks import small_disk
from tests.storages import (
    Failing,
    fill_slot,
    load,
    make_state,
    order_for,
    s3_server,
    save,
    write_state,
)

V1, V2 = Version(1, 1), Version(1, 2)
PATIENT = Patience(limit_s=30.0, first_pause_s=0.01, longest_pause_s=0.05)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of 600 kB, and not for two."""
    with small_disk(tmp_path / "small", "size=1m") as place:
        yield place


def test_what_was_written_has_the_digest_of_the_slot(tmp_path: Path) -> None:
    """The bytes are read once, for the digests of the files and of the slot; also if repeated."""
    series = Series(str(tmp_path / "ckpt"))
    data = memoryview(random.Random(7).randbytes(2 * CHUNK))
    files = {"a": bytes(data[:5000]), "b": bytes(data), "c": b"", "d": bytes(data[: CHUNK + 1])}
    storage = Failing(series.directory, errno.EIO, times=1)
    with fill_slot(tmp_path / "slot", series, V1, SHARED, files) as slot:
        meta = slot.read()
        assert meta is not None
        written = write_part(storage, series, "a1", slot, patience=PATIENT)
        assert written.digest == digest_of(slot.data[: meta.data_length])
    digests = {entry.name: entry.digest for entry in written.files}
    assert digests == {name: digest_of(content) for name, content in files.items()}


def test_a_full_disk_is_said_and_costs_no_older_checkpoint(small: Path, tmp_path: Path) -> None:
    series = Series(str(small / "ckpt"))
    storage = open_storage(series.directory)
    old = make_state(1, size=600_000)
    save(storage, series, V1, old, "a1", tmp_path)
    with pytest.raises(RetryableError) as caught:
        write_state(storage, series, V2, make_state(2, size=600_000), "a2", tmp_path)
    said = str(caught.value)
    assert "shared.safetensors (600 kB)" in said
    assert "were free there" in said
    assert "No space left on device" in said
    assert load(storage, series, V1, tmp_path) == old
    # Giving up makes the room free again, and the next attempt works once there is enough.
    abandon(storage, "a2")
    assert apply_retention(storage, Series(series.directory, keep_last=1)) == []
    save(storage, series, V2, make_state(3, size=100_000), "a3", tmp_path)
    assert [one.version for one in list_committed(storage, series)] == [V2, V1]


def test_a_disk_that_is_full_at_the_commit_leaves_the_old_state(
    small: Path, tmp_path: Path
) -> None:
    series = Series(str(small / "ckpt"))
    storage = open_storage(series.directory)
    old, new = make_state(1, size=100_000), make_state(2, size=100_000)
    save(storage, series, V1, old, "a1", tmp_path)
    entries = write_state(storage, series, V2, new, "a2", tmp_path)
    filler = small / "filler"
    free = os.statvfs(small)
    filler.write_bytes(bytes(free.f_bavail * free.f_frsize))
    order = order_for(series, V2, "a2", entries)
    with pytest.raises(RetryableError, match=r"step 2 could not be committed.*No space left"):
        commit(storage, series, order, patience=Patience(limit_s=0))
    assert load(storage, series, V1, tmp_path) == old
    assert storage.get("latest") == series.name(1).encode()
    filler.unlink()
    commit(storage, series, order)
    assert load(storage, series, V2, tmp_path) == new


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ETIMEDOUT])
def test_errors_that_pass_are_waited_for(tmp_path: Path, code: int) -> None:
    series = Series(str(tmp_path / "ckpt"))
    storage = Failing(series.directory, code, times=4)
    state = make_state(1)
    entries = write_state(storage, series, V1, state, "a1", tmp_path, PATIENT)
    commit(storage, series, order_for(series, V1, "a1", entries))
    assert storage.left == 0
    assert load(storage, series, V1, tmp_path) == state


def test_errors_that_are_waited_for_are_told(tmp_path: Path) -> None:
    """Otherwise nobody hears of a broken disk while newer steps supersede each other."""
    series = Series(str(tmp_path / "ckpt"))
    storage = Failing(series.directory, errno.EIO, times=2)
    told: list[str] = []
    patience = Patience(limit_s=30.0, first_pause_s=0.01, longest_pause_s=0.05, failed=told.append)
    write_state(storage, series, V1, make_state(1), "a1", tmp_path, patience)
    assert len(told) == 2
    assert "could not be written" in told[0]
    assert "Input/output error" in told[0]


@pytest.mark.parametrize("after", range(1, 5))
def test_a_directory_whose_names_may_be_lost_ends_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The kernel tells of a lost write once: to sync again would succeed and mean nothing."""
    series = Series(str(tmp_path / "ckpt"))
    storage = open_storage(series.directory)
    entries = write_state(storage, series, V1, make_state(1), "a1", tmp_path)
    left = after

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        nonlocal left
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            left -= 1
            if left == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    order = order_for(series, V1, "a1", entries)
    with pytest.raises(RejectedError, match=r"may be lost when the machine stops: Input/output"):
        commit(storage, series, order, patience=PATIENT)
    assert left == 0


def test_patience_ends(tmp_path: Path) -> None:
    series = Series(str(tmp_path / "ckpt"))
    storage = Failing(series.directory, errno.EIO, times=1_000_000)
    patience = Patience(limit_s=2.0, first_pause_s=0.01, longest_pause_s=0.05)
    with pytest.raises(RetryableError, match=r"could not be written.*Input/output error"):
        write_state(storage, series, V1, make_state(1), "a1", tmp_path, patience)
    assert storage.left < 1_000_000 - 1


def test_whoever_waits_for_a_storage_can_be_told_to_stop() -> None:
    stop = threading.Event()
    begun = time.monotonic()

    def fail() -> None:
        stop.set()
        raise OSError(errno.EIO, "broken")

    with pytest.raises(RetryableError, match="it failed: broken"):
        persistently("it failed", fail, Patience(limit_s=600, first_pause_s=500), stop)
    assert time.monotonic() - begun < 60


def test_a_read_only_directory_is_said_at_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "ro", "size=1m") as place:
        series = Series(str(place / "ckpt"))
        storage = open_storage(series.directory)
        old = make_state(1)
        save(storage, series, V1, old, "a1", tmp_path)
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, timeout=120)
        for_ever = Patience(limit_s=600, first_pause_s=500)
        begun = time.monotonic()
        with pytest.raises(RejectedError, match="Read-only file system"):
            write_state(storage, series, V2, make_state(2), "a2", tmp_path, for_ever)
        assert time.monotonic() - begun < 60
        assert load(storage, series, V1, tmp_path) == old


def test_a_disk_that_reads_badly_is_not_called_whole(tmp_path: Path) -> None:
    series = Series(str(tmp_path / "ckpt"))
    storage = open_storage(series.directory)
    save(storage, series, V1, make_state(1), "a1", tmp_path)
    (committed,) = list_committed(storage, series)
    path = tmp_path / "ckpt" / committed.name / "shared.safetensors"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # Its first page cannot be read.
    assert any(
        "shared.safetensors" in what for what in verify_checkpoint(storage, committed).problems
    )


def test_a_store_that_is_gone_is_an_error_that_may_pass(tmp_path: Path) -> None:
    with s3_server() as url:
        series = Series(f"{url}/gone")
        storage = open_storage(series.directory)
        save(storage, series, V1, make_state(1), "a1", tmp_path)
    with pytest.raises(RetryableError, match="s3://"):
        list_committed(storage, series)


def test_a_bucket_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with s3_server():
        series = Series("s3://no-such-bucket/x")
        storage = open_storage(series.directory)
        with pytest.raises((RetryableError, RejectedError), match="no-such-bucket"):
            write_state(storage, series, V1, make_state(1), "a1", tmp_path)
