# SPDX-License-Identifier: Apache-2.0
"""What every storage must do, on each of them: disk, tmpfs (no O_DIRECT), objects, S3."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from holdfast.checkpoint.digests import CHUNK, digest_of
from holdfast.checkpoint.storage import open_storage
from holdfast.checkpoint.storage_port import SMALL_MAX, Storage, readable_size
from holdfast.model.errors import RetryableError, StateError, UsageError
from tests.storages import make, s3_server


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["disk", "tmpfs", "objects", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    match request.param:
        case "disk":
            yield open_storage(f"file://{tmp_path}/new/ckpt")
        case "tmpfs":
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                yield open_storage(f"{folder}/ckpt")
        case "objects":
            yield open_storage(f"memory://{tmp_path}/ckpt")
            fsspec.filesystem("memory").store.clear()
        case _:
            yield open_storage(f"{request.getfixturevalue('s3')}/{tmp_path.name}")


def read_back(storage: Storage, path: str) -> bytes:
    reader = storage.open(path)
    content = bytearray(reader.size)
    half = reader.size // 2
    reader.read_into(half, memoryview(content)[half:])
    reader.read_into(0, memoryview(content)[:half])
    reader.close()
    return bytes(content)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, CHUNK, CHUNK + 5000])
def test_what_is_written_is_read(storage: Storage, size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)
    moved: list[int] = []
    digest = storage.write("a/b/file", memoryview(content)[:size], 2, moved.append)
    assert digest == digest_of(content[:size])
    assert sum(moved) == size
    assert read_back(storage, "a/b/file") == content[:size]
    assert storage.files("a") == {"b/file": size}


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_what_is_too_large_for_a_small_file_is_not_read(kind: str, tmp_path: Path) -> None:
    if kind == "disk":
        storage = open_storage(str(tmp_path))
        (tmp_path / "small").touch()
        os.truncate(tmp_path / "small", 4 * SMALL_MAX)
    else:
        storage = open_storage(f"memory://{tmp_path}")
        storage.put("small", bytes(SMALL_MAX + 1))
    with pytest.raises(StateError, match=r"small has more than 268\.4 MB"):
        storage.get("small")
    storage.remove("small")


def test_an_empty_small_file_is_one(storage: Storage) -> None:
    storage.write("folder/other", memoryview(b"x"), 2)
    storage.put("folder/small", b"")
    assert storage.get("folder/small") == b""
    assert storage.get("folder") is None


def test_a_shorter_file_replaces_a_longer_one(storage: Storage) -> None:
    storage.write("file", memoryview(b"x" * 10_000), 2)
    storage.write("file", memoryview(b"y" * 10), 2)
    assert read_back(storage, "file") == b"y" * 10


def test_a_writer_that_was_cut_off_does_not_tear_what_another_has_written(storage: Storage) -> None:
    """A lost node's part is written by another node, and then it was not dead after all."""
    data = memoryview(os.urandom(2 * CHUNK + 5))

    def come_back_late(_: int) -> None:
        storage.write("a/part", data, 1)
        raise RetryableError("its storage is gone")

    with pytest.raises(RetryableError, match="its storage is gone"):
        storage.write("a/part", data, 1, come_back_late)
    assert read_back(storage, "a/part") == data
    assert storage.files("a") == {"part": len(data)}


def test_a_reader_says_when_a_file_ends_too_soon(storage: Storage) -> None:
    storage.write("file", memoryview(b"x" * 5000), 2)
    reader = storage.open("file")
    with pytest.raises(RetryableError, match="ends after 5 kB"):
        reader.read_into(0, memoryview(bytearray(5001)))
    reader.close()


def test_small_files_are_replaced(storage: Storage) -> None:
    assert storage.get("a/latest") is None
    make(storage, "a/latest")
    storage.put("a/latest", b"two")
    assert storage.get("a/latest") == b"two"
    assert storage.files("") == {"a/latest": 3}


def test_a_small_file_makes_no_directory(tmp_path: Path) -> None:
    """A manifest that comes late would be a checkpoint without files."""
    storage = open_storage(str(tmp_path / "ckpt"))
    with pytest.raises(FileNotFoundError):
        storage.put("a/manifest.json", b"{}")
    assert not (tmp_path / "ckpt").exists()


def test_folders_are_listed_without_the_hidden_one(storage: Storage) -> None:
    assert storage.folders("") == []
    assert storage.files("nothing") == {}
    for path in ("b/x", "a/y", "a/deep/z", ".holdfast/t/x", "plain"):
        make(storage, path)
    assert storage.folders("") == ["a", "b"]
    assert set(storage.files("a")) == {"y", "deep/z"}


def test_ages_are_small_for_what_is_new(storage: Storage) -> None:
    assert storage.entries(".holdfast") == {}
    make(storage, ".holdfast/one")
    make(storage, ".holdfast/two/x")
    entries = storage.entries(".holdfast")
    assert set(entries) == {"one", "two"}
    assert all(abs(age_s) < 60 for age_s in entries.values())


def test_removing_takes_files_and_whole_folders(storage: Storage) -> None:
    for path in ("a/x", "a/deep/y", "ab/x", "c"):
        make(storage, path)
    storage.remove("a")
    storage.remove("c")
    storage.remove("never-there")
    assert set(storage.files("")) == {"ab/x"}


def test_a_missing_file_is_no_crash_but_an_error_of_its_kind(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.open("gone")


def test_renames_and_exchanges_where_they_exist(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "ckpt"))
    make(storage, "one/x", b"1")
    make(storage, "two/x", b"2")
    assert storage.exchange("one", "two")
    assert (storage.get("one/x"), storage.get("two/x")) == (b"2", b"1")
    storage.rename("one", ".holdfast/three")
    assert storage.get(".holdfast/three/x") == b"2"


@pytest.mark.parametrize("url", ["relative/path", "nosuchscheme://x"])
def test_a_directory_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=url):
        open_storage(url)


def test_sizes_are_readable() -> None:
    sizes = (0, 777, 49_987_655, 2.1e9, 3e13)
    assert [readable_size(size) for size in sizes] == [
        "0 B",
        "777 B",
        "49.99 MB",
        "2.1 GB",
        "30 TB",
    ]
