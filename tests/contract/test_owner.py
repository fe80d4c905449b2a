# SPDX-License-Identifier: Apache-2.0
"""A checkpoint directory has one job at a time, on every storage."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from holdfast.checkpoint.owner import GONE_S, Claim
from holdfast.checkpoint.places import clean_leftovers
from holdfast.checkpoint.posix import PosixStorage
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import Storage
from holdfast.model.errors import RejectedError, RetryableError
from tests.storages import Later, make, s3_server

NOTE = ".holdfast/owner.json"
REFUSED = r"another job writes to .*: give every job a checkpoint directory of its own"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["disk", "objects", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    match request.param:
        case "disk":
            yield PosixStorage(str(tmp_path / "ckpt"))
        case "objects":
            yield open_storage(f"memory://{tmp_path}")
            fsspec.filesystem("memory").store.clear()
        case _:
            yield open_storage(f"{request.getfixturevalue('s3')}{tmp_path}")


def test_a_second_job_is_refused_when_the_first_is_seen_to_live(storage: Storage) -> None:
    first, second = Claim("one"), Claim("two")
    assert second.look(storage) is None
    first.take(storage)
    assert second.look(storage) is not None
    for _ in range(2):
        with pytest.raises(RetryableError, match=REFUSED):
            second.take(storage)
    first.take(storage)
    with pytest.raises(RejectedError, match=REFUSED):
        second.take(storage)
    assert first.look(storage) is None
    assert first.is_held(storage)
    assert not second.is_held(storage)


def test_of_two_jobs_that_begin_at_once_one_is_refused(storage: Storage) -> None:
    first, second = Claim("one"), Claim("two")
    assert first.look(storage) is second.look(storage) is None
    first.take(storage)
    with pytest.raises(RejectedError, match=REFUSED):
        second.take(storage)


def test_a_job_that_does_not_renew_its_note_has_left(storage: Storage) -> None:
    first, second = Claim("one"), Claim("two")
    first.take(storage)
    later = Later(storage, GONE_S)
    assert Claim("three").look(later) is None
    second.take(later)
    with pytest.raises(RejectedError, match=REFUSED):
        first.take(storage)


def test_what_was_restored_before_another_job_wrote_is_not_added(storage: Storage) -> None:
    """It would be the newest, and what the other has reached would go by retention."""
    first, second = Claim("one"), Claim("two")
    first.take(storage)
    second.look(storage)
    first.take(storage)
    later = Later(storage, GONE_S)
    with pytest.raises(RejectedError, match=REFUSED):
        second.take(later)
    assert second.look(later) is None
    second.take(later)


def test_the_nodes_of_one_job_do_not_stand_in_each_others_way(storage: Storage) -> None:
    for claim in itertools.islice(itertools.cycle([Claim("one"), Claim("one")]), 4):
        claim.take(storage)
        assert claim.is_held(storage)


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff",
        b"{}",
        b'{"job": "x", "host": "a\\nb", "system": "", "pid": 1, "started": 1}',
        b'{"job": "x", "host": "a", "system": "", "pid": -1, "started": 1}',
    ],
)
def test_what_is_no_note_is_replaced(storage: Storage, note: bytes) -> None:
    make(storage, NOTE, note)
    claim = Claim("one")
    claim.take(storage)
    assert claim.is_held(storage)


def test_a_note_of_long_ago_is_cleared_away(storage: Storage) -> None:
    Claim("one").take(storage)
    clean_leftovers(storage, ())
    assert storage.get(NOTE) is not None
    clean_leftovers(storage, (), older_than_s=-60)
    assert storage.get(NOTE) is None


def test_a_process_of_this_machine_that_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    lines = (
        "from holdfast.checkpoint.owner import Claim",
        "from holdfast.checkpoint.posix import PosixStorage",
        f"Claim('one').take(PosixStorage({str(tmp_path)!r}))",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=120)
    storage = PosixStorage(str(tmp_path))
    assert Claim("one").is_held(storage)
    claim = Claim("two")
    assert claim.look(storage) is None
    claim.take(storage)
    assert claim.is_held(storage)
